"""Checks whether kernels that start before their predecessors end can be captured and compute the same."""

import logging
from math import sqrt
from typing import NamedTuple, Self

import torch
from torch import Tensor

from tgis.errors import first_line
from tgis.shard.attention.interface import Heads
from tgis.shard.kernels.cuda.check.inputs import Draw
from tgis.shard.kernels.cuda.functions import dependent_launch
from tgis.shard.kernels.cuda.implementations import Implementations
from tgis.shard.runner.device.stream import DeviceStream

logger = logging.getLogger(__name__)

SIZE, NUM_ROWS, NUM_LAYERS, NUM_REPLAYS = 1024, 16, 3, 3
HEADS, HEAD_DIM, BLOCK_SIZE = Heads(num_heads=8, num_kv_heads=2), 64, 16
DTYPE = torch.bfloat16


class _Layer(NamedTuple):
    """Weights of a layer, and its part of the cache."""

    norm: Tensor
    qkv: Tensor
    out: Tensor
    up: Tensor
    down: Tensor
    keys: Tensor
    values: Tensor

    @classmethod
    def random(cls, draw: Draw) -> Self:
        def matrix(out_features: int, in_features: int) -> Tensor:
            return (draw.normal(out_features, in_features) / sqrt(in_features)).to(DTYPE)

        width = HEADS.num_heads * HEAD_DIM
        pages = NUM_ROWS // BLOCK_SIZE, HEADS.num_kv_heads, BLOCK_SIZE, HEAD_DIM
        return cls(
            norm=draw.normal(SIZE),
            qkv=matrix(width + 2 * HEADS.num_kv_heads * HEAD_DIM, SIZE),
            out=matrix(SIZE, width),
            up=matrix(2 * SIZE, SIZE),
            down=matrix(SIZE, SIZE),
            keys=torch.zeros(pages, dtype=DTYPE, device=draw.device),
            values=torch.zeros(pages, dtype=DTYPE, device=draw.device),
        )


class _Chain:
    """Layers like a model's in fixed memory. Each kernel that starts early reads results of another one."""

    def __init__(self, device: torch.device, kernels: Implementations):
        draw = Draw(device)
        self._kernels = kernels
        self._layers = [_Layer.random(draw) for _ in range(NUM_LAYERS)]
        self._angles = draw.normal(2, NUM_ROWS, HEAD_DIM // 2)
        self._slots = draw.permutation(NUM_ROWS).long()
        self._x = torch.zeros(NUM_ROWS, SIZE, device=device)
        self.inputs = [draw.normal(NUM_ROWS, SIZE) for _ in range(NUM_REPLAYS)]

    @torch.inference_mode()
    def fill(self, x: Tensor) -> None:
        self._x.copy_(x)

    @torch.inference_mode()
    def work(self) -> None:
        kernels, x = self._kernels, self._x
        delta: Tensor | None = None
        for layer in self._layers:
            y = kernels.norm(x, delta, layer.norm, None, 1e-5, False, DTYPE)
            qkv = kernels.multiply_few(y, layer.qkv, None, DTYPE)
            cache = layer.keys, layer.values
            queries = kernels.turn_and_keep(qkv, HEADS, self._angles, *cache, self._slots)
            parts = kernels.multiply_few(queries.flatten(1), layer.out, None, torch.float32, True)
            y = kernels.norm(x, parts, layer.norm, None, 1e-5, False, DTYPE, DTYPE)
            gated = kernels.gate(kernels.multiply_few(y, layer.up, None, DTYPE), "silu", True)
            parts = kernels.multiply_few(gated, layer.down, None, torch.float32, True)
            delta = kernels.add_parts(parts, None, DTYPE)
        assert delta is not None, "there are layers"
        x.add_(delta)

    def copy_results(self) -> list[Tensor]:
        results = [self._x, *(pages for layer in self._layers for pages in (layer.keys, layer.values))]
        return [each.clone() for each in results]


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
    expected = []
    for x in chain.inputs:
        chain.fill(x)
        chain.work()
        expected.append(chain.copy_results())
    dependent_launch.refuse(None)
    try:
        graph = stream.capture(chain.work)
    except RuntimeError as error:
        return first_line(error)
    for x, results in zip(chain.inputs, expected, strict=True):
        chain.fill(x)
        graph.replay()
        stream.record().wait()
        if not all(map(torch.equal, chain.copy_results(), results)):
            return "replayed layers are wrong"
    return None
