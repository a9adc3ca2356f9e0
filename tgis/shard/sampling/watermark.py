"""Green lists for the watermark of Kirchenbauer et al. (2023), "A Watermark for Large Language Models",
section 3. They are drawn like TGI's, so that TGI's detector recognizes the watermark."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

HASH_KEY = 15485863
# Number of cached green lists. A permutation of 128k ids takes about a millisecond; 1,024 lists take 16 MiB.
MAX_CACHED = 1024


def green_tokens(
    previous: npt.NDArray[np.int32], gammas: npt.NDArray[np.float64], vocab_size: int
) -> npt.NDArray[np.bool_]:
    """Return the green tokens of n rows, bool [n, vocab_size]. `previous` [n] has each row's last token, and
    `gammas` [n] its fraction of green tokens."""
    bits = pack_green(previous, gammas, vocab_size).view(np.uint8)
    return np.unpackbits(bits, axis=-1, count=vocab_size, bitorder="little").view(np.bool_)


def pack_green(
    previous: npt.NDArray[np.int32], gammas: npt.NDArray[np.float64], vocab_size: int
) -> npt.NDArray[np.int32]:
    """Return the same as bits, int32 [n, ceil(vocab_size / 32)]: bit i % 32 of word i / 32 is token i."""
    pairs = zip(previous.tolist(), gammas.tolist(), strict=True)
    return np.stack([_draw_green(token_id, gamma, vocab_size) for token_id, gamma in pairs])


@lru_cache(MAX_CACHED)
def _draw_green(token_id: int, gamma: float, vocab_size: int) -> npt.NDArray[np.int32]:
    # Every platform uses the CPU's generator, so that all ranks and machines draw the same lists.
    generator = torch.Generator().manual_seed(HASH_KEY * token_id)
    is_green = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    is_green[torch.randperm(vocab_size, generator=generator)[: int(vocab_size * gamma)].numpy()] = True
    return np.packbits(is_green, bitorder="little").view("<i4")
