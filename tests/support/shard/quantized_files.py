"""Writes checkpoints of 8-bit floats and of bitsandbytes. The libraries quantize, and also compute the
numbers that the result represents."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.functional import QuantState, dequantize_4bit, int8_vectorwise_quant, quantize_4bit
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import load_file, save_file
from torch import Tensor

E4M3 = torch.float8_e4m3fn
# Tables, heads and routers, which quantizers skip.
NOT_QUANTIZED = re.compile(
    r".*(embed|wte|wpe|lm_head|shared|router|relative_attention_bias|\.gate\.weight).*"
)
TRANSPOSED = re.compile(r".*\.(c_attn|c_proj|c_fc)\.weight")  # of GPT-2


@dataclass(frozen=True)
class Quantized:
    """Tensors of a module by name suffix, and the library's dequantized numbers in its type."""

    tensors: dict[str, Tensor]
    weight: Tensor


@dataclass(frozen=True)
class Kind:
    settings: dict[str, Any]
    quantize: Callable[[Tensor], Quantized | None]
    """Function that quantizes a matrix, or returns None for a matrix that is not quantized."""
    of_stacks: bool = False
    """True if stacks of experts are quantized too."""


def float8(
    matrix: Tensor, block: tuple[int, int] | None = None, per_row: bool = False, dtype: Any = torch.float32
) -> Quantized:
    height, width = matrix.shape
    rows, columns = block or ((1, width) if per_row else (height, width))
    padded = torch.zeros(-(-height // rows) * rows, -(-width // columns) * columns)
    padded[:height, :width] = matrix
    blocks = padded.view(len(padded) // rows, rows, -1, columns)
    scales = (blocks.abs().amax((1, 3)) / 448).to(dtype)
    spread = scales.float().repeat_interleave(rows, 0)[:height].repeat_interleave(columns, 1)[:, :width]
    codes = (matrix / spread).clamp(-448, 448).to(E4M3)
    strategy = "block" if block else "channel" if per_row else "tensor"
    structure = list(block) if block else None
    args = QuantizationArgs(num_bits=8, type="float", strategy=strategy, block_structure=structure)
    end = "weight_scale_inv" if block else "weight_scale"
    if not block and not per_row:
        scales = scales.flatten()[0]
    return Quantized({"weight": codes, end: scales}, dequantize(codes, scales, args=args))


def with_input_scale(result: Quantized) -> Quantized:
    return Quantized({**result.tensors, "input_scale": torch.tensor(0.5)}, result.weight)


def four_bits(
    matrix: Tensor, kind: str, block: int = 64, nested: bool = False, storage: torch.dtype = torch.uint8
) -> Quantized:
    packed, state = quantize_4bit(
        matrix.contiguous(),
        blocksize=block,
        compress_statistics=nested,
        quant_type=kind,
        quant_storage=storage,
    )
    kept: QuantState = state
    tensors = {f"weight.{end}": tensor for end, tensor in kept.as_dict(packed=True).items()}
    # Given the matrix's shape, the library's CPU kernel assumes that blocks begin with rows, even if they do
    # not.
    kept.shape = torch.Size((1, matrix.numel()))
    return Quantized({"weight": packed, **tensors}, dequantize_4bit(packed, kept).view(matrix.shape))


def eight_bits(matrix: Tensor) -> Quantized:
    codes, scales, _ = int8_vectorwise_quant(matrix.to(torch.float16))
    tensors = {"weight": codes, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return Quantized(tensors, torch.ops.bitsandbytes.int8_vectorwise_dequant(codes, scales))


def _bitsandbytes(**settings: Any) -> dict[str, Any]:
    return {"quant_method": "bitsandbytes", "llm_int8_skip_modules": ["lm_head"], **settings}


KINDS = {
    "fp8, a scale for each matrix": Kind(
        {"quant_method": "fp8", "activation_scheme": "static"}, lambda x: with_input_scale(float8(x)), True
    ),
    "fp8, a scale for each row": Kind(
        {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]},
        lambda x: float8(x, per_row=True),
        True,
    ),
    "fp8, a scale for each block": Kind(
        {"quant_method": "fp8", "weight_block_size": [16, 24]}, lambda x: float8(x, (16, 24)), True
    ),
    "nf4": Kind(
        _bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"), lambda x: four_bits(x, "nf4", 32)
    ),
    "fp4, nested": Kind(
        _bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_quant_storage="bfloat16"),
        lambda x: four_bits(x, "fp4", nested=True, storage=torch.bfloat16),
    ),
    "int8": Kind(_bitsandbytes(load_in_8bit=True), eight_bits),
}


def write_quantized(plain: Path, quantized: Path, kind: Kind) -> None:
    """Write a checkpoint's matrices in this format, and replace those in `plain` by the rounded numbers."""
    content, written = load_file(plain / "model.safetensors"), {}
    for name, tensor in list(content.items()):
        is_matrix = name.endswith(".weight") and tensor.dim() in (2, 3 if kind.of_stacks else 2)
        written[name] = tensor
        if not is_matrix or NOT_QUANTIZED.fullmatch(name):
            continue
        turned = TRANSPOSED.fullmatch(name) is not None and "GPT2" in (plain / "config.json").read_text()
        result = _quantize(tensor.T if turned else tensor, kind.quantize)
        if result is None:
            continue
        del written[name]
        module = name.removesuffix(".weight")
        written |= {f"{module}.{end}": each.contiguous() for end, each in result.tensors.items()}
        weight = result.weight.float()
        content[name] = (weight.T if turned else weight).contiguous()
    quantized.mkdir()
    save_file(content, plain / "model.safetensors")
    save_file(written, quantized / "model.safetensors")
    for file in plain.glob("*.json"):
        settings = json.loads(file.read_text())
        if file.name == "config.json":
            settings["quantization_config"] = kind.settings
        (quantized / file.name).write_text(json.dumps(settings))


def _quantize(tensor: Tensor, quantize: Callable[[Tensor], Quantized | None]) -> Quantized | None:
    if tensor.dim() == 2:
        return quantize(tensor)
    results = [each for matrix in tensor if (each := quantize(matrix))]
    ends = results[0].tensors
    stacked = {end: torch.stack([each.tensors[end] for each in results]) for end in ends}
    stacked |= {end: each.unsqueeze(1) for end, each in stacked.items() if each.dim() == 1}
    return Quantized(stacked, torch.stack([each.weight for each in results]))
