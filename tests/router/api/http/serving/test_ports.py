"""Tests the features that all HTTP ports of a router share."""

import asyncio
import http.client

import pytest

from tests.support.router.http_ports import API, HTTP, open_ports

LEAST_AGE_S = 0.1


def ask_until_it_ends(port: int) -> None:
    """Send requests over one connection until an answer announces the connection's end."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.connect()
    connected = connection.sock
    while True:
        connection.request("GET", "/playground")
        response = connection.getresponse()
        response.read()
        if response.getheader("connection") == "close":
            return
        assert connection.sock is connected


@pytest.mark.parametrize("port", [HTTP, API])
async def test_a_connection_has_an_age(port: str) -> None:
    async with (
        open_ports(
            playground=True, http_api_port=0 if port == API else None, max_connection_age=LEAST_AGE_S
        ) as ports,
        asyncio.timeout(20),
    ):
        await asyncio.to_thread(ask_until_it_ends, ports[port])
