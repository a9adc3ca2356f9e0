"""Provides a launched service and its stubs."""

from collections.abc import Iterator
from pathlib import Path

from tests.support.processes import Service
from tgis.pb.generation_pb2_grpc import GenerationServiceStub


class Client:
    """Stubs of a running service."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.channel = service.channel()
        self.stub = GenerationServiceStub(self.channel)


def launch(directory: Path, *flags: str, env: dict[str, str] | None = None) -> Service:
    ports = ["--bind", "127.0.0.1", "--port", "0", "--grpc-port", "0"]
    termination_log = ["--termination-log", str(directory / "termination-log")]
    return Service(["launcher", "--model-name", str(directory), *ports, *termination_log, *flags], env)


def serve(directory: Path, *flags: str) -> Iterator[Client]:
    client = Client(launch(directory, *flags).wait_until_serving())
    try:
        yield client
    finally:
        client.channel.close()
        code = client.service.end()
    assert code == 0, client.service.output
