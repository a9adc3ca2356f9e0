"""Checks recovery under live streams when shards die, disagree or stay away, and the router's shutdown."""

import contextlib
import queue
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.accounts import assert_nothing_left, take_baseline
from tests.support.link_files import free_ports
from tests.support.processes import Service
from tests.support.router.fake_shard import FakeShard, ShardServer
from tests.support.router.http_port import get
from tests.support.router.messages import batch, single, stopping
from tests.support.router.model_of_shard import column
from tests.support.router.router_process import Setup, restart_shards, start_router, stop_router
from tests.support.router.streams import LENGTH, NUM_STREAMS, Streams
from tests.support.tokenizers.trained import write_byte_level
from tgis.net.framing import frame
from tgis.net.ports import IN_USE
from tgis.pb import generation_pb2
from tgis.pb import shard_pb2 as pb
from tgis.router.shards.client import LOST

RECOVERY_TIMEOUT = 2.0


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Setup]:
    """Start a router with two shards. After the test, a router that still runs must have nothing in use."""
    setup = start_router(tmp_path, 2, "--recovery-timeout", str(RECOVERY_TIMEOUT))
    baseline = warm_up(setup)
    yield setup
    if setup.service.process.poll() is None:
        assert_nothing_left(setup.http, baseline)
    stop_router(setup)


def warm_up(setup: Setup) -> dict[str, float]:
    """Return the resources that the idle router uses after its first request."""
    setup.stub.Generate(batch("a"))
    return take_baseline(setup.http)


def test_two_ranks_answer_as_one(pair: Setup) -> None:
    streams = Streams(pair, step_s=0.001)
    assert streams.results() == streams.expected()
    assert pair.shards[0].num_steps == pair.shards[1].num_steps


def test_streams_go_on_when_the_shards_come_back(pair: Setup) -> None:
    streams = Streams(pair)
    for server in pair.servers:
        server.stop()
    wait_for_health(pair, 503)
    assert get(pair.http + "/live")[0] == 200
    restart_shards(pair, epoch=2)
    assert streams.results() == streams.expected()
    wait_for_health(pair, 200)
    assert stop_router(pair) == 0
    assert "ERROR" not in pair.service.output, "nothing is left behind that the interpreter complains about"


def test_a_router_without_shards_ends_all_calls_with_a_reason(pair: Setup) -> None:
    """Expect the router to exit afterwards."""
    streams = Streams(pair, step_s=0.2)
    pair.servers[1].stop()
    wait_for_health(pair, 503)
    pair.service.process.send_signal(signal.SIGUSR1)
    ends = [(error.code(), error.details()) for error in streams.failures()]
    assert ends == [(grpc.StatusCode.UNAVAILABLE, LOST)] * NUM_STREAMS
    with pytest.raises(grpc.RpcError) as refused:
        pair.stub.Generate(batch("a"), timeout=10)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert pair.service.process.wait(10) == 0
    line = f"the shards will not be restarted; requests ended with an error: {NUM_STREAMS}"
    assert line in pair.service.output


def test_one_lost_rank_is_a_lost_group(pair: Setup) -> None:
    """Restart one rank. The other has the old epoch, so the router waits until both have the same epoch."""
    streams = Streams(pair)
    pair.servers[1].stop()
    pair.servers[1] = ShardServer(FakeShard(1, epoch=2, world_size=2), pair.uds_path)
    wait_for_health(pair, 503)
    time.sleep(0.3)
    assert get(pair.http + "/health")[0] == 503
    for server in pair.servers:
        server.stop()
    restart_shards(pair, epoch=2)
    assert streams.results() == streams.expected()


def test_ranks_that_disagree_are_found_out(pair: Setup) -> None:
    """Expect the router to ask both ranks for their info again."""
    streams = Streams(pair)
    pair.shards[1].info.replaced_kernels.append("gate")
    pair.shards[1].wrong_digests.put(1)
    assert streams.results() == streams.expected()
    assert 'tgi_replaced_kernels{kernel="gate"} 1.0' in get(pair.http + "/metrics")[1].splitlines()
    assert pair.shards[0].num_streams == 2
    assert "the ranks disagree" in pair.service.output


def changed(**columns: Any) -> Callable[[pb.StepResponse], bytes]:
    def change(response: pb.StepResponse) -> bytes:
        for name, value in columns.items():
            setattr(response, name, value)
        return frame(response)

    return change


