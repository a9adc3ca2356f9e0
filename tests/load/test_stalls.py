"""Open and closed loops against a server that stalls: latencies count from the intended send times."""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import trustme

from tgis.load.apis.http import HttpLinks
from tgis.load.apis.interface import LoadTarget
from tgis.load.apis.openai import OpenAiClient
from tgis.load.errors import AnswerError
from tgis.load.figures import summarize_level
from tgis.load.job import LoadJob
from tgis.load.loops import TIMEOUT, LoadRun
from tgis.load.processes import LoadProcesses, RunRecord
from tgis.load.records import AnswerRecord, RunClock
from tgis.load.worker import MODULE
from tgis.load.workload.arrivals import arrival_times
from tgis.load.workload.conversations import ConversationSource, TokenScale, Workload

STALL = (0.2, 0.6)  # seconds from the start in which the server answers nothing
USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}


def make_body(reason: str | None) -> str:
    last = {"text": "b", "finish_reason": reason}
    events = [{"choices": [{"text": "a"}]}, {"choices": [last]}, {"choices": [], "usage": USAGE}]
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


BODY = make_body("length")


@dataclass
class StallingServer:
    target: LoadTarget
    start: float = 0.0
    status: str = "200 OK"
    body: str = BODY
    num_connections: int = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
                if STALL[0] <= (now := time.monotonic() - self.start) < STALL[1]:
                    await asyncio.sleep(STALL[1] - now)
                answer = f"HTTP/1.1 {self.status}\r\ncontent-length: {len(self.body)}\r\n\r\n{self.body}"
                writer.write(answer.encode())
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving() -> AsyncIterator[StallingServer]:
    server = StallingServer(LoadTarget(address="", model="m"))
    listener = await asyncio.start_server(server.answer, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    server.target = replace(server.target, address=f"127.0.0.1:{port}")
    async with listener:
        yield server


def make_job(target: LoadTarget, **fields: object) -> LoadJob:
    given: dict[str, object] = {"concurrency": 0, "workload": Workload(output_tokens="2"), **fields}
    return LoadJob(
        api="completions",
        target=target,
        scale=TokenScale(),
        first_index=0,
        step=1,
        warm_up=0,
        **given,  # type: ignore[arg-type]
    )


async def load(server: StallingServer, block_s: float = 0.0, **fields: object) -> list[AnswerRecord]:
    """Run a loop; `block_s` is a time for which this process does nothing in the middle."""
    job = make_job(server.target, **fields)
    client = OpenAiClient(server.target, is_chat=False)
    run = LoadRun(job, client, ConversationSource(job.workload, job.scale))
    server.start = time.monotonic() if not server.start else server.start
    if block_s:
        asyncio.get_running_loop().call_later(0.1, time.sleep, block_s)
    await run.run(RunClock(time.monotonic()))
    await client.close()
    return run.records


@pytest.mark.usefixtures("steady_clock")
async def test_an_open_loop_counts_the_stall_in_every_request_that_should_have_been_sent() -> None:
    schedule = tuple(arrival_times("constant", 50, 0.8, None, 0))
    async with serving() as server:
        records = await load(server, schedule=schedule)
        connections = server.num_connections
    assert [record.error for record in records] == [None] * len(schedule)
    assert {record.cached_tokens for record in records} == {3}
    for record in records:
        expected = STALL[1] - record.intended if STALL[0] <= record.intended < STALL[1] else 0.0
        assert record.total_s >= expected - 0.01
    assert sum(record.total_s > 0.1 for record in records) >= 14  # of the 15 sent before the last 0.1 s
    assert connections < len(schedule), "connections are used again"


@pytest.mark.usefixtures("steady_clock")
async def test_a_closed_loop_of_one_client_sees_the_stall_once() -> None:
    async with serving() as server:
        records = await load(server, concurrency=1, duration_s=0.8)
    assert len(records) > 3
    assert 1 <= sum(record.total_s > 0.3 for record in records) <= 2  # a second one on a busy machine


async def test_a_stall_of_the_generator_is_counted_and_reported() -> None:
    async with serving() as server:
        server.start = time.monotonic() - 60  # it does not stall
        records = await load(server, block_s=0.4, schedule=tuple(arrival_times("constant", 50, 0.6, None, 0)))
    late = [record for record in records if record.sent - record.intended > 0.1]
    assert len(late) >= 14
    assert all(record.total_s >= record.sent - record.intended for record in late)
    figures = summarize_level([RunRecord(records, [0.1], [0.0], 1.0)], None, {})
    assert "late" in figures["generator"]["bottleneck"]


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        ("429 Too Many Requests", "too many", "HTTP 429", "too many"),
        ("200 OK", 'data: {"error": {"message": "lost"}}\n\n', "error in the stream", "{'message': 'lost'}"),
        ("200 OK", "data: nothing\n\n", "protocol", "JSONDecodeError"),
        ("nonsense", "", "protocol", ""),
        ("200 OK", make_body("time_limit"), "ended by time_limit", ""),
        ("200 OK", make_body(None), "no stop reason", ""),
    ],
)
async def test_failures_are_kinds_with_messages(status: str, body: str, kind: str, message: str) -> None:
    async with serving() as server:
        server.start, server.status, server.body = 1.0, status, body
        records = await load(server, concurrency=2, num_conversations=3)
    assert [record.error for record in records] == [kind] * 3
    assert all(message in record.message for record in records)
    figures = summarize_level([RunRecord(records, [0.1], [0.0], 1.0)], None, {})
    assert set(figures["messages"]) == ({kind} if records[0].message else set())


