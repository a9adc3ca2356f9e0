"""GPTQ and its form on disk in plain numpy, from the paper and from the table of formats, and conversion of a
GPTQ checkpoint to a plain one."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

Array = NDArray[np.float64]


class Solved(NamedTuple):
    codes: Array  # [num_rows, num_columns]
    scales: Array  # [num_rows, num_groups]
    zeros: Array  # [num_rows, num_groups]
    edges: Array  # distances of unrounded codes to the nearest boundary between two codes


def solve(
    weight: Array, hessian: Array, bits: int, group: int, sym: bool, act_order: bool, percdamp: float
) -> Solved:
    """Solve equations (2) and (3) of the paper column by column, without blocks or Cholesky factors. Each
    rounded column is removed from the inverse Hessian by Gaussian elimination."""
    left, h, (rows, width) = weight.copy(), hessian.copy(), weight.shape
    for k in range(width):
        if h[k, k] == 0:
            h[k, k], left[:, k] = 1, 0
    order = sorted(range(width), key=lambda k: -h[k, k]) if act_order else list(range(width))
    original = left.copy()
    h += np.eye(width) * percdamp * np.mean([h[k, k] for k in range(width)])
    groups = -(-width // group)
    codes, edges = np.zeros((rows, width)), np.zeros((rows, width))
    scales, zeros = np.zeros((rows, groups)), np.zeros((rows, groups))
    importance = (
        np.diag(hessian) * 1.0
    )  # of the original Hessian, where the order does not follow the columns
    importance[importance == 0] = 1
    inverse = torch.linalg.inv(torch.from_numpy(h)).numpy().copy()
    if not act_order:
        importance = find_costs(inverse)
    for step, k in enumerate(order):
        g = k // group
        if act_order or k % group == 0:
            spanned = original if act_order else left
            for row in range(rows):
                own = spanned[row, g * group : (g + 1) * group]
                weights = importance[g * group : (g + 1) * group]
                scales[row, g], zeros[row, g] = find_grid(own, weights, bits, sym)
        exact = left[:, k] / scales[:, g] + zeros[:, g]
        edges[:, k] = np.abs(exact - np.floor(exact) - 0.5)
        codes[:, k] = np.clip(np.round(left[:, k] / scales[:, g]) + zeros[:, g], 0, 2**bits - 1)
        error = left[:, k] - (codes[:, k] - zeros[:, g]) * scales[:, g]
        rest = order[step:]
        left[:, rest] -= (error / inverse[k, k])[:, None] * inverse[k, rest]
        inverse -= inverse[:, [k]] * inverse[[k], :] / inverse[k, k]
    return Solved(codes, scales, zeros, edges)


def refine(
    weights: Array, hessian: Array, codes: Array, grids: list[tuple[float, float]], bits: int
) -> Array:
    """Return better weights of a row: three times, each column takes the code with the least error of the
    outputs, and after each group, the group's scale is fitted by linear regression."""
    codes, grids, group = codes.copy(), list(grids), -(-len(weights) // len(grids))

    def decode() -> Array:
        return np.array([(c - grids[k // group][1]) * grids[k // group][0] for k, c in enumerate(codes)])

    def measure() -> float:
        off = weights - decode()
        return float(off @ hessian @ off)

    root = np.linalg.cholesky(hessian).T
    for k in [k for _ in range(3) for k in range(len(weights))]:
        errors = []
        for codes[k] in range(2**bits):
            errors.append(measure())
        codes[k] = np.argmin(errors)
        if (k + 1) % group == 0 or k + 1 == len(weights):
            g = k // group
            scale, zero = grids[g]
            steps = np.where(np.arange(len(weights)) // group == g, codes - zero, 0.0)
            if steps.any():
                rest = weights - decode() + steps * scale
                (fitted,), *_ = np.linalg.lstsq((root @ steps)[:, None], root @ rest, rcond=None)
                grids[g] = max(float(np.float16(fitted)), 2.0**-24), zero
    return decode()


def find_costs(inverse: Array) -> Array:
    """Return what a squared error of each column costs once the columns before it are rounded."""
    left, costs = inverse.copy(), np.zeros(len(inverse))
    for k in range(len(left)):
        costs[k] = 1 / left[k, k]
        left -= left[:, [k]] * left[[k], :] / left[k, k]
    return costs


def find_grid(weights: Array, importance: Array, bits: int, sym: bool) -> tuple[float, float]:
    """Return the scale and the zero of a row's weights in a group: the best of the grids that span 0.7 to 1
    times the range, then of those with a zero beside it, and always of those with the scales of least squared
    error for their codes."""

    def measure(grid: tuple[float, float]) -> float:
        scale, zero = grid
        off = weights - (np.clip(np.round(weights / scale) + zero, 0, 2**bits - 1) - zero) * scale
        return float((importance * off * off).sum())

    def fit(grid: tuple[float, float]) -> float:
        scale, zero = grid
        steps = np.clip(np.round(weights / scale) + zero, 0, 2**bits - 1) - zero
        if not (importance * steps * steps).sum() > 0:
            return scale
        fitted = (importance * weights * steps).sum() / (importance * steps * steps).sum()
        return max(float(np.float16(fitted)), 2.0**-24)

    span, zero = span_weights(weights, bits, sym)
    spans = [float(np.float16(float(np.float16(span)) * w)) for w in (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)]
    best = min(((each, zero) for scale in spans for each in (scale, fit((scale, zero)))), key=measure)
    for beside in () if sym else (zero - 1, zero + 1):
        own = min(max(beside, 1), 2**bits - 1)
        best = min([best, (best[0], own), (fit((best[0], own)), own)], key=measure)
    return best


def span_weights(weights: Array, bits: int, sym: bool) -> tuple[float, float]:
    largest = 2**bits - 1
    if sym:
        return 2 * float(np.abs(weights).max()) / largest, 2.0 ** (bits - 1)
    low, high = min(weights.min(), 0.0), max(weights.max(), 0.0)
    zero = np.round(-low / ((high - low) / largest))
    if zero == 0:  # zero cannot be stored, so the grid begins one code later
        return float(high / (largest - 1)), 1.0
    return float((high - low) / largest), float(zero)


def read_bits(words: NDArray[np.int32], bits: int) -> NDArray[np.int64]:
    """Return the values packed along the first axis, lowest bits first."""
    columns = np.ascontiguousarray(words.T).view(np.uint8)
    stream = np.unpackbits(columns, axis=1, bitorder="little")
    values = stream.reshape(len(columns), -1, bits) @ (1 << np.arange(bits))
    return values.T


def read_module(tensors: dict[str, Tensor]) -> Tensor:
    """Return w[n, k] = (c - z) s with the group of k, where stored zeros are one less: float32 [rows,
    columns]."""
    bits = count_bits(tensors)
    codes = read_bits(tensors["qweight"].numpy(), bits)  # [num_columns, num_rows]
    zeros = read_bits(tensors["qzeros"].numpy().T, bits).T + 1 & (1 << bits) - 1
    group_of = tensors["g_idx"].numpy()
    weights = (codes - zeros[group_of]) * tensors["scales"].numpy().astype(np.float64)[group_of]
    return torch.from_numpy(weights.T.astype(np.float32).copy())


def count_bits(tensors: dict[str, Tensor]) -> int:
    """Return the bits of a module, or of a stack of modules, from its shapes."""
    return 32 * tensors["qweight"].shape[-2] // tensors["g_idx"].shape[-1]


def read_checkpoint(directory: Path) -> dict[str, Tensor]:
    """Return the plain tensors of a checkpoint written by this service."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    stored: dict[str, Tensor] = {}
    for file in sorted(set(index.values())):
        content = load_file(directory / file)
        assert {name for name, at in index.items() if at == file} == content.keys()
        stored |= content
    described = json.loads((directory / "config.json").read_text())["quantization_config"]
    assert int(stored.pop("gptq_bits")) == described["bits"]
    assert int(stored.pop("gptq_groupsize")) == described["group_size"]
    plain = {}
    for module in {name.removesuffix(".qweight") for name in stored if name.endswith(".qweight")}:
        parts = {end: stored.pop(f"{module}.{end}") for end in ("qweight", "qzeros", "scales", "g_idx")}
        assert count_bits(parts) == find_bits(described, module)
        if parts["qweight"].dim() == 3:
            entries = [{end: part[i] for end, part in parts.items()} for i in range(len(parts["qweight"]))]
            plain[f"{module}.weight"] = torch.stack([read_module(entry) for entry in entries])
        else:
            plain[f"{module}.weight"] = read_module(parts)
    return plain | stored


def find_bits(described: dict[str, Any], module: str) -> int:
    """Return the bits of a module as GPTQModel and vLLM read them: the first expression of `dynamic` that
    matches the beginning of the name replaces the bits of all."""
    for pattern, own in described.get("dynamic", {}).items():
        if re.match(pattern.removeprefix("+:"), module):
            return int(own["bits"])
    return int(described["bits"])


def write_plain(original: Path, quantized: Path, plain: Path, turns: bool = False) -> None:
    """Write a plain checkpoint with the weights of a quantized one, in the type and shape of the original.
    `turns`: the original stores the matrices of its layers as [in, out]."""
    before, after = load_file(original / "model.safetensors"), read_checkpoint(quantized)
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        is_turned = turns and tensor.dim() == 2 and not torch.equal(tensor, before[name])
        after[name] = (tensor.T if is_turned else tensor).contiguous()
        assert after[name].shape == before[name].shape
    plain.mkdir()
    save_file(after, plain / "model.safetensors", {"format": "pt"})
    for file in original.glob("*.json"):
        (plain / file.name).write_bytes(file.read_bytes())
