"""Features of this machine's ARM processor that LLVM's code generator knows, but its detection does not."""

import ctypes
import platform

from llvmlite import binding
from numba import config

AT_HWCAP = 16  # from Linux's uapi/linux/auxvec.h
# Bit of AT_HWCAP, from arch/arm64/include/uapi/asm/hwcap.h -> LLVM's name of the feature.
_FEATURES = {1 << 20: "dotprod"}


def complete_features() -> None:
    """Compile for the features that LLVM does not detect. Has no effect on other processors, and if the
    variable NUMBA_CPU_FEATURES sets the features."""
    if platform.machine() == "aarch64" and config.CPU_FEATURES is None:
        detected = binding.get_host_cpu_features().flatten()
        config.CPU_FEATURES = ",".join(filter(None, (detected, *name_features(_read_capabilities()))))


def name_features(capabilities: int) -> list[str]:
    """Return features in LLVM's form."""
    return [f"+{name}" for bit, name in _FEATURES.items() if capabilities & bit]


def _read_capabilities() -> int:
    read = ctypes.CDLL(None).getauxval
    read.restype = ctypes.c_ulong
    read.argtypes = [ctypes.c_ulong]
    value: int = read(AT_HWCAP)
    return value
