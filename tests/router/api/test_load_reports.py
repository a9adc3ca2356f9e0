"""Tests reports of the load: gRPC's own client balances by them, and they have the values of the metrics."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.http_exchange import exchange
from tests.support.router.load import MAX_BATCH_SIZE, engine_load
from tests.support.router.messages import batch, single, stopping
from tests.support.router.served_grpc import ServedGrpc, open_grpc, status_of
from tests.support.router.served_http import MODEL, open_http
from tgis.pb import generation_pb2 as pb
from tgis.pb import orca_pb2
from tgis.pb.orca_pb2_grpc import OpenRcaServiceStub, add_OpenRcaServiceServicer_to_server
from tgis.process.memory.release import MemoryRelease
from tgis.router.api.grpc import load_service
from tgis.router.api.grpc.health import Health
from tgis.router.api.grpc.interceptors.error_interceptor import ErrorInterceptor
from tgis.router.api.grpc.interceptors.load_interceptor import LoadInterceptor
from tgis.router.api.grpc.load_service import LoadService
from tgis.router.api.grpc.refusal_pacing import RefusalPacing
from tgis.router.api.grpc.slow_clients import SlowClients
from tgis.router.api.load_reports import LoadReports
from tgis.router.metrics import request_rates
from tgis.router.metrics.engine_load import EngineLoad
from tgis.router.metrics.metrics import MetricLimits, Metrics
from tgis.router.metrics.request_rates import RequestRates

pytestmark = pytest.mark.usefixtures("steady_clock")

TOKENIZE = pb.BatchedTokenizeRequest(requests=[pb.TokenizeRequest(text="a")])
ASK = "endpoint-load-metrics-format"
# gRPC's client takes this report from the trailing metadata and does not show it.
BINARY = [(ASK, "BIN")]
NAMES = {"kv_cache_usage_perc", "num_requests_running", "num_requests_waiting"}


@asynccontextmanager
async def serve_health(load: EngineLoad, is_ready: bool) -> AsyncIterator[int]:
    """Serve gRPC's health with reports of a load, and of 100 requests per second. Yield the port."""
    metrics = Metrics(MetricLimits(100, 99, 8))
    metrics.request_success.follow(lambda: 100 * time.monotonic(), "eos_token", "single")

    async def read() -> EngineLoad:
        return load

    reports = LoadReports(read, RequestRates(metrics, None), MAX_BATCH_SIZE)
    errors = ErrorInterceptor(SlowClients(60), RefusalPacing(), MemoryRelease(), metrics.request_failure)
    server = grpc.aio.server(interceptors=[LoadInterceptor(reports), errors])
    health = Health()
    health.set(is_ready)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    add_OpenRcaServiceServicer_to_server(LoadService(reports), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)


@pytest.mark.parametrize("is_out_of_band", [False, True])
async def test_grpcs_weighted_round_robin_balances_by_them(
    monkeypatch: pytest.MonkeyPatch, is_out_of_band: bool
) -> None:
    """The two services have equal rates of requests, and one is three times as busy. Without reports of
    requests and utilization, the policy would send them equal parts."""
    monkeypatch.setattr(load_service, "MIN_INTERVAL_S", 0.05)
    monkeypatch.setattr(request_rates, "INTERVAL_S", 0.0)
    policy = {
        "enableOobLoadReport": is_out_of_band,
        "oobReportingPeriod": "0.05s",
        "blackoutPeriod": "0s",
        "weightUpdatePeriod": "0.1s",
    }
    config = json.dumps({"loadBalancingConfig": [{"weighted_round_robin": policy}]})
    async with AsyncExitStack() as stack:
        ports = [
            await stack.enter_async_context(serve_health(engine_load(running, waiting, 0.1), is_ready))
            for running, waiting, is_ready in ((2, 1, True), (5, 4, False))
        ]
        target = "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in ports)
        channel = grpc.aio.insecure_channel(target, options=[("grpc.service_config", config)])
        check = health_pb2_grpc.HealthStub(await stack.enter_async_context(channel)).Check
        metadata = () if is_out_of_band else BINARY

        async def num_ready(num_calls: int) -> int:
            request = health_pb2.HealthCheckRequest()
            answers = [await check(request, metadata=metadata) for _ in range(num_calls)]
            return sum(answer.status == health_pb2.HealthCheckResponse.SERVING for answer in answers)

        async with asyncio.timeout(20):
            while await num_ready(80) != pytest.approx(60, abs=4):
                pass  # weights are computed every tenth of a second


def read_json(value: str) -> dict[str, float]:
    kind, _, text = value.partition(" ")
    assert kind == "JSON"
    named: dict[str, float] = json.loads(text)["named_metrics"]
    return named


