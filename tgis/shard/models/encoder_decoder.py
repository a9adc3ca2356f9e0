"""Encoder-decoder transformer. Families differ only in their `EncoderDecoderSpec`.

The tokens of all sequences are packed along one axis. A sequence's results do not depend on the other
sequences of the step."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from tgis.shard.attention.interface import Attention, Scoring
from tgis.shard.layers.embedding import Embedding, LMHead
from tgis.shard.layers.linear import ColumnParallel, RowParallel
from tgis.shard.layers.lora import TokenAdapters
from tgis.shard.layers.ops import Parts
from tgis.shard.models.interface import StepInputs
from tgis.shard.models.parts.blocks import (
    MLP,
    BranchInput,
    BranchOutput,
    SelfAttention,
    make_norm,
    make_positions,
)
from tgis.shard.models.parts.relative_bias import read_bias
from tgis.shard.models.spec import EncoderDecoderSpec, StackSpec

# Cache layer for the keys and values of the encoder's current layer. The decoder overwrites it after the
# encoder has finished.
SCRATCH_LAYER = 0

# (residual stream, branch's input, ...) -> output still to be added to the stream, or None if it was added.
Branch = Callable[[Tensor, BranchInput, StepInputs, Attention], Tensor | None]


class CrossAttention:
    def __init__(self, spec: StackSpec, parts: Parts, path: str, layer: int):
        self._layer = layer
        self._head_dim = spec.head_dim
        self._scoring = Scoring(scale=spec.score_scale, causal=False)
        size = spec.hidden_size
        inner = spec.num_heads * spec.head_dim
        self._q = ColumnParallel(parts, f"{path}.q", size, [inner], spec.qkv_bias)
        self._kv = ColumnParallel(parts, f"{path}.kv", size, [inner, inner], spec.qkv_bias)
        out = RowParallel(parts, f"{path}.out", inner, size, spec.out_bias)
        self._norm_product = parts.kernels.norm_product
        self._output = BranchOutput(parts, out, finish=None)

    def write_keys_and_values(self, states: Tensor, inputs: StepInputs, attention: Attention) -> None:
        """Cache the keys and values of the encoder's output `states`, [num_tokens, hidden_size]."""
        k, v = self._kv(states, inputs.adapters).view(len(states), 2, -1, self._head_dim).unbind(1)
        attention.keep(self._layer, k, v, inputs.plan)  # [num_tokens, num_heads, head_dim]

    def __call__(
        self, x: Tensor, source: BranchInput, inputs: StepInputs, attention: Attention
    ) -> Tensor | None:
        """Return the output still to be added to x, the residual stream, or None if it was added."""
        assert inputs.cross is not None, "steps of decoders have a plan for cross-attention"
        q = self._norm_product(*source, self._q, None, inputs.adapters)
        q = q.view(len(x), -1, self._head_dim)  # [num_tokens, num_heads, head_dim]
        y = attention.attend(self._layer, q, inputs.cross, self._scoring)
        return self._output(x, y.flatten(1), inputs.adapters)


class Layer:
    """Layer with the branches self-attention, cross-attention (in a decoder) and feed-forward.

    If `norm_place` is "before", x += branch(norm(x)), and the next layer adds the last branch's output. If it
    is "sum", x = norm(x + branch(x))."""

    def __init__(
        self,
        spec: StackSpec,
        parts: Parts,
        path: str,
        cache_layer: int,
        scoring: Scoring,
        cross_attention: CrossAttention | None,
    ):
        attend = SelfAttention(spec, parts, f"{path}.attention", cache_layer, scoring)
        feed = MLP(spec, parts, f"{path}.mlp")
        branches: dict[str, Branch | None] = {
            "norm_1": lambda x, source, inputs, attention: attend(
                x, source, None, attention, inputs.plan, inputs.adapters
            ),
            "cross_norm": cross_attention,
            "norm_2": lambda x, source, inputs, attention: feed(x, source, inputs.adapters),
        }
        self._branches = [
            (make_norm(spec, parts, f"{path}.{name}"), branch) for name, branch in branches.items() if branch
        ]
        self._norms_sums = spec.norm_place == "sum"

    def __call__(
        self, x: Tensor, delta: Tensor | None, inputs: StepInputs, attention: Attention
    ) -> tuple[Tensor, Tensor | None]:
        for norm, branch in self._branches:
            if self._norms_sums:
                x = norm(x, branch(x, BranchInput(x), inputs, attention))
            else:
                delta = branch(x, BranchInput(x, delta, norm), inputs, attention)
        return x, delta


