"""Checks whether kernels that start before their predecessors end can be captured and compute the same."""

import logging

import torch
from torch import Tensor

from tgis.errors import first_line
from tgis.shard.kernels.cuda.check.inputs import Draw
from tgis.shard.kernels.cuda.functions import dependent_launch
from tgis.shard.kernels.cuda.implementations import Implementations
from tgis.shard.runner.device.stream import DeviceStream

logger = logging.getLogger(__name__)

SIZE, NUM_ROWS, NUM_PRODUCTS, NUM_REPLAYS = 1024, 16, 12, 3


class _Chain:
    """Products of which each reads the result of the one before, in fixed memory."""

    def __init__(self, device: torch.device, kernels: Implementations):
        draw = Draw(device)
        self._kernels = kernels
        self._weights = [(draw.normal(SIZE, SIZE) / SIZE**0.5).bfloat16() for _ in range(3)]
        self.inputs = [draw.normal(NUM_ROWS, SIZE).bfloat16() for _ in range(NUM_REPLAYS)]
        self.x = torch.zeros_like(self.inputs[0])
        self.y = torch.zeros_like(self.x)

    @torch.inference_mode()
    def work(self) -> None:
        y = self.x
        for number in range(NUM_PRODUCTS):
            weight = self._weights[number % len(self._weights)]
            y = self._kernels.multiply_few(y, weight, None, y.dtype)
        self.y.copy_(y)

    def compute(self, x: Tensor) -> Tensor:
        self.x.copy_(x)
        self.work()
        return self.y.clone()


def check_dependent_launches(stream: DeviceStream, kernels: Implementations) -> None:
    """Launch kernels normally from now on, with a warning, if those that start early cannot be captured, or
    if replays differ from kernels that are launched normally. None may have failed its check so."""
    if not dependent_launch.is_dependent(stream.device):
        return
    reason = find_obstacle(stream, kernels)
    dependent_launch.refuse(reason)
    if reason is not None:
        logger.warning("kernels start only when those before them have ended: %s", reason)


def find_obstacle(stream: DeviceStream, kernels: Implementations) -> str | None:
    """Return why kernels cannot start early; None if they can."""
    chain = _Chain(stream.device, kernels)
    dependent_launch.refuse("results to compare with")
    expected = [chain.compute(x) for x in chain.inputs]
    dependent_launch.refuse(None)
    try:
        graph = stream.capture(chain.work)
    except RuntimeError as error:
        return first_line(error)
    for x, y in zip(chain.inputs, expected, strict=True):
        chain.x.copy_(x)
        graph.replay()
        stream.record().wait()
        if not torch.equal(chain.y, y):
            return "replayed products are wrong"
    return None
