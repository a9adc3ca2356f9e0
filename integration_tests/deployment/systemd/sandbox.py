"""Runs a command with the settings of a systemd unit, without systemd: its limits, its umask, its filter of
system calls and address families. `python -m ... UNIT COMMAND ARGUMENT...`"""

import ctypes
import errno
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from integration_tests.deployment.systemd.units import Unit, read_unit

LIBRARY = "libseccomp.so.2"
LIMITS = {"LimitNOFILE": resource.RLIMIT_NOFILE, "LimitCORE": resource.RLIMIT_CORE}
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_EQUAL = 4


class _Comparison(ctypes.Structure):
    """libseccomp's `scmp_arg_cmp`."""

    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("value", ctypes.c_uint64),
        ("unused", ctypes.c_uint64),
    )


def missing_tools() -> str:
    """Return the requirements of a sandbox that this machine lacks; empty if it has all."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return LIBRARY
    return "" if shutil.which("systemd-analyze") else "systemd-analyze"


def enter(unit: Unit) -> None:
    """Apply the filter, permanently."""
    for name, number in LIMITS.items():
        limit = int(unit.last(name))
        resource.setrlimit(number, (limit, limit))
    os.umask(int(unit.last("UMask"), 8))
    calls = {call for group in unit.words("SystemCallFilter") for call in _calls_of(group)}
    _filter(calls, unit.words("RestrictAddressFamilies"))


def _calls_of(group: str) -> Iterator[str]:
    command = ["systemd-analyze", "syscall-filter", group]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    for line in map(str.strip, shown.splitlines()[1:]):
        if line.startswith("@"):
            yield from _calls_of(line)
        elif line and not line.startswith("#"):
            yield line


def _filter(calls: set[str], families: list[str]) -> None:
    library = ctypes.CDLL(LIBRARY)
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(_ERRNO | errno.EPERM))
    for call in calls - {"socket"}:
        number = library.seccomp_syscall_resolve_name(call.encode())
        if number >= 0:  # otherwise this processor has no such call
            assert library.seccomp_rule_add(context, _ALLOW, number, 0) == 0, call
    number = library.seccomp_syscall_resolve_name(b"socket")
    for family in families:
        is_family = _Comparison(0, _EQUAL, getattr(socket, family), 0)
        assert library.seccomp_rule_add_array(context, _ALLOW, number, 1, ctypes.byref(is_family)) == 0, (
            family
        )
    assert library.seccomp_load(context) == 0


if __name__ == "__main__":
    path, *command = sys.argv[1:]
    enter(read_unit(Path(path).read_text(), ""))
    os.execv(command[0], command)  # noqa: S606
