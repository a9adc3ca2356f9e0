"""Slopes of ALiBi: Press, Smith, Lewis, "Train Short, Test Long: Attention with Linear Biases", 2021."""


def alibi_slopes(num_heads: int, bias_max: float = 8.0) -> tuple[float, ...]:
    """Return one slope per head. Slopes decrease geometrically to 2^-bias_max.

    Heads beyond the largest power of two use every other slope of a model with twice as many heads."""
    power = 1 << (num_heads.bit_length() - 1)
    whole = [2.0 ** (-bias_max * i / power) for i in range(1, power + 1)]
    between = [2.0 ** (-bias_max * (i - 0.5) / power) for i in range(1, num_heads - power + 1)]
    return (*whole, *between)
