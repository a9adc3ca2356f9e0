"""Kinds of checkpoints with packed integers, for `quantized_files.write_quantized`."""

from functools import partial
from typing import Any

from torch import Tensor

from tests.support.shard import packers
from tests.support.shard.compressed import compress
from tests.support.shard.quantized_files import Kind, Quantized

SIZE = 16  # columns per group; some matrices end with a partial group


def gptq(matrix: Tensor, bits: int, is_v2: bool = False, is_reordered: bool = False) -> Quantized:
    rounded = packers.round_matrix(matrix, bits, SIZE, is_reordered=is_reordered)
    return Quantized(packers.pack_gptq(rounded, is_v2, has_order=is_reordered), rounded.dequantize())


def awq_gemm(matrix: Tensor) -> Quantized:
    rounded = packers.round_matrix(matrix, 4, SIZE)
    return Quantized(packers.pack_awq_gemm(rounded), rounded.dequantize())


def awq_gemv(matrix: Tensor) -> Quantized:
    rounded = packers.round_matrix(matrix, 4, 32)
    return Quantized(packers.pack_awq_gemv(rounded, 32), rounded.dequantize())


def marlin(matrix: Tensor) -> Quantized | None:
    if matrix.shape[0] % 64 or matrix.shape[1] % 16:
        return None  # Marlin's packer does not support such a matrix
    rounded = packers.round_matrix(matrix, 4, SIZE, is_symmetric=True)
    return Quantized(packers.pack_marlin(rounded), rounded.dequantize())


def compressed(matrix: Tensor, form: str, arguments: dict[str, Any]) -> Quantized:
    tensors, weight, _ = compress(matrix.contiguous(), form, **arguments)
    return Quantized(tensors, weight)


def _gptq(bits: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": SIZE, **more}


def _awq(version: str, size: int) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": size, "version": version, "zero_point": True}


def _compressed(form: str, **arguments: Any) -> Kind:
    group = {"targets": ["Linear"], "weights": {"type": "int", **arguments}}
    settings = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    return Kind(settings, partial(compressed, form=form, arguments=arguments))


PACKED_KINDS = {
    "gptq": Kind(_gptq(4), partial(gptq, bits=4), of_stacks=True),
    "gptq, desc_act": Kind(_gptq(8, desc_act=True), partial(gptq, bits=8, is_reordered=True), of_stacks=True),
    "gptq_v2": Kind(_gptq(2, checkpoint_format="gptq_v2"), partial(gptq, bits=2, is_v2=True), of_stacks=True),
    "marlin": Kind(_gptq(4, is_marlin_format=True), marlin),
    "awq gemm": Kind(_awq("gemm", SIZE), awq_gemm, of_stacks=True),
    "awq gemv": Kind(_awq("gemv", 32), awq_gemv, of_stacks=True),
    "pack-quantized": _compressed(
        "pack-quantized", num_bits=4, strategy="group", group_size=SIZE, symmetric=False
    ),
    "int-quantized": _compressed("int-quantized", num_bits=8, strategy="channel", symmetric=True),
}
