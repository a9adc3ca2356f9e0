"""One rank's service on its Unix sockets: the main thread takes the steps and computes them, gRPC's threads
answer everything else."""

import gc
import logging
import os
import select
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TypeVar

import grpc

from tgis import failpoints, hub
from tgis.config import ShardConfig
from tgis.errors import OperatorError
from tgis.frames import FrameReader, frame, steps_path
from tgis.heartbeat import Heartbeat
from tgis.pb import shard_pb2 as pb
from tgis.pb.shard_pb2_grpc import ShardServiceServicer, add_ShardServiceServicer_to_server
from tgis.shard.code_cache import keep_with_run
from tgis.shard.compiled import is_compiling
from tgis.shard.content_calls import ContentCalls
from tgis.shard.content_loading import open_spool, open_store
from tgis.shard.engine import Engine
from tgis.shard.loading import load, sequence_length

logger = logging.getLogger(__name__)

NUM_RPC_THREADS = 8
# Calls that read files, at once; further ones wait without a thread, and until their deadlines at most.
NUM_FINDS, NUM_LOADS = 16, 2
STEPS_BETWEEN_COLLECTIONS = 1000
READ_BYTES = 1 << 18
GARBAGE = frame(pb.StepResponse(step_id=1 << 63, rows=b"garbage"))  # which no router takes for an answer
SEND_TIMEOUT = struct.pack("ll", 10, 0)  # seconds and microseconds
SERVER_OPTIONS = [
    ("grpc.so_reuseport", 0),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
]


class SocketError(OperatorError):
    """The socket cannot be opened; the text is one line."""


class StepSocket:
    """The stream of steps of the router that connected last; any before it is over."""

    def __init__(self, path: str) -> None:
        """Raises SocketError."""
        self._listener = socket.socket(socket.AF_UNIX)
        Path(path).unlink(missing_ok=True)
        with _private_socket(path):
            self._listener.bind(path)
        self._listener.listen()
        self._poll = select.poll()
        self._poll.register(self._listener, select.POLLIN)
        self._connection: socket.socket | None = None
        self._frames = FrameReader()

    def receive(self) -> list[pb.StepRequest] | None:
        """Waits for steps; None: a stream begins."""
        while True:
            ready = {number for number, _ in self._poll.poll()}
            if self._listener.fileno() in ready:
                self._begin()
                return None
            if requests := [pb.StepRequest.FromString(body) for body in self._frames.push(self._read())]:
                return requests

    def send(self, response: pb.StepResponse) -> None:
        """Nowhere if the router is gone."""
        if self._connection is not None:
            try:
                is_garbage = failpoints.hit("shard.before_answer")
                self._connection.sendall(GARBAGE if is_garbage else frame(response))
            except OSError as error:
                self._end(error)

    def _begin(self) -> None:
        if self._connection is not None:
            self._end("a newer one has taken over")
        self._connection, _ = self._listener.accept()
        # A router that reads no answers must not keep its successor waiting for ever.
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, SEND_TIMEOUT)
        self._frames = FrameReader()
        self._poll.register(self._connection, select.POLLIN)

    def _read(self) -> bytes:
        assert self._connection is not None, "only what is connected has bytes"
        try:
            data = self._connection.recv(READ_BYTES)
        except OSError as error:
            self._end(error)
            return b""
        if not data:
            self._end("it was closed")
        return data

    def _end(self, reason: object) -> None:
        assert self._connection is not None
        logger.info("the router's stream is over: %s", reason)
        self._poll.unregister(self._connection)
        self._connection.close()
        self._connection = None


Method = TypeVar("Method", bound=Callable[..., object])


def _beside_others(threads: ThreadPoolExecutor) -> Callable[[Method], Method]:
    """A method that gRPC calls on these threads instead of its own, which a disk that hangs must not take.

    A call that waits for one of them, and is over by then, is not begun. Should gRPC give up the attribute,
    calls would wait for each other again, and a test would fail."""

    def mark(method: Method) -> Method:
        method.experimental_thread_pool = threads  # type: ignore[attr-defined]
        return method

    return mark


