"""Storage of quantized modules: GPTQ as AutoGPTQ writes it, and 8 bits as compressed-tensors writes it."""

from collections.abc import Mapping
from math import gcd

import torch
from torch import Tensor

from tgis.shard.checkpoint.codes import CodeLayout
from tgis.shard.checkpoint.tensors import WeightsError
from tgis.shard.quant.formats.words import unpack
from tgis.shard.quant.schemes.rounding import round_to_floats, round_to_integers
from tgis.shard.quantize.group_codes import GroupCodes
from tgis.shard.quantize.settings import Method, QuantizeError

WORD_BITS = 32
LARGEST_WEIGHT = torch.finfo(torch.float16).max  # so that scales fit float16
Tensors = dict[str, Tensor]


def pack_groups(codes: GroupCodes, rows: Tensor, bits: int) -> Tensors:
    """Return GPTQ's tensors of a module that holds `rows` of the matrix, int64 [num_rows]:

    qweight int32 [num_columns * bits / 32, num_rows], qzeros int32 [num_groups, num_rows * bits / 32] (zeros
    minus one), scales float16 [num_groups, num_rows], g_idx int32 [num_columns]."""
    tensors = {
        "qweight": pack_words(codes.codes[:, rows], bits),
        "qzeros": pack_words((codes.zeros[:, rows] - 1).T, bits).T,
        "scales": codes.scales[:, rows],
        "g_idx": codes.group_of.int(),
    }
    return {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}


def unpack_groups(tensors: Mapping[str, Tensor], bits: int) -> GroupCodes:
    """Invert `pack_groups` for one module."""
    return GroupCodes(
        unpack(tensors["qweight"].T, bits).T,
        tensors["scales"],
        unpack(tensors["qzeros"], bits) + 1,
        tensors["g_idx"].long(),
    )


def pack_words(values: Tensor, bits: int) -> Tensor:
    """Pack values, uint8 [num_values, n], without gaps into words, int32 [num_values * bits / 32, n].

    The first value is in the lowest bits of the first word. Values of 3 bits may extend over two words."""
    shared = gcd(WORD_BITS, bits)
    values_per_period, words_per_period = WORD_BITS // shared, bits // shared  # period of the packing
    periods = values.reshape(-1, values_per_period, values.shape[1]).long()  # [num_periods, -1, n]
    words = periods.new_zeros(len(periods), words_per_period, values.shape[1])
    for i in range(values_per_period):
        word, shift = divmod(i * bits, WORD_BITS)
        words[:, word] |= periods[:, i] << shift
        if shift + bits > WORD_BITS:
            words[:, word + 1] |= periods[:, i] >> (WORD_BITS - shift)
    return words.flatten(0, 1).to(torch.int32)  # keeps the lower half


def check_size(name: str, num_rows: int, num_columns: int, bits: int) -> None:
    """Raise QuantizeError unless the codes of a module fill whole words."""
    for kind, size in (("rows", num_rows), ("columns", num_columns)):
        if size * bits % WORD_BITS:
            raise QuantizeError(
                f"{name} has {size} {kind}, whose codes of {bits} bits do not fill words of {WORD_BITS} "
                "bits: use other --bits, or --method int8 or fp8"
            )


def pack_rows(weight: Tensor, method: Method) -> Tensors:
    """Round a matrix [num_rows, num_columns] to 8 bits with a scale per row. Return the tensors of
    compressed-tensors: weight int8 or float8_e4m3fn, weight_scale float32 [num_rows, 1]."""
    if method == "int8":
        codes = round_to_integers(weight, CodeLayout(torch.int8, 8, None))
    else:
        codes = round_to_floats(weight, CodeLayout(torch.float8_e4m3fn, 8, None))
    scales = torch.where(codes.scales > 0, codes.scales, 1.0)  # other servers may divide by them
    return {"weight": codes.values, "weight_scale": scales}


def check_weight(weight: Tensor, label: str) -> None:
    """Raise WeightsError if a weight has elements that cannot be quantized."""
    if not (weight.abs() <= LARGEST_WEIGHT).all():
        raise WeightsError(f"{label} contains values that are not finite or too large to be quantized")