def with_a_top_token_too_few(response: pb.StepResponse) -> bytes:
    response.top_tokens.counts = column([1] * len(response.ended))
    return frame(response)


def with_an_invalid_token(response: pb.StepResponse) -> bytes:
    response.token_ids = column([-1] * len(response.ended))
    return frame(response)


def with_tokens_twice(response: pb.StepResponse) -> bytes:
    response.rows, response.token_ids = 2 * response.rows, 2 * response.token_ids
    response.ended *= 2
    return frame(response)


GARBAGE: dict[str, Callable[[pb.StepResponse], bytes]] = {
    "no end": lambda response: b"\xff" * 9,
    "no message": lambda response: b"\x03\x00\x00\x00\xff\xff\xff",
    "another step's": changed(step_id=1 << 40),
    "columns that do not fit": changed(rows=b"garbage"),
    "an unknown row": changed(rows=b"abcd", token_ids=b"efgh", ended=b"i"),
    "top tokens that are not there": with_a_top_token_too_few,
    "no token": with_an_invalid_token,
    "a token too many": with_tokens_twice,
}


def test_an_invalid_answer_is_a_lost_link(tmp_path: Path) -> None:
    """Send each kind of invalid answer in turn, under live streams."""
    setup = start_router(tmp_path, 1)
    shard, baseline = setup.shards[0], warm_up(setup)
    try:
        streams = Streams(setup, length=150)
        for number, garbage in enumerate(GARBAGE.values(), shard.num_streams + 1):
            shard.garbage.put(garbage)
            deadline = time.monotonic() + 60
            tried = shard.num_steps + 2 * NUM_STREAMS  # one per crash suspect, and more of all
            while shard.num_streams < number or shard.num_steps < tried:
                assert time.monotonic() < deadline, setup.service.output
                time.sleep(0.01)
        assert streams.results() == streams.expected()
        assert_nothing_left(setup.http, baseline)
    finally:
        assert stop_router(setup) == 0
    assert "Traceback" not in setup.service.output


def test_details_out_of_order_are_a_lost_link(pair: Setup) -> None:
    def cut(response: pb.StepResponse) -> bytes:
        [details] = response.input_details
        details.start, details.count, details.ranks = 1, details.count - 1, details.ranks[4:]
        return frame(response)

    options = generation_pb2.ResponseOptions(input_tokens=True)
    pair.shards[0].garbage.put(cut)
    [answer] = pair.stub.Generate(batch("four little girls", response=options)).responses
    assert pair.shards[0].num_streams == 2
    tokens = pair.tokenizer.encode("four little girls").tokens
    assert [token.text for token in answer.input_tokens] == tokens


def test_past_the_recovery_timeout_calls_end(pair: Setup) -> None:
    streams = Streams(pair, step_s=0.1)
    lost = time.monotonic()
    for server in pair.servers:
        server.stop()
    assert set(streams.errors()) == {grpc.StatusCode.UNAVAILABLE}
    assert time.monotonic() - lost > RECOVERY_TIMEOUT - 0.5
    with pytest.raises(grpc.RpcError) as refused:
        pair.stub.Generate(batch("a"))
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    restart_shards(pair, epoch=2)
    wait_for_health(pair, 200)
    assert pair.stub.Generate(batch("a")).responses


def test_time_limits_run_on_while_shards_are_lost(pair: Setup) -> None:
    pair.shards[0].step_s = pair.shards[1].step_s = 0.05
    criteria = stopping(LENGTH, min_new_tokens=LENGTH, time_limit_millis=700)
    started = time.monotonic()
    stream = pair.stub.GenerateStream(single("a", stopping=criteria))
    next(stream)
    next(stream)
    for server in pair.servers:
        server.stop()
    *_, last = stream
    assert last.stop_reason == 4
    assert time.monotonic() - started >= 0.7


def test_sigterm_lets_streams_finish(pair: Setup) -> None:
    """Expect refusals of new calls meanwhile, on an old channel and on a new one."""
    streams = Streams(pair, step_s=0.05)
    pair.service.process.send_signal(signal.SIGTERM)
    wait_until_closed(pair.service.grpc_port)
    with pair.service.channel() as fresh:
        for channel in (pair.channel, fresh):
            with pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary("/fmaas.GenerationService/ModelInfo")(b"", timeout=20)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert streams.results() == streams.expected()
    assert pair.service.end() == 0


