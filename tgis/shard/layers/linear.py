"""Linear layers that know how to cut themselves over ranks and read their own part of the checkpoint only."""

import torch
from torch import Tensor

from tgis.shard.collectives import World
from tgis.shard.layers.lora import Cut, TokenAdapters
from tgis.shard.layers.ops import Parts


class Adaptable:
    """Adds to a layer's product what the tokens' adapters make of its input."""

    def __init__(self, parts: Parts, path: str, cut: Cut):
        self._path, self._kernels = path, parts.kernels
        parts.cuts[path] = cut

    def __call__(self, x: Tensor, y: Tensor, adapters: TokenAdapters | None) -> Tensor:
        """x: [num_tokens, own columns]; y: [num_tokens, own rows], changed."""
        deltas = None if adapters is None else adapters.at(self._path)
        if adapters is not None and deltas is not None:
            self._kernels.add_low_rank(y, x, deltas, adapters)
        return y


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
        self._adapt = Adaptable(parts, path, Cut((sum(widths), in_features), tuple(rows)))
        weight = parts.weights.find(f"{path}.weight", (sum(widths), in_features))
        mine = [weight.read(part) for part in rows]
        together = mine[0] if len(mine) == 1 else torch.cat(mine)
        self._multiply = parts.pack(together, weight.label)
        self._bias = parts.read_vector(f"{path}.bias", sum(widths), rows) if bias else None
        self._add = parts.kernels.add

    def __call__(self, x: Tensor, adapters: TokenAdapters | None) -> Tensor:
        y = self._adapt(x, self._multiply(x), adapters)
        return y if self._bias is None else self._add(y, self._bias)


class RowParallel:
    """y = x W^T + b, the columns of W split: [num_tokens, own columns] -> [num_tokens, out_features].

    The ranks' products are summed, then the bias is added once."""

    def __init__(self, parts: Parts, path: str, in_features: int, out_features: int, bias: bool):
        self._world, columns = parts.world, parts.world.slice(in_features)
        whole = (slice(0, out_features),)
        self._adapt = Adaptable(parts, path, Cut((out_features, in_features), whole, columns))
        weight = parts.weights.find(f"{path}.weight", (out_features, in_features))
        mine = weight.read(columns=columns)
        self._multiply = parts.pack(mine, weight.label)
        self._bias = parts.read_vector(f"{path}.bias", out_features) if bias else None
        self._add = parts.kernels.add

    def __call__(self, x: Tensor, adapters: TokenAdapters | None) -> Tensor:
        y = self._world.all_reduce(self.partial(x, adapters))
        return y if self._bias is None else self._add(y, self._bias)

    def partial(self, x: Tensor, adapters: TokenAdapters | None) -> Tensor:
        """This rank's part of the sum over ranks, without the bias."""
        return self._adapt(x, self._multiply(x), adapters)


class Replicated:
    """y = x W^T, whole on every rank: [num_tokens, in_features] -> [num_tokens, out_features].

    Small matrices on which much depends, which expert computes what: they are not quantized."""

    def __init__(self, parts: Parts, path: str, in_features: int, out_features: int):
        self._adapt = Adaptable(parts, path, Cut((out_features, in_features), (slice(0, out_features),)))
        weight = parts.weights.find(f"{path}.weight", (out_features, in_features))
        self._multiply = parts.kernels.pack(weight.read(), parts.dtype, weight.label)

    def __call__(self, x: Tensor, adapters: TokenAdapters | None) -> Tensor:
        return self._adapt(x, self._multiply(x), adapters)


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
