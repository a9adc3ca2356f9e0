"""Runs kernels that are compiled for ARM in QEMU's user mode, on the memory of this process.

The emulated process reads this process's memory through a file descriptor, page by page when a kernel accesses it,
and writes changes back before `call` returns. So the ordinary tests of kernels run unchanged."""

import os
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
_COMPILER, _EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
_LIBRARIES = "/usr/aarch64-linux-gnu"
# LLVM's name of a processor -> QEMU's. QEMU has no Neoverse V2.
_MODELS = {"neoverse-n1": "neoverse-n1", "neoverse-v2": "max"}
MISSING = [name for name in (_COMPILER, _EMULATOR) if shutil.which(name) is None]
"""Commands that the emulator needs and this machine lacks."""


class Emulator:
    """Process with an emulated processor. It ends with this process."""

    def __init__(self, processor: str):
        self._directory = Path(tempfile.mkdtemp(prefix="tgis-arm-"))
        self._num_libraries = 0
        runner = self._directory / "runner"
        sources = [str(_HERE / name) for name in ("runner.c", "numba_runtime.c")]
        _compile("-O2", "-Wall", "-Wextra", "-Werror", "-rdynamic", *sources, "-o", str(runner), "-ldl")
        memory = os.open("/proc/self/mem", os.O_RDWR)
        command = [_EMULATOR, "-cpu", _MODELS[processor], "-L", _LIBRARIES, str(runner), str(memory)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[memory]
        )
        os.close(memory)

    def load(self, compiled: Any) -> int:
        """Return the address, in the emulated process, of a function that numba.cfunc has compiled."""
        self._num_libraries += 1
        library = self._directory / f"kernel{self._num_libraries}.so"
        with tempfile.NamedTemporaryFile(suffix=".o") as file:
            file.write(compiled._library._get_compiled_object())
            file.flush()
            _compile("-shared", file.name, "-o", str(library), "-lm")
        address = self._ask(b"L", _text(str(library)), _text(compiled._wrapper_name))
        assert address, "the kernel cannot be loaded"
        return address

    def call(self, function: int, args: int) -> None:
        """Run a function on arguments at an address of this process."""
        self._ask(b"C", struct.pack("qq", function, args))

    def _ask(self, kind: bytes, *parts: bytes) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"".join((struct.pack("q", kind[0]), *parts)))
        self._process.stdin.flush()
        reply = self._process.stdout.read(8)
        assert len(reply) == 8, f"the emulated process has ended: {self._process.wait()}"
        [number] = struct.unpack("q", reply)
        return int(number)


def run_program(source: str, model: str, directory: Path) -> str:
    """Compile a C program in a directory, run it on a processor that QEMU emulates, and return its output."""
    file = directory / "program.c"
    file.write_text(source)
    _compile(str(file), "-o", str(directory / "program"))
    command = [_EMULATOR, "-cpu", model, "-L", _LIBRARIES, str(directory / "program")]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def _text(text: str) -> bytes:
    return struct.pack("q", len(text)) + text.encode()


def _compile(*arguments: str) -> None:
    subprocess.run([_COMPILER, *arguments], check=True)
