"""Lists the element types of tensors in GGUF files, with the sizes of their blocks."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GgufType:
    """Type whose elements are stored in blocks of `block_elements` adjacent elements of a row."""

    name: str
    block_elements: int
    block_bytes: int


_32, _256 = 32, 256

# By the number in files. Missing numbers belong to removed types.
TYPES = {
    0: GgufType("F32", 1, 4),
    1: GgufType("F16", 1, 2),
    2: GgufType("Q4_0", _32, 18),
    3: GgufType("Q4_1", _32, 20),
    6: GgufType("Q5_0", _32, 22),
    7: GgufType("Q5_1", _32, 24),
    8: GgufType("Q8_0", _32, 34),
    10: GgufType("Q2_K", _256, 84),
    11: GgufType("Q3_K", _256, 110),
    12: GgufType("Q4_K", _256, 144),
    13: GgufType("Q5_K", _256, 176),
    14: GgufType("Q6_K", _256, 210),
    16: GgufType("IQ2_XXS", _256, 66),
    17: GgufType("IQ2_XS", _256, 74),
    18: GgufType("IQ3_XXS", _256, 98),
    19: GgufType("IQ1_S", _256, 50),
    20: GgufType("IQ4_NL", _32, 18),
    21: GgufType("IQ3_S", _256, 110),
    22: GgufType("IQ2_S", _256, 82),
    23: GgufType("IQ4_XS", _256, 136),
    29: GgufType("IQ1_M", _256, 56),
    30: GgufType("BF16", 1, 2),
    34: GgufType("TQ1_0", _256, 54),
    35: GgufType("TQ2_0", _256, 66),
    39: GgufType("MXFP4", _32, 17),
}
