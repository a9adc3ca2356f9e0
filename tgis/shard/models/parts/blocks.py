"""Self-attention and feed-forward, split over ranks."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tgis.shard.attention.interface import Attention, AttentionPlan, Heads, Scoring
from tgis.shard.layers.activation import find_kernel
from tgis.shard.layers.embedding import PositionEmbedding
from tgis.shard.layers.linear import ColumnParallel, RowParallel
from tgis.shard.layers.lora import TokenAdapters
from tgis.shard.layers.norm import Norm, SplitNorm, make_bare_head_norm, read_head_norm
from tgis.shard.layers.ops import Activation, ExpertProducts, Parts
from tgis.shard.models.spec import LayerSpec


def make_norm(spec: LayerSpec, parts: Parts, path: str, scale: float = 1.0) -> Norm:
    return Norm(parts, path, spec.hidden_size, spec.norm_eps, spec.norm, scale)


def make_positions(spec: LayerSpec, parts: Parts, path: str) -> PositionEmbedding | None:
    if not spec.num_positions:
        return None
    return PositionEmbedding(parts, path, spec.num_positions, spec.hidden_size, spec.position_offset)


class BranchInput(NamedTuple):
    """Input norm(x + delta) of a branch, where None is left out. The branch computes it and writes the sum to
    x."""

    x: Tensor  # [num_tokens, hidden_size]
    delta: Tensor | None = None
    norm: Norm | None = None


# Transforms a branch's output, [num_tokens, hidden_size], before it is added to the residual stream.
Finish = Callable[[Tensor], Tensor]


class BranchOutput:
    """Last linear layer of a branch. Without `finish`, the platform may add its output to the residual
    stream."""

    def __init__(self, parts: Parts, linear: RowParallel, finish: Finish | None):
        self._linear = linear
        self._finish = finish
        self._product_add = parts.kernels.product_add

    def __call__(self, x: Tensor, y: Tensor, adapters: TokenAdapters | None) -> Tensor | None:
        """Return the output still to be added to x, [num_tokens, hidden_size], or None if it was added."""
        if self._finish is None:
            return self._product_add(x, y, self._linear, adapters)
        return self._finish(self._linear(y, adapters))


class AttentionLayer(Protocol):
    """Attention of one layer with its projections, from the residual stream to the branch's output."""

    def __call__(
        self,
        x: Tensor,
        source: BranchInput,
        angles: Tensor | None,
        attention: Attention,
        plan: AttentionPlan,
        adapters: TokenAdapters | None,
        query_factors: Tensor | None = None,
    ) -> Tensor | None:
        """Return the output still to be added to x, the residual stream, or None if it was added. The
        factors, [num_tokens], multiply the queries of layers without norms of heads."""


