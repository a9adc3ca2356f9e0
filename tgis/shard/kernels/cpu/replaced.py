"""Warnings about kernels that are replaced because the processor's instructions fail a check at the start."""

import logging

logger = logging.getLogger(__name__)


def warn_of_rounding(kernel: str) -> None:
    """Warn that a kernel of products of pairs is replaced."""
    logger.warning(
        "CPU kernel %s is replaced by rounding and float32 arithmetic, which is slower: this processor's "
        "AVX512_BF16 computes something else",
        kernel,
    )


def warn_without_amx(kernel: str, instructions: str) -> None:
    """Warn that a kernel of products on tiles is replaced."""
    logger.warning(
        "CPU kernel %s is replaced by one without AMX: this processor's %s computes something else",
        kernel,
        instructions,
    )
