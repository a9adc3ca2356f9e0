"""Creates random caches and queries for measurements of attention."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from bench.gpu.target import Target
from bench.shapes import Shape
from tgis.shard.attention.interface import Scoring
from tgis.shard.kernels.cuda.attend_tiles import tile_tokens
from tgis.shard.kernels.cuda.attention import QueryTile, cut_tiles
from tgis.shard.kernels.cuda.implementations import Implementations
from tgis.shard.kernels.cuda.step_state import Segments, count_segments

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Scene:
    """Sequences of one length, each with its own blocks in random order."""

    shape: Shape
    length: int
    keys: Tensor  # [num_blocks, num_kv_heads, BLOCK_SIZE, head_dim]
    values: Tensor
    block_tables: Tensor  # int32 [num_rows, max_blocks]
    dtype: torch.dtype  # of queries

    @property
    def scoring(self) -> Scoring:
        return Scoring(scale=self.shape.head_dim**-0.5)

    @cached_property
    def segments(self) -> Segments:
        num_rows, device = len(self.block_tables), self.keys.device
        seq_lens = torch.full((num_rows,), self.length, dtype=torch.int32, device=device)
        starts = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
        starts[1:] = count_segments(seq_lens).cumsum(0)
        return Segments(torch.arange(num_rows, dtype=torch.int32, device=device), seq_lens, starts)

    def attend_segments(self, kernels: Implementations, q: Tensor) -> Tensor:
        """Attend with the last token of each sequence, q [num_rows, num_heads, head_dim]."""
        where = self.keys, self.values, self.block_tables
        return kernels.attend_segments(q, *where, self.segments, self.length, self.scoring)

    def attend_tiles(self, kernels: Implementations, q: Tensor) -> Tensor:
        """Attend with all tokens of the first sequence, q [length, num_heads, head_dim]."""
        max_tokens = tile_tokens(self.shape.num_heads // self.shape.num_kv_heads)
        cut = list(cut_tiles([QueryTile(0, 0, self.length, 0, self.length)], max_tokens))
        tiles, out = torch.tensor(cut, dtype=torch.int32, device=q.device), torch.empty_like(q)
        where = self.keys, self.values, self.block_tables
        kernels.attend_tiles(q, *where, tiles, self.length, self.scoring, out)
        return out


def draw_scene(
    target: Target,
    shape: Shape,
    num_rows: int,
    length: int,
    dtype: torch.dtype,
    cache_type: torch.dtype | None = None,
) -> Scene:
    """Return a scene whose cache has the type of queries, or `cache_type`."""
    width = -(-length // BLOCK_SIZE)
    size = (num_rows * width, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
    keys, values = (
        torch.randn(size, device=target.device, dtype=dtype).to(cache_type or dtype) for _ in range(2)
    )
    order = torch.randperm(num_rows * width, device=target.device)
    return Scene(shape, length, keys, values, order.int().view(num_rows, width), dtype)


def draw_queries(scene: Scene, count: int) -> Tensor:
    """Return random queries, [count, num_heads, head_dim]."""
    size = (count, scene.shape.num_heads, scene.shape.head_dim)
    return torch.randn(size, device=scene.keys.device, dtype=scene.dtype)
