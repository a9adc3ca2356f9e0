"""The one decoder-only transformer; what differs between families is in its `DecoderSpec`.

Tokens of all sequences are packed along one axis; no result depends on the sequences beside its own."""

import torch
from torch import Tensor

from tgis.shard.attention.base import Attention, AttentionMetadata, Scoring
from tgis.shard.layers.activation import gated
from tgis.shard.layers.embedding import Embedding, Head
from tgis.shard.layers.kernels import Parts
from tgis.shard.layers.linear import ColumnParallel, RowParallel
from tgis.shard.layers.norm import RMSNorm
from tgis.shard.layers.rotary import Rotary
from tgis.shard.models.interface import StepInputs
from tgis.shard.models.spec import DecoderSpec


class SelfAttention:
    def __init__(self, spec: DecoderSpec, parts: Parts, path: str, layer: int):
        size = parts.world.size
        kv_pieces = min(size, spec.num_kv_heads)
        self._layer, self._split = layer, parts.kernels.split_heads
        self._num_heads, self._num_kv_heads = spec.num_heads // size, spec.num_kv_heads // kv_pieces
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        widths, pieces = [q_size, kv_size, kv_size], [size, kv_pieces, kv_pieces]
        self._qkv = ColumnParallel(parts, f"{path}.qkv", spec.hidden_size, widths, spec.qkv_bias, pieces)
        self._out = RowParallel(parts, f"{path}.out", q_size, spec.hidden_size, spec.out_bias)
        self._scoring = Scoring(scale=spec.head_dim**-0.5)

    def __call__(
        self, x: Tensor, angles: Tensor, attention: Attention, metadata: AttentionMetadata
    ) -> Tensor:
        q, k, v = self._split(self._qkv(x), self._num_heads, self._num_kv_heads, angles)
        attention.write(self._layer, k, v, metadata)
        y = attention.attend(self._layer, q, metadata, self._scoring)  # [num_tokens, num_heads, head_dim]
        return self._out(y.flatten(1))


class MLP:
    def __init__(self, spec: DecoderSpec, parts: Parts, path: str):
        widths = [spec.intermediate_size, spec.intermediate_size]
        self._up = ColumnParallel(parts, f"{path}.up", spec.hidden_size, widths, spec.mlp_bias)
        self._down = RowParallel(
            parts, f"{path}.down", spec.intermediate_size, spec.hidden_size, spec.mlp_bias
        )
        self._activate = gated(spec.activation, parts.kernels)

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._activate(self._up(x)))


class Block:
    """x += delta; x += attention(norm_1(x)); gives mlp(norm_2(x)), the delta that the next block adds."""

    def __init__(self, spec: DecoderSpec, parts: Parts, layer: int):
        path = f"blocks.{layer}"
        self._norm_1 = RMSNorm(parts, f"{path}.norm_1", spec.hidden_size, spec.norm_eps)
        self._attention = SelfAttention(spec, parts, f"{path}.attention", layer)
        self._norm_2 = RMSNorm(parts, f"{path}.norm_2", spec.hidden_size, spec.norm_eps)
        self._mlp = MLP(spec, parts, f"{path}.mlp")

    def __call__(
        self,
        x: Tensor,
        delta: Tensor | None,
        angles: Tensor,
        attention: Attention,
        metadata: AttentionMetadata,
    ) -> Tensor:
        attended = self._attention(self._norm_1(x, delta), angles, attention, metadata)
        return self._mlp(self._norm_2(x, attended))


class Decoder:
    def __init__(self, spec: DecoderSpec, parts: Parts):
        self.spec = spec
        self._rotary = Rotary(spec.rope, parts.kernels)
        self._embed = Embedding(parts, "embed", spec.vocab_size, spec.hidden_size)
        self._blocks = [Block(spec, parts, layer) for layer in range(spec.num_layers)]
        self._norm = RMSNorm(parts, "norm", spec.hidden_size, spec.norm_eps)
        self._head = Head(parts, "head", spec.vocab_size, spec.hidden_size)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, attention: Attention) -> Tensor:
        """[num_tokens, hidden_size]"""
        x, metadata = self._embed(inputs.token_ids), inputs.metadata
        angles = self._rotary(inputs.positions)
        delta: Tensor | None = None
        for block in self._blocks:
            delta = block(x, delta, angles, attention, metadata)
        return x if delta is None else x.add_(delta)

    @torch.inference_mode()
    def logits(self, x: Tensor) -> Tensor:
        """Any rows of what `forward` gave, [n, hidden_size] -> float32 [n, vocab_size]. Raises WorldError."""
        return self._head(self._norm(x.contiguous()))
