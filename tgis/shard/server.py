"""Service of one rank: the main thread launches steps, and gRPC's threads answer all other calls."""

import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NoReturn

import grpc
import torch

from tgis import failpoints, log_output
from tgis.config.processes import ShardConfig
from tgis.errors import first_line
from tgis.hub.gguf_files import find_named_place
from tgis.pb import shard_pb2 as pb
from tgis.pb.shard_pb2_grpc import add_ShardServiceServicer_to_server
from tgis.process.heartbeat import Heartbeat
from tgis.process.memory.page_collapse import collapse_soon
from tgis.prompts.artifact_cache import ArtifactCache
from tgis.prompts.store import AdapterStore
from tgis.shard.adapters.loading import open_artifact_cache, open_store
from tgis.shard.adapters.registry import LoadedAdapters
from tgis.shard.adapters.rpc import AdapterServicer
from tgis.shard.runner.interface import ModelRunner, Pending
from tgis.shard.startup.load import load_where_possible
from tgis.shard.startup.platforms.interface import is_gpu_failure
from tgis.shard.transport.link import Endpoint, choose_endpoint
from tgis.shard.transport.step_stream import StepSocket

logger = logging.getLogger(__name__)

NUM_RPC_THREADS = 8
STEPS_BETWEEN_COLLECTIONS = 1000
SERVER_OPTIONS = [
    ("grpc.so_reuseport", 0),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.server_handshake_timeout_ms", 10_000),  # limit for peers that connect and send nothing
]


class ShardService(AdapterServicer):
    def __init__(
        self,
        info: pb.InfoResponse,
        store: AdapterStore,
        artifacts: ArtifactCache,
        adapters: LoadedAdapters,
    ) -> None:
        super().__init__(store, artifacts, adapters)
        self._info = info

    def Info(self, request: pb.InfoRequest, context: grpc.ServicerContext) -> pb.InfoResponse:
        return self._info

    def Health(self, request: pb.HealthRequest, context: grpc.ServicerContext) -> pb.HealthResponse:
        return pb.HealthResponse()


def serve(config: ShardConfig, heartbeat: Heartbeat) -> NoReturn:
    """Load the model and compute steps. Raises OperatorError before the first step.

    The process exits with status 0 on SIGTERM or SIGINT, and with status 1 when a step fails."""
    _exit_on_signals()
    # The collection after loading would take a sixth of a second for the objects of imported modules.
    gc.freeze()
    endpoint = choose_endpoint(config)
    failpoints.hit("shard.before_loading")
    plan, runner = load_where_possible(config, heartbeat.limit_time)
    store = open_store(config, runner.model, plan.demand.max_sequence_length)
    service = ShardService(runner.info, store, open_artifact_cache(config), runner.adapters)
    # Open the step socket first: a router that sees the gRPC socket may connect to the step socket at once.
    steps = StepSocket(endpoint.open_steps())
    server = _listen(service, endpoint)
    _stop_garbage_collector()
    if plan.on.device.type == "cpu":  # steps of a GPU do not pass through the processor's caches
        collapse_soon()
    named = find_named_place(Path(config.model_path))
    logger.info("rank %d of %d is ready: %s on %s", config.rank, config.world_size, named, endpoint.name)

    def fail() -> NoReturn:
        log_failure(sys.exception())
        server.stop(None)
        _exit(1)

    heartbeat.finish_loading(plan.on.compiler.is_compiling)
    StepLoop(runner, steps, heartbeat, fail).run()


def log_failure(error: BaseException | None) -> None:
    """Log why a step failed. GPU errors are reported late, so their traceback would be misleading."""
    if isinstance(error, torch.OutOfMemoryError):
        logger.critical(
            "a step ran out of GPU memory, and this process exits: reduce --max-step-tokens, "
            "--max-batch-size or --kv-cache-tokens"
        )
    elif isinstance(error, Exception) and is_gpu_failure(error):
        logger.critical("the GPU failed in a step, and this process exits: %s", first_line(error))
    else:
        logger.error("a step failed, and this process exits", exc_info=error)


def _listen(service: ShardService, endpoint: Endpoint) -> grpc.Server:
    server = grpc.server(ThreadPoolExecutor(NUM_RPC_THREADS, "rpc"), options=SERVER_OPTIONS)
    add_ShardServiceServicer_to_server(service, server)
    endpoint.open_calls(server)
    server.start()
    return server


class StepLoop:
    """Launches steps as they arrive, with at most `max_pending` unanswered ones, and answers them in order.

    If `max_pending` is more than one, another thread waits for the results and sends the answers, so that
    launches continue. Either thread calls `fail` when an exception ends it."""

    def __init__(
        self, runner: ModelRunner, steps: StepSocket, heartbeat: Heartbeat, fail: Callable[[], NoReturn]
    ) -> None:
        self._runner = runner
        self._steps = steps
        self._heartbeat = heartbeat
        self._fail = fail
        self._free = threading.Semaphore(runner.max_pending)
        self._pending = SimpleQueue[Pending]()
        self._num_steps = 0

    def run(self) -> NoReturn:
        if self._runner.max_pending > 1:
            threading.Thread(target=self._answer_all, name="answers", daemon=True).start()
        try:
            while True:
                requests = self._steps.receive()
                if requests is None:
                    self._begin_stream()
                    continue
                for request in requests:
                    self._launch(request)
        except Exception:
            self._fail()

    def _begin_stream(self) -> None:
        for _ in range(self._runner.max_pending):  # wait for all answers
            self._free.acquire()
        self._free.release(self._runner.max_pending)
        self._steps.accept()
        self._runner.reset()

    def _launch(self, request: pb.StepRequest) -> None:
        self._free.acquire()
        self._heartbeat.begin_step(request.timeout_ms / 1000)
        pending = self._runner.launch(request)
        if self._runner.max_pending > 1:
            self._pending.put(pending)
        else:
            self._answer(pending)

    def _answer_all(self) -> NoReturn:
        try:
            while True:
                self._answer(self._pending.get())
        except Exception:
            self._fail()

    def _answer(self, pending: Pending) -> None:
        response = pending.answer()
        self._heartbeat.end_step()
        self._steps.send(response)
        failpoints.hit("shard.after_answer")
        self._num_steps += 1
        if self._num_steps % STEPS_BETWEEN_COLLECTIONS == 0:
            gc.collect()
        self._free.release()


def _stop_garbage_collector() -> None:
    """Disable automatic garbage collection, which `StepLoop` runs instead, and exempt the objects loaded so
    far."""
    gc.collect()
    gc.freeze()
    gc.disable()


def _exit_on_signals() -> None:
    # Python runs signal handlers only on the main thread, which may be computing a step. The signal writes to
    # the wake-up file descriptor immediately, so a thread that reads it can exit.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)

    def wait() -> None:
        os.read(reader, 1)
        logger.info("exiting after a signal")
        _exit(0)

    threading.Thread(target=wait, name="signals", daemon=True).start()


def _exit(status: int) -> NoReturn:
    """Exit without waiting for gRPC's threads, because they wait for a router."""
    logging.shutdown()
    if output := log_output.installed():
        output.wait()
    os._exit(status)