class SelfAttention:
    """Self-attention of cache layer `layer`. Slopes and biases in `scoring` are those of this rank's
    heads."""

    def __init__(
        self,
        spec: LayerSpec,
        parts: Parts,
        path: str,
        layer: int,
        scoring: Scoring,
        finish: Finish | None = None,
    ):
        size = parts.group.size
        kv_pieces = min(size, spec.num_kv_heads)
        self._layer = layer
        self._scoring = scoring
        self._norm_product = parts.kernels.norm_product
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        num_projections = {"both": 2, "keys": 1, "none": 0}[spec.kv_projections]
        num_query_parts = 1 + spec.has_output_gate  # the gate precedes the queries
        widths = [q_size] * num_query_parts + [kv_size] * num_projections
        pieces = [size] * num_query_parts + [kv_pieces] * num_projections
        input_size = spec.attention_input_size or spec.hidden_size
        self._qkv = ColumnParallel(parts, f"{path}.qkv", input_size, widths, spec.qkv_bias, pieces)
        out = RowParallel(parts, f"{path}.out", q_size, spec.hidden_size, spec.out_bias)
        self._output = BranchOutput(parts, out, finish)
        self._clip = spec.clip_qkv
        self._clamp = parts.kernels.clamp
        head_norm = None
        self._whole_norms = None
        if spec.qk_norm == "head":
            has_keys = num_projections > 0
            head_norm = read_head_norm(parts, path, spec.head_dim, spec.norm_eps, spec.norm, has_keys)
        if spec.qk_norm == "bare_head":
            head_norm = make_bare_head_norm(parts, spec.head_dim, spec.norm_eps)
        if head_norm is not None and spec.value_norm:
            head_norm = replace(head_norm, v_weight=torch.ones(spec.head_dim, device=parts.kernels.device))
        num_kv_heads = spec.num_kv_heads // kv_pieces if num_projections else 0
        self._heads = Heads(spec.num_heads // size, num_kv_heads, head_norm)
        self._repeats_keys = spec.kv_projections == "keys"
        self._q_size = q_size // size
        self._multiply_sigmoid = parts.kernels.multiply_sigmoid if spec.has_output_gate else None
        self._scale_rows = parts.kernels.scale_rows
        if spec.qk_norm == "whole":
            self._whole_norms = (
                SplitNorm(parts, f"{path}.q_norm", q_size, size, spec.norm_eps),
                SplitNorm(parts, f"{path}.k_norm", kv_size, kv_pieces, spec.norm_eps),
            )

    def __call__(
        self,
        x: Tensor,
        source: BranchInput,
        angles: Tensor | None,
        attention: Attention,
        plan: AttentionPlan,
        adapters: TokenAdapters | None,
        query_factors: Tensor | None = None,
    ) -> Tensor | None:
        """Implement `AttentionLayer`."""
        # [num_tokens, own gate if there is one, q, k and v]
        rows = self._norm_product(*source, self._qkv, None, adapters)
        qkv = rows if self._multiply_sigmoid is None else rows[:, self._q_size :]
        if self._clip is not None:
            self._clamp(qkv, self._clip)
        if self._whole_norms is not None:
            qkv = self._normalise(qkv, *self._whole_norms)
        if self._repeats_keys:
            qkv = torch.cat((qkv, qkv[:, self._q_size :]), 1)
        if query_factors is not None:
            self._scale_rows(qkv[:, : self._q_size], query_factors)
        # [num_tokens, num_heads, head_dim]
        y = attention.run(self._layer, qkv, self._heads, angles, plan, self._scoring).flatten(1)
        if self._multiply_sigmoid is not None:
            self._multiply_sigmoid(y, rows[:, : self._q_size])
        return self._output(x, y, adapters)

    def _normalise(self, qkv: Tensor, q_norm: SplitNorm, k_norm: SplitNorm) -> Tensor:
        group = self._heads.num_heads // self._heads.num_kv_heads
        width = qkv.shape[1] // (group + 2)  # width of k
        q, k, v = torch.split(qkv, [group * width, width, width], -1)
        return torch.cat([q_norm(q), k_norm(k), v], -1)


class MLP:
    def __init__(self, spec: LayerSpec, parts: Parts, path: str, finish: Finish | None = None):
        size = spec.hidden_size
        widths = [spec.intermediate_size] * (1 + spec.gated)
        self._up = ColumnParallel(parts, f"{path}.up", size, widths, spec.mlp_bias)
        self._down = RowParallel(parts, f"{path}.down", spec.intermediate_size, size, spec.mlp_bias)
        self._activation = Activation(find_kernel(spec.activation), spec.gated)
        self._gate_scale = spec.gate_scale
        self._kernels = parts.kernels
        self._output = BranchOutput(parts, self._down, finish)

    def __call__(self, x: Tensor, source: BranchInput, adapters: TokenAdapters | None) -> Tensor | None:
        """Return the output still to be added to x, the residual stream, or None if it was added."""
        return self._output(x, self._activate(source, adapters), adapters)

    def partial(self, x: Tensor, adapters: TokenAdapters | None) -> Tensor:
        """Return this rank's summand of the output."""
        return self._down.summand(self._activate(BranchInput(x), adapters), adapters)

    @property
    def products(self) -> ExpertProducts:
        product = self._up.as_product(None)
        assert product is not None, "no adapter changes it"
        return ExpertProducts(product, self._down.own_product)

    @property
    def activation(self) -> Activation:
        return self._activation

    def is_adapted(self, adapters: TokenAdapters | None) -> bool:
        """Return True if an adapter changes one of the layers."""
        return self._up.is_adapted(adapters) or self._down.is_adapted(adapters)

    def _activate(self, source: BranchInput, adapters: TokenAdapters | None) -> Tensor:
        if self._gate_scale == 1:
            return self._kernels.norm_product(*source, self._up, self._activation, adapters, self._down)
        gate_up = self._kernels.norm_product(*source, self._up, None, adapters)
        self._kernels.scale(gate_up[:, : gate_up.shape[1] // 2], self._gate_scale)
        return self._kernels.multiply_gated(gate_up, self._activation.name)
