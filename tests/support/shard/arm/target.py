"""Makes numba compile for an ARM processor on any machine. It must be imported before numba, in a process that
does nothing else: its name and features are in NUMBA_CPU_NAME and NUMBA_CPU_FEATURES."""

import llvmlite.binding as llvm
from llvmlite.binding import targets

TRIPLE = "aarch64-unknown-linux-gnu"
N1 = "+neon,+fp-armv8,+fullfp16,+dotprod,+lse,+rdm,+rcpc,+crc"
# LLVM's name of a processor -> features, without SVE, whose vectors have no fixed size.
PROCESSORS = {"neoverse-n1": N1, "neoverse-v2": f"{N1},+i8mm,+bf16"}


def use() -> None:
    """Compile for `TRIPLE` from now on. The code cannot be run in this process."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    for module in (llvm, targets):
        module.get_process_triple = lambda: TRIPLE
        module.get_default_triple = lambda: TRIPLE