def read_text(value: str) -> dict[str, float]:
    kind, _, text = value.partition(" ")
    assert kind == "TEXT"
    pairs = (pair.split("=") for pair in text.split(", "))
    values = {name: float(number) for name, number in pairs}
    prefix = "named_metrics."
    return {name.removeprefix(prefix): each for name, each in values.items() if name.startswith(prefix)}


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[ServedGrpc]:
    async with open_grpc(tmp_path) as served:
        yield served


async def trailers(call: object) -> dict[str, str | bytes]:
    await status_of(call)
    return dict(await call.trailing_metadata() or ())  # type: ignore[attr-defined]


async def test_trailing_metadata_have_the_values_of_the_metrics(served: ServedGrpc) -> None:
    long = served.stub.GenerateStream(single("a", stopping=stopping(150, min_new_tokens=150)))
    await long.read()
    await long.read()
    metadata = [(ASK, "JSON")]
    trailing = await trailers(served.stub.Tokenize(TOKENIZE, metadata=metadata))
    named = read_json(str(trailing["endpoint-load-metrics"]))
    assert (named["num_requests_running"], named["num_requests_waiting"]) == (1, 0)
    assert 0 < named["kv_cache_usage_perc"] <= served.scene.metrics.kv_cache_usage.value()
    while await long.read() is not grpc.aio.EOF:
        pass
    assert await long.code() is grpc.StatusCode.OK


@pytest.mark.parametrize(("name", "read"), [("json", read_json), ("TEXT", read_text)])
async def test_calls_and_streams_have_both_kinds_of_trailing_metadata(
    served: ServedGrpc, name: str, read: Callable[[str], dict[str, float]]
) -> None:
    metadata = [(ASK, name)]
    for call in (
        served.stub.Generate(batch("a", stopping=stopping(2)), metadata=metadata),
        served.stub.GenerateStream(single("a", stopping=stopping(2)), metadata=metadata),
    ):
        trailing = await trailers(call)
        assert set(read(str(trailing["endpoint-load-metrics"]))) == NAMES
        assert trailing["tgis-generated-tokens"] == "2"


async def test_only_successful_calls_that_ask_have_reports(served: ServedGrpc) -> None:
    calls = [
        served.stub.Tokenize(TOKENIZE),
        served.stub.Tokenize(TOKENIZE, metadata=[(ASK, "XML")]),
        served.stub.Generate(batch("a"), metadata=[(ASK, "TEXT"), ("tgis-unknown", "1")]),
    ]
    for call in calls:
        assert not [key for key in await trailers(call) if key.startswith("endpoint-load")]


async def test_http_responses_have_them_in_a_header(tmp_path: Path) -> None:
    def post(path: str, form: str | None, **fields: object) -> str | None:
        headers = {} if form is None else {ASK: form}
        reply = exchange(f"{served.url}{path}", {"model": MODEL, "prompt": "a", **fields}, headers)
        return reply.headers.get("endpoint-load-metrics")

    async with open_http(tmp_path) as served:
        completions = "/v1/completions"
        text = await asyncio.to_thread(post, completions, "text", max_tokens=2)
        assert set(read_text(text or "")) == NAMES
        streamed = await asyncio.to_thread(post, completions, "JSON", max_tokens=2, stream=True)
        assert set(read_json(streamed or "")) == NAMES
        assert (await asyncio.to_thread(post, completions, "BIN", max_tokens=2) or "").startswith("BIN ")
        for path, form in ((completions, None), (completions, "XML"), ("/v1/nothing", "TEXT")):
            assert await asyncio.to_thread(post, path, form, max_tokens=2) is None


async def test_the_service_reports_at_once_and_then_in_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intervals without a meaning are the shortest or the longest one."""
    monkeypatch.setattr(load_service, "MIN_INTERVAL_S", 0.1)
    async with serve_health(engine_load(1, 0, 0.25), True) as port:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for seconds, num_reports in ((0, 3), (-5, 3), (2**62, 1)):
                request = orca_pb2.OrcaLoadReportRequest()
                request.report_interval.seconds = seconds
                call = OpenRcaServiceStub(channel).StreamCoreMetrics(request)
                for _ in range(num_reports):
                    assert (await call.read()).named_metrics["kv_cache_usage_perc"] == 0.25
                call.cancel()


async def test_streams_of_reports_end_when_the_service_stops() -> None:
    async def read() -> EngineLoad:
        return engine_load(0, 0, 0)

    rates = RequestRates(Metrics(MetricLimits(100, 99, 8)), None)
    service = LoadService(LoadReports(read, rates, MAX_BATCH_SIZE))
    server = grpc.aio.server()
    add_OpenRcaServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = OpenRcaServiceStub(channel).StreamCoreMetrics(orca_pb2.OrcaLoadReportRequest())
        await call.read()
        service.end()
        async with asyncio.timeout(0.8):  # less than the interval
            assert await call.read() is grpc.aio.EOF
    await server.stop(None)
