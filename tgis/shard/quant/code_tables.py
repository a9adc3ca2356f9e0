"""Values of 4-bit codes, in the order of bitsandbytes and of MXFP4."""

# Quantiles of a normal distribution, from "QLoRA: Efficient Finetuning of Quantized LLMs" (Dettmers et al.,
# 2023), appendix E.
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
# Sign, two exponent bits and one mantissa bit, divided by the largest value.
_FP4_MAGNITUDES = tuple(magnitude / 12 for magnitude in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))
FP4 = (*_FP4_MAGNITUDES, *(-magnitude for magnitude in _FP4_MAGNITUDES))

# Sign, two exponent bits and one mantissa bit.
_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_E2M1_MAGNITUDES, *(-magnitude for magnitude in _E2M1_MAGNITUDES))

TABLES = {"nf4": NF4, "fp4": FP4}
