"""Attention scenes with GPU kernels."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.support.cuda.interpreter import interpreted
from tests.support.cuda.poisoned import poisoned_memory
from tests.support.shard.attention_scene import Scene, Shape
from tgis.shard.attention.interface import Scoring
from tgis.shard.kernels.cuda.attention import CudaAttention, QueryTile, cut_tiles
from tgis.shard.kernels.cuda.implementations import Implementations
from tgis.shard.kernels.cuda.step_state import Segments, count_segments
from tgis.shard.memory.kv_cache import UNSCALED, CacheScale

KERNELS: dict[str, Callable[[], Implementations]] = {"kernel": interpreted, "twin": Implementations.plain}

# Rounding errors of weights and results, for values up to 4.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


# Types of queries to a cache of 8-bit floats.
QUERIES = {torch.float8_e4m3fn: torch.bfloat16, torch.float8_e5m2: torch.float16}


class CudaScene(Scene):
    """Scene whose queries have the cache's type, or a type of QUERIES, unless it is given. The rows of its
    block tables end with a block of NaN."""

    attention: CudaAttention

    def __init__(
        self,
        shape: Shape,
        lengths: list[int],
        kernels: Implementations,
        dtype: torch.dtype | None = None,
        scale: CacheScale = UNSCALED,
    ):
        super().__init__(shape, lengths, scale=scale)
        self.kernels, self.group = kernels, shape.num_heads // shape.num_kv_heads
        self.attention = CudaAttention(self.cache, kernels, self.group)
        self.write_all()
        self.q = self.q.to(dtype or QUERIES.get(shape.dtype, shape.dtype))
        blocks = set(range(self.cache.keys.shape[1]))
        poison = blocks.difference(*self.tables).pop()
        num_used = [-(-length // shape.block_size) for length in lengths]
        self.tables = [
            table[:used] + [poison] * (len(table) - used + 2)
            for table, used in zip(self.tables, num_used, strict=True)
        ]

    @property
    def where(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys, values and block tables of the only layer."""
        return *self.attention.pages(0), torch.tensor(self.tables, dtype=torch.int32)

    def attend_last(self, work: Sequence[tuple[int, int]], scoring: Scoring) -> Tensor:
        """Attend with the last token of each (sequence, length). A length of 0 is an idle row."""
        q = torch.stack([self.q[self.rows(i, 0, max(1, length))][-1] for i, length in work])
        rows, lengths = torch.tensor(work, dtype=torch.int32).unbind(1)
        starts = torch.zeros(len(work) + 1, dtype=torch.int32)
        starts[1:] = count_segments(lengths).cumsum(0)
        segments = Segments(rows.contiguous(), lengths.contiguous(), starts)
        self.check_scoring(scoring)
        with poisoned_memory():
            longest, scale = int(lengths.max()), self.cache.scales[0]
            return self.kernels.attend_segments(q, *self.where, segments, longest, scoring, scale)

    def attend_spans(self, work: Sequence[tuple[int, int, int]], scoring: Scoring) -> list[Tensor]:
        """Attend with the tokens [start, end) of each (sequence, start, end)."""
        q = torch.cat([self.q[self.rows(*span)] for span in work])
        spans, first = [], 0
        for i, start, end in work:
            spans.append(QueryTile(i, first, end - start, start, end))
            first += end - start
        tiles = torch.tensor(list(cut_tiles(spans, self.attention.tile_tokens)), dtype=torch.int32)
        out = torch.full_like(q, torch.nan)
        longest = max(end for _, _, end in work)
        self.check_scoring(scoring)
        scale = self.cache.scales[0]
        self.kernels.attend_tiles(q, *self.where, tiles, longest, scoring, out, scale)
        return list(out.split([span.num_tokens for span in spans]))

    def check_last(self, work: Sequence[tuple[int, int]], scoring: Scoring) -> None:
        for (i, length), result in zip(work, self.attend_last(work, scoring), strict=True):
            if length:
                self.check_near(result, self.expected(i, length - 1, length, scoring)[0])
            else:
                assert not result.any()

    def check_spans(self, work: Sequence[tuple[int, int, int]], scoring: Scoring) -> None:
        for span, result in zip(work, self.attend_spans(work, scoring), strict=True):
            self.check_near(result, self.expected(*span, scoring))

    def check_scoring(self, scoring: Scoring) -> None:
        """Check that every head has its slope and biases, so that no kernel reads beyond them."""
        for of_heads in (scoring.slopes, scoring.bias, scoring.sinks):
            assert of_heads is None or len(of_heads) == self.shape.num_heads

    def check_near(self, actual: Tensor, expected: Tensor) -> None:
        assert actual.dtype == self.q.dtype
        torch.testing.assert_close(actual.double(), expected, rtol=2e-5, atol=TOLERANCES[self.q.dtype])
