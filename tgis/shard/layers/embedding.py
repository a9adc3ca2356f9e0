"""Token embedding and head, whose vocabulary is split over ranks, and learned position embeddings."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tgis.shard.collectives import ProcessGroup
from tgis.shard.layers.linear import LoraAddition
from tgis.shard.layers.lora import Cut, TokenAdapters
from tgis.shard.layers.ops import Parts


def _rows_of_rank(group: ProcessGroup, vocab_size: int) -> slice:
    """Return the rows of this rank. The last ranks may have fewer, or none."""
    rows = -(-vocab_size // group.size)
    return slice(min(group.rank * rows, vocab_size), min((group.rank + 1) * rows, vocab_size))


class Embedding:
    """Token embedding: ids int64 [num_tokens] -> float32 [num_tokens, hidden_size]."""

    def __init__(self, parts: Parts, path: str, vocab_size: int, hidden_size: int):
        self._group = parts.group
        self._share = _rows_of_rank(parts.group, vocab_size)
        self._kernels = parts.kernels
        self._path = path
        # Every rank adds the adapters' whole update after the sum over ranks.
        parts.cuts[path] = Cut((vocab_size, hidden_size), (slice(0, vocab_size),), is_table=True)
        self._table = parts.open_table(path, (vocab_size, hidden_size), self._share)

    def __call__(self, token_ids: Tensor, adapters: TokenAdapters | None) -> Tensor:
        x = self._look_up(token_ids)
        if adapters is not None and (deltas := adapters.at(self._path)) is not None:
            self._kernels.add_looked_up(x, token_ids, deltas, adapters)
        return x

    def _look_up(self, token_ids: Tensor) -> Tensor:
        if self._group.size == 1:
            return self._table.look_up(token_ids)
        if not self._table.num_rows:
            x = torch.zeros(len(token_ids), self._table.width, device=token_ids.device)
        else:
            ids, is_own = self._kernels.select_ids(token_ids, self._share.start, self._share.stop)
            x = self._kernels.clear_rows(self._table.look_up(ids), is_own)
        return self._group.all_reduce(x)


class LMHead:
    """Head: float32 [n, hidden_size] -> logits float32 [n, vocab_size], equal on all ranks."""

    def __init__(self, parts: Parts, path: str, vocab_size: int, hidden_size: int):
        self._group = parts.group
        self._vocab_size = vocab_size
        shape = (vocab_size, hidden_size)
        share = _rows_of_rank(parts.group, vocab_size)
        self._adapt = LoraAddition(parts, path, Cut(shape, (share,)))
        self._num_missing = -(-vocab_size // parts.group.size) - (share.stop - share.start)
        self._kernels = parts.kernels
        self._multiply = parts.pack("head", path, shape, (share,))

    def __call__(self, x: Tensor, adapters: TokenAdapters | None) -> Tensor:
        y = self._adapt(x, self._multiply(x), adapters)
        if self._num_missing:  # all_gather needs equal widths, and the last ranks may have fewer rows
            y = self._widen(y)
        return self._group.all_gather(y)[:, : self._vocab_size]

    def _widen(self, y: Tensor) -> Tensor:
        """Return y with more columns, whose values are not used."""
        if self._num_missing > y.shape[1]:
            return F.pad(y, (0, self._num_missing))
        return self._kernels.concatenate(y, y[:, : self._num_missing])  # which can be captured


class PositionEmbedding:
    """Position embedding: int64 [num_tokens] -> float32 [num_tokens, hidden_size], from a learned table,
    whole on every rank. `offset` is the row of the first position."""

    def __init__(self, parts: Parts, path: str, num_rows: int, hidden_size: int, offset: int):
        self._table = parts.read_table(path, (num_rows, hidden_size))
        self._offset = offset
        self._look_up = parts.kernels.look_up

    def __call__(self, positions: Tensor) -> Tensor:
        return self._look_up(self._table, positions, self._offset)
