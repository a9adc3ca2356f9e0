"""Computes the experts that the tokens have chosen, each for its own tokens only, and the weighted sum of
each token's experts. The host does not know how many tokens an expert has."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tgis.shard.kernels.cuda import gate
from tgis.shard.kernels.cuda.gate import _activate, _multiply
from tgis.shard.kernels.cuda.grouped import group_rows
from tgis.shard.kernels.cuda.grouped.expert_table import MANY_ROWS, ExpertTable
from tgis.shard.kernels.cuda.grouped.group_rows import read_tile

BLOCK_IN, BLOCK_OUT = 64, 64
BLOCK_SUM = 1024
NUM_WARPS, NUM_STAGES = 4, 4


@triton.jit
def _multiply_tile(
    rows,
    is_row,
    factors,
    weight,
    first,
    SIZE_IN: tl.constexpr,
    SIZE_OUT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    IS_SCALED: tl.constexpr,
):
    """Return the product of rows, whose addresses are given, with BLOCK_OUT rows of a weight [SIZE_OUT,
    SIZE_IN] from row `first` on, float32 [TILE, BLOCK_OUT]."""
    out = first + tl.arange(0, BLOCK_OUT)
    total = tl.zeros((TILE, BLOCK_OUT), tl.float32)
    for begin in range(0, SIZE_IN, BLOCK_IN):
        column = begin + tl.arange(0, BLOCK_IN)
        is_column = (column < SIZE_IN)[None, :]
        value = tl.load(rows[:, None] + column[None, :], mask=is_row[:, None] & is_column, other=0.0)
        if IS_SCALED:
            value = value.to(tl.float32) * factors[:, None]
        part = tl.load(
            weight + out[:, None].to(tl.int64) * SIZE_IN + column[None, :],
            mask=(out < SIZE_OUT)[:, None] & is_column,
            other=0.0,
        )
        total = tl.dot(value.to(part.dtype), tl.trans(part), total, input_precision="tf32x3")
    return total


@triton.jit
def _read_bias(address, first, SIZE_OUT: tl.constexpr, BLOCK_OUT: tl.constexpr):
    out = first + tl.arange(0, BLOCK_OUT)
    bias = tl.load(address).to(tl.pointer_type(tl.float32))
    return tl.load(bias + out, mask=out < SIZE_OUT, other=0.0)[None, :]


@triton.jit
def multiply_up(
    x,
    factors,
    addresses,
    order,
    tiles,
    activated,
    gate_scale,
    SIZE_IN: tl.constexpr,
    SIZE_OUT: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    NAME: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SCALED: tl.constexpr,
):
    """Write BLOCK_OUT columns of the activated first product of a tile, in the order of the tiles."""
    tile = tl.program_id(0)
    first = tl.program_id(1) * BLOCK_OUT
    if tl.load(tiles + 3 * tile + 2) == 0:
        return
    expert, place, is_row, chosen = read_tile(order, tiles, tile, TILE)
    rows = x + chosen // NUM_CHOSEN * SIZE_IN
    factor = tl.load(factors + chosen, mask=is_row, other=0.0)
    address = addresses + 4 * expert
    weight = tl.multiple_of(tl.load(address).to(tl.pointer_type(activated.dtype.element_ty)), 16)
    value = _multiply_tile(
        rows, is_row, factor, weight, first, SIZE_IN, SIZE_OUT, TILE, BLOCK_IN, BLOCK_OUT, IS_SCALED
    )
    if HAS_BIAS:
        value += _read_bias(address + 1, first, SIZE_OUT, BLOCK_OUT)
    if IS_GATED:
        below = weight + SIZE_OUT * SIZE_IN
        up = _multiply_tile(
            rows, is_row, factor, below, first, SIZE_IN, SIZE_OUT, TILE, BLOCK_IN, BLOCK_OUT, IS_SCALED
        )
        if HAS_BIAS:
            up += _read_bias(address + 1, SIZE_OUT + first, 2 * SIZE_OUT, BLOCK_OUT)
        value = _multiply(value * gate_scale, up, NAME)
    else:
        value = _activate(value, NAME)
    out = first + tl.arange(0, BLOCK_OUT)
    at = activated + place[:, None].to(tl.int64) * SIZE_OUT + out[None, :]
    tl.store(at, value.to(activated.dtype.element_ty), mask=is_row[:, None] & (out < SIZE_OUT)[None, :])


@triton.jit
def multiply_down(
    activated,
    addresses,
    order,
    tiles,
    products,
    SIZE_IN: tl.constexpr,
    SIZE_OUT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Write BLOCK_OUT columns of the second product of a tile, in the order of the choices."""
    tile = tl.program_id(0)
    first = tl.program_id(1) * BLOCK_OUT
    if tl.load(tiles + 3 * tile + 2) == 0:
        return
    expert, place, is_row, chosen = read_tile(order, tiles, tile, TILE)
    rows = activated + place.to(tl.int64) * SIZE_IN
    address = addresses + 4 * expert + 2
    weight = tl.multiple_of(tl.load(address).to(tl.pointer_type(activated.dtype.element_ty)), 16)
    value = _multiply_tile(
        rows, is_row, None, weight, first, SIZE_IN, SIZE_OUT, TILE, BLOCK_IN, BLOCK_OUT, False
    )
    if HAS_BIAS:
        value += _read_bias(address + 1, first, SIZE_OUT, BLOCK_OUT)
    out = first + tl.arange(0, BLOCK_OUT)
    at = products + chosen[:, None] * SIZE_OUT + out[None, :]
    tl.store(at, value.to(products.dtype.element_ty), mask=is_row[:, None] & (out < SIZE_OUT)[None, :])


