"""Latent attention (DeepSeek-AI, "DeepSeek-V2", 2024), split over ranks by query heads.

A key is a product W_K c with the token's latent c, so a query's score q (W_K c) equals (q W_K) c, and the
weighted sum of values W_V c is W_V times the weighted sum of latents. So attention reads latents as the
keys and values of one head that all query heads share. Keys and values are never computed, neither for
generated tokens nor for prompts, so results do not depend on how a prompt is cut."""

from functools import partial

import torch
from torch import Tensor

from tgis.shard.attention.interface import Attention, AttentionPlan, Heads, Scoring
from tgis.shard.layers.linear import ColumnParallel, LoraAddition, RowParallel
from tgis.shard.layers.lora import Cut, TokenAdapters
from tgis.shard.layers.norm import Norm
from tgis.shard.layers.ops import Parts
from tgis.shard.models.parts.blocks import BranchInput, BranchOutput, Finish
from tgis.shard.models.spec import DecoderSpec


class LatentAttention:
    """Self-attention of cache layer `layer`. Every rank caches the latents."""

    def __init__(
        self,
        spec: DecoderSpec,
        parts: Parts,
        path: str,
        layer: int,
        scoring: Scoring,
        finish: Finish | None = None,
    ):
        latent = spec.latent
        size = parts.group.size
        assert latent is not None, "only models with latents have this layer"
        self._layer = layer
        self._scoring = scoring
        self._latent = latent
        self._num_heads = spec.num_heads // size
        self._norm_product = parts.kernels.norm_product
        q_size = spec.num_heads * latent.query_dim
        rank = latent.query_rank
        widths = [rank or q_size, latent.page_dim]
        pieces = [size if rank is None else 1, 1]
        self._latents = ColumnParallel(
            parts, f"{path}.latents", spec.hidden_size, widths, spec.qkv_bias, pieces
        )
        self._q_norm = self._q = None
        if rank is not None:
            self._q_norm = Norm(parts, f"{path}.q_norm", rank, latent.norm_eps, "rms")
            self._q = ColumnParallel(parts, f"{path}.q", rank, [q_size], False)
        self._norm = Norm(parts, f"{path}.latent_norm", latent.rank, latent.norm_eps, "rms")
        height = spec.num_heads * (latent.plain_dim + latent.value_dim)
        own = [f"{path}.heads.{head}" for head in range(spec.num_heads)[parts.group.slice(spec.num_heads)]]
        keys, values = (latent.plain_dim, latent.rank), (latent.value_dim, latent.rank)
        self._keys = [HeadLinear(parts, f"{one}.keys", keys, height, is_transposed=True) for one in own]
        self._values = [HeadLinear(parts, f"{one}.values", values, height) for one in own]
        out_size = spec.num_heads * latent.value_dim
        out = RowParallel(parts, f"{path}.out", out_size, spec.hidden_size, spec.out_bias)
        self._output = BranchOutput(parts, out, finish)

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
        rope_dim = self._latent.rope_dim
        latents = self._norm_product(*source, self._latents, None, adapters)
        q, kv = latents.tensor_split([latents.shape[1] - self._latent.page_dim], 1)
        if self._q is not None:
            q = self._norm_product(q.contiguous(), None, self._q_norm, self._q, None, adapters)
        if query_factors is not None:
            q = q * query_factors.unsqueeze(1)
        q = q.reshape(len(q), self._num_heads, -1)  # [num_tokens, num_heads, query_dim]
        q = self._absorb(q, adapters)  # [num_tokens, num_heads, page_dim]
        latent = self._norm(kv[:, rope_dim:].contiguous())
        page = torch.cat([kv[:, :rope_dim], latent.to(kv.dtype)], 1)
        qkv = torch.cat([q.flatten(1), page, page], 1)
        heads = Heads(self._num_heads, 1)
        y = attention.run(self._layer, qkv, heads, angles, plan, self._scoring)
        return self._output(x, _multiply_heads(self._values, y[..., rope_dim:], adapters), adapters)

    def _absorb(self, q: Tensor, adapters: TokenAdapters | None) -> Tensor:
        """Return queries of latents, [num_tokens, num_heads, page_dim], for queries of keys."""
        rotated, plain = q.tensor_split([self._latent.rope_dim], 2)
        absorbed = _multiply_heads(self._keys, plain, adapters)
        return torch.cat([rotated, absorbed.view(*q.shape[:2], -1)], 2)


class HeadLinear:
    """Product with one head's rows of a matrix, or with their transpose. The rows stay floats unless they are
    stored as codes, and their transpose is always floats."""

    def __init__(
        self, parts: Parts, path: str, shape: tuple[int, int], module_height: int, is_transposed: bool = False
    ):
        whole = (slice(0, shape[0]),)
        cut = Cut(shape, whole, is_transposed=is_transposed, module_height=module_height)
        self._adapt = LoraAddition(parts, path, cut)
        pack = parts.pack_transposed if is_transposed else partial(parts.pack, "replicated")
        self._multiply = pack(path, shape)

    def __call__(self, x: Tensor, adapters: TokenAdapters | None) -> Tensor:
        return self._adapt(x, self._multiply(x), adapters)


def _multiply_heads(heads: list[HeadLinear], x: Tensor, adapters: TokenAdapters | None) -> Tensor:
    """Multiply each head of x, [num_tokens, num_heads, width], by its own matrix. Return the heads' results
    side by side, [num_tokens, num_heads * any]."""
    return torch.cat([one(x[:, head].contiguous(), adapters) for head, one in enumerate(heads)], 1)
