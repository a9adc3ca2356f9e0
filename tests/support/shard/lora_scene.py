"""Random adapters of a layer, and their effect computed in float64."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from tgis.shard.kernels.cpu.ops import CPU_KERNELS
from tgis.shard.layers.lora import AdapterSet, Deltas, LowRank, TokenAdapters

RANKS = (1, 2, 7, 8, 9, 16, 24, 33, 64, 100, 257)


def draw_low_rank(in_features: int, rank: int, first: int, width: int) -> LowRank:
    a, b = torch.randn(in_features, rank) / in_features**0.5, torch.randn(rank, width) / rank**0.5
    return LowRank(a, b, first)


def draw_int(low: int, high: int) -> int:
    return int(torch.randint(low, high + 1, ()))


@dataclass
class Scene:
    """Input and output of a layer, and the adapters of its tokens."""

    x: Tensor  # [num_tokens, in_features]
    y: Tensor  # [num_tokens, out_features]
    deltas: Deltas
    indices: Tensor  # [num_tokens]

    def add(self, tokens: Tensor | slice = slice(None)) -> Tensor:
        """Return those rows of y with their adapters' changes."""
        y = self.y[tokens].clone()
        tuned = TokenAdapters(AdapterSet(()), self.indices[tokens])
        CPU_KERNELS.add_low_rank(y, self.x[tokens].contiguous(), self.deltas, tuned)
        return y

    def expected(self) -> Tensor:
        y = self.y.double()
        for t, i in enumerate(self.indices.tolist()):
            for one in self.deltas.parts[i] if i >= 0 else ():
                y[t, one.first : one.first + one.b.shape[1]] += (
                    self.x[t].double() @ one.a.double() @ one.b.double()
                )
        return y


def draw_scene(num_tokens: int, in_features: int, out_features: int, num_adapters: int = 3) -> Scene:
    """Return a scene. Every adapter changes some columns, in up to three parts; the last one changes none."""
    parts = []
    for _ in range(num_adapters):
        bounds = sorted({0, out_features, *(draw_int(0, out_features) for _ in range(3))})
        spans = [(one, other) for one, other in pairwise(bounds) if draw_int(0, 3)]
        ranks = [RANKS[draw_int(0, len(RANKS) - 1)] for _ in spans]
        parts.append(
            tuple(
                draw_low_rank(in_features, rank, begin, end - begin)
                for (begin, end), rank in zip(spans, ranks, strict=True)
            )
        )
    indices = torch.randint(-1, num_adapters + 1, (num_tokens,), dtype=torch.int32)
    x, y = torch.randn(num_tokens, in_features), torch.randn(num_tokens, out_features)
    return Scene(x, y, Deltas((*parts, ())), indices)