@triton.jit
def add_chosen(
    products,
    factors,
    y,
    SIZE: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_SCALED: tl.constexpr,
):
    """Add BLOCK columns of the experts of token `program_id(0)`, in the order of its choices."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for nth in range(NUM_CHOSEN):
        chosen = token * NUM_CHOSEN + nth
        value = tl.load(products + chosen * SIZE + column, mask=column < SIZE, other=0.0).to(tl.float32)
        if not IS_SCALED:
            value *= tl.load(factors + chosen)
        total += value
    tl.store(y + token * SIZE + column, total, mask=column < SIZE)


def launch(x: Tensor, weights: Tensor, chosen: Tensor, table: ExpertTable, tile: int) -> Tensor:
    """Return the weighted sum of each token's experts, float32 [num_tokens, width].

    x: float32 [num_tokens, width]; weights: float32 [num_tokens, num_chosen]; chosen: int64, numbers of
    experts. `tile` is the maximum number of rows that a program multiplies."""
    num_tokens, width = x.shape
    num_chosen = chosen.shape[1]
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if not num_tokens:
        return y
    first = table.experts[0]
    size = table.size
    rows = group_rows.launch(chosen.flatten().int(), len(table.experts), tile)
    x = (x if table.scales_input else x.to(table.dtype)).contiguous()
    factors = weights.contiguous()
    count = num_tokens * num_chosen
    activated = torch.empty((count, size), dtype=table.dtype, device=x.device)
    # Products of float16 models may exceed the range of float16.
    product_type = table.dtype if table.dtype == torch.bfloat16 else torch.float32
    products = torch.empty((count, width), dtype=product_type, device=x.device)
    options = {"TILE": tile, "BLOCK_IN": BLOCK_IN, "BLOCK_OUT": BLOCK_OUT}
    options |= {"num_warps": NUM_WARPS, "num_stages": NUM_STAGES if tile < MANY_ROWS else 3}
    multiply_up[(len(rows.tiles), triton.cdiv(size, BLOCK_OUT))](
        x,
        factors,
        table.addresses,
        *rows,
        activated,
        float(table.gate_scale),
        SIZE_IN=width,
        SIZE_OUT=size,
        NUM_CHOSEN=num_chosen,
        NAME=table.activation.name,
        IS_GATED=table.activation.is_gated,
        HAS_BIAS=first.up_bias is not None,
        IS_SCALED=table.scales_input,
        **options,
    )
    multiply_down[(len(rows.tiles), triton.cdiv(width, BLOCK_OUT))](
        activated,
        table.addresses,
        *rows,
        products,
        SIZE_IN=size,
        SIZE_OUT=width,
        HAS_BIAS=first.down_bias is not None,
        **options,
    )
    _add(products, factors, y, table.scales_input)
    return y


def _add(products: Tensor, factors: Tensor, y: Tensor, is_scaled: bool) -> None:
    num_tokens, width = y.shape
    sizes = {"SIZE": width, "NUM_CHOSEN": factors.shape[1], "BLOCK": BLOCK_SUM, "IS_SCALED": is_scaled}
    add_chosen[(num_tokens, triton.cdiv(width, BLOCK_SUM))](products, factors, y, **sizes)


def plain(x: Tensor, weights: Tensor, chosen: Tensor, table: ExpertTable, tile: int) -> Tensor:
    """Compute every expert for every token."""
    y = torch.zeros_like(x, dtype=torch.float32)
    for number, expert in enumerate(table.experts):
        is_own = chosen == number  # [num_tokens, num_chosen]
        factor = torch.where(is_own, weights, 0.0).sum(1, keepdim=True)
        taken = (x * factor if table.scales_input else x).to(table.dtype)
        value = _linear(taken, expert.up, expert.up_bias)
        if table.activation.is_gated:
            value[:, : table.size] *= table.gate_scale
        value = gate.plain(value, table.activation.name, table.activation.is_gated).to(table.dtype)
        out = _linear(value, expert.down, expert.down_bias)
        out = out if table.scales_input else out * factor
        y += torch.where(is_own.any(1, keepdim=True), out, 0.0)
    return y


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x.float(), weight.float(), bias)
