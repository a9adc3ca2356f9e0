"""Modules that the library compressed-tensors quantizes, packs and dequantizes."""

from typing import Any

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor


def compress(weight: Tensor, form: str, **arguments: Any) -> tuple[dict[str, Tensor], Tensor, dict[str, Any]]:
    """Return a module's tensors, its weight as dequantized by the library, and `quantization_config`.
    `arguments` are those of QuantizationArgs."""
    args = QuantizationArgs(**arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    scale, zero = calculate_qparams(*_find_bounds(weight, args), args)
    state = {"weight": weight, "weight_scale": scale.to(weight.dtype), "weight_zero_point": zero}
    compressor = BaseCompressor.get_value_from_registry(form)
    packed = compressor.compress(state, scheme)
    weights = compressor.decompress(packed, scheme)["weight"]
    groups = {"group_0": {"targets": ["Linear"], "format": form, "weights": args.model_dump(mode="json")}}
    settings = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}
    return {end: tensor.contiguous() for end, tensor in packed.items()}, weights, settings


def _find_bounds(weight: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor]:
    """Return the minimum and the maximum for each scale."""
    if args.strategy == "tensor":
        return weight.min().reshape(1), weight.max().reshape(1)
    if args.strategy == "block":
        height, width = args.block_structure
        blocks = weight.unflatten(1, (-1, width)).unflatten(0, (-1, height)).transpose(1, 2).flatten(2)
        return blocks.amin(-1), blocks.amax(-1)
    groups = weight.unflatten(1, (-1, args.group_size or weight.shape[1]))
    return groups.amin(-1), groups.amax(-1)


def draw_weight(num_rows: int, num_columns: int, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(0)
    return (torch.randn(num_rows, num_columns) * 0.2 + 0.05).to(dtype)
