"""The service of one rank. The main thread receives steps and computes them; gRPC's threads answer all other
calls."""

import gc
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn, TypeVar

import grpc

from tgis import failpoints
from tgis.config.processes import ShardConfig
from tgis.hub import model_files
from tgis.pb import shard_pb2 as pb
from tgis.pb.shard_pb2_grpc import ShardServiceServicer, add_ShardServiceServicer_to_server
from tgis.process.heartbeat import Heartbeat
from tgis.shard.adapters.loading import open_spool, open_store
from tgis.shard.adapters.rpc import ContentCalls
from tgis.shard.kernels.cpu.jit.cache import add_run_directory
from tgis.shard.kernels.cpu.jit.compiler import is_compiling
from tgis.shard.runner.model_runner import Engine
from tgis.shard.startup.load import load, sequence_length
from tgis.shard.transport.link import Link, choose_link
from tgis.shard.transport.step_stream import StepSocket

logger = logging.getLogger(__name__)

NUM_RPC_THREADS = 8
# Concurrency limits of calls that read files. Further calls wait without a thread, at most until their
# deadlines.
NUM_FINDS, NUM_LOADS, NUM_COPIES = 16, 2, 4
STEPS_BETWEEN_COLLECTIONS = 1000
SERVER_OPTIONS = [
    ("grpc.so_reuseport", 0),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.server_handshake_timeout_ms", 10_000),  # limit for peers that connect and send nothing
]


Method = TypeVar("Method", bound=Callable[..., object])


def _beside_others(threads: ThreadPoolExecutor) -> Callable[[Method], Method]:
    """Make gRPC run a method on these threads instead of its own, so that a hanging disk does not block
    gRPC's threads.

    A call that ends while it waits for a thread is never started. This uses an experimental attribute of
    gRPC. If gRPC removes it, calls wait for each other again, and a test fails."""

    def mark(method: Method) -> Method:
        method.experimental_thread_pool = threads  # type: ignore[attr-defined]
        return method

    return mark


class ShardService(ShardServiceServicer):
    """gRPC service of a shard: all calls except the steps."""

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

    @_beside_others(ThreadPoolExecutor(NUM_COPIES, "copy"))
    def Fetch(self, request: pb.FetchRequest, context: grpc.ServicerContext) -> Iterator[pb.FetchResponse]:
        return self._content_calls.fetch(request, context)

    @_beside_others(ThreadPoolExecutor(NUM_COPIES, "put"))
    def Put(self, requests: Iterator[pb.PutRequest], context: grpc.ServicerContext) -> pb.PutResponse:
        return self._content_calls.put(requests, context)

    def Unload(self, request: pb.UnloadRequest, context: grpc.ServicerContext) -> pb.UnloadResponse:
        return self._content_calls.unload(request, context)


def serve(config: ShardConfig) -> NoReturn:
    """Load the model, open the sockets, and compute steps.

    The sockets are `{uds_path}-{rank}` and the one for steps beside it, or TCP ports. The process exits with
    status 0 on SIGTERM and with status 1 after a step fails. Errors before the first step raise an
    OperatorError."""
    _end_on_signals()
    link = choose_link(config)
    if config.kernel_cache is not None:
        add_run_directory(Path(config.kernel_cache))
    failpoints.hit("shard.before_loading")
    engine = load(config)
    length = sequence_length(config, model_files.read_json(Path(config.model_path), "config.json"))
    store = open_store(config, engine.model, length)
    service = ShardService(engine.info, ContentCalls(store, open_spool(config), engine.contents))
    # Open the socket for steps first: a router that finds the gRPC socket may connect to this one at once.
    steps = StepSocket(link.open_steps())
    server = _listen(service, link)
    _quieten_interpreter()
    logger.info("rank %d of %d serves %s on %s", config.rank, config.world_size, config.model_path, link.name)
    try:
        _compute(engine, steps, Heartbeat(config.heartbeat_fd, is_compiling))
    except Exception:
        logger.exception("a step failed; this process can answer for nothing any more")
    server.stop(None)
    _exit(1)


def _listen(service: ShardService, link: Link) -> grpc.Server:
    server = grpc.server(ThreadPoolExecutor(NUM_RPC_THREADS, "rpc"), options=SERVER_OPTIONS)
    add_ShardServiceServicer_to_server(service, server)
    link.open_calls(server)
    server.start()
    return server


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
    """Turn off automatic garbage collection, and exclude the objects loaded so far from later collections.

    `_compute` collects the little garbage of steps between two steps."""
    gc.collect()
    gc.freeze()
    gc.disable()


def _end_on_signals() -> None:
    """Exit at once on SIGTERM or SIGINT, even in the middle of a step.

    Python runs signal handlers only on the main thread, which may be computing a step. The wake-up file
    descriptor is written immediately, so a thread that reads it can exit."""
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
    """Exit without waiting for gRPC's threads, because they wait for a router."""
    logging.shutdown()
    os._exit(status)
