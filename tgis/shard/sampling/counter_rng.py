"""Counter-based RNG: random numbers are a pure function of (seed, position, token id).

They do not depend on rank, machine or batch, so a sequence that is resumed elsewhere continues with the same
random numbers."""

from itertools import repeat

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Number of elements that are processed together. They fit into a core's cache; the hash reads them about 20
# times.
CHUNK = 1 << 17
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
STRIDE = np.uint64(0xD1B54A32D192ED03)
# The largest float32 below 1: `log1p(-u)` must stay finite.
BELOW_ONE = 1 - 2.0**-24


def draw_keys(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> Tensor:
    """Hash (seed, position) to 64 bits for each of n draws. Return int32 [n, 2]."""
    bits = _mix64(_mix64(seeds + GOLDEN) ^ (positions.astype(np.uint64) * STRIDE))  # [n]
    return torch.from_numpy(bits.view(np.int32).reshape(-1, 2))


def draw_columns(scores: Tensor, keys: Tensor, token_ids: Tensor) -> Tensor:
    """Draw one column per row with the probabilities softmax(scores). Return int64 [n].

    This is an exponential race: token i finishes after a time Exp(1) / p_i, and the earliest token is drawn.
    The random number depends on the token id, not on the column, so columns that cannot win may be omitted.
    Shapes: scores [n, width], where -inf is never drawn; keys [n, 2]; token_ids int32 [width] or [n,
    width]."""
    rows = max(1, CHUNK // scores.shape[-1])
    if len(scores) <= rows:
        return _draw_columns(scores, keys, token_ids)
    ids = torch.split(token_ids, rows) if token_ids.dim() == 2 else repeat(token_ids)
    parts = zip(torch.split(scores, rows), torch.split(keys, rows), ids, strict=False)
    return torch.cat([_draw_columns(*part) for part in parts])


def _draw_columns(scores: Tensor, keys: Tensor, token_ids: Tensor) -> Tensor:
    times = uniforms(keys, token_ids).neg_().log1p_().neg_()  # [n, width]
    weights = (scores - scores.amax(-1, keepdim=True)).exp_()
    return weights.div_(times).argmax(-1)


def uniforms(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Return uniform 31-bit numbers in (0, 1), float32 [n, width], for arguments as in `draw_columns`.

    Their resolution is highest near 0, where the race is decided. The hash uses 32-bit rounds with two 32-bit
    keys, because torch multiplies 32-bit integers three times as fast as 64-bit ones."""
    bits = (token_ids * _wrap(0x9E3779B1)) ^ keys[:, :1]
    bits = _fold(bits, 16).mul_(_wrap(0x7FEB352D)).add_(keys[:, 1:])
    bits = _fold(bits, 15).mul_(_wrap(0x846CA68B))
    bits = _fold(bits, 16).bitwise_and_(0x7FFFFFFF)
    return bits.float().add_(0.5).mul_(2.0**-31).clamp_(max=BELOW_ONE)


def _fold(bits: Tensor, shift: int) -> Tensor:
    """Compute bits ^ (bits >> shift) in place. The mask undoes the sign extension of torch's shift."""
    return bits.bitwise_xor_((bits >> shift).bitwise_and_((1 << (32 - shift)) - 1))


def _wrap(constant: int) -> int:
    """Return the same 32 bits as a signed number."""
    return constant - (1 << 32) if constant >> 31 else constant


def _mix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix bits bijectively, so that every bit of the result depends on every bit of x."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
