"""Check the step loop with runners whose steps may be pending.

The tests check when steps are launched, the order and receiver of the answers, and how the loop ends."""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tgis.net.framing import FrameReader, frame
from tgis.pb import shard_pb2 as pb
from tgis.process import heartbeat
from tgis.process.heartbeat import Heartbeat
from tgis.shard.server import StepLoop
from tgis.shard.transport.link import UnixListener
from tgis.shard.transport.step_stream import StepSocket

TIMEOUT_S = 10.0
PERIOD_S = 0.05
FAILS = 999  # a step whose launch fails


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Step:
    """A pending step that is computed when the test says so."""

    def __init__(self, number: int) -> None:
        self.number, self.computed, self.error = number, threading.Event(), False
        self.answered_on: threading.Thread | None = None

    def answer(self) -> pb.StepResponse:
        assert self.computed.wait(TIMEOUT_S)
        self.answered_on = threading.current_thread()
        if self.error:
            raise RuntimeError(f"step {self.number}")
        return pb.StepResponse(step_id=self.number)


class Runner:
    def __init__(self, max_pending: int) -> None:
        self.max_pending = max_pending
        self.launched: list[Step] = []
        self.resets: list[int] = []  # the number of steps launched before each reset

    def launch(self, request: pb.StepRequest) -> Step:
        if request.step_id == FAILS:
            raise RuntimeError("launch")
        self.launched.append(Step(request.step_id))
        return self.launched[-1]

    def reset(self) -> None:
        assert all(step.answered_on for step in self.launched), "a step is pending"
        self.resets.append(len(self.launched))

    def finish(self, number: int, error: bool = False) -> None:
        [step] = [step for step in self.launched if step.number == number]
        step.error = error
        step.computed.set()

    @property
    def numbers(self) -> list[int]:
        return [step.number for step in self.launched]


class Stream:
    def __init__(self, path: Path) -> None:
        self.socket, self._frames = socket.socket(socket.AF_UNIX), FrameReader()
        self.socket.connect(str(path))
        self.socket.settimeout(TIMEOUT_S)

    def send(self, *numbers: int, timeout_ms: int = 0) -> None:
        steps = [pb.StepRequest(step_id=number, timeout_ms=timeout_ms) for number in numbers]
        self.socket.sendall(b"".join(map(frame, steps)))

    def receive(self) -> list[int]:
        """Return the numbers of the next answers, or an empty list at the end of the stream."""
        bodies = self._frames.push(self.socket.recv(1 << 16))
        return [pb.StepResponse.FromString(body).step_id for body in bodies]

    def hears_nothing(self) -> bool:
        self.socket.settimeout(0.05)
        try:
            return not self.socket.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return True
        finally:
            self.socket.settimeout(TIMEOUT_S)


class Served:
    """A loop in its own thread, and its first stream."""

    def __init__(self, directory: Path, max_pending: int, heartbeat_fd: int | None) -> None:
        self.runner, self.failures = Runner(max_pending), list[BaseException | None]()
        self._path, self._streams = directory / "steps", list[Stream]()
        self._listener = UnixListener(str(self._path))
        self._steps = StepSocket(self._listener)
        heartbeat = Heartbeat(heartbeat_fd)
        heartbeat.finish_loading(lambda: False)
        self._loop = StepLoop(self.runner, self._steps, heartbeat, self._fail)
        self.thread = threading.Thread(target=self._loop.run, daemon=True)
        self.thread.start()
        self.stream = self.connect()

    def connect(self) -> Stream:
        self._streams.append(Stream(self._path))
        return self._streams[-1]

    def wait_for(self, numbers: list[int]) -> None:
        wait_until(lambda: self.runner.numbers == numbers)

    def end(self) -> None:
        if self.thread.is_alive():
            for step in self.runner.launched:
                step.computed.set()
            if self.failures:  # in a shard, the process would have ended
                self._loop._free.release()
            self.connect().send(FAILS)
            self.thread.join(TIMEOUT_S)
        assert not self.thread.is_alive()
        for stream in self._streams:
            stream.socket.close()
        self._steps._connection.close()
        self._listener._listener.close()

    def _fail(self) -> None:
        self.failures.append(sys.exception())


