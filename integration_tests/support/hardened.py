"""Runs a service in an environment as restricted as in clusters: an unknown user id, no capabilities, a
read-only disk except for /tmp, no network except loopback."""

import asyncio
import contextlib
import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from ipaddress import ip_address
from itertools import chain
from pathlib import Path

import pytest

from integration_tests.support.service import Client
from tests.support.processes import Service, children_of

USER_ID = 1000660000
FILES = Path("/tmp/files")  # paths of the files that the service is given
AUDIT = Path("/tmp/audit")
COMPILED_CODE = str(Path("tgis/shard/kernels/cpu/jit/__pycache__").absolute())
GRPC_PORT, HTTP_PORT = 8033, 3000  # the defaults
_CLONE_NEWNET = 0x40000000
_IN_OPEN = 0x20
# Arguments: a directory to mount on, the size of /tmp, the files, paths to keep visible, `--`, the command.
# Directories that only their owner may enter, like /root, are covered like /tmp.
_SET_UP = """
set -e
new=$1 size=$2 files=$3
shift 3
ip link set lo up
mount --make-rprivate /
show() {
    mkdir -p "$2"
    mount --bind "$1" "$2"
    mount -o remount,bind,ro "$2"
}
cover() {
    covered=$1
    mount -t tmpfs -o mode=$2,size=$size tmpfs "$new"
    shift 2
    while [ "$1" != -- ]; do
        case $1 in "$covered"/*) show "$1" "$new${1#"$covered"}" ;; esac
        shift
    done
}
cover "$HOME_OF_ROOT" 755 "$@"
mount --move "$new" "$HOME_OF_ROOT"
cover /tmp 1777 "$@"
mkdir "$new/audit"
mount -t tmpfs -o mode=1777 tmpfs "$new/audit"
show "$files" "$new/files"
mount --move "$new" /tmp
while [ "$1" != -- ]; do shift; done
shift
[ ! -d "$HIDDEN" ] || mount -t tmpfs tmpfs "$HIDDEN"
while read -r _ _ _ _ target _; do
    case $target in
        "$HIDDEN") mount -o remount,bind,ro "$target" ;;
        /tmp | /tmp/* | /proc*) ;;
        *) mount -o remount,bind,ro "$target" ;;
    esac
done < /proc/self/mountinfo
exec setpriv --reuid=USER --regid=0 --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all \\
    env "$@"
""".replace("USER", str(USER_ID)).replace("$HOME_OF_ROOT", str(Path("~root").expanduser()))


def interpreter(scratch: Path, files: Path, size: str) -> list[str]:
    """Return a command that runs Python there; /tmp has `size`, and contains `files` and Python's own
    files."""
    (scratch / "root").mkdir(exist_ok=True)
    paths = {Path.cwd(), Path(sys.base_prefix), *(Path(path).absolute() for path in sys.path if path)}
    visible = [path for path in paths if path.exists() and not paths & set(path.parents)]
    arguments = map(str, (scratch / "root", size, files, *visible))
    set_up = ["unshare", "--mount", "--net", "sh", "-c", _SET_UP, "sh", *arguments, "--"]
    return [*set_up, os.path.realpath(sys.executable)]


def environment() -> dict[str, str]:
    path = [Path(__file__).parents[1] / "audit", Path.cwd(), *filter(None, sys.path)]
    return {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "AUDIT_DIRECTORY": str(AUDIT),
        "HOME": "/nonexistent",
        "TMPDIR": "/tmp",
    }


def skip_unless_possible(scratch: Path, files: Path) -> None:
    """Skip with the reason if the machine does not allow it."""
    missing = [tool for tool in ("unshare", "setpriv", "mount", "ip") if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"needs root, and {missing or 'no more'}, to make namespaces")
    start_another = "import subprocess, sys, tgis; subprocess.run([sys.executable, '-c', ''], check=True)"
    command = [*interpreter(scratch, files, "1m"), "-c", start_another]
    env = os.environ | environment()
    tried = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    if tried.returncode:
        pytest.skip(f"no such place can be made here: {tried.stderr.splitlines()[-1:]}")


@dataclass(frozen=True)
class Event:
    kind: str
    what: str


