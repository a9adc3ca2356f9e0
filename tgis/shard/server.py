"""One rank's service on its Unix socket: gRPC's threads carry messages, the main thread computes the
steps."""

import enum
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NoReturn, TypeVar

import grpc

from tgis import hub
from tgis.config import ShardConfig
from tgis.errors import OperatorError
from tgis.pb import shard_pb2 as pb
from tgis.pb.shard_pb2_grpc import ShardServiceServicer, add_ShardServiceServicer_to_server
from tgis.shard.content_calls import ContentCalls
from tgis.shard.content_loading import open_spool, open_store
from tgis.shard.engine import Engine
from tgis.shard.loading import load, sequence_length

logger = logging.getLogger(__name__)

NUM_RPC_THREADS = 8
# Calls that read files, at once; further ones wait without a thread, and until their deadlines at most.
NUM_FINDS, NUM_LOADS = 16, 2
STEPS_BETWEEN_COLLECTIONS = 1000
# Answers leave while the next step computes, as soon as a thread of gRPC's gets a turn.
SWITCH_INTERVAL_S = 0.0005
SERVER_OPTIONS = [
    ("grpc.so_reuseport", 0),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
]


class SocketError(OperatorError):
    """The socket cannot be opened; the text is one line."""


class Mark(enum.Enum):
    """What befalls a stream beside its messages."""

    BEGUN = enum.auto()
    ENDED = enum.auto()
    REPLACED = enum.auto()


class Stream:
    """One Step call: what is to be sent to the router."""

    def __init__(self) -> None:
        self.outbox: SimpleQueue[pb.StepResponse | Mark] = SimpleQueue()


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
    """Puts the steps of the newest stream into `inbox`; answers everything else itself."""

    def __init__(self, info: pb.InfoResponse, content_calls: ContentCalls) -> None:
        self.inbox: SimpleQueue[tuple[Stream, pb.StepRequest | Mark]] = SimpleQueue()
        self._info, self._content_calls = info, content_calls
        self._newest: Stream | None = None
        self._lock = threading.Lock()

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

    def Step(
        self, requests: Iterator[pb.StepRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.StepResponse]:
        stream = self._begin()
        if not context.add_callback(lambda: stream.outbox.put(Mark.ENDED)):
            return  # the router is gone already
        threading.Thread(target=self._read, args=(stream, requests), name="steps", daemon=True).start()
        while True:
            answer = stream.outbox.get()
            if isinstance(answer, pb.StepResponse):
                yield answer
            elif answer is Mark.REPLACED:
                context.abort(grpc.StatusCode.ABORTED, "a newer stream has taken over")
            else:
                return

    def _begin(self) -> Stream:
        stream = Stream()
        with self._lock:
            if self._newest is not None:
                self._newest.outbox.put(Mark.REPLACED)
            self._newest = stream
            self.inbox.put((stream, Mark.BEGUN))
        return stream

    def _read(self, stream: Stream, requests: Iterator[pb.StepRequest]) -> None:
        try:
            for request in requests:
                self.inbox.put((stream, request))
        except grpc.RpcError:
            logger.info("the router's stream broke off")
        self.inbox.put((stream, Mark.ENDED))


def serve(config: ShardConfig) -> NoReturn:
    """Loads the model, then opens the socket `{uds_path}-{rank}` and computes until SIGTERM (status 0) or
    until a step fails (status 1). What goes wrong before raises one of the errors of `load`, or
    SocketError."""
    _end_on_signals()
    engine = load(config)
    length = sequence_length(config, hub.read_json(Path(config.model_path), "config.json"))
    store = open_store(config, engine.model, length)
    service = ShardService(engine.info, ContentCalls(store, open_spool(config), engine.contents))
    path = Path(f"{config.uds_path}-{config.rank}")
    server = _listen(service, path)
    _quieten_interpreter()
    logger.info("rank %d of %d serves %s on %s", config.rank, config.world_size, config.model_path, path)
    try:
        _compute(engine, service.inbox)
    except Exception:
        logger.exception("a step failed; this process can answer for nothing any more")
    server.stop(None)
    _exit(1)


def _listen(service: ShardService, path: Path) -> grpc.Server:
    """The socket is this user's alone."""
    server = grpc.server(ThreadPoolExecutor(NUM_RPC_THREADS, "rpc"), options=SERVER_OPTIONS)
    add_ShardServiceServicer_to_server(service, server)
    path.unlink(missing_ok=True)
    mask = os.umask(0o177)
    try:
        server.add_insecure_port(f"unix:{path}")
    except RuntimeError as error:
        raise SocketError(f"cannot listen on {path}: {error}") from error
    finally:
        os.umask(mask)
    server.start()
    return server


def _compute(engine: Engine, inbox: SimpleQueue[tuple[Stream, pb.StepRequest | Mark]]) -> NoReturn:
    current, num_steps = None, 0
    while True:
        stream, item = inbox.get()
        if item is Mark.BEGUN:
            current = stream
            engine.reset()
        elif item is Mark.ENDED:
            stream.outbox.put(Mark.ENDED)
        elif stream is current:  # else it was sent before the newer stream took over
            assert isinstance(item, pb.StepRequest)
            stream.outbox.put(engine.execute(item))
            num_steps += 1
            if num_steps % STEPS_BETWEEN_COLLECTIONS == 0:
                gc.collect()


def _quieten_interpreter() -> None:
    """What is loaded stays; the little that steps leave behind is collected between two of them."""
    gc.collect()
    gc.freeze()
    gc.disable()
    sys.setswitchinterval(SWITCH_INTERVAL_S)


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
