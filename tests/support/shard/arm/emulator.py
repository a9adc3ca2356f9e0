"""Runs kernels that are compiled for ARM in QEMU's user mode, on the memory of this process.

The emulated process reads this process's memory page by page, when a kernel accesses it, and writes changes
back before `call` returns. So the ordinary tests of kernels run unchanged."""

import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
_COMPILER, _EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
_LIBRARIES = "/usr/aarch64-linux-gnu"
# LLVM's name of a processor -> QEMU's. QEMU has no Neoverse V2.
_MODELS = {"neoverse-n1": "neoverse-n1", "neoverse-v2": "max"}
MISSING = [name for name in (_COMPILER, _EMULATOR) if shutil.which(name) is None]
"""Commands that the emulator needs and this machine lacks."""

# Minimum distance between this process's memory and the emulator's own, so that both can grow.
_MARGIN = 4 << 30
_MAX_STARTS = 50


class Emulator:
    """Process with an emulated processor. It ends with this process."""

    def __init__(self, processor: str):
        self._directory = tempfile.TemporaryDirectory(prefix="tgis-arm-")
        self._num_libraries = 0
        runner = self._place("runner")
        sources = [str(_HERE / name) for name in ("runner.c", "numba_runtime.c")]
        _compile("-O2", "-Wall", "-Wextra", "-Werror", "-rdynamic", *sources, "-o", runner, "-ldl")
        for _ in range(_MAX_STARTS):
            self._process = _start(_MODELS[processor], runner)
            self._read_number()
            if _are_apart(os.getpid(), self._process.pid):
                return
            self._process.kill()
        raise RuntimeError("the emulator's memory overlaps this process's at every start")

    def load(self, compiled: Any) -> int:
        """Return the address, in the emulated process, of a function that numba.cfunc has compiled."""
        self._num_libraries += 1
        library = self._place(f"kernel{self._num_libraries}.so")
        with tempfile.NamedTemporaryFile(suffix=".o") as file:
            file.write(compiled._library._get_compiled_object())
            file.flush()
            _compile("-shared", file.name, "-o", library, "-lm")
        address = self._ask(b"L", _text(library), _text(compiled._wrapper_name))
        assert address, "the kernel cannot be loaded"
        return address

    def call(self, function: int, args: int) -> None:
        """Run a function on arguments at an address of this process."""
        self._ask(b"C", struct.pack("qq", function, args))

    def _place(self, name: str) -> str:
        return str(Path(self._directory.name, name))

    def _ask(self, kind: bytes, *parts: bytes) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(b"".join((struct.pack("q", kind[0]), *parts)))
        self._process.stdin.flush()
        return self._read_number()

    def _read_number(self) -> int:
        assert self._process.stdout is not None
        reply = self._process.stdout.read(8)
        assert len(reply) == 8, f"the emulated process has ended: {self._process.wait()}"
        [number] = struct.unpack("q", reply)
        return int(number)


def run_program(source: str, model: str, directory: Path) -> str:
    """Compile a C program in a directory, run it on QEMU's processor `model`, and return its output."""
    file, program = directory / "program.c", str(directory / "program")
    file.write_text(source)
    _compile(str(file), "-o", program)
    command = [_EMULATOR, "-cpu", model, "-L", _LIBRARIES, program]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def _start(model: str, runner: str) -> subprocess.Popen[bytes]:
    memory = os.open("/proc/self/mem", os.O_RDWR)
    try:
        return subprocess.Popen(
            [_EMULATOR, "-cpu", model, "-L", _LIBRARIES, runner, str(memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[memory],
        )
    finally:
        os.close(memory)


def _are_apart(process: int, emulator: int) -> bool:
    """Return True if no memory of a process is close to an emulator's. QEMU does not notice if a kernel
    accesses an address that the emulator itself uses."""
    theirs = list(_list_memory(emulator))
    return all(
        end + _MARGIN <= other_begin or other_end + _MARGIN <= begin
        for begin, end in _list_memory(process)
        for other_begin, other_end in theirs
    )


def _list_memory(process: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of addresses that kernels may access, so not stacks."""
    for line in Path(f"/proc/{process}/maps").read_text().splitlines():
        addresses, *_, name = line.split()
        if not name.startswith(("[stack", "[v")):
            begin, end = addresses.split("-")
            yield int(begin, 16), int(end, 16)


def _text(text: str) -> bytes:
    return struct.pack("q", len(text)) + text.encode()


def _compile(*arguments: str) -> None:
    subprocess.run([_COMPILER, *arguments], check=True)