class ShardService(ShardServiceServicer):
    """Answers everything but the steps."""

    def __init__(self, info: pb.InfoResponse, content_calls: ContentCalls) -> None:
        self._info, self._content_calls = info, content_calls

    def Info(self, request: pb.InfoRequest, context: grpc.ServicerContext) -> pb.InfoResponse:
        return self._info

    def Health(self, request: pb.HealthRequest, context: grpc.ServicerContext) -> pb.HealthResponse:
        return pb.HealthResponse()

    @_beside_others(ThreadPoolExecutor(NUM_FINDS, "find"))
    def Find(self, request: pb.FindRequest, context: grpc.ServicerContext) -> pb.FindResponse:
        return self._content_calls.find(request, context)

    @_beside_others(ThreadPoolExecutor(NUM_LOADS, "load"))
    def Load(self, request: pb.LoadRequest, context: grpc.ServicerContext) -> pb.LoadResponse:
        return self._content_calls.load(request, context)

    def Unload(self, request: pb.UnloadRequest, context: grpc.ServicerContext) -> pb.UnloadResponse:
        return self._content_calls.unload(request, context)


def serve(config: ShardConfig) -> NoReturn:
    """Loads the model, then opens the socket `{uds_path}-{rank}`, with that of the steps beside it, and
    computes until SIGTERM (status 0) or until a step fails (status 1). What goes wrong before raises one of
    the errors of `load`, or SocketError."""
    _end_on_signals()
    if config.kernel_cache is not None:
        keep_with_run(Path(config.kernel_cache))
    failpoints.hit("shard.before_loading")
    engine = load(config)
    length = sequence_length(config, hub.read_json(Path(config.model_path), "config.json"))
    store = open_store(config, engine.model, length)
    service = ShardService(engine.info, ContentCalls(store, open_spool(config), engine.contents))
    path = f"{config.uds_path}-{config.rank}"
    steps = StepSocket(steps_path(path))  # who finds the other may connect to this one
    server = _listen(service, path)
    _quieten_interpreter()
    logger.info("rank %d of %d serves %s on %s", config.rank, config.world_size, config.model_path, path)
    try:
        _compute(engine, steps, Heartbeat(config.heartbeat_fd, is_compiling))
    except Exception:
        logger.exception("a step failed; this process can answer for nothing any more")
    server.stop(None)
    _exit(1)


def _listen(service: ShardService, path: str) -> grpc.Server:
    server = grpc.server(ThreadPoolExecutor(NUM_RPC_THREADS, "rpc"), options=SERVER_OPTIONS)
    add_ShardServiceServicer_to_server(service, server)
    Path(path).unlink(missing_ok=True)
    with _private_socket(path):
        server.add_insecure_port(f"unix:{path}")
    server.start()
    return server


@contextmanager
def _private_socket(path: str) -> Iterator[None]:
    """What is bound meanwhile is this user's alone. Raises SocketError."""
    mask = os.umask(0o177)
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise SocketError(f"cannot listen on {path}: {error}") from error
    finally:
        os.umask(mask)


def _compute(engine: Engine, steps: StepSocket, heartbeat: Heartbeat) -> NoReturn:
    num_steps = 0
    while True:
        requests = steps.receive()
        if requests is None:
            engine.reset()
            continue
        for request in requests:
            with heartbeat.step(request.timeout_ms / 1000):
                response = engine.execute(request)
            steps.send(response)
            failpoints.hit("shard.after_answer")
            num_steps += 1
            if num_steps % STEPS_BETWEEN_COLLECTIONS == 0:
                gc.collect()


def _quieten_interpreter() -> None:
    """What is loaded stays; the little that steps leave behind is collected between two of them."""
    gc.collect()
    gc.freeze()
    gc.disable()


def _end_on_signals() -> None:
    """Ends the process at once, even in the middle of a step: the interpreter runs handlers on the main
    thread only, but wakes a waiting thread from wherever the signal arrives."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)

    def wait() -> None:
        os.read(reader, 1)
        logger.info("told to end")
        _exit(0)

    threading.Thread(target=wait, name="signals", daemon=True).start()


def _exit(status: int) -> NoReturn:
    """Without waiting for gRPC's threads, which wait for a router."""
    logging.shutdown()
    os._exit(status)
