"""Warnings about kernels that are replaced because the processor's instructions failed the check at
startup."""

import logging

logger = logging.getLogger(__name__)


def warn_of_rounding(kernel: str) -> None:
    """Warn that a kernel with AVX512_BF16 is replaced."""
    logger.warning(
        "CPU kernel %s is replaced by rounding and float32 arithmetic, which is slower: this processor's "
        "AVX512_BF16 returned wrong results",
        kernel,
    )


def warn_without_amx(kernel: str, instructions: str) -> None:
    """Warn that a kernel with AMX tiles is replaced."""
    logger.warning(
        "CPU kernel %s is replaced by one without AMX: this processor's %s returned wrong results",
        kernel,
        instructions,
    )
