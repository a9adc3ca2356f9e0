"""Slopes of attention with linear biases (ALiBi): a key's loss of score per position."""


def alibi_slopes(num_heads: int, bias_max: float = 8.0) -> tuple[float, ...]:
    """Return one slope per head, falling geometrically to 2^-bias_max.

    Heads past the greatest power of two take every other slope of twice as many heads."""
    power = 1 << (num_heads.bit_length() - 1)
    whole = [2.0 ** (-bias_max * i / power) for i in range(1, power + 1)]
    between = [2.0 ** (-bias_max * (i - 0.5) / power) for i in range(1, num_heads - power + 1)]
    return (*whole, *between)
