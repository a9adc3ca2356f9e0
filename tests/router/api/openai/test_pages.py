"""Tests the page at the root of a port, for people who open the address in a browser."""

import asyncio
import urllib.error
import urllib.request

import pytest

from tests.support.router.http_ports import API, HTTP, open_ports

TEXT = "OpenAI's API is served here under /v1, and described in /openapi.json"


async def get(port: int) -> tuple[int, str]:
    def ask() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    return await asyncio.to_thread(ask)


@pytest.mark.parametrize(
    ("playground", "text"), [(False, f"{TEXT}.\n"), (True, f"{TEXT}; /playground is a page to try it.\n")]
)
async def test_the_root_page_lists_the_apis(playground: bool, text: str) -> None:
    async with open_ports(playground=playground) as ports:
        assert await get(ports[HTTP]) == (200, text)
    async with open_ports(playground=playground, http_api_port=0) as ports:
        assert await get(ports[API]) == (200, text)
        assert (await get(ports[HTTP]))[0] == 404


async def test_the_root_of_a_port_without_an_api_is_missing() -> None:
    async with open_ports(None) as ports:
        assert (await get(ports[HTTP]))[0] == 404
