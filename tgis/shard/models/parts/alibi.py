"""Slopes of attention with linear biases (ALiBi): how much a key loses per position that it lies behind."""


def alibi_slopes(num_heads: int, bias_max: float = 8.0) -> tuple[float, ...]:
    """One per head. A power of two of them fall geometrically to 2^-bias_max; any heads above the greatest
    power of two take every other slope of twice as many."""
    power = 1 << (num_heads.bit_length() - 1)
    whole = [2.0 ** (-bias_max * i / power) for i in range(1, power + 1)]
    between = [2.0 ** (-bias_max * (i - 0.5) / power) for i in range(1, num_heads - power + 1)]
    return (*whole, *between)
