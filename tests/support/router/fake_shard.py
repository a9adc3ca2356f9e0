"""Fake shards: the plain model of a shard behind real sockets."""

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from tests.support.router.model_of_contents import Library, ShelfOfShard, fail
from tests.support.router.model_of_shard import ModelOfShard
from tgis.net.framing import FrameReader, frame, steps_path
from tgis.pb import shard_pb2 as pb
from tgis.pb.shard_pb2_grpc import ShardServiceServicer, add_ShardServiceServicer_to_server

VOCAB_SIZE = 400
EOS, PAD = 1, 2
NUM_BLOCKS, BLOCK_SIZE = 64, 8
NUM_THREADS = 24  # for calls of a shard


class FakeShard(ShardServiceServicer):
    """Fake shard that runs a ModelOfShard behind the real protocol; `step_s` is the duration of a step."""

    def __init__(
        self,
        rank: int = 0,
        epoch: int = 1,
        info: pb.InfoResponse | None = None,
        library: Library | None = None,
        world_size: int = 1,
    ) -> None:
        """Create a shard. `info` replaces the usual fields; all ranks of a group share one library."""
        self.info = pb.InfoResponse(
            model_kind=pb.InfoResponse.MODEL_KIND_DECODER_ONLY,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=[EOS],
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            pad_token_id=PAD,
            prompt_cache_bytes=1 << 20,
            adapter_cache_bytes=1 << 20,
            rank=rank,
            world_size=world_size,
            epoch=epoch,
        )
        self.info.MergeFrom(info or pb.InfoResponse())
        self.shelf = ShelfOfShard(library or Library(), self.info, rank)
        self.model = self._model()
        self.rank, self.step_s = rank, 0.001
        self.path = pb.STEP_PATH_UNSPECIFIED
        self.num_steps = 0
        self.last_opened: pb.OpenRow | None = None
        """Message of the row that was opened last."""
        self.num_streams = 0
        self.poison: int | None = None
        """Prompt length at which the stream ends, as if the shard had crashed."""
        self.hangs_from: str | None = None
        """Name of the method at which the shard hangs. From then on, it answers no calls."""
        self.runs = threading.Event()
        self.runs.set()
        self.garbage: queue.SimpleQueue[Callable[[pb.StepResponse], bytes]] = queue.SimpleQueue()
        """Functions that each encode one answer in place of `frame`."""
        self.wrong_digests: queue.SimpleQueue[int] = queue.SimpleQueue()

    def begin(self, method: str, context: grpc.ServicerContext) -> None:
        if method == self.hangs_from:
            self.runs.clear()
        self.runs.wait(30)
        if not context.is_active():  # the caller or the process has ended
            fail(context, (grpc.StatusCode.CANCELLED, ""))

    def Info(self, request: pb.InfoRequest, context: grpc.ServicerContext) -> pb.InfoResponse:
        self.begin("Info", context)
        return self.info

    def _model(self) -> ModelOfShard:
        info = self.info
        sizes = info.num_blocks, info.block_size, info.vocab_size, info.rope_switch_len, info.num_states
        model = ModelOfShard(*sizes)
        model.check_contents = self.shelf.check_row
        return model

    def Find(self, request: pb.FindRequest, context: grpc.ServicerContext) -> pb.FindResponse:
        assert self.rank == 0, "one rank finds"
        self.begin("Find", context)
        return self.shelf.find(request, context)

    def Load(self, request: pb.LoadRequest, context: grpc.ServicerContext) -> pb.LoadResponse:
        self.begin("Load", context)
        return self.shelf.load(request, context)

    def Fetch(self, request: pb.FetchRequest, context: grpc.ServicerContext) -> Iterator[pb.FetchResponse]:
        assert self.rank == 0, "one rank has what was found"
        self.begin("Fetch", context)
        return self.shelf.fetch(request, context)

    def Put(self, requests: Iterator[pb.PutRequest], context: grpc.ServicerContext) -> pb.PutResponse:
        self.begin("Put", context)
        return self.shelf.put(requests, context)

    def Unload(self, request: pb.UnloadRequest, context: grpc.ServicerContext) -> pb.UnloadResponse:
        self.begin("Unload", context)
        return self.shelf.unload(request)

    def answer(self, connection: socket.socket) -> None:
        """Answer the steps of one stream. The first stream has the model that the shard was created with: a
        test may have changed it before the stream is accepted."""
        if self.num_streams:
            self.model = self._model()
        self.num_streams += 1
        frames = FrameReader()
        while data := _received(connection):
            for request in map(pb.StepRequest.FromString, frames.push(data)):
                time.sleep(self.step_s)
                self.num_steps += 1
                self.last_opened = next(reversed(request.opened_rows), self.last_opened)
                if any(row.prompt_len == self.poison for row in request.opened_rows):
                    return  # a real shard would have crashed
                response = self.model.execute(request)
                response.path = self.path
                if not self.wrong_digests.empty():
                    response.digest ^= self.wrong_digests.get()
                answer = (frame if self.garbage.empty() else self.garbage.get())(response)
                with contextlib.suppress(OSError):  # the router may have closed it
                    connection.sendall(answer)


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1 << 16)
    except OSError:
        return b""


class ShardServer:
    """FakeShard behind its two sockets."""

    def __init__(self, shard: FakeShard, uds_path: str) -> None:
        self._shard = shard
        self._connections: list[socket.socket] = []
        self._server = grpc.server(ThreadPoolExecutor(NUM_THREADS))
        add_ShardServiceServicer_to_server(shard, self._server)
        self._listener = self._open(f"{uds_path}-{shard.rank}")
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()
        self._server.start()

    def _open(self, path: str) -> socket.socket:
        """Open the socket for calls, and return the listener for steps."""
        Path(steps_path(path)).unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(steps_path(path))
        listener.listen()
        self._server.add_insecure_port(f"unix:{path}")
        return listener

    def _accept(self) -> None:
        """Accept one stream after another."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            with connection:
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        self._shard.answer(connection)

    def cut(self) -> None:
        """Close the streams."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        """Stop like a process that dies."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self.cut()
        self._listener.close()
        stopped = self._server.stop(0)
        self._shard.runs.set()
        stopped.wait()
        self._thread.join()
