"""Lists the processes of a router with several workers, and the clients' connections to each of them."""

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc

from integration_tests.support.service import Client
from tests.support.connections import OWN_CONNECTION, count_connections
from tests.support.processes import Service, children_of
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub


def router_pids(service: Service) -> tuple[int, list[int]]:
    """Return the process ids of the engine process and of the workers, in the order of their numbers."""
    children = children_of(service.process.pid)
    [engine] = children["engine"]
    return engine, sorted(children["router"], key=lambda pid: number_of_worker(pid) or 0)


def number_of_worker(pid: int) -> int | None:
    """Return the worker of a connection; None if it has just ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        return int(words[words.index("--worker") + 1])
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def connections_to_all(service: Service, least: int = 1) -> Iterator[list[Client]]:
    """Yield clients with one connection each, with at least this many to every worker."""
    _, workers = router_pids(service)
    with ExitStack() as stack:
        clients: list[Client] = []
        while any(count_connections(worker, service.grpc_port) < least for worker in workers):
            assert len(clients) < 64, "connections do not spread"
            clients.append(connect(service))
            stack.enter_context(clients[-1].channel)
        yield clients


def connect(service: Service) -> Client:
    """Return a client with a new connection."""
    client = Client(service)
    client.channel = grpc.insecure_channel(f"127.0.0.1:{service.grpc_port}", OWN_CONNECTION)
    client.stub = GenerationServiceStub(client.channel)
    client.stub.ModelInfo(pb.ModelInfoRequest(), timeout=20)
    return client
