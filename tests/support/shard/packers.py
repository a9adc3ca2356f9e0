"""Packers of quantized checkpoints, one value at a time, in the layouts of the libraries that write them:
AutoGPTQ (GPTQ and Marlin) and AutoAWQ. compressed-tensors packs its own."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Rounded:
    """Matrix rounded to integers."""

    bits: int
    codes: np.ndarray  # [num_rows, num_columns], from 0
    zeros: np.ndarray  # [num_rows, num_groups]
    scales: np.ndarray  # float16 [num_rows, num_groups]
    group_of: np.ndarray  # [num_columns]

    def dequantize(self) -> Tensor:
        zeros, scales = self.zeros[:, self.group_of], self.scales[:, self.group_of]
        return torch.from_numpy((self.codes - zeros).astype(np.float32) * scales.astype(np.float32))


def draw(
    num_rows: int,
    num_columns: int,
    bits: int = 4,
    group: int = 32,
    is_reordered: bool = False,
    is_symmetric: bool = False,
    seed: int = 0,
) -> Rounded:
    """Draw a matrix with zeros of all sizes."""
    rng, num_groups = np.random.default_rng(seed), -(-num_columns // group)
    group_of = np.arange(num_columns) // group
    if is_reordered:
        rng.shuffle(group_of)
    zeros = rng.integers(0, 1 << bits, (num_rows, num_groups))
    if is_symmetric:
        zeros[:] = 1 << (bits - 1)
    scales = rng.uniform(0.001, 0.1, (num_rows, num_groups)).astype(np.float16)
    return Rounded(bits, rng.integers(0, 1 << bits, (num_rows, num_columns)), zeros, scales, group_of)


def round_matrix(
    matrix: Tensor, bits: int = 4, group: int = 32, is_symmetric: bool = False, is_reordered: bool = False
) -> Rounded:
    """Round float32 [num_rows, num_columns] to the nearest integers."""
    weights, max_code = matrix.numpy(), (1 << bits) - 1
    group_of = np.arange(weights.shape[1]) // group
    if is_reordered:
        np.random.default_rng(0).shuffle(group_of)
    codes, zeros, scales = np.zeros(weights.shape, int), [], []
    for g in range(group_of.max() + 1):
        part = weights[:, group_of == g]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if is_symmetric:
            high = np.maximum(high, -low)
            low = -high
        scale = np.maximum((high - low) / max_code, 1e-4).astype(np.float16).astype(np.float32)
        zero = np.full(len(weights), 1 << (bits - 1)) if is_symmetric else np.round(-low / scale).astype(int)
        codes[:, group_of == g] = np.clip(np.round(part / scale[:, None]) + zero[:, None], 0, max_code)
        zeros.append(np.clip(zero, 0, max_code))
        scales.append(scale.astype(np.float16))
    return Rounded(bits, codes, np.stack(zeros, 1), np.stack(scales, 1), group_of)


def pack_bits(rows: np.ndarray, bits: int) -> np.ndarray:
    """Pack each row of integers into words, the first integer at the lowest bits of the first word."""
    packed = []
    for row in rows:
        whole = sum(int(value) << (bits * place) for place, value in enumerate(row))
        num_words = -(-len(row) * bits // 32)
        packed.append([(whole >> (32 * word)) & 0xFFFFFFFF for word in range(num_words)])
    return np.array(packed, np.uint32).reshape(len(rows), -1).view(np.int32)


def pack_gptq(rounded: Rounded, is_v2: bool = False, has_order: bool = True) -> Tensors:
    """Pack like AutoGPTQ, or like GPTQModel's version 2."""
    stored_zeros = rounded.zeros if is_v2 else (rounded.zeros - 1) & ((1 << rounded.bits) - 1)
    result = {
        "qweight": pack_bits(rounded.codes, rounded.bits).T,
        "qzeros": pack_bits(stored_zeros.T, rounded.bits),
        "scales": rounded.scales.T,
    }
    if has_order:
        result["g_idx"] = rounded.group_of.astype(np.int32)
    return _as_tensors(result)


def pack_awq_gemm(rounded: Rounded) -> Tensors:
    return _as_tensors(
        {
            "qweight": pack_bits(_interleave(rounded.codes.T), 4),
            "qzeros": pack_bits(_interleave(rounded.zeros.T), 4),
            "scales": rounded.scales.T,
        }
    )


def _interleave(values: np.ndarray) -> np.ndarray:
    """Put eight adjacent columns in the order of AutoAWQ's kernel."""
    order, out = [0, 2, 4, 6, 1, 3, 5, 7], np.empty_like(values)
    for column in range(values.shape[1]):
        out[:, column] = values[:, column // 8 * 8 + order[column % 8]]
    return out


def pack_awq_gemv(rounded: Rounded, group: int) -> Tensors:
    """Pack with as many words of zeros as AutoAWQ's kernel reads."""
    num_rows, num_groups = rounded.scales.shape
    multiple = {128: 1, 64: 2, 32: 4}[group]
    width = math.ceil(math.ceil(num_groups / 8) / multiple) * multiple
    zeros, scales = np.zeros((num_rows, 8 * width), int), np.zeros((num_rows, 8 * width), np.float16)
    zeros[:, :num_groups], scales[:, :num_groups] = rounded.zeros, rounded.scales
    return _as_tensors(
        {"qweight": pack_bits(rounded.codes, 4), "qzeros": pack_bits(zeros, 4), "scales": scales}
    )


def pack_marlin(rounded: Rounded) -> Tensors:
    """Pack a symmetric matrix like AutoGPTQ's `QuantLinear.pack` for Marlin."""
    num_rows, num_columns = rounded.codes.shape
    tiles = rounded.codes.T.reshape(num_columns // 16, 16, num_rows // 16, 16).transpose(0, 2, 1, 3)
    values = tiles.reshape(num_columns // 16, num_rows * 16)
    permuted = values.reshape(-1, 1024)[:, _list_places()].reshape(values.shape)
    grouped = [i + 8 * j for i in range(8) for j in range(8)]
    whole = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    order = grouped if rounded.scales.shape[1] > 1 else whole
    scales = rounded.scales.T.reshape(-1, len(order))[:, order].reshape(-1, num_rows)
    return _as_tensors({"B": pack_bits(permuted, 4), "s": scales})


def _list_places() -> list[int]:
    """Return the index in four tiles of each value, in the order in which a warp's threads load them."""
    places = []
    for thread in range(32):
        rows = [2 * (thread % 4) + step for step in (0, 1, 8, 9)]
        own = [16 * row + thread // 4 + 8 * half for half in (0, 1) for row in rows]
        for tile in range(4):
            places += [256 * tile + own[place] for place in (0, 2, 4, 6, 1, 3, 5, 7)]
    return places


def _as_tensors(arrays: dict[str, np.ndarray]) -> Tensors:
    return {end: torch.from_numpy(np.ascontiguousarray(array)) for end, array in arrays.items()}
