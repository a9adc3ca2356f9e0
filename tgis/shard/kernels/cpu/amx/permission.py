"""Permission to use AMX tiles, which a process must ask the system for before its first instruction."""

import ctypes
import errno
import os

_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 0x1023, 18  # from Linux's asm/prctl.h and asm/fpu/types.h


def ask() -> str | None:
    """Ask for permission for all threads of this process. Return why the system refuses, None if it does
    not."""
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype, syscall.argtypes = ctypes.c_long, [ctypes.c_long] * 3
    if syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0:
        return None
    number = ctypes.get_errno()
    return f"{errno.errorcode.get(number, number)}, {os.strerror(number)}"