class LayerStack:
    """Stack of the encoder or, with `cross_attentions`, of the decoder."""

    def __init__(
        self, spec: StackSpec, parts: Parts, path: str, cross_attentions: Sequence[CrossAttention] = ()
    ):
        self._spec = spec
        self._kernels = parts.kernels
        self._embed_norm = make_norm(spec, parts, f"{path}.embed_norm") if spec.embedding_norm else None
        self._norm = make_norm(spec, parts, f"{path}.norm") if spec.final_norm else None
        self._positions = make_positions(spec, parts, f"{path}.positions")
        self._layers = list(_layers(spec, parts, f"{path}.blocks", cross_attentions))

    def __call__(self, x: Tensor, inputs: StepInputs, attention: Attention) -> Tensor:
        """Return the hidden states of embedded tokens x, [num_tokens, hidden_size]. Overwrites x."""
        x = self._embed(x, inputs)
        delta: Tensor | None = None
        for layer in self._layers:
            x, delta = layer(x, delta, inputs, attention)
        return x if delta is None else self._kernels.add(x, delta)

    def normalise(self, x: Tensor) -> Tensor:
        """Apply the last norm, if any, to contiguous x, [n, hidden_size]."""
        return self._norm(x) if self._norm else x

    def _embed(self, x: Tensor, inputs: StepInputs) -> Tensor:
        if self._spec.embedding_scale != 1:
            self._kernels.scale(x, self._spec.embedding_scale)
        if inputs.virtual is not None:
            x[inputs.virtual.places] = inputs.virtual.embeddings
        if self._positions:
            self._kernels.add(x, self._positions(inputs.positions))
        return self._embed_norm(x) if self._embed_norm else x


class EncoderDecoderModel:
    def __init__(self, spec: EncoderDecoderSpec, parts: Parts):
        self.spec = spec
        self.parts = parts
        self.prompt_width = spec.encoder.hidden_size
        self._tokens = Embedding(parts, "embed", spec.vocab_size, spec.encoder.hidden_size)
        self._encoder = LayerStack(spec.encoder, parts, "encoder")
        self._cross_attentions = [
            CrossAttention(spec.decoder, parts, f"decoder.blocks.{layer}.cross", layer)
            for layer in range(spec.num_layers)
        ]
        self._decoder = LayerStack(spec.decoder, parts, "decoder", self._cross_attentions)
        self._head = LMHead(parts, "head", spec.vocab_size, spec.decoder.hidden_size)
        self._head_bias: Tensor | None = None  # [vocab_size]
        if spec.has_head_bias and parts.weights.has("head_bias.bias"):
            bias = parts.weights.find("head_bias.bias", (1, spec.vocab_size)).read()
            bias = bias[0].to(parts.kernels.device, parts.dtype)
            self._head_bias = bias.to(torch.float32, copy=True)

    @torch.inference_mode()
    def encode(self, inputs: StepInputs, attention: Attention) -> None:
        x = self._encoder(self._embed(inputs), inputs, attention)
        states = self._encoder.normalise(x)  # [num_tokens, hidden_size]
        for cross_attention in self._cross_attentions:
            cross_attention.write_keys_and_values(states, inputs, attention)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, attention: Attention) -> Tensor:
        return self._decoder(self._embed(inputs), inputs, attention)

    @torch.inference_mode()
    def logits(self, x: Tensor, adapters: TokenAdapters | None = None) -> Tensor:
        scores = self._head(self._decoder.normalise(x.contiguous()), adapters)  # [n, vocab_size]
        if self.spec.logit_scale != 1:
            scores = self.parts.kernels.scale(scores, self.spec.logit_scale)
        return scores if self._head_bias is None else self.parts.kernels.add(scores, self._head_bias)

    def _embed(self, inputs: StepInputs) -> Tensor:
        return self._tokens(inputs.token_ids, inputs.adapters)


def _layers(
    spec: StackSpec, parts: Parts, path: str, cross_attentions: Sequence[CrossAttention]
) -> Iterator[Layer]:
    is_decoder = bool(cross_attentions)
    relative = spec.relative_bias
    bias = None  # [own heads, any]
    for layer in range(spec.num_layers):
        if relative and (layer == 0 or relative.is_per_layer):
            bias = read_bias(parts, f"{path}.{layer}.bias", relative, spec.num_heads, is_decoder)
        scoring = Scoring(scale=spec.score_scale, causal=is_decoder, bias=bias)
        cross_attention = cross_attentions[layer] if is_decoder else None
        cache_layer = layer if is_decoder else SCRATCH_LAYER
        yield Layer(spec, parts, f"{path}.{layer}", cache_layer, scoring, cross_attention)