def test_streams_longer_than_the_shutdown_timeout_end_unavailable(tmp_path: Path) -> None:
    setup = start_router(tmp_path, 1, "--shutdown-timeout", "0.5")
    streams = Streams(setup, count=2, step_s=0.5)
    assert stop_router(setup) == 0, setup.service.output
    assert set(streams.errors()) == {grpc.StatusCode.UNAVAILABLE}


def wait_until_closed(port: int) -> None:
    """Wait until no router listens at the port."""
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            return
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_for_health(setup: Setup, status: int) -> None:
    deadline = time.monotonic() + 60
    while get(setup.http + "/health")[0] != status:
        assert time.monotonic() < deadline, setup.service.output
        time.sleep(0.02)


def wait_until_alive(port: int, timeout_s: float = 30) -> None:
    """Wait until the HTTP port is open. The router handles signals before it opens the port."""
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()
            return
        assert time.monotonic() < deadline
        time.sleep(0.02)


def router_fails(directory: Path, *flags: str) -> str:
    command = ["router", "--tokenizer-path", str(directory), "--shard-uds-path", str(directory / "shard")]
    ports = ["--bind", "127.0.0.1", "--port", "0", "--grpc-port", "0", "--max-sequence-length", "99"]
    service = Service([*command, *ports, *flags])
    assert service.process.wait(20) == 1
    assert service.end() == 1
    return service.lines[-1]


def test_start_failures_are_one_line(tmp_path: Path, pair: Setup) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert router_fails(empty) == "error: No existing fast tokenizer (tokenizer.json) found"
    (empty / "tokenizer.json").write_text("{")
    assert router_fails(empty).startswith("error: Problem loading tokenizer for model: ")
    directory = tmp_path / "model"
    write_byte_level(directory)
    port = str(pair.service.grpc_port)
    text = "error: port {} on 127.0.0.1 cannot be opened: Address already in use" + IN_USE
    assert router_fails(directory, "--grpc-port", port) == text.format(port)
    port = str(pair.service.http_port)
    assert router_fails(directory, "--port", port) == text.format(port)


def test_a_watch_of_the_health_does_not_hold_up_the_end(pair: Setup) -> None:
    """Expect the watch to end without an error. If the router waited for it, the watch would be aborted."""
    states: queue.SimpleQueue[object] = queue.SimpleQueue()

    def watch() -> None:
        request = health_pb2.HealthCheckRequest(service="fmaas.GenerationService")
        try:
            for answer in health_pb2_grpc.HealthStub(pair.channel).Watch(request):
                states.put(answer.status)
            states.put("over")
        except grpc.RpcError as error:
            states.put(error)

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert states.get(timeout=30) == health_pb2.HealthCheckResponse.SERVING
    assert pair.service.end() == 0
    assert states.get(timeout=30) == health_pb2.HealthCheckResponse.NOT_SERVING
    assert states.get(timeout=30) == "over"
    watcher.join()


def test_a_request_that_always_kills_the_shards_ends(pair: Setup) -> None:
    """Expect the router to serve the next request."""
    pair.shards[0].poison = len(pair.tokenizer.encode("kill").ids)
    with pytest.raises(grpc.RpcError) as caught:
        pair.stub.Generate(batch("kill"))
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    match = re.fullmatch(
        r"Request failed during generation: internal error, request ([0-9a-f]{16})", caught.value.details()
    )
    assert match is not None
    pair.service.wait_for_line(f"request {match[1]} failed: the shards crash whenever they compute it", 5)
    pair.service.wait_for_line(f"request_id={match[1]} ", 5)  # the log line of the call itself
    assert pair.stub.Generate(batch("a longer text that does no harm")).responses


def test_a_router_that_waits_for_shards_can_be_stopped(tmp_path: Path) -> None:
    write_byte_level(tmp_path)
    command = ["router", "--tokenizer-path", str(tmp_path), "--shard-uds-path", str(tmp_path / "nobody")]
    port = free_ports()
    ports = ["--bind", "127.0.0.1", "--port", str(port), "--grpc-port", "0", "--max-sequence-length", "99"]
    service = Service([*command, *ports])
    wait_until_alive(port)
    assert service.end(timeout_s=10) == 0
