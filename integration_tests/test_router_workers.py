"""Several router workers and an engine process, any of which may die: requests that are lost, and requests
that are unaffected."""

import contextlib
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.service import free_ports
from integration_tests.support.live_streams import read
from integration_tests.support.router_workers import connect, connections_to_all, router_pids
from integration_tests.support.service import Client, launch, serve
from integration_tests.support.tuned_files import write_adapter
from tests.support.accounts import differences
from tests.support.connections import OWN_CONNECTION, count_connections
from tests.support.http_exchange import exchange
from tests.support.processes import Service, children_of
from tests.support.shard.checkpoints import write_llama
from tests.support.tls_files import issue
from tests.support.tokenizers.trained import write_byte_level
from tgis.net.ports import IN_USE
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub
from tgis.process.run_directory import running_urls

NUM_WORKERS = 2
TEXTS = ("girl", "once upon a time", "quick brown fox", "café 東京")
WORKERS = ("--dtype", "float32", "--router-workers", str(NUM_WORKERS))
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE

Answer = tuple[str, int]
Answers = dict[str, Answer]
"""Return the responses to TEXTS without losses."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tmp_path_factory.mktemp("models") / "tiny"
    write_llama(model, vocab_size=403, max_position_embeddings=256, eos_token_id=1)
    write_byte_level(model, 400)
    return model


@pytest.fixture(scope="module")
def api_port() -> int:
    return free_ports(1)[0]


@pytest.fixture(scope="module")
def service(directory: Path, api_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    adapters = tmp_path_factory.mktemp("adapters")
    write_adapter(adapters / "lora", directory, 1, ["q_proj"])
    api = ("--http-api", "openai", "--http-api-port", str(api_port))
    for client in serve(directory, *WORKERS, *api, "--adapter-cache", str(adapters), "--runtime-adapters"):
        client.channel.close()
        yield client.service
        assert "Traceback" not in client.service.output, client.service.output


@pytest.fixture(scope="module")
def answers(service: Service) -> Answers:
    client = connect(service)
    with client.channel:
        return {text: read(client, text) for text in TEXTS}


def texts_of(clients: list[Client]) -> list[str]:
    return [TEXTS[i % len(TEXTS)] for i in range(len(clients))]


def expected(clients: list[Client], answers: Answers) -> list[Answer]:
    return [answers[text] for text in texts_of(clients)]


def begin_all(clients: list[Client]) -> list[Future[Answer]]:
    """Run streams of all clients."""
    running, threads = threading.Barrier(len(clients) + 1), ThreadPoolExecutor(len(clients))
    streams = [
        threads.submit(read, client, text, running)
        for client, text in zip(clients, texts_of(clients), strict=True)
    ]
    threads.shutdown(wait=False)
    running.wait(30)
    assert not any(stream.done() for stream in streams), "they must be running when something is lost"
    return streams


def wait_until(condition: Callable[[], object], service: Service) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, service.output
        time.sleep(0.05)


@pytest.mark.slow
def test_a_killed_engine_disturbs_no_stream(service: Service, answers: Answers) -> None:
    shards = children_of(service.process.pid)["serve"]
    engine, workers = router_pids(service)
    with connections_to_all(service) as clients:
        streams = begin_all(clients)
        os.kill(engine, signal.SIGKILL)
        assert [stream.result(60) for stream in streams] == expected(clients, answers)
    service.wait_for_line("engine process was killed by SIGKILL (out of memory?); restarting it")
    assert children_of(service.process.pid)["serve"] == shards
    fresh, same = router_pids(service)
    assert (fresh != engine, same) == (True, workers)
    wait_until(lambda: not differences(service.http, {}), service)


def test_a_killed_worker_ends_its_own_streams(service: Service, answers: Answers) -> None:
    engine, workers = router_pids(service)
    victim = workers[1]
    with connections_to_all(service) as clients:
        streams = begin_all(clients)
        num_connected = count_connections(victim, service.grpc_port)
        assert num_connected > 0
        num_starts = count_starts(service, "Router 1: ")
        os.kill(victim, signal.SIGKILL)
        errors = [stream.exception(60) for stream in streams]
        survivors = [i for i, error in enumerate(errors) if error is None]
        whole = expected(clients, answers)
        assert [streams[i].result() for i in survivors] == [whole[i] for i in survivors]
    lost = [error.code() for error in errors if isinstance(error, grpc.RpcError)]
    assert lost == [UNAVAILABLE] * num_connected
    service.wait_for_line("router worker 1 was killed by SIGKILL (out of memory?); restarting it")
    wait_until(lambda: len(children_of(service.process.pid)["router"]) == NUM_WORKERS, service)
    same, [first, fresh] = router_pids(service)
    assert (same, first, fresh != victim) == (engine, workers[0], True)
    wait_until(lambda: count_starts(service, "Router 1: ") > num_starts, service)
    with connections_to_all(service) as clients:
        assert [stream.result(60) for stream in begin_all(clients)] == expected(clients, answers)
    wait_until(lambda: not differences(service.http, {}), service)


def test_a_name_of_an_adapter_is_every_workers_and_outlives_each(service: Service, api_port: int) -> None:
    url = f"http://127.0.0.1:{api_port}/v1"

    def statuses() -> set[int]:
        """Send requests that name it, on separate connections."""
        body = {"model": "sql", "prompt": "girl", "max_tokens": 1}
        return {exchange(f"{url}/completions", body).status for _ in range(12)}

    load = {"lora_name": "sql", "lora_path": "lora"}
    for turn in range(3):
        assert exchange(f"{url}/load_lora_adapter", load).status == 200
        assert statuses() == {200}
        if turn == 1:
            os.kill(router_pids(service)[0], signal.SIGKILL)
            assert statuses() == {200}
        if turn == 2:
            num_served = len(served_lines(service))
            os.kill(router_pids(service)[1][0], signal.SIGKILL)
            wait_until(lambda: len(served_lines(service)) > num_served, service)  # noqa: B023
            assert statuses() == {200}
        assert exchange(f"{url}/unload_lora_adapter", {"lora_name": "sql"}).status == 200
        assert statuses() == {404}
    cards = {exchange(f"{url}/models").body for _ in range(12)}
    assert len(cards) == 1, "what workers say of the models does not differ"


def served_lines(service: Service) -> list[str]:
    return [line for line in service.lines if "serving gRPC" in line]


def count_starts(service: Service, prefix: str) -> int:
    """Return how often the worker with this prefix of log lines has begun to serve."""
    return sum(line.startswith(prefix) and "serving gRPC" in line for line in service.lines)


def test_every_worker_says_that_it_is_healthy(service: Service) -> None:
    with connections_to_all(service) as clients:
        for client in clients:
            stub = health_pb2_grpc.HealthStub(client.channel)
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=20)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert service.http in running_urls(), "`tgis top` finds it"
    for path in ["/health", "/live"] * 8:  # one connection each
        with urllib.request.urlopen(service.http + path, timeout=20) as response:
            assert response.status == 200


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "3"])
def test_a_second_service_fails_on_each_port(
    service: Service, api_port: int, directory: Path, tmp_path: Path, workers: str
) -> None:
    api = ["--http-api", "openai", "--http-api-port"]
    free = [str(port) for port in free_ports(3)]
    flags = [
        ["--port", str(service.http_port), "--grpc-port", free[1], *api, free[2]],
        ["--port", free[0], "--grpc-port", str(service.grpc_port), *api, free[2]],
        ["--port", free[0], "--grpc-port", free[1], *api, str(api_port)],
    ]
    for ports, taken in zip(flags, (service.http_port, service.grpc_port, api_port), strict=True):
        log = ["--termination-log", str(tmp_path / "log"), "--bind", "127.0.0.1"]
        command = ["launcher", "--model-name", str(directory), *ports, *log, "--router-workers", workers]
        second = Service(command)
        assert second.process.wait(60) == 1
        assert second.end() == 1
        line = f"port {taken} on 127.0.0.1 cannot be opened: Address already in use{IN_USE}"
        assert second.lines[-1].removeprefix("error: ").removeprefix("router: ") == line


@pytest.mark.slow
def test_a_drain_loses_nothing(directory: Path, answers: Answers) -> None:
    """Even if the engine process dies meanwhile, the port is closed to new clients at once."""
    service = launch(directory, *WORKERS).wait_until_serving()
    with contextlib.ExitStack() as stack:
        stack.callback(service.end)
        clients = stack.enter_context(connections_to_all(service))
        streams = begin_all(clients)
        service.process.send_signal(signal.SIGTERM)
        os.kill(router_pids(service)[0], signal.SIGKILL)
        assert [stream.result(60) for stream in streams] == expected(clients, answers)
        with pytest.raises(grpc.RpcError):
            connect(service)
        assert service.process.wait(30) == 0, service.output
    again = [line for line in service.lines if "restarting it" in line]
    assert len(again) == 1, service.output
    assert "engine process was killed by SIGKILL" in again[0]


@pytest.mark.slow
def test_workers_that_hang_and_an_engine_that_hangs(directory: Path, answers: Answers) -> None:
    service = launch(directory, *WORKERS).wait_until_serving()
    with contextlib.ExitStack() as stack:
        stack.callback(service.end)
        with connections_to_all(service) as clients:
            streams = begin_all(clients)
            os.kill(router_pids(service)[0], signal.SIGSTOP)
            assert [stream.result(60) for stream in streams] == expected(clients, answers)
        os.kill(router_pids(service)[1][0], signal.SIGSTOP)
        service.wait_for_line("engine process hung and was killed; restarting it")
        service.wait_for_line("router worker 0 hung and was killed; restarting it")
        wait_until(lambda: len(children_of(service.process.pid)["router"]) == NUM_WORKERS, service)
    assert service.end() == 0, service.output


@pytest.mark.slow
def test_certificates_and_tokens_are_reloaded_in_all_workers(directory: Path, tmp_path: Path) -> None:
    authority, tls, tokens = trustme.CA(), tmp_path / "tls", tmp_path / "tokens"
    tls.mkdir()
    for name in ("cert", "key"):
        (tls / f"{name}.pem").symlink_to(Path("..data") / f"{name}.pem")
    issue(authority, tls)
    tokens.write_text("first\n")
    files = ["--tls-cert-path", str(tls / "cert.pem"), "--tls-key-path", str(tls / "key.pem")]
    service = launch(directory, *WORKERS, *files, "--auth-tokens-path", str(tokens)).wait_until_serving()
    with contextlib.ExitStack() as stack:
        stack.callback(service.end)
        assert is_let_in(service, authority, "first", "second")
        other = trustme.CA()
        issue(other, tls)
        tokens.write_text("second\n")
        wait_until(lambda: is_let_in(service, other, "second", "first"), service)
    assert service.end() == 0, service.output


def is_let_in(service: Service, authority: trustme.CA, token: str, other_token: str) -> bool:
    """Return whether all workers accept a client that trusts the CA, only with the first token."""
    credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    _, workers = router_pids(service)
    with contextlib.ExitStack() as stack:
        for _ in range(64):
            channel = grpc.secure_channel(f"localhost:{service.grpc_port}", credentials, OWN_CONNECTION)
            stub = GenerationServiceStub(stack.enter_context(channel))
            codes = [code_of(stub, each) for each in (token, other_token)]
            if codes != [grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED]:
                return False
            if all(count_connections(worker, service.grpc_port) for worker in workers):
                return True
    raise AssertionError("connections do not spread")


def code_of(stub: GenerationServiceStub, token: str) -> grpc.StatusCode:
    try:
        metadata = [("authorization", f"Bearer {token}")]
        stub.ModelInfo(pb.ModelInfoRequest(), metadata=metadata, timeout=20)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK
