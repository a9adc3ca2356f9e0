"""Runs each test with the synchronous and with the asyncio client."""

import pytest

from tests.support.blocking_clients import CLIENTS, OpenClient


@pytest.fixture(params=CLIENTS)
def open_client(request: pytest.FixtureRequest) -> OpenClient:
    return CLIENTS[request.param]
