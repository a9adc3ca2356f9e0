"""Runs two launchers as one group, each on its own node: on loopback, or in separate networks connected by a
cable that can be cut."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import trustme

from integration_tests.support.hardened import Relay
from integration_tests.support.service import Client
from tests.support.link_files import LinkFiles, free_ports
from tests.support.processes import Service

NAME = "group.example"
HOSTS = ("198.51.100.1", "198.51.100.2")  # addresses for documentation, used only in these networks
NOWHERE = "02:00:00:00:00:01"
GRPC_PORT, HTTP_PORT = 8033, 3000


class TwoNodes:
    """Group whose node 0 has the router; `start` starts a node, repeatedly if needed."""

    def __init__(self, home: Path, model: Path, *flags: str) -> None:
        self.home = home
        files = LinkFiles(home / "link").write(trustme.CA(), NAME)
        self.flags = [*files.flags, "--link-server-name", NAME, "--model-name", str(model), *flags]
        self.flags += ["--nnodes", "2", "--cpu-threads", "1"]
        self.port = free_ports()
        self.nodes: dict[int, Service] = {}

    def start(self, rank: int, *flags: str) -> Service:
        temporary = self.home / f"{rank}"
        temporary.mkdir(exist_ok=True)
        own = ["--node-rank", str(rank), "--termination-log", str(self.home / f"end-{rank}")]
        command = ["launcher", *self.flags, *own, *self._place(), *flags]
        service = Service(command, {"TMPDIR": str(temporary)}, python=self._python(rank))
        self.nodes[rank] = service
        return service

    def serve(self) -> Client:
        """Wait until both are connected."""
        for rank in (1, 0):
            self.start(rank)
        self.nodes[0].wait_until_serving(180)
        return Client(self.nodes[0])

    def end(self) -> list[int]:
        """End all nodes simultaneously, as a cluster does; return their exit codes, node 0 first."""
        for service in self.nodes.values():
            service.process.terminate()
        for service in self.nodes.values():
            service.process.wait(60)
        return [self.nodes[rank].end() for rank in sorted(self.nodes)]

    def clear(self, rank: int) -> None:
        """Remove the disk of a lost machine."""
        shutil.rmtree(self.home / f"{rank}")

    def left_over(self) -> list[Path]:
        """Remove the nodes' files."""
        return [path for rank in self.nodes for path in (self.home / f"{rank}").iterdir()]

    def _place(self) -> list[str]:
        ports = ["--port", "0", "--grpc-port", "0"]
        return ["--bind", "127.0.0.1", *ports, "--master-addr", "127.0.0.1", "--master-port", str(self.port)]

    def _python(self, rank: int) -> Sequence[str]:
        return (sys.executable,)


class TwoNetworks(TwoNodes):
    """Create the networks; skip with the reason if that is not possible."""

    def __init__(self, home: Path, model: Path, *flags: str) -> None:
        super().__init__(home, model, *flags)
        missing = [tool for tool in ("unshare", "nsenter", "ip") if shutil.which(tool) is None]
        if missing:
            pytest.skip(f"needs {missing} to make networks")
        # Networks exist as long as a process is in them.
        self._holders = [subprocess.Popen(["unshare", "--net", "sleep", "900"]) for _ in HOSTS]
        self._relay: Relay | None = None
        try:
            self._lay_cable()
        except subprocess.CalledProcessError as error:
            self.remove()
            pytest.skip(f"no networks can be made here: {error.stderr}")

    def serve(self) -> Client:
        for rank in (1, 0):
            self.start(rank)
        service = self.nodes[0].wait_until_serving(180)
        self._relay = Relay(service.process.pid, service.grpc_port, service.http_port)
        service.grpc_port, service.http_port = self._relay.ports
        return Client(service)

    def cut(self) -> None:
        """Cut the cable: packets are lost without notice."""
        for rank in range(2):
            self._ip(rank, "neigh", "replace", HOSTS[1 - rank], "lladdr", NOWHERE, "dev", "cable")

    def mend(self) -> None:
        for rank in range(2):
            self._ip(rank, "neigh", "del", HOSTS[1 - rank], "dev", "cable")

    def listening(self, rank: int) -> set[str]:
        """Return the hosts with listening sockets in that network."""
        lines = self._in(rank, "ss", "-Htln").splitlines()
        hosts = {line.split()[3].rsplit(":", 1)[0] for line in lines}
        return {host.strip("[]").removeprefix("::ffff:") for host in hosts}

    def remove(self) -> None:
        if self._relay is not None:
            self._relay.stop()
        for holder in self._holders:
            holder.kill()
            holder.wait()

    def _lay_cable(self) -> None:
        pids = [str(holder.pid) for holder in self._holders]
        for pid in pids:  # the process may still be entering its network
            while Path(f"/proc/{pid}/ns/net").readlink() == Path("/proc/self/ns/net").readlink():
                pass
        cable = ["link", "add", "cable", "netns", pids[0], "type", "veth", "peer", "name", "cable"]
        subprocess.run(["ip", *cable, "netns", pids[1]], check=True, capture_output=True, text=True)
        for rank, host in enumerate(HOSTS):
            self._ip(rank, "address", "add", f"{host}/24", "dev", "cable")
            for device in ("lo", "cable"):
                self._ip(rank, "link", "set", device, "up")

    def _ip(self, rank: int, *arguments: str) -> None:
        self._in(rank, "ip", *arguments)

    def _in(self, rank: int, *command: str) -> str:
        enter = ["nsenter", "--net", "--target", str(self._holders[rank].pid)]
        return subprocess.run([*enter, *command], check=True, capture_output=True, text=True).stdout

    def _place(self) -> list[str]:
        return ["--bind", "127.0.0.1", "--master-addr", HOSTS[0]]

    def _python(self, rank: int) -> Sequence[str]:
        enter = f"/proc/{self._holders[rank].pid}/ns/net"
        return ("nsenter", f"--net={enter}", sys.executable)
