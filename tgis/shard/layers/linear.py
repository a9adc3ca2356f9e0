"""Linear layers that know how to cut themselves over ranks and read their own part of the checkpoint only."""

import torch
from torch import Tensor

from tgis.shard.layers.kernels import Parts
from tgis.shard.world import World


class ColumnParallel:
    """y = x W^T + b, the rows of W split over ranks: [num_tokens, in_features] -> [num_tokens, own rows].

    W may pack several matrices (q, k, v; gate, up), each split on its own: `widths` are their row counts,
    `pieces` how many ways each can be cut (fewer than ranks where neighbours share key/value heads)."""

    def __init__(
        self,
        parts: Parts,
        path: str,
        in_features: int,
        widths: list[int],
        bias: bool,
        pieces: list[int] | None = None,
    ):
        rows = _cut(parts.world, widths, pieces or [parts.world.size] * len(widths))
        weight = parts.weights.find(f"{path}.weight", (sum(widths), in_features))
        mine = [weight.read(part) for part in rows]
        together = mine[0] if len(mine) == 1 else torch.cat(mine)
        self._multiply = parts.kernels.pack(together, parts.dtype, weight.label)
        self._bias = parts.read_vector(f"{path}.bias", sum(widths), rows) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        y = self._multiply(x)
        return y if self._bias is None else y.add_(self._bias)


class RowParallel:
    """y = x W^T + b, the columns of W split: [num_tokens, own columns] -> [num_tokens, out_features].

    The ranks' products are summed, then the bias is added once."""

    def __init__(self, parts: Parts, path: str, in_features: int, out_features: int, bias: bool):
        self._world = parts.world
        weight = parts.weights.find(f"{path}.weight", (out_features, in_features))
        mine = weight.read(columns=parts.world.slice(in_features))
        self._multiply = parts.kernels.pack(mine, parts.dtype, weight.label)
        self._bias = parts.read_vector(f"{path}.bias", out_features) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        y = self._world.all_reduce(self.partial(x))
        return y if self._bias is None else y.add_(self._bias)

    def partial(self, x: Tensor) -> Tensor:
        """This rank's part of the sum over ranks, without the bias."""
        return self._multiply(x)


class Replicated:
    """y = x W^T, whole on every rank: [num_tokens, in_features] -> [num_tokens, out_features]."""

    def __init__(self, parts: Parts, path: str, in_features: int, out_features: int):
        weight = parts.weights.find(f"{path}.weight", (out_features, in_features))
        self._multiply = parts.kernels.pack(weight.read(), parts.dtype, weight.label)

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiply(x)


def _cut(world: World, widths: list[int], pieces: list[int]) -> list[slice]:
    """This rank's rows of the packed matrices; neighbouring ones are one slice, so that they are copied
    once."""
    rows: list[slice] = []
    begin = 0
    for width, count in zip(widths, pieces, strict=True):
        mine = world.slice(width, count)
        start, stop = begin + mine.start, begin + mine.stop
        if rows and rows[-1].stop == start:
            start = rows.pop().start
        rows.append(slice(start, stop))
        begin += width
    return rows
