"""HTTP/2 clients that abuse the gRPC port; steady clients of both ports beside them lose nothing."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from integration_tests.support.greedy_answers import Model
from integration_tests.support.service import Client, serve
from integration_tests.support.steady_client import API, beside_a_steady_client
from tests.support.router import attacks, http2_floods
from tests.support.router.attacks import Bystander

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.one_worker("a scrape must see the router whole"),
]

HOST, SEED = "127.0.0.1", 20
COUNT = 3_000  # of frames or connections of each attack that is made together with others
FEW = {"odd_frames": 100, "garbage": 100}  # attacks that wait on each connection
FLAGS = ["--dtype", "float32", "--slow-reader-timeout", "2", *API]


@pytest.fixture(scope="module")
def client(model: Model) -> Iterator[Client]:
    yield from serve(model.directory, *FLAGS)


@contextmanager
def undisturbed(client: Client) -> Iterator[int]:
    """Yield the gRPC port."""
    port = client.service.grpc_port
    with beside_a_steady_client(client), Bystander(HOST, port) as bystander:
        yield port
    assert bystander.lost == []


@pytest.mark.parametrize("name", http2_floods.FLOODS)
def test_valid_frames_in_odd_numbers(client: Client, name: str) -> None:
    flood, count = http2_floods.FLOODS[name]
    with undisturbed(client) as port:
        flood(HOST, port, count)


def test_all_floods_together(client: Client) -> None:
    with undisturbed(client) as port, ThreadPoolExecutor(len(attacks.FLOODS)) as threads:
        floods = [
            threads.submit(flood, HOST, port, FEW.get(name, COUNT), SEED)
            for name, flood in attacks.FLOODS.items()
        ]
        for each in floods:
            each.result()
