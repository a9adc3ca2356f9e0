"""A model runner that computes on a thread of its own, up to a step behind, as one on a device does."""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from tgis.pb import shard_pb2 as pb
from tgis.shard.adapters.registry import LoadedAdapters
from tgis.shard.models.interface import Model
from tgis.shard.runner.interface import ModelRunner


class LateRunner:
    """Has the steps of a runner that computes at once computed later."""

    max_pending = 2

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._thread = ThreadPoolExecutor(1, "late", torch.set_num_threads, (1,))
        self._pending: deque[LateStep] = deque()
        self.most_pending = 0

    @property
    def info(self) -> pb.InfoResponse:
        return self._runner.info

    @property
    def model(self) -> Model:
        return self._runner.model

    @property
    def adapters(self) -> LoadedAdapters:
        return self._runner.adapters

    def launch(self, request: pb.StepRequest) -> "LateStep":
        computed = self._thread.submit(lambda: self._runner.launch(request).answer())
        step = LateStep(self._pending, computed)
        self._pending.append(step)
        self.most_pending = max(self.most_pending, len(self._pending))
        assert len(self._pending) <= self.max_pending
        return step

    def reset(self) -> None:
        assert not self._pending, "a step is pending"
        self._thread.submit(self._runner.reset).result()

    def close(self) -> None:
        self._thread.shutdown()


class LateStep:
    def __init__(self, pending: "deque[LateStep]", computed: "Future[pb.StepResponse]") -> None:
        self._pending, self._computed = pending, computed

    def answer(self) -> pb.StepResponse:
        assert self._pending[0] is self, "not in the order of launches"
        response = self._computed.result()
        self._pending.popleft()
        return response
