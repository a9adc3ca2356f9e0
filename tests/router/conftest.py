"""Starts a real router process that is connected to simulated shards through real sockets."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import trustme
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import add_TraceServiceServicer_to_server

from tests.support.accounts import assert_nothing_left, take_baseline
from tests.support.router.router_process import NUM_WORKERS, Setup, start_router, stop_router
from tests.support.suites import skip_tests_of_one_worker
from tests.support.tls_files import Files
from tests.support.trace_collector import Collector
from tgis.pb import generation_pb2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if NUM_WORKERS > 1:
        skip_tests_of_one_worker(items)


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    setup = start_router(tmp_path_factory.mktemp("router"), 1, "--max-batch-size", "16")
    setup.stub.ModelInfo(generation_pb2.ModelInfoRequest())
    baseline = take_baseline(setup.http)
    yield setup
    assert_nothing_left(setup.http, baseline)
    assert stop_router(setup) == 0, setup.service.output


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    server = grpc.server(ThreadPoolExecutor(4))
    servicer = Collector()
    add_TraceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    servicer.open_gate.set()
    server.stop(None).wait()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Write TLS files. The RSA key of the server allows every cipher suite."""
    directory = tmp_path_factory.mktemp("pem")
    authority = trustme.CA()
    server = authority.issue_cert("127.0.0.1", "localhost", key_type=trustme.KeyType.RSA)
    authority.cert_pem.write_to_path(directory / "ca.pem")
    server.private_key_pem.write_to_path(directory / "key.pem")
    server.cert_chain_pems[0].write_to_path(directory / "cert.pem")
    return Files(directory, authority)
