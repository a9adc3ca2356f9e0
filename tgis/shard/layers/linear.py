"""Linear layers split over ranks. Each rank reads only its own part of the checkpoint."""

from torch import Tensor

from tgis.shard.collectives import ProcessGroup
from tgis.shard.layers.lora import Cut, TokenAdapters
from tgis.shard.layers.ops import BiasedProduct, Parts, Product


class LoraAddition:
    """Addition of LoRA adapters' updates to the output of a linear layer."""

    def __init__(self, parts: Parts, path: str, cut: Cut):
        self._path = path
        self._kernels = parts.kernels
        parts.cuts[path] = cut

    def __call__(self, x: Tensor, y: Tensor, adapters: TokenAdapters | None) -> Tensor:
        """Add the adapters' updates for x, [num_tokens, own columns], to y, [num_tokens, own rows], in
        place."""
        if adapters is not None and (deltas := adapters.at(self._path)) is not None:
            self._kernels.add_low_rank(y, x, deltas, adapters)
        return y

    def is_needed(self, adapters: TokenAdapters | None) -> bool:
        return adapters is not None and adapters.at(self._path) is not None


class ColumnParallel:
    """Linear layer y = x W^T + b with the rows of W split over ranks: [num_tokens, in_features] ->
    [num_tokens, own rows].

    W may pack several matrices (q, k, v; gate, up) of `widths` rows, each split separately into `pieces`
    parts. There are fewer parts than ranks if neighbouring ranks share key/value heads."""

    def __init__(
        self,
        parts: Parts,
        path: str,
        in_features: int,
        widths: list[int],
        bias: bool,
        pieces: list[int] | None = None,
    ):
        rows = _rows_of_rank(parts.group, widths, pieces or [parts.group.size] * len(widths))
        shape = (sum(widths), in_features)
        self._adapt = LoraAddition(parts, path, Cut(shape, tuple(rows)))
        self._multiply = parts.pack("linear", path, shape, rows)
        self._bias = parts.read_vector(f"{path}.bias", sum(widths), rows) if bias else None
        self._add = parts.kernels.add

    def __call__(self, x: Tensor, adapters: TokenAdapters | None) -> Tensor:
        y = self._adapt(x, self._multiply(x), adapters)
        return y if self._bias is None else self._add(y, self._bias)

    def as_product(self, adapters: TokenAdapters | None) -> BiasedProduct | None:
        return None if self._adapt.is_needed(adapters) else BiasedProduct(self._multiply, self._bias)

    def input_product(self, adapters: TokenAdapters | None) -> Product | None:
        return None if self._adapt.is_needed(adapters) else self._multiply

    def adapt(self, x: Tensor, y: Tensor, adapters: TokenAdapters | None) -> Tensor:
        return self._adapt(x, y, adapters)

    def is_adapted(self, adapters: TokenAdapters | None) -> bool:
        return self._adapt.is_needed(adapters)


class RowParallel:
    """Linear layer y = x W^T + b with the columns of W split over ranks: [num_tokens, own columns] ->
    [num_tokens, out_features]. The ranks' outputs are summed; then the bias is added."""

    def __init__(self, parts: Parts, path: str, in_features: int, out_features: int, bias: bool):
        self._group = parts.group
        columns = parts.group.slice(in_features)
        shape = (out_features, in_features)
        whole = (slice(0, out_features),)
        self._adapt = LoraAddition(parts, path, Cut(shape, whole, columns))
        self._multiply = parts.pack("linear", path, shape, whole, columns)
        self._bias = parts.read_vector(f"{path}.bias", out_features) if bias else None
        self._add = parts.kernels.add

    def __call__(self, x: Tensor, adapters: TokenAdapters | None) -> Tensor:
        y = self._group.all_reduce(self.partial(x, adapters))
        return y if self._bias is None else self._add(y, self._bias)

    def as_product(self, adapters: TokenAdapters | None) -> BiasedProduct | None:
        does_more = self._group.size > 1 or self._adapt.is_needed(adapters)
        return None if does_more else BiasedProduct(self._multiply, self._bias)

    def input_product(self, adapters: TokenAdapters | None) -> Product | None:
        return None if self._adapt.is_needed(adapters) else self._multiply

    def adapt(self, x: Tensor, y: Tensor, adapters: TokenAdapters | None) -> Tensor:
        return self._adapt(x, y, adapters)

    def is_adapted(self, adapters: TokenAdapters | None) -> bool:
        return self._adapt.is_needed(adapters)

    @property
    def own_product(self) -> BiasedProduct:
        """The product and bias of `summand`."""
        return BiasedProduct(self._multiply, None if self._group.rank else self._bias)

    def partial(self, x: Tensor, adapters: TokenAdapters | None) -> Tensor:
        """Return this rank's summand of the output, without the bias."""
        return self._adapt(x, self._multiply(x), adapters)

    def summand(self, x: Tensor, adapters: TokenAdapters | None) -> Tensor:
        """Return this rank's summand of the output. The bias is in that of the first rank."""
        y = self.partial(x, adapters)
        return y if self._bias is None or self._group.rank else self._add(y, self._bias)


class Replicated:
    """Linear layer y = x W^T + b, whole on every rank: [num_tokens, in_features] -> [num_tokens,
    out_features]. Used for small matrices where rounding matters, such as routers of experts."""

    def __init__(self, parts: Parts, path: str, in_features: int, out_features: int, bias: bool = False):
        shape = (out_features, in_features)
        whole = (slice(0, out_features),)
        self._adapt = LoraAddition(parts, path, Cut(shape, whole))
        self._multiply = parts.pack("replicated", path, shape, whole)
        self._bias = parts.read_vector(f"{path}.bias", out_features) if bias else None
        self._add = parts.kernels.add

    def __call__(self, x: Tensor, adapters: TokenAdapters | None) -> Tensor:
        y = self._adapt(x, self._multiply(x), adapters)
        return y if self._bias is None else self._add(y, self._bias)


def _rows_of_rank(group: ProcessGroup, widths: list[int], pieces: list[int]) -> list[slice]:
    """Return this rank's rows of the packed matrices. Adjacent slices are merged, so that one copy
    suffices."""
    rows: list[slice] = []
    begin = 0
    for width, count in zip(widths, pieces, strict=True):
        mine = group.slice(width, count)
        start, stop = begin + mine.start, begin + mine.stop
        if rows and rows[-1].stop == start:
            start = rows.pop().start
        rows.append(slice(start, stop))
        begin += width
    return rows
