"""The service config for clients is the documented one, and gRPC accepts it."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from integration_tests.deployment.manifests.rendering import DEPLOYMENT, ROOT
from tests.support.blocking_clients import CLIENTS
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import (
    GenerationServiceServicer,
    GenerationServiceStub,
    add_GenerationServiceServicer_to_server,
)
from tgis_client import UnavailableError

pytestmark = pytest.mark.deploy

NAME = "fmaas.GenerationService"
CONFIG = (DEPLOYMENT / "client" / "service-config.json").read_text()


class SecondTime(GenerationServiceServicer):
    """Server that is unavailable once."""

    def __init__(self) -> None:
        self.calls = 0

    def ModelInfo(self, request: pb.ModelInfoRequest, context: grpc.ServicerContext) -> pb.ModelInfoResponse:
        self.calls += 1
        if self.calls == 1:
            context.abort(grpc.StatusCode.UNAVAILABLE, "again")
        return pb.ModelInfoResponse(max_sequence_length=7)


@pytest.fixture
def service() -> Iterator[tuple[str, SecondTime, health.HealthServicer]]:
    server, second, state = grpc.server(ThreadPoolExecutor(4)), SecondTime(), health.HealthServicer()
    add_GenerationServiceServicer_to_server(second, server)
    health_pb2_grpc.add_HealthServicer_to_server(state, server)
    state.set(NAME, health_pb2.HealthCheckResponse.SERVING)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", second, state
    finally:
        server.stop(None).wait()


def model_info(target: str, config: str) -> pb.ModelInfoResponse:
    with grpc.insecure_channel(target, [("grpc.service_config", config)]) as channel:
        return GenerationServiceStub(channel).ModelInfo(pb.ModelInfoRequest(), timeout=5)


@pytest.mark.parametrize("page", ["reliability.md", "deployment.md"])
def test_it_is_the_documented_one(page: str) -> None:
    blocks = re.findall(r"```json\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    assert json.loads(CONFIG) in [json.loads(block) for block in blocks]


def test_calls_are_made_again(service: tuple[str, SecondTime, health.HealthServicer]) -> None:
    target, second, _ = service
    assert model_info(target, CONFIG).max_sequence_length == 7
    assert second.calls == 2


def test_backends_that_are_not_serving_get_no_calls(
    service: tuple[str, SecondTime, health.HealthServicer],
) -> None:
    target, second, state = service
    state.set(NAME, health_pb2.HealthCheckResponse.NOT_SERVING)
    with pytest.raises(grpc.RpcError) as error:
        model_info(target, CONFIG)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert second.calls == 0


@pytest.mark.parametrize("name", CLIENTS)
def test_the_python_client_makes_calls_again(
    service: tuple[str, SecondTime, health.HealthServicer], name: str
) -> None:
    target, second, _ = service
    with CLIENTS[name](target, service_config=CONFIG) as client:
        assert client.model_info().max_sequence_length == 7
    assert second.calls == 2


@pytest.mark.parametrize("name", CLIENTS)
def test_the_python_client_checks_the_health_of_backends(
    service: tuple[str, SecondTime, health.HealthServicer], name: str
) -> None:
    target, second, state = service
    state.set(NAME, health_pb2.HealthCheckResponse.NOT_SERVING)
    with CLIENTS[name](target, service_config=CONFIG) as client, pytest.raises(UnavailableError) as error:
        client.model_info()
    assert (error.value.num_attempts, second.calls) == (4, 0)


def test_an_invalid_service_config_fails_every_call(
    service: tuple[str, SecondTime, health.HealthServicer],
) -> None:
    target, second, _ = service
    wrong = json.loads(CONFIG)
    wrong["methodConfig"][0]["retryPolicy"]["backoffMultiplier"] = -1
    with pytest.raises(grpc.RpcError):
        model_info(target, json.dumps(wrong))
    assert second.calls == 0
