"""Compares HTTP servers: the CPU time of a streamed part, and what their settings limit.

`python -m bench.http_servers --python PYTHON` runs those of PYTHON's environment, for which pip installs
granian, hypercorn, uvicorn, httptools, uvloop and h11, and this service's HTTP port, and prints a table."""

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.http_server_app import NUM_PARTS

HYPERCORN = (
    "read_timeout = 5\nkeep_alive_timeout = 5\nh11_max_incomplete_size = 16384\nloglevel = 'critical'\n"
)
UVICORN = "-m uvicorn APP --port PORT --no-access-log --log-level error --lifespan off --loop uvloop"
SERVERS = {
    "tgis": "-m bench.http_server_app PORT",
    "uvicorn, httptools": f"{UVICORN} --http httptools --timeout-keep-alive 5 --limit-concurrency 256",
    "uvicorn, h11": f"{UVICORN} --http h11 --timeout-keep-alive 5 --limit-concurrency 256 "
    "--h11-max-incomplete-event-size 16384",
    "hypercorn": "-m hypercorn -c FOLDER/hypercorn.toml -b 127.0.0.1:PORT -k uvloop APP",
    "granian": "-m granian --interface asginl --port PORT --workers 1 --loop uvloop --http 1 --no-log "
    "--no-ws --backlog 512 --backpressure 256 --http1-header-read-timeout 5000 --http1-buffer-size 16384 APP",
}
LIMITED = " behind an ASGI limit"
WAIT_S = 20.0
STREAM_S = 4.0
NUM_STREAMS = 16
NUM_CONNECTIONS = 600
HEAD_OF_BODY = b"POST /upload HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n"


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode()


