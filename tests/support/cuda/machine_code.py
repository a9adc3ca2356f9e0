"""Reads what a kernel costs from its machine code, with the tools in Triton's wheel."""

import re
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

from triton import knobs

from tgis.shard.kernels.cuda.offline.driver import OfflineKernel

_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")


@dataclass(frozen=True)
class MachineCode:
    registers: int  # of a thread
    stack_bytes: int  # of a thread; registers that do not suffice are kept there
    shared_bytes: int
    warps: int
    warpgroup_products: int  # instructions for tensor cores of sm_90
    tensor_products: int  # the same of a single warp
    loads: int  # instructions that read global memory
    wide_loads: int  # those of them that read 16 bytes a thread

    def faults(self, max_shared_bytes: int) -> list[str]:
        """Return what no kernel may do, each in a line."""
        found = []
        if self.stack_bytes:
            found.append(f"{self.stack_bytes} bytes of registers are spilled")
        if self.shared_bytes > max_shared_bytes:
            found.append(f"{self.shared_bytes} bytes of shared memory, at most {max_shared_bytes}")
        return found


def read_machine_code(kernel: OfflineKernel) -> MachineCode:
    _, registers, stack_bytes, names = _disassemble(kernel.cubin)

    def count(pattern: str) -> int:
        return sum(bool(re.match(pattern, name)) for name in names)

    return MachineCode(
        registers=registers,
        stack_bytes=stack_bytes,
        shared_bytes=kernel.metadata.shared,
        warps=kernel.metadata.num_warps,
        warpgroup_products=count("HGMMA"),
        tensor_products=count("HMMA"),
        loads=count("LDG"),
        wide_loads=count(r"LDG.*\.128"),
    )


def read_target(kernel: OfflineKernel) -> str:
    """Return what the code was compiled for, like sm_90a."""
    return _disassemble(kernel.cubin)[0]


@lru_cache
def _disassemble(cubin: bytes) -> tuple[str, int, int, list[str]]:
    """Return the target, the number of registers, the bytes of stack, and the names of instructions."""
    with TemporaryDirectory() as directory:
        file = Path(directory) / "kernel.cubin"
        file.write_bytes(cubin)
        instructions, usage = _dump("--dump-sass", file), _USAGE.search(_dump("-res-usage", file))
    target = re.search(r"code for (\w+)", instructions)
    assert usage, "cuobjdump says nothing of registers"
    assert target, "cuobjdump says nothing of the target"
    return target[1], int(usage[1]), int(usage[2]), _INSTRUCTION.findall(instructions)


def _dump(what: str, file: Path) -> str:
    command = [knobs.nvidia.cuobjdump.path, what, str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
