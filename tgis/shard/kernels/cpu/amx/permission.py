"""Permission to use AMX tiles, which a process must request from the system before the first instruction."""

import ctypes
import errno
import logging
import os

from tgis.shard.kernels.cpu.amx import instructions

logger = logging.getLogger(__name__)

_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 0x1023, 18  # from Linux's asm/prctl.h and asm/fpu/types.h


def may_use_tiles() -> bool:
    """Return True if the processor has AMX and the system permits this process to use it."""
    if instructions.INSTRUCTIONS is None:
        return False
    refused = ask()
    if refused is not None:
        logger.warning("the system does not permit the use of AMX, so it is not used: %s", refused)
    return refused is None


def ask() -> str | None:
    """Request permission for all threads of this process. Return the system's error, or None if it
    permits."""
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    syscall.argtypes = [ctypes.c_long] * 3
    if syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0:
        return None
    number = ctypes.get_errno()
    return f"{errno.errorcode.get(number, number)}, {os.strerror(number)}"
