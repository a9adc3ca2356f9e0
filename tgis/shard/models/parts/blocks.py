"""Building blocks of transformer layers, cut over ranks: self-attention and feed-forward."""

import torch
from torch import Tensor

from tgis.shard.attention.interface import Attention, AttentionMetadata, Scoring
from tgis.shard.layers.activation import activation, gated_activation
from tgis.shard.layers.embedding import PositionEmbedding
from tgis.shard.layers.linear import ColumnParallel, RowParallel
from tgis.shard.layers.lora import TokenAdapters
from tgis.shard.layers.norm import Norm, SplitNorm, read_head_norm
from tgis.shard.layers.ops import Parts
from tgis.shard.models.spec import LayerSpec


def make_norm(spec: LayerSpec, parts: Parts, path: str) -> Norm:
    return Norm(parts, path, spec.hidden_size, spec.norm_eps, spec.norm)


def make_positions(spec: LayerSpec, parts: Parts, path: str) -> PositionEmbedding | None:
    if not spec.num_positions:
        return None
    return PositionEmbedding(parts, path, spec.num_positions, spec.hidden_size, spec.position_offset)


class SelfAttention:
    """Self-attention. `layer` is the cache's; `scoring` has slopes and bias of this rank's heads only."""

    def __init__(self, spec: LayerSpec, parts: Parts, path: str, layer: int, scoring: Scoring):
        size = parts.group.size
        kv_pieces = min(size, spec.num_kv_heads)
        self._layer, self._scoring, self._split = layer, scoring, parts.kernels.split_heads
        self._num_heads, self._num_kv_heads = spec.num_heads // size, spec.num_kv_heads // kv_pieces
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        widths, pieces = [q_size, kv_size, kv_size], [size, kv_pieces, kv_pieces]
        self._qkv = ColumnParallel(parts, f"{path}.qkv", spec.hidden_size, widths, spec.qkv_bias, pieces)
        self._out = RowParallel(parts, f"{path}.out", q_size, spec.hidden_size, spec.out_bias)
        self._clip, self._clamp = spec.clip_qkv, parts.kernels.clamp
        self._head_norm, self._whole_norms = None, None
        if spec.qk_norm == "head":
            self._head_norm = read_head_norm(parts, path, spec.head_dim, spec.norm_eps, spec.norm)
        elif spec.qk_norm == "whole":
            self._whole_norms = (
                SplitNorm(parts, f"{path}.q_norm", q_size, size, spec.norm_eps),
                SplitNorm(parts, f"{path}.k_norm", kv_size, kv_pieces, spec.norm_eps),
            )

    def __call__(
        self,
        x: Tensor,
        angles: Tensor | None,
        attention: Attention,
        metadata: AttentionMetadata,
        adapters: TokenAdapters | None,
    ) -> Tensor:
        qkv = self._qkv(x, adapters)  # [num_tokens, own q, k and v]
        if self._clip is not None:
            self._clamp(qkv, self._clip)
        if self._whole_norms is not None:
            qkv = self._normalise(qkv, *self._whole_norms)
        q, k, v = self._split(qkv, self._num_heads, self._num_kv_heads, angles, self._head_norm)
        attention.write(self._layer, k, v, metadata)
        y = attention.attend(self._layer, q, metadata, self._scoring)  # [num_tokens, num_heads, head_dim]
        return self._out(y.flatten(1), adapters)

    def _normalise(self, qkv: Tensor, q_norm: SplitNorm, k_norm: SplitNorm) -> Tensor:
        group = self._num_heads // self._num_kv_heads
        width = qkv.shape[1] // (group + 2)  # width of k
        q, k, v = torch.split(qkv, [group * width, width, width], -1)
        return torch.cat([q_norm(q), k_norm(k), v], -1)


class MLP:
    def __init__(self, spec: LayerSpec, parts: Parts, path: str):
        size, widths = spec.hidden_size, [spec.intermediate_size] * (1 + spec.gated)
        self._up = ColumnParallel(parts, f"{path}.up", size, widths, spec.mlp_bias)
        self._down = RowParallel(parts, f"{path}.down", spec.intermediate_size, size, spec.mlp_bias)
        self._activate = (gated_activation if spec.gated else activation)(spec.activation, parts.kernels)

    def __call__(self, x: Tensor, adapters: TokenAdapters | None) -> Tensor:
        return self._down(self.activate(x, adapters), adapters)

    def partial(self, x: Tensor, adapters: TokenAdapters | None) -> Tensor:
        """Return this rank's part of the sum, without the bias."""
        return self._down.partial(self.activate(x, adapters), adapters)

    def activate(self, x: Tensor, adapters: TokenAdapters | None) -> Tensor:
        return self._activate(self._up(x, adapters))
