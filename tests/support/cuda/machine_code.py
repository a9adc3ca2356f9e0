"""Reads a kernel's resources from its machine code with the tools in Triton's wheel."""

import re
import subprocess
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

from triton import knobs

from tgis.shard.kernels.cuda.offline.driver import OfflineKernel

_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")


@dataclass(frozen=True)
class Resources:
    registers: int  # per thread
    stack_bytes: int  # per thread, for spilled registers
    shared_bytes: int
    warps: int

    def faults(self, max_shared_bytes: int) -> list[str]:
        """Return the faults that no kernel may have, one per line."""
        results = []
        if self.stack_bytes:
            results.append(f"{self.stack_bytes} bytes of registers are spilled")
        if self.shared_bytes > max_shared_bytes:
            results.append(f"{self.shared_bytes} bytes of shared memory, at most {max_shared_bytes}")
        return results


@dataclass(frozen=True)
class MachineCode(Resources):
    warpgroup_products: int  # tensor-core instructions of sm_90
    tensor_products: int  # tensor-core instructions of single warps
    loads: int  # instructions that read global memory
    wide_loads: int  # instructions that read 16 bytes per thread of global memory


def read_resources(kernel: OfflineKernel) -> Resources:
    usage = _USAGE.search(_dump("-res-usage", kernel.cubin))
    assert usage, "cuobjdump says nothing of registers"
    return Resources(
        registers=int(usage[1]),
        stack_bytes=int(usage[2]),
        shared_bytes=kernel.metadata.shared,
        warps=kernel.metadata.num_warps,
    )


def read_machine_code(kernel: OfflineKernel) -> MachineCode:
    """Read the resources and the instructions. The latter takes a hundred times as long."""
    names = _INSTRUCTION.findall(_dump("--dump-sass", kernel.cubin))

    def count(pattern: str) -> int:
        return sum(bool(re.match(pattern, name)) for name in names)

    return MachineCode(
        **asdict(read_resources(kernel)),
        warpgroup_products=count("HGMMA"),
        tensor_products=count("HMMA"),
        loads=count("LDG"),
        wide_loads=count(r"LDG.*\.128"),
    )


def read_target(kernel: OfflineKernel) -> str:
    """Return the compilation target, such as sm_90a."""
    target = re.search(r"\.(sm_\w+)\.cubin", _dump("--list-elf", kernel.cubin))
    assert target, "cuobjdump says nothing of the target"
    return target[1]


@lru_cache
def _dump(what: str, cubin: bytes) -> str:
    with TemporaryDirectory() as directory:
        file = Path(directory) / "kernel.cubin"
        file.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, what, str(file)]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
