"""Permission to use AMX tiles, which a process must ask the system for before its first instruction."""

import ctypes
import errno
import logging
import os

from tgis.shard.kernels.cpu.amx import instructions

logger = logging.getLogger(__name__)

_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 0x1023, 18  # from Linux's asm/prctl.h and asm/fpu/types.h


def may_use_tiles() -> bool:
    """Return True if there is AMX and the system permits its use to this process."""
    if instructions.INSTRUCTIONS is None:
        return False
    refused = ask()
    if refused is not None:
        logger.warning("the system does not permit the use of AMX, so it is not used: %s", refused)
    return refused is None


def ask() -> str | None:
    """Ask for permission for all threads of this process. Return why the system refuses, None if it does
    not."""
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    syscall.argtypes = [ctypes.c_long] * 3
    if syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0:
        return None
    number = ctypes.get_errno()
    return f"{errno.errorcode.get(number, number)}, {os.strerror(number)}"
