"""Tests the gRPC options for a port that several router workers share, and for the age of its connections."""

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from tgis.config.option import LARGEST
from tgis.config.processes import RouterConfig
from tgis.router.api.grpc.server_options import grpc_options


@pytest.mark.parametrize(
    ("num_workers", "asked", "age_ms"),
    [(1, None, None), (1, 2.5, 2500), (2, None, 600_000), (2, 2.5, 2500)],
)
def test_connections_to_several_workers_have_an_age(
    num_workers: int, asked: float | None, age_ms: int | None
) -> None:
    config = RouterConfig(tokenizer_path="", router_workers=num_workers, max_connection_age=asked)
    options = dict(grpc_options(config))
    assert options.get("grpc.max_connection_age_ms") == age_ms
    assert options["grpc.so_reuseport"] == (num_workers > 1)


def test_grpc_takes_the_largest_values() -> None:
    times = {"keepalive_time": float(LARGEST), "max_connection_age": float(LARGEST)}
    sizes = {"max_message_bytes": LARGEST, "max_metadata_bytes": LARGEST, "max_concurrent_requests": 100_000}
    config = RouterConfig(tokenizer_path="", **times, **sizes)  # type: ignore[arg-type]
    with ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads, options=grpc_options(config))
        assert server.add_insecure_port("127.0.0.1:0")
        server.stop(None).wait()
