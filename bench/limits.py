"""Computes the machine's limits for a shape, in tokens per second, from its read bandwidth and its rates of
products."""

from dataclasses import dataclass

from bench.shapes import Shape, count_parameters

WIDTHS = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "int8": 1.0}


@dataclass(frozen=True)
class Rates:
    """Measured rates of the machine, per second: bytes read, float32 operations of a large matrix product,
    and operations on registers of the instructions for bfloat16 numbers and 8-bit integers; the last two are
    None if the processor lacks the instruction."""

    read: float
    gemm: float
    bfloat16: float | None = None
    int8: float | None = None


def count_step_weights(shape: Shape) -> int:
    """Return the number of weights that a decode step reads: all except an embedding table that is not also
    the head."""
    return count_parameters(shape) - (0 if shape.tie_embeddings else _table(shape))


def count_body_weights(shape: Shape) -> int:
    """Return the number of weights that each token of a prompt is multiplied by: neither embedding table nor
    head."""
    return count_step_weights(shape) - _table(shape)


def count_attention(shape: Shape, start: int, end: int) -> int:
    """Return the operations of causal attention for a sequence's tokens [start, end): two per channel for the
    scores, two per channel for the sums."""
    seen = (end * (end + 1) - start * (start + 1)) // 2
    return 4 * shape.num_layers * shape.num_heads * shape.head_dim * seen


def prefill_operations(shape: Shape, num_tokens: int) -> int:
    return 2 * count_body_weights(shape) * num_tokens + count_attention(shape, 0, num_tokens)


def decode_operations(shape: Shape, input_tokens: int, new_tokens: int) -> int:
    """Return the operations of the steps that generate the second to the last token of one sequence."""
    steps, end = new_tokens - 1, input_tokens + new_tokens - 1
    return 2 * count_step_weights(shape) * steps + count_attention(shape, input_tokens, end)


def prefill_limit(
    shape: Shape, num_tokens: int, product_rate: float, attention_rate: float | None = None
) -> float:
    """Return the tokens per second of one prompt, from operations per second. Attention has the rate of
    products unless another is given."""
    attention = count_attention(shape, 0, num_tokens)
    products = prefill_operations(shape, num_tokens) - attention
    return num_tokens / (products / product_rate + attention / (attention_rate or product_rate))


def decode_limit(
    shape: Shape, dtype: str, batch: int, input_tokens: int, new_tokens: int, rates: Rates
) -> float:
    """Return the tokens per second of `batch` sequences together: the lower of the limits by reading the
    weights once per step and by multiplying. For one sequence it is the former, for 32 the latter."""
    reading = batch * rates.read / (count_step_weights(shape) * WIDTHS[dtype])
    multiplying = (new_tokens - 1) * rates.gemm / decode_operations(shape, input_tokens, new_tokens)
    return min(reading, multiplying)


def count_cache_bytes(shape: Shape, dtype: str, num_tokens: int) -> float:
    """Return the bytes of the keys and values of a sequence. The cache has 16 bits if weights have fewer."""
    elements = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * num_tokens
    return elements * max(2.0, WIDTHS[dtype])


def long_decode_limit(shape: Shape, dtype: str, context: int, rates: Rates) -> float:
    """Return the tokens per second of one sequence, limited by reading the weights and its keys and
    values."""
    weights = count_step_weights(shape) * WIDTHS[dtype]
    return rates.read / (weights + count_cache_bytes(shape, dtype, context))


def _table(shape: Shape) -> int:
    return shape.vocab_size * shape.hidden_size
