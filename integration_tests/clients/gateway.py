"""Launches services without tokens and the Shepherd Model Gateway in front of them."""

import json
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from integration_tests.clients.expectations import Served
from integration_tests.clients.served import FLAGS, MODEL, launch_served
from integration_tests.support.service import Client, launch
from tests.support.link_files import free_ports

READY_S = 60.0
ANSWER_S = 60.0
ENGINE_API = ("--grpc-api", "fmaas,vllm-engine")


@dataclass(frozen=True)
class Gateway:
    served: Served
    services: list[Client]
    smg: Path
    """The gateway's program."""

    @property
    def worker_urls(self) -> list[str]:
        return [f"grpc://127.0.0.1:{client.service.grpc_port}" for client in self.services]

    @contextmanager
    def run_another(self, name: str, *flags: str, num_services: int | None = None) -> Iterator[str]:
        """Run another gateway in front of the first services, by default all, and yield its URL."""
        log = Path(self.served.directory).parent / f"smg-{name}.log"
        with run_gateway(self.smg, self.worker_urls[:num_services], log, *flags) as url:
            yield url


@contextmanager
def launch_gateway(directory: Path, smg: Path, num_services: int = 3) -> Iterator[Gateway]:
    """Launch services of one model, and a gateway in front of them from the program `smg`."""
    with ExitStack() as stack:
        served, first = stack.enter_context(launch_served(directory, *ENGINE_API, has_key=False))
        flags = (*FLAGS, *ENGINE_API, "--served-model-name", MODEL)
        flags += ("--max-sequence-length", str(served.max_sequence_length))
        others = stack.enter_context(_launch_all(Path(served.directory), num_services - 1, *flags))
        gateway = Gateway(served, [first, *others], smg)
        url = stack.enter_context(run_gateway(smg, gateway.worker_urls, directory / "smg.log"))
        yield replace(gateway, served=replace(served, base_url=f"{url}/v1"))


@contextmanager
def _launch_all(directory: Path, count: int, *flags: str) -> Iterator[list[Client]]:
    """Launch services at the same time. Checks may end or kill them."""
    launched = [launch(directory, *flags) for _ in range(count)]
    with ExitStack() as stack:
        for service in launched:
            stack.callback(service.end)
        clients = [Client(service.wait_until_serving()) for service in launched]
        for client in clients:
            stack.callback(client.channel.close)
        yield clients
    codes = [service.process.returncode for service in launched]
    assert set(codes) <= {0, -signal.SIGKILL}, "\n".join(service.output for service in launched)


@contextmanager
def run_gateway(smg: Path, urls: Sequence[str], log: Path, *flags: str) -> Iterator[str]:
    """Run a gateway in front of services, and yield its URL once it has a model."""
    port, metrics_port = free_ports(), free_ports()
    command = [str(smg), "launch", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(metrics_port), "--worker-urls", *urls, *flags]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            _wait_until_ready(f"http://127.0.0.1:{port}", log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(20)


def _wait_until_ready(url: str, log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while True:
        try:
            with urllib.request.urlopen(f"{url}/readiness", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)


def ask(url: str, messages: list[dict[str, str]], max_tokens: int, **fields: Any) -> Any:
    """Return the open response of a gateway to a chat."""
    body = {"model": MODEL, "messages": messages, "max_tokens": max_tokens, "temperature": 0, **fields}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request, timeout=ANSWER_S)


def engine_of(client: Client) -> Any:
    """Return the stub of a service's engine API."""
    return VllmEngineStub(client.channel)  # type: ignore[no-untyped-call]
