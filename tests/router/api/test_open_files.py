"""Tests that the connections of all ports and the router's other files fit into the process's limit."""

import resource
from collections.abc import Iterator

import pytest

from tgis.config.processes import RouterConfig
from tgis.router.api.open_files import share_files

REST = 256  # files reserved for everything else


@pytest.fixture
def limit() -> Iterator[int]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("num_files", [1024, 4096, 8192, 16_000])
@pytest.mark.parametrize("num_http", [1, 64, 1024, 4000])
def test_too_few_file_descriptors_are_reported(limit: int, num_files: int, num_http: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, limit))
    config = RouterConfig(tokenizer_path="", http_api="openai", max_http_connections=num_http)
    shares = share_files(config)
    # requests, idle connections, and connections without a request yet
    used = REST + shares.grpc + num_http + num_http + shares.http_fresh
    assert used - shares.num_missing <= num_files
    assert shares.num_missing == max(used - num_files, 0)
    assert shares.grpc >= min((num_files - REST) // 2, 4096)
    assert 128 <= shares.http_fresh <= 128 + 4 * num_http
    if num_files - REST >= 4096 + 128 + 6 * num_http:
        assert (shares.grpc, shares.http_fresh) == (4096, 128 + 4 * num_http)


def test_without_an_api_grpc_has_all(limit: int) -> None:
    for num_files, expected in ((600, 344), (100, 50), (9000, 4096)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, limit))
        assert share_files(RouterConfig(tokenizer_path="")).grpc == expected