@dataclass(frozen=True)
class Server:
    port: int

    async def connect(self, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        return reader, writer

    async def report(self) -> dict[str, int]:
        """Return the app's counts and the process's id."""
        reader, writer = await self.connect(
            get("/report").replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        )
        text = (await asyncio.wait_for(reader.read(), 10)).decode()
        writer.close()
        counts: dict[str, int] = json.loads(text[text.index("{") : text.rindex("}") + 1])
        return counts

    def server_ends(self) -> list[str]:
        """Return one line of `ss` for each of the server's connections."""
        command = ["ss", "-tnoH", "state", "established", f"sport = :{self.port}"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


async def seconds_until_end(server: Server, head: bytes, piece: bytes = b"") -> str:
    """Send `piece` twice a second, and return after how many seconds the connection ended."""
    reader, writer = await server.connect(head)
    begun = time.monotonic()
    end = asyncio.ensure_future(read_to_end(reader))
    while not end.done() and time.monotonic() - begun < WAIT_S:
        writer.write(piece)
        await asyncio.wait({end}, timeout=0.5)
    writer.transport.abort()
    return f"{time.monotonic() - begun:.0f} s" if end.done() else "no limit"


async def read_to_end(reader: asyncio.StreamReader) -> None:
    with suppress(OSError):
        while await reader.read(1 << 16):
            pass


async def slow_reader(server: Server) -> str:
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(get("/flood"))
        own_port, begun = client.getsockname()[1], time.monotonic()
        while time.monotonic() - begun < WAIT_S:
            await asyncio.sleep(0.5)
            if not any(f":{own_port} " in line for line in server.server_ends()):
                return f"{time.monotonic() - begun:.0f} s"
        is_active = (await server.report())["/flood active"]
    return "no limit" if is_active else "the request ends, its connection does not"


async def keepalive(server: Server) -> str:
    _, writer = await server.connect(get("/wait"))
    await asyncio.sleep(0.5)
    is_on = any("timer:(keepalive" in line for line in server.server_ends())
    writer.transport.abort()
    return "probes" if is_on else "no limit"


async def many_connections(server: Server) -> str:
    connections = [await server.connect() for _ in range(NUM_CONNECTIONS)]
    await asyncio.sleep(2)
    num_open = len(server.server_ends())
    try:
        await server.report()
        others = "served"
    except ValueError:  # another status has another body
        others = "refused"
    for _, writer in connections:
        writer.transport.abort()
    return f"{num_open} of {NUM_CONNECTIONS} stay, a request is {others}"


async def pipelined(server: Server) -> str:
    """Return by how much memory grows while a connection sends requests and the first one is served."""
    process = psutil.Process((await server.report())["pid"])
    before = process.memory_info().rss
    _, writer = await server.connect(get("/wait") * 2000)
    for _ in range(100):
        with suppress(TimeoutError):
            async with asyncio.timeout(1):
                await writer.drain()
                writer.write(get("/wait") * 2000)
                continue
        break
    grown = process.memory_info().rss - before
    writer.transport.abort()
    return f"{grown / (1 << 20):.0f} MiB"


async def cpu_time(server: Server) -> str:
    process = psutil.Process((await server.report())["pid"])
    num_streams, end = 0, time.monotonic() + STREAM_S

    async def run() -> None:
        nonlocal num_streams
        reader, writer = await server.connect()
        while time.monotonic() < end:
            writer.write(get("/stream"))
            await reader.readuntil(b"0\r\n\r\n")
            num_streams += 1
        writer.close()

    before = process.cpu_times()
    await asyncio.gather(*(run() for _ in range(NUM_STREAMS)))
    after = process.cpu_times()
    used = after.user + after.system - before.user - before.system
    return f"{1e6 * used / num_streams / NUM_PARTS:.1f} µs"


Case = Callable[[Server], Coroutine[Any, Any, str]]
TOGETHER: dict[str, Case] = {
    "a connection without a request": lambda server: seconds_until_end(server, b""),
    "slow headers": lambda server: seconds_until_end(server, b"GET /stream HTTP/1.1\r\nX: ", b"x"),
    "headers of 64 KB": lambda server: seconds_until_end(server, b"GET /stream HTTP/1.1\r\nX: ", b"x" * 8192),
    "half a body, then nothing": lambda server: seconds_until_end(server, HEAD_OF_BODY + b"x"),
    "a slow body": lambda server: seconds_until_end(server, HEAD_OF_BODY, b"x"),
    "a client that does not read": slow_reader,
}
IN_TURN: dict[str, Case] = {
    "a client whose network is gone": keepalive,
    "connections without a request": many_connections,
    "200,000 requests on one connection": pipelined,
    "CPU time of a streamed part": cpu_time,
}


@asynccontextmanager
async def running(command: list[str], port: int) -> AsyncIterator[Server]:
    quiet = subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, stdout=quiet, stderr=quiet)
    server = Server(port)
    try:
        for attempt in range(100):
            try:
                await server.report()
                break
            except OSError:
                assert attempt < 99, f"{command} does not start"
                await asyncio.sleep(0.2)
        yield server
    finally:
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        await process.wait()
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()


async def measure(server: Server) -> dict[str, str]:
    together = await asyncio.gather(*(case(server) for case in TOGETHER.values()))
    cells = dict(zip(TOGETHER, together, strict=True))
    for name, case in IN_TURN.items():
        cells[name] = await case(server)
        await asyncio.sleep(1)  # until the server has closed the case's connections
    return cells


def command_of(line: str, python: str, folder: str, app: str, port: int) -> list[str]:
    values = {"APP": f"bench.http_server_app:{app}", "PORT": str(port), "FOLDER": folder}
    for name, value in values.items():
        line = line.replace(name, value)
    return [python, *line.split()]


async def measure_all(python: str, names: list[str]) -> dict[str, dict[str, str]]:
    table = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "hypercorn.toml").write_text(HYPERCORN)
        for name in names:
            for app in ("app",) if name == "tgis" else ("app", "limited_app"):
                with socket.create_server(("127.0.0.1", 0)) as free:
                    port = free.getsockname()[1]
                interpreter = sys.executable if name == "tgis" else python
                async with running(command_of(SERVERS[name], interpreter, folder, app, port), port) as server:
                    table[name + LIMITED * (app != "app")] = await measure(server)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--python", required=True, help="interpreter of the environment with the other servers"
    )
    parser.add_argument("--only", choices=SERVERS, action="append", help="default: all")
    options = parser.parse_args()
    table = asyncio.run(measure_all(options.python, options.only or [*SERVERS]))
    print("| |", " | ".join(table), "|\n|", " --- |" * (len(table) + 1))
    for case in (*TOGETHER, *IN_TURN):
        print(f"| {case} |", " | ".join(column[case] for column in table.values()), "|")


if __name__ == "__main__":
    main()
