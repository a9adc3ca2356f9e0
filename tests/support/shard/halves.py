"""Quantized checkpoint format that exists only in tests. Instead of `{module}.weight`, it has
`{module}.codes`, int8 [..., out_features, in_features], and `{module}.scales`, float32 [..., out_features,
num_groups]. `group` of `quantization_config` is the number of adjacent columns that share a scale."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from tgis.shard.checkpoint.codes import CodeLayout, Codes
from tgis.shard.checkpoint.format import Tensors
from tgis.shard.checkpoint.tensors import ALL, FileTensor, Stored, WeightsError

NAME = "halves"
GROUP = 4
# Number of columns per head: no rank could cut its own columns out of groups of heads. Convolutions are no
# matrices.
NOT_QUANTIZED = re.compile(r".*(relative_attention_bias|conv1d)\.weight")
TRANSPOSED = re.compile(r".*\.(c_attn|c_proj|c_fc)\.weight")  # of GPT-2


class Halves:
    def __init__(self, settings: Mapping[str, Any]):
        self._group: int = settings["group"]
        self.layout = make_layout(self._group)

    def open(self, tensors: Tensors, module: str) -> "HalvesTensor | None":
        if f"{module}.codes" not in tensors:
            return None
        result = (tensors.fetch_any(f"{module}.{kind}") for kind in ("codes", "scales"))
        return HalvesTensor(*result, self._group)

    def count_weights(self, name: str, shape: tuple[int, ...]) -> int | None:
        if name.endswith(".scales"):
            return 0
        return torch.Size(shape).numel() if name.endswith(".codes") else None


class HalvesTensor:
    def __init__(self, codes: FileTensor, scales: FileTensor, group: int):
        self._codes, self._scales, self._group = codes, scales, group
        self.shape, self.label = codes.shape, codes.label

    def entry(self, index: int) -> "HalvesTensor":
        return HalvesTensor(self._codes.entry(index), self._scales.entry(index), self._group)

    def read(self, rows: slice = ALL, columns: slice = ALL) -> Tensor:
        return self.codes(rows, columns).dequantize()

    def layout(self, columns: slice = ALL) -> CodeLayout:
        return make_layout(self._group)

    def codes(self, rows: slice = ALL, columns: slice = ALL) -> Codes:
        start, stop, _ = columns.indices(self.shape[1])
        if start % self._group or (stop % self._group and stop != self.shape[1]):
            text = f"columns {start} to {stop} cannot be cut out of groups of {self._group}"
            raise WeightsError(f"{self.label}: {text}")
        groups = slice(start // self._group, -(-stop // self._group))
        return Codes(self.layout(), self._codes.read(rows, columns), self._scales.read(rows, groups))


def make_layout(group: int = GROUP) -> CodeLayout:
    return CodeLayout(torch.int8, 8, group)


def pack(part: Stored) -> Callable[[Tensor], Tensor]:
    """Return a platform's product for such codes, which are read a few rows at a time."""
    height = part.shape[0]
    pieces = [part.codes(slice(first, min(first + 7, height))) for first in range(0, height, 7)]
    values = torch.cat([piece.values for piece in pieces]).unflatten(1, (-1, GROUP))
    scales = torch.cat([piece.scales for piece in pieces]).unsqueeze(-1)
    weight = (values * scales).flatten(1)
    return lambda x: F.linear(x, weight)


def write_halves(plain: Path, quantized: Path, is_transposed: bool, group: int = GROUP) -> None:
    """Write a checkpoint's matrices in this format, and replace those in `plain` by the rounded numbers."""
    content, halves = load_file(plain / "model.safetensors"), {}
    for name, tensor in list(content.items()):
        if not name.endswith(".weight") or tensor.dim() < 2 or NOT_QUANTIZED.fullmatch(name):
            halves[name] = tensor
            continue
        turns = is_transposed and TRANSPOSED.fullmatch(name)
        codes, scales, rounded = _round(tensor.T if turns else tensor, group)
        module = name.removesuffix(".weight")
        halves |= {f"{module}.codes": codes, f"{module}.scales": scales}
        content[name] = (rounded.T if turns else rounded).contiguous()
    quantized.mkdir()
    save_file(content, plain / "model.safetensors")
    save_file(halves, quantized / "model.safetensors")
    for file in plain.glob("*.json"):
        settings = json.loads(file.read_text())
        if file.name == "config.json":
            settings["quantization_config"] = {"quant_method": NAME, "group": group}
        (quantized / file.name).write_text(json.dumps(settings))


def _round(matrix: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales, and the numbers that they represent."""
    width = matrix.shape[-1]
    groups = F.pad(matrix.float(), (0, -width % group)).unflatten(-1, (-1, group))
    scales = groups.abs().amax(-1).clamp(min=1e-6) / 127
    codes = (groups / scales.unsqueeze(-1)).round()
    values = (codes * scales.unsqueeze(-1)).flatten(-2)[..., :width]
    return codes.to(torch.int8).flatten(-2)[..., :width].contiguous(), scales, values.contiguous()
