"""Exponentials and logarithms with an error of less than one unit in the last place, like the CPU's.

They consist of IEEE 754 additions, multiplications and divisions. If the launch sets enable_fp_fusion=False,
results have the same bits on every GPU and in Triton's interpreter."""

import triton
import triton.language as tl

# LN2_HIGH has 15 bits, so its product with an exponent is exact. LN2_LOW is log(2) - LN2_HIGH.
LN2_HIGH, LN2_LOW = tl.constexpr(0.693145751953125), tl.constexpr(1.42860682030941723e-6)
LOG2_E = tl.constexpr(1.4426950408889634)
# exp(LOWEST) is near the smallest normal number.
LOWEST = tl.constexpr(-87.0)
SQRT_HALF_BITS = tl.constexpr(0x3F3504F3)


@triton.jit
def exp_negative(x):
    """Return exp(x) for x <= 0; 0 for x < LOWEST."""
    inside = tl.maximum(x, LOWEST)
    exponent = tl.floor(inside * LOG2_E + 0.5)
    r = (inside - exponent * LN2_HIGH) - exponent * LN2_LOW  # |r| <= log(2) / 2
    series = 1 / 5040
    series = 1 / 720 + r * series
    series = 1 / 120 + r * series
    series = 1 / 24 + r * series
    series = 1 / 6 + r * series
    series = 1 / 2 + r * series
    power = ((exponent.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x < LOWEST, 0.0, (1.0 + (r + r * r * series)) * power)


@triton.jit
def log_positive(x):
    """Return log(x) for normal x > 0."""
    exponent, mantissa = _split(x)
    return _log_of_parts(exponent, mantissa - 1.0, mantissa * 0.0)


@triton.jit
def log_complement(u):
    """Return log(1 - u) for 0 < u < 1. The relative error is small also for small u."""
    x = 1.0 - u
    rest = (1.0 - x) - u  # (1 - u) - x
    exponent, mantissa = _split(x)
    is_near_one = exponent == 0
    fraction = tl.where(is_near_one, -u, mantissa - 1.0)
    return _log_of_parts(exponent, fraction, tl.where(is_near_one, 0.0, tl.div_rn(rest, x)))


@triton.jit
def _split(x):
    """Split x > 0 into an exponent of 2, int32, and a factor in [sqrt(1/2), sqrt(2))."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - SQRT_HALF_BITS) >> 23
    return exponent, (bits - (exponent << 23)).to(tl.float32, bitcast=True)


@triton.jit
def _log_of_parts(exponent, fraction, rest):
    """Return exponent * log(2) + log(1 + fraction) + rest for a small rest.

    With s = f / (2 + f), log(1 + f) is 2 atanh(s) = 2 s + s^3 (2/3 + 2/5 s^2 + ...), and 2 s = f - s f."""
    s = tl.div_rn(fraction, 2.0 + fraction)
    z = s * s
    series = 2 / 9
    series = 2 / 7 + z * series
    series = 2 / 5 + z * series
    series = z * (2 / 3 + z * series)
    half = 0.5 * fraction * fraction  # s f = half - s half
    scale = exponent.to(tl.float32)
    tail = half - (s * (half + series) + (scale * LN2_LOW + rest))
    return scale * LN2_HIGH - (tail - fraction)