class Hardened:
    """Running service of two shards that can be reached from here."""

    def __init__(self, scratch: Path, files: Path, *flags: str, size: str, is_compiled: bool = True) -> None:
        """Ports and address are the defaults. `files` contains a directory `model`; compiled kernels may be
        left out."""
        skip_unless_possible(scratch, files)
        command = ["launcher", "--model-name", str(FILES / "model"), "--num-shard", "2", *flags]
        env = environment() | {"HIDDEN": "" if is_compiled else COMPILED_CODE}
        self.service = Service(command, env, python=interpreter(scratch, files, size))
        self.service.wait_until_serving()
        self._relay = Relay(self.service.process.pid, GRPC_PORT, HTTP_PORT)
        self.service.grpc_port, self.service.http_port = self._relay.ports
        self.client = Client(self.service)

    @property
    def pids(self) -> list[int]:
        """Process ids, the launcher's first."""
        pid = self.service.process.pid
        return [pid, *chain(*children_of(pid).values())]

    @property
    def root(self) -> Path:
        """Return its files, as it sees them."""
        return self.proc / "root"

    @property
    def proc(self) -> Path:
        return Path(f"/proc/{self.service.process.pid}")

    def addresses(self, *tables: str, states: Collection[str] = ()) -> set[tuple[str, int]]:
        """Return the hosts and ports of its network's sockets, in the given states if any."""
        listening = set()
        for table in tables:
            for line in (self.proc / "net" / table).read_text().splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                host, port = local.split(":")
                if not states or state in states:
                    words = [bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8)]
                    listening.add((str(ip_address(b"".join(words))), int(port, 16)))
        return listening

    def unix_sockets(self) -> set[str]:
        """Return the names of the listening sockets."""
        lines = [line.split() for line in (self.proc / "net" / "unix").read_text().splitlines()[1:]]
        return {line[7] for line in lines if len(line) == 8 and line[3] == "00010000"}

    def counters(self) -> dict[str, int]:
        """Return the kernel's counters of its network."""
        lines = [line.split() for line in (self.proc / "net" / "snmp6").read_text().splitlines()]
        by_name = {name: int(value) for name, value in lines}
        pairs = [line.split(": ") for line in (self.proc / "net" / "snmp").read_text().splitlines()]
        for (kind, names), (_, values) in zip(pairs[::2], pairs[1::2], strict=True):
            by_name |= {
                kind + name: int(value) for name, value in zip(names.split(), values.split(), strict=True)
            }
        return by_name

    def audited(self) -> dict[str, list[Event]]:
        """Return the audit events of each of its interpreters, by process id, including ended ones."""
        logs = (self.root / AUDIT.relative_to("/")).iterdir()
        return {log.name: [Event(*json.loads(line)) for line in log.read_text().splitlines()] for log in logs}

    def end(self) -> int:
        """End it, and return its exit code."""
        self.client.channel.close()
        try:
            return self.service.end()
        finally:
            self._relay.stop()


class Relay:
    """Forward connections from loopback ports here to those of a process in a separate network."""

    def __init__(self, pid: int, *ports: int) -> None:
        self._pid, self._targets = pid, ports
        self._listeners = [socket.create_server(("127.0.0.1", 0)) for _ in ports]
        self.ports = [listener.getsockname()[1] for listener in self._listeners]
        self._over, self._loop = asyncio.Event(), asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="relay")
        self._thread.start()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    def _run(self) -> None:
        """Enter that network with the calling thread, permanently, and with the sockets that it creates."""
        with Path(f"/proc/{self._pid}/ns/net").open() as network:
            if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        async with contextlib.AsyncExitStack() as servers:
            for listener, port in zip(self._listeners, self._targets, strict=True):
                await servers.enter_async_context(
                    await asyncio.start_server(self._pass_on(port), sock=listener)
                )
            await self._over.wait()

    def _pass_on(self, port: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        async def both_ways(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                their_reader, their_writer = await asyncio.open_connection("127.0.0.1", port)
                await asyncio.gather(_pump(reader, their_writer), _pump(their_reader, writer))

        return both_ways


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.closing(writer):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()


class Watch:
    """Watch that reports every access to one of these directories or its contents."""

    def __init__(self, *directories: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.inotify_init1(os.O_NONBLOCK)
        for directory in directories:
            assert self._libc.inotify_add_watch(self._fd, os.fsencode(directory), _IN_OPEN) >= 0

    def has_seen(self) -> bool:
        """Return the accesses since the last call."""
        try:
            return bool(os.read(self._fd, 1 << 16))
        except BlockingIOError:
            return False
