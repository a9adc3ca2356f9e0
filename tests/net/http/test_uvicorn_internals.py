"""Private parts of uvicorn that `uvicorn_internals.py` uses, on real objects: a new version of uvicorn that
changes one of them fails here. The other tests of this folder show how connections behave."""

import ast
import asyncio
import inspect
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import Server, ServerState

from tgis.net.http import uvicorn_internals
from tgis.net.http.joined_writes import JoinedWrites
from tgis.net.http.slow_readers import Flow
from tgis.net.http.uvicorn_internals import HttpConnection

FILE = Path(uvicorn_internals.__file__)
MOVED = f"uvicorn {version('uvicorn')} is not what tgis/net/{FILE.name} was checked with"
OVERRIDDEN = {
    *(
        "connection_made",
        "connection_lost",
        "eof_received",
        "data_received",
        "pause_writing",
        "resume_writing",
    ),
    *("on_message_begin", "on_header", "on_headers_complete", "on_body", "on_message_complete"),
    *("_start_asgi_task", "on_response_complete", "timeout_keep_alive_handler"),
}
INHERITED = {
    *("__init__", "_unset_keepalive_if_required", "on_url", "shutdown", "send_400_response"),
    *("_get_upgrade", "_should_upgrade", "_should_upgrade_to_ws", "_unsupported_upgrade_warning"),
    "handle_websocket_upgrade",
}
"""Methods that are not overridden; all of uvicorn 0.54."""


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"body"})


@pytest.fixture
async def protocol() -> HttpToolsProtocol:
    """Return uvicorn's own protocol after a request."""
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off")
    protocol = HttpToolsProtocol(config, ServerState(), {})
    server = await asyncio.get_running_loop().create_server(lambda: protocol, "127.0.0.1", 0)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert b"body" in await asyncio.wait_for(reader.read(), 5)
        writer.close()
    return protocol


def methods(kind: type) -> set[str]:
    return {name for name, value in vars(kind).items() if inspect.isfunction(value)}


def attributes_read(*owners: str) -> Iterator[str]:
    """Yield the attributes of these expressions in the file."""
    for node in ast.walk(ast.parse(FILE.read_text())):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in owners:
            yield node.attr


def test_the_protocol_has_the_same_methods() -> None:
    differing = methods(HttpToolsProtocol) ^ (OVERRIDDEN | INHERITED)
    assert not differing, f"{MOVED}: HttpToolsProtocol gained or lost {sorted(differing)}"


@pytest.mark.parametrize("name", sorted(OVERRIDDEN))
def test_overridden_methods_have_the_same_parameters(name: str) -> None:
    theirs, ours = (inspect.signature(getattr(kind, name)) for kind in (HttpToolsProtocol, HttpConnection))
    assert [*theirs.parameters] == [*ours.parameters], f"{MOVED}: parameters of {name}"


async def test_the_connection_uses_what_the_protocol_has(protocol: HttpToolsProtocol) -> None:
    ours = {*vars(HttpConnection), *HttpConnection.__annotations__}
    missing = {*attributes_read("self")} - ours - {*dir(protocol)} - {"routes", "groups", "options"}
    assert not missing, f"{MOVED}: HttpToolsProtocol has no {sorted(missing)}"


async def test_the_protocol_has_no_other_use_for_our_names(protocol: HttpToolsProtocol) -> None:
    ours = {name for name in vars(HttpConnection) if not name.startswith("__")} - OVERRIDDEN
    clashes = ours & {*dir(protocol)}
    assert not clashes, f"{MOVED}: HttpToolsProtocol has its own {sorted(clashes)}"


async def test_a_request_has_the_state_that_is_read(protocol: HttpToolsProtocol) -> None:
    cycle = protocol.cycle
    assert isinstance(cycle, RequestResponseCycle), MOVED
    names = {*attributes_read("cycle", "self.cycle", "running.cycle", "self._running.cycle")}
    assert {"response_started", "more_body", "disconnected", "message_event", "keep_alive"} < names
    missing = names - {*dir(cycle)}
    assert not missing, f"{MOVED}: RequestResponseCycle has no {sorted(missing)}"
    assert cycle.response_started, MOVED
    assert not cycle.more_body, MOVED
    assert not cycle.keep_alive, MOVED
    assert cycle.chunked_encoding, MOVED


async def test_flow_control_has_the_same_interface() -> None:
    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        transport = JoinedWrites(writer.transport, asyncio.get_running_loop())
        theirs, ours = FlowControl(transport), Flow(transport, lambda: None)
        differing.update({name for name in dir(theirs) if name[0] != "_"} - {*dir(ours)})
        writer.close()

    differing = {"not run"}
    async with await asyncio.start_server(run, "127.0.0.1", 0) as server:
        differing.clear()
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
    assert not differing, f"{MOVED}: FlowControl has {sorted(differing)}"


def test_the_server_has_what_is_overridden_and_read() -> None:
    server = Server(uvicorn.Config(app, log_config=None))
    assert [*inspect.signature(Server.capture_signals).parameters] == ["self"], MOVED
    assert server.server_state.connections == set(), MOVED
    assert server.should_exit is False, MOVED
    assert STATUS_LINE[431] == b"HTTP/1.1 431 Request Header Fields Too Large\r\n", MOVED