Serve = Callable[..., Served]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    started: list[Served] = []

    def start(max_pending: int, heartbeat_fd: int | None = None) -> Served:
        started.append(Served(tmp_path, max_pending, heartbeat_fd))
        return started[-1]

    yield start
    for served in started:
        served.end()


def test_steps_are_launched_ahead_and_answered_in_order(serve: Serve) -> None:
    served = serve(2)
    runner, stream = served.runner, served.stream
    stream.send(1)
    served.wait_for([1])
    stream.send(2, 3, 4)
    served.wait_for([1, 2])
    runner.finish(2)
    assert stream.hears_nothing()
    assert runner.numbers == [1, 2], "no more than two are pending"
    runner.finish(1)
    answered = stream.receive()
    while len(answered) < 2:
        answered += stream.receive()
    assert answered == [1, 2]
    served.wait_for([1, 2, 3, 4])
    runner.finish(3)
    assert stream.receive() == [3]
    runner.finish(4)
    assert stream.receive() == [4]


def test_a_new_stream_waits_for_the_steps_of_the_one_before(serve: Serve) -> None:
    served = serve(2)
    runner, first = served.runner, served.stream
    first.send(1, 2)
    served.wait_for([1, 2])
    second = served.connect()
    second.send(5)
    assert second.hears_nothing()
    assert runner.resets == [0]
    for number in (1, 2):
        runner.finish(number)
        assert first.receive() == [number]
    assert first.receive() == []
    served.wait_for([1, 2, 5])
    assert runner.resets == [0, 2]
    runner.finish(5)
    assert second.receive() == [5]


def test_answers_to_a_router_that_is_gone_are_dropped(serve: Serve) -> None:
    served = serve(2)
    served.stream.send(1, 2)
    served.wait_for([1, 2])
    served.stream.socket.close()
    served.runner.finish(1)
    served.runner.finish(2)
    again = served.connect()
    again.send(3)
    served.wait_for([1, 2, 3])
    served.runner.finish(3)
    assert again.receive() == [3]
    assert not served.failures


def test_one_at_a_time_is_answered_where_it_is_launched(serve: Serve) -> None:
    served = serve(1)
    served.stream.send(1, 2)
    served.wait_for([1])
    assert served.stream.hears_nothing()
    assert served.runner.numbers == [1]
    served.runner.finish(1)
    assert served.stream.receive() == [1]
    served.wait_for([1, 2])
    served.runner.finish(2)
    assert served.stream.receive() == [2]
    assert [step.answered_on for step in served.runner.launched] == [served.thread] * 2


@pytest.mark.parametrize("max_pending", [1, 2])
def test_a_step_that_cannot_be_launched_ends_all(serve: Serve, max_pending: int) -> None:
    served = serve(max_pending)
    served.stream.send(FAILS)
    served.thread.join(TIMEOUT_S)
    assert [str(error) for error in served.failures] == ["launch"]


@pytest.mark.parametrize("max_pending", [1, 2])
def test_a_step_that_fails_late_is_noticed_at_once(serve: Serve, max_pending: int) -> None:
    """Check that pending answers are sent although no further step arrives."""
    served = serve(max_pending)
    served.stream.send(1)
    served.wait_for([1])
    served.runner.finish(1, error=True)
    wait_until(lambda: bool(served.failures))
    assert [str(error) for error in served.failures] == ["step 1"]


def listen(heartbeats: int, count: int) -> bytes:
    """Return that many heartbeats, or those up to the first that reports a hanging step."""
    heard = b""
    while len(heard) < count and b"!" not in heard:
        heard += os.read(heartbeats, 1)
    return heard


def test_a_step_has_its_time_once_it_is_the_oldest(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "PERIOD_S", PERIOD_S)
    heartbeats, writer = os.pipe()
    served, limit = serve(2, writer), 12
    timeout_ms = int(limit * PERIOD_S * 1000)
    served.stream.send(1, 2, timeout_ms=timeout_ms)
    served.wait_for([1, 2])
    for number in (1, 2):
        assert b"!" not in listen(heartbeats, 8)
        served.runner.finish(number)
        assert served.stream.receive() == [number]
    assert b"!" not in listen(heartbeats, limit + 4), "no step is pending"
    served.stream.send(3, 4, timeout_ms=timeout_ms)
    served.wait_for([1, 2, 3, 4])
    heard = listen(heartbeats, limit + 8)
    assert heard.endswith(b"!")
    assert len(heard) >= limit
