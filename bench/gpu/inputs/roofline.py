"""Computes lower bounds of a step's time: each operator takes its bytes over the bandwidth or its operations
over the rate, whichever is more."""

from dataclasses import dataclass

from bench.shapes import Shape

BYTES = 2  # bytes of a weight, an activation, a key or a value


@dataclass(frozen=True)
class Rates:
    bandwidth: float  # bytes a second
    gemm: float  # operations a second


def list_linears(shape: Shape) -> list[tuple[int, int]]:
    """Return the matrices [out_features, in_features] of one layer."""
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return [
        (q_size + 2 * kv_size, shape.hidden_size),
        (shape.hidden_size, q_size),
        (2 * shape.intermediate_size, shape.hidden_size),
        (shape.hidden_size, shape.intermediate_size),
    ]


def linear_seconds(num_tokens: int, matrix: tuple[int, int], rates: Rates) -> float:
    rows, columns = matrix
    num_bytes = BYTES * (rows * columns + num_tokens * (rows + columns))
    return max(num_bytes / rates.bandwidth, 2 * rows * columns * num_tokens / rates.gemm)


def weight_bytes(shape: Shape) -> int:
    """Return the bytes of weights that a decode step reads."""
    each = sum(rows * columns for rows, columns in list_linears(shape))
    return BYTES * (shape.num_layers * each + shape.vocab_size * shape.hidden_size)


def kv_bytes(shape: Shape, num_tokens: int, itemsize: int = BYTES) -> int:
    """Return the bytes of the keys and values of cached tokens, numbers of `itemsize` bytes."""
    return 2 * itemsize * num_tokens * shape.num_kv_heads * shape.head_dim * shape.num_layers


def decode_seconds(
    shape: Shape, num_rows: int, context: int, rates: Rates, cache_itemsize: int = BYTES
) -> float:
    linears = sum(linear_seconds(num_rows, matrix, rates) for matrix in list_linears(shape))
    head = linear_seconds(num_rows, (shape.vocab_size, shape.hidden_size), rates)
    logits = 4 * num_rows * shape.vocab_size / rates.bandwidth
    cache = kv_bytes(shape, num_rows * context, cache_itemsize) / rates.bandwidth
    return shape.num_layers * linears + head + logits + cache


def prefill_operations(shape: Shape, num_tokens: int) -> float:
    """Return the operations of a prompt without the head. On average, a query attends to half of the keys."""
    linears = sum(2 * rows * columns for rows, columns in list_linears(shape)) * num_tokens
    pairs = num_tokens * (num_tokens + 1) / 2
    return shape.num_layers * (linears + 4 * shape.num_heads * shape.head_dim * pairs)