@pytest.mark.parametrize(("header", "expected"), [("content-length: 9999", "connection"), ("x: y", None)])
async def test_an_answer_that_ends_with_its_connection_is_whole_if_it_has_no_length(
    header: str, expected: str | None
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 200 OK\r\n{header}\r\n\r\n{BODY}".encode())
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listener:
        address = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        server = StallingServer(LoadTarget(address=address, model="m"))
        [record] = await load(server, concurrency=1, num_conversations=1)
    assert record.error == expected


@pytest.mark.usefixtures("steady_clock")
async def test_a_request_without_an_answer_times_out() -> None:
    async with serving() as server:
        server.start = time.monotonic() - STALL[0]
        [record] = await load(server, concurrency=1, num_conversations=1, timeout_s=0.05)
    assert (record.error, record.arrivals) == (TIMEOUT, [])


async def test_answers_of_another_length_are_faults() -> None:
    async with serving() as server:
        server.start = 1.0
        [record] = await load(
            server, concurrency=1, num_conversations=1, workload=Workload(output_tokens="3")
        )
    assert record.faults == ["wrong length"]


async def test_clients_wait_after_a_failure() -> None:
    async with serving() as server:
        server.start, server.status = 1.0, "503 Service Unavailable"
        records = await load(server, concurrency=1, num_conversations=3, error_pause_s=0.1)
    assert all(after.sent - before.sent >= 0.1 for before, after in pairwise(records))


async def test_a_stream_is_cancelled_in_the_middle() -> None:
    left = asyncio.Semaphore(0)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nx: y\r\n\r\n")
        try:
            while True:
                writer.write(b'data: {"choices": [{"text": "a"}]}\n\n')
                await writer.drain()
                await asyncio.sleep(0.001)
        except ConnectionError:
            left.release()
        finally:
            writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listener:
        address = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        server = StallingServer(LoadTarget(address=address, model="m"))
        workload = Workload(output_tokens="100", cancel_share=1.0)
        records = await load(server, concurrency=2, num_conversations=4, workload=workload)
        async with asyncio.timeout(60):
            for _ in records:
                await left.acquire()
    assert [(record.is_cancelled, record.error, record.faults) for record in records] == [
        (True, None, [])
    ] * 4
    assert all(1 <= record.output_tokens < 100 for record in records)
    figures = summarize_level([RunRecord(records, [0.1], [0.0], 1.0)], None, {})
    assert (figures["cancelled"], figures["succeeded"], figures["total"]) == (4, 0, {"count": 0})


async def test_connections_are_closed_at_the_end_of_a_job(tmp_path: Path) -> None:
    """The process waits for its next job, in which its event loop does not run."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(context)
    choice = {"text": "ab", "finish_reason": "length"}
    body = json.dumps({"data": [{"id": "m"}], "choices": [choice], "usage": USAGE})
    server = StallingServer(LoadTarget(address=""), start=1.0, body=body)
    listener = await asyncio.start_server(server.answer, "127.0.0.1", 0, ssl=context)
    async with listener, LoadProcesses(1) as processes:
        port = listener.sockets[0].getsockname()[1]
        target = LoadTarget(address=f"localhost:{port}", is_tls=True, ca_cert=str(tmp_path / "ca.pem"))
        workload = Workload(output_tokens="2", unary_share=1.0)
        job = make_job(target, concurrency=8, num_conversations=16, workload=workload)
        run = await processes.run([job], lambda _: None)
        assert {record.error for record in run.records} == {None}
        assert server.num_connections >= 8
        [client] = [one for one in psutil.Process().children() if MODULE in one.cmdline()]
        for _ in range(100):  # the records are sent first
            connections = client.net_connections("tcp")
            if not (left := [one for one in connections if one.raddr and one.raddr.port == port]):
                break
            await asyncio.sleep(0.05)
        assert left == []


@pytest.mark.parametrize(("limit", "expected"), [(None, 1), (2, 3), (1, 5)])
async def test_connections_are_replaced_after_some_calls(limit: int | None, expected: int) -> None:
    async with serving() as server:
        server.start = 1.0
        server.target = replace(server.target, calls_per_connection=limit)
        await load(server, concurrency=1, num_conversations=5)
    assert server.num_connections == expected


async def test_a_service_that_is_not_there() -> None:
    with pytest.raises(AnswerError, match="connection"):
        await HttpLinks(LoadTarget(address="127.0.0.1:1")).ask("GET", "/")
