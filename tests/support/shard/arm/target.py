"""Makes numba compile for an ARM processor on any machine."""

import os
from typing import Any

import llvmlite.binding as llvm
from llvmlite.binding import targets

TRIPLE = "aarch64-unknown-linux-gnu"
_N1 = "+neon,+fp-armv8,+fullfp16,+dotprod,+lse,+rdm,+rcpc,+crc"
PROCESSORS = {"neoverse-n1": _N1, "neoverse-v2": f"{_N1},+i8mm,+bf16"}
"""LLVM's name of a processor -> features that are detected on it."""


def use(processor: str) -> None:
    """Compile for a processor from now on. The code cannot run in this process. Numba must not be imported
    yet."""
    _import_numba(NUMBA_CPU_NAME=processor, NUMBA_CPU_FEATURES=PROCESSORS[processor])
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    for module in (llvm, targets):
        module.get_process_triple = module.get_default_triple = lambda: TRIPLE

    from numba.core.codegen import JITCPUCodegen

    JITCPUCodegen._customize_tm_options = _make_relocatable


def _import_numba(**variables: str) -> None:
    """Import numba's configuration with environment variables that child processes do not inherit."""
    os.environ.update(variables)
    import numba.core.config

    assert all(getattr(numba.core.config, name[6:]) == value for name, value in variables.items())
    for name in variables:
        del os.environ[name]


def _make_relocatable(codegen: Any, options: dict[str, Any]) -> None:
    """Set options with which code can become a shared library. Addresses take fewer instructions than in
    numba's own code for ARM; nothing else differs."""
    options.update(reloc="pic", codemodel="default", cpu=codegen._get_host_cpu_name())
    options["features"] = codegen._tm_features
