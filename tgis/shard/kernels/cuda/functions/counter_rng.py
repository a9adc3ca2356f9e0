"""Counter-based RNG in Triton, with the bits of `sampling.counter_rng`."""

import triton
import triton.language as tl

from tgis.shard.sampling import counter_rng

GOLDEN, STRIDE = tl.constexpr(int(counter_rng.GOLDEN)), tl.constexpr(int(counter_rng.STRIDE))
BELOW_ONE = tl.constexpr(counter_rng.BELOW_ONE)


@triton.jit
def draw_key(seed_low, seed_high, position):
    """Hash an int32 position and a seed, given as two int32, to a key of two uint32."""
    seed = _as_unsigned(seed_low).to(tl.uint64) | (_as_unsigned(seed_high).to(tl.uint64) << 32)
    bits = _mix64(_mix64(seed + GOLDEN) ^ (position.to(tl.uint64) * STRIDE))
    return bits.to(tl.uint32), (bits >> 32).to(tl.uint32)


@triton.jit
def uniforms(key_low, key_high, token_ids):
    """Return a uniform float32 in (0, 1) for each int32 token id."""
    bits = (_as_unsigned(token_ids) * 0x9E3779B1) ^ key_low
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D + key_high
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    bits = (bits ^ (bits >> 16)) & 0x7FFFFFFF
    return tl.minimum((bits.to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10, BELOW_ONE)


@triton.jit
def _mix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _as_unsigned(x):
    return x.to(tl.uint32, bitcast=True)
