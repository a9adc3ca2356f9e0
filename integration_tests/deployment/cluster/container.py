"""Runs one container as a container runtime does: with its own namespaces, the image's files, its mounts, an
unknown user id, and no capabilities. Run as a program, this process becomes the container."""

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 24, 38
_CLONE_NEWNET = 0x40000000
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_NAMESPACES = ("--mount", "--net", "--pid", "--ipc", "--uts")
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Mount:
    """Mount of a directory or file of this machine or, without a source, of memory with an optional size."""

    target: str
    source: str | None = None
    is_read_only: bool = False
    size: int = 0


@dataclass(frozen=True)
class Spec:
    root: str
    """Root directory of the image, made by scripts/image_root.sh."""
    scratch: str
    """Directory for the container's layers."""
    command: list[str]
    env: dict[str, str]
    mounts: list[Mount] = field(default_factory=list)
    directory: str = "/"
    user: int = 1000660000
    groups: list[int] = field(default_factory=list)
    address: str = "10.128.0.7"
    """Address of the pod."""
    is_root_read_only: bool = True


class Container:
    """Container that starts on construction; its output is kept."""

    def __init__(self, spec: Spec) -> None:
        self.spec, scratch = spec, Path(spec.scratch)
        (scratch / "spec.json").write_text(json.dumps(asdict(spec)))
        self._log = scratch / "log"
        becoming, has_become = os.pipe()
        module = [sys.executable, "-m", __name__, str(scratch / "spec.json"), str(has_become)]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                ["unshare", *_NAMESPACES, "--fork", "--kill-child", *module],
                stdout=log,
                stderr=log,
                pass_fds=[has_become],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        os.close(has_become)
        with open(becoming, "rb") as pipe:
            pipe.read(1)  # nothing if it has failed
        own = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        self.pid = int(own[0]) if own else 0
        """Host's process id of the container's first process."""

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self, until: float) -> int | None:
        """Return its status; None if it has not ended by this time of the monotonic clock."""
        try:
            return self.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """Kill its first process, which ends all others and the process that started it."""
        if self.pid:  # a process that changes its user is no longer killed with its parent
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        else:
            self.process.kill()
        self.process.wait()

    def run(self, command: Sequence[str], timeout: float) -> tuple[int, str]:
        """Run another command in it, as a hook or a probe; return status and output. Raises TimeoutError."""
        enter = ["/usr/bin/nsenter", f"--target={self.pid}", "--mount", "--net", "--pid", "--ipc", "--root"]
        user = [f"--wdns={self.spec.directory}", f"--setuid={self.spec.user}", "--setgid=0"]
        process = subprocess.Popen(
            [*enter, *user, "--", *command],
            env=self.spec.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise TimeoutError(f"no end within {timeout:g} s") from error
        return process.returncode, output

    def connect(self, port: int, timeout: float) -> socket.socket:
        """Connect to the pod's address, from its own network, which is the only one. Raises OSError."""
        with ThreadPoolExecutor(1) as thread:
            made = thread.submit(self._make_socket).result()
        made.settimeout(timeout)
        try:
            made.connect((self.spec.address, port))
        except BaseException:
            made.close()
            raise
        return made

    def _make_socket(self) -> socket.socket:
        """Enter its network with the calling thread, permanently."""
        with open(f"/proc/{self.pid}/ns/net") as network:
            if _libc.setns(network.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        return socket.socket()


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def _make_root(spec: Spec) -> Path:
    """Mount the image below a writable layer in memory. The targets of mounts are created first."""
    own = Path(spec.scratch) / "own"
    own.mkdir()
    _mount("-t", "tmpfs", "tmpfs", str(own))
    for name in ("upper", "work", "root"):
        (own / name).mkdir()
    layers = f"lowerdir={spec.root},upperdir={own / 'upper'},workdir={own / 'work'}"
    _mount("-t", "overlay", "overlay", "-o", layers, str(own / "root"))
    return own / "root"


def _fill(spec: Spec, root: Path) -> None:
    for name in ("proc", "sys"):
        (root / name).mkdir()
    _mount("-t", "proc", "proc", str(root / "proc"))
    _mount("--bind", "-o", "ro", "/sys", str(root / "sys"))
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n::1 localhost\n")
    (root / "dev").mkdir()
    _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", str(root / "dev"))
    for name in _DEVICES:
        _attach(root, Mount(f"/dev/{name}", f"/dev/{name}"))
    _attach(root, Mount("/dev/shm", size=64 << 20))
    for mount in sorted(spec.mounts, key=lambda mount: mount.target.count("/")):
        _attach(root, mount)
    _mount("-o", "remount,ro", str(root / "dev"))
    if spec.is_root_read_only:
        _mount("-o", "remount,ro", str(root))


def _attach(root: Path, mount: Mount) -> None:
    target = root / mount.target.lstrip("/")
    if mount.source is None:
        target.mkdir(parents=True, exist_ok=True)
        size = f",size={mount.size}" if mount.size else ""
        _mount("-t", "tmpfs", "-o", f"mode=1777{size}", "tmpfs", str(target))
        return
    if Path(mount.source).is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    _mount("--bind", mount.source, str(target))
    if mount.is_read_only:
        _mount("-o", "remount,bind,ro", str(target))


def _give_up_all_rights(user: int, groups: Sequence[int]) -> None:
    capability = 0
    while not _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0):
        capability += 1
    assert capability > 30
    os.setgroups(groups)
    os.setresgid(0, 0, 0)
    os.setresuid(user, user, user)
    assert not _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _become(spec: Spec, has_become: int) -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    subprocess.run(["ip", "address", "add", f"{spec.address}/32", "dev", "lo"], check=True)
    _mount("--make-rprivate", "/")
    root = _make_root(spec)
    _fill(spec, root)
    os.chroot(root)
    os.chdir(spec.directory)
    os.umask(0o022)
    _give_up_all_rights(spec.user, spec.groups)
    os.write(has_become, b"\n")
    os.execvpe(spec.command[0], spec.command, spec.env)  # noqa: S606


def _read(values: Mapping[str, object]) -> Spec:
    mounts = [Mount(**mount) for mount in values["mounts"]]  # type: ignore[attr-defined]
    return Spec(**{**values, "mounts": mounts})  # type: ignore[arg-type]


if __name__ == "__main__":
    os.set_inheritable(int(sys.argv[2]), False)
    spec = _read(json.loads(Path(sys.argv[1]).read_text()))
    try:
        _become(spec, int(sys.argv[2]))
    except FileNotFoundError as error:
        sys.exit(f"error: {spec.command[0]}: {error}")
