"""Decoder-only transformer. Families differ only in their `DecoderSpec`.

The tokens of all sequences are packed along one axis. A sequence's results do not depend on the other
sequences of the step."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from tgis.shard.attention.interface import Attention, AttentionPlan, Scoring
from tgis.shard.layers.embedding import Embedding, LMHead
from tgis.shard.layers.linear import Replicated
from tgis.shard.layers.lora import TokenAdapters
from tgis.shard.layers.norm import Norm
from tgis.shard.layers.ops import Parts
from tgis.shard.layers.rotary import Rotary
from tgis.shard.memory.state_cache import StepStates
from tgis.shard.models.interface import StepInputs, Taps
from tgis.shard.models.parts.blocks import (
    MLP,
    AttentionLayer,
    BranchInput,
    Finish,
    SelfAttention,
    make_norm,
    make_positions,
)
from tgis.shard.models.parts.delta_net import DeltaNetMixer
from tgis.shard.models.parts.latent_attention import LatentAttention
from tgis.shard.models.parts.layer_inputs import LayerInputBranch, LayerInputEmbedding
from tgis.shard.models.parts.mamba import MambaMixer
from tgis.shard.models.parts.moe import DenseWithExperts, SparseMLP
from tgis.shard.models.spec import DecoderSpec

FeedForward = Callable[[Tensor, BranchInput, TokenAdapters | None], Tensor | None]


@dataclass(frozen=True)
class StepContext:
    attention: Attention
    plan: AttentionPlan
    angles: tuple[Tensor, ...]  # [2, num_tokens, dim / 2] of each of `DecoderSpec.distinct_ropes`
    adapters: TokenAdapters | None
    query_factors: Tensor | None = None  # float32 [num_tokens], for layers that scale queries
    states: StepStates | None = None  # of recurrent layers
    layer_inputs: Tensor | None = None  # float32 [num_tokens, num_layers, width], of `LayerInputs`


class Mixer(Protocol):
    """Branch of a layer that lets a token read those before it."""

    def __call__(self, x: Tensor, source: BranchInput, context: StepContext) -> Tensor | None:
        """Return the output still to be added to x, the residual stream, or None if it was added."""


class LayerMamba:
    def __init__(self, spec: DecoderSpec, parts: Parts, path: str, layer: int, finish: Finish | None = None):
        assert spec.mamba is not None, "the layer is recurrent"
        number = sorted(spec.mamba.layers).index(layer)
        self._mix = MambaMixer(spec, parts, f"{path}.mamba", number, finish)

    def __call__(self, x: Tensor, source: BranchInput, context: StepContext) -> Tensor | None:
        return self._mix(x, source, context.states, context.adapters)


class LayerDeltaNet:
    def __init__(self, spec: DecoderSpec, parts: Parts, path: str, layer: int, finish: Finish | None = None):
        assert spec.delta_net is not None, "the layer is recurrent"
        number = sorted(spec.delta_net.layers).index(layer)
        self._mix = DeltaNetMixer(spec, parts, f"{path}.delta_net", number, finish)

    def __call__(self, x: Tensor, source: BranchInput, context: StepContext) -> Tensor | None:
        return self._mix(x, source, context.states, context.adapters)


class LayerAttention:
    def __init__(self, spec: DecoderSpec, parts: Parts, path: str, layer: int, finish: Finish | None = None):
        window = spec.window(layer)
        own = parts.group.slice(spec.num_heads)
        slopes = spec.slopes[own] if spec.slopes else None
        scoring = Scoring(
            scale=spec.score_scale,
            first_key=spec.first_key,
            window=window,
            chunk=spec.chunk(layer),
            soft_cap=spec.attention_soft_cap,
            slopes=None if slopes is None else torch.tensor(slopes, device=parts.kernels.device),
            sinks=parts.read_vector(f"{path}.attention.sinks", spec.num_heads, [own]) if spec.sinks else None,
        )
        number = spec.attention_layers.index(layer)
        rope = spec.layer_rope(layer)
        self._rope = None if rope is None else spec.distinct_ropes.index(rope)
        attended = spec.at(layer)
        if spec.qk_norm == "bare_head" and rope is None:
            attended = replace(attended, qk_norm="none")
        kind = LatentAttention if spec.latent else SelfAttention
        self._attention: AttentionLayer = kind(attended, parts, f"{path}.attention", number, scoring, finish)
        self._scales_queries = spec.scales_queries(layer)

    def __call__(self, x: Tensor, source: BranchInput, context: StepContext) -> Tensor | None:
        angles = None if self._rope is None else context.angles[self._rope]
        factors = context.query_factors if self._scales_queries else None
        return self._attention(x, source, angles, context.attention, context.plan, context.adapters, factors)


class MambaBesideAttention:
    """Attention and Mamba that read the same x, each through a norm that includes the factor of its input."""

    def __init__(self, spec: DecoderSpec, parts: Parts, path: str, layer: int):
        factors = spec.side_by_side
        assert factors is not None, "only models with both in a layer have this part"
        self._add = parts.kernels.add
        self._norms = (
            make_norm(spec, parts, f"{path}.norm_1", factors.attention_input),
            make_norm(spec, parts, f"{path}.mamba_norm", factors.mamba_input),
        )
        # Neither output may be added to x before the other branch has read x.
        finish = (_scale_by(parts, factors.attention_output), _scale_by(parts, factors.mamba_output))
        self._attend = LayerAttention(spec, parts, path, layer, finish[0])
        self._mix = LayerMamba(spec, parts, path, layer, finish[1])

    def __call__(self, x: Tensor, source: BranchInput, context: StepContext) -> Tensor:
        """Implement `Mixer`. The source has no norm."""
        assert source.norm is None, "each branch has its own"
        if source.delta is not None:
            self._add(x, source.delta)
        attended = self._attend(x, BranchInput(x, None, self._norms[0]), context)
        mixed = self._mix(x, BranchInput(x, None, self._norms[1]), context)
        assert attended is not None, "branches with a factor do not add their outputs"
        assert mixed is not None, "branches with a factor do not add their outputs"
        return self._add(mixed, attended)


class Block:
    """Pre-norm block. Returns x after attention or a recurrent layer, and the feed-forward's output as the
    delta that the next norm adds in the same pass; the delta is None if it was added already. A block may
    have only one of the two branches."""

    def __init__(self, spec: DecoderSpec, parts: Parts, layer: int):
        path = f"blocks.{layer}"
        self._mix: Mixer | None = None
        self._feed_forward: FeedForward | None = None
        if spec.mixes(layer):
            self._norm_1, finish = _make_norms(spec, parts, path, 1, layer > 0 or spec.has_first_norm)
            self._mix = _make_mixer(spec, parts, path, layer, finish)
        if spec.feeds_forward(layer):
            self._norm_2, finish = _make_norms(spec, parts, path, 2)
            self._feed_forward = _make_feed_forward(spec, parts, path, layer, finish)

    def __call__(self, x: Tensor, delta: Tensor | None, context: StepContext) -> tuple[Tensor, Tensor | None]:
        if self._mix is not None:
            delta = self._mix(x, BranchInput(x, delta, self._norm_1), context)
        if self._feed_forward is not None:
            delta = self._feed_forward(x, BranchInput(x, delta, self._norm_2), context.adapters)
        return x, delta


class ParallelBlock:
    """Block whose attention and feed-forward read the same x."""

    def __init__(self, spec: DecoderSpec, parts: Parts, layer: int):
        path = f"blocks.{layer}"
        self._norm_1 = make_norm(spec, parts, f"{path}.norm_1")
        self._norm_2 = make_norm(spec, parts, f"{path}.norm_2") if spec.residual == "parallel" else None
        self._add = parts.kernels.add
        # The attention's output must not be added to x before the feed-forward has read x.
        self._attend = LayerAttention(spec, parts, path, layer, finish=lambda attended: attended)
        self._feed_forward = _make_feed_forward(spec, parts, path, layer)

    def __call__(self, x: Tensor, delta: Tensor | None, context: StepContext) -> tuple[Tensor, Tensor | None]:
        if self._norm_2 is not None:
            sources = BranchInput(x, delta, self._norm_1), BranchInput(x, None, self._norm_2)
        else:
            sources = (BranchInput(self._norm_1(x, delta)),) * 2
        attended = self._attend(x, sources[0], context)
        assert attended is not None
        fed = self._feed_forward(x, sources[1], context.adapters)
        return x, attended if fed is None else self._add(fed, attended)


class PostNormBlock:
    """Post-norm block: x = norm(x + attention(x)); x = norm(x + mlp(x))."""

    def __init__(self, spec: DecoderSpec, parts: Parts, layer: int):
        path = f"blocks.{layer}"
        self._norm_1, self._norm_2 = (make_norm(spec, parts, f"{path}.norm_{i}") for i in (1, 2))
        self._attend = LayerAttention(spec, parts, path, layer)
        self._feed_forward = _make_feed_forward(spec, parts, path, layer)

    def __call__(self, x: Tensor, delta: Tensor | None, context: StepContext) -> tuple[Tensor, Tensor | None]:
        assert delta is None, "post-norm blocks add their outputs themselves"
        x = self._norm_1(x, self._attend(x, BranchInput(x), context))
        return self._norm_2(x, self._feed_forward(x, BranchInput(x), context.adapters)), None


class ScaledBlock:
    """Block followed by the branch of its `LayerInputs`, and by a learned factor."""

    def __init__(self, spec: DecoderSpec, parts: Parts, layer: int):
        path = f"blocks.{layer}"
        self._block = Block(spec, parts, layer)
        self._branch = LayerInputBranch(spec, parts, path, layer) if spec.layer_inputs else None
        self._factor = 1.0
        if spec.layer_scalars:
            factor = parts.read_vector(f"{path}.output.layer_scalar", 1)
            self._factor = 1.0 if factor.is_meta else factor.item()  # models of shapes have no values
        self._kernels = parts.kernels

    def __call__(self, x: Tensor, delta: Tensor | None, context: StepContext) -> tuple[Tensor, Tensor | None]:
        x, delta = self._block(x, delta, context)
        if delta is not None:
            x = self._kernels.add(x, delta)
        if self._branch is not None:
            assert context.layer_inputs is not None, "the model embeds them"
            x = self._kernels.add(x, self._branch(x, context.layer_inputs, context.adapters))
        return self._kernels.scale(x, self._factor), None


AnyBlock = Block | ParallelBlock | PostNormBlock | ScaledBlock


class Decoder:
    def __init__(self, spec: DecoderSpec, parts: Parts):
        self.spec = spec
        self.parts = parts
        self._rotaries = [Rotary(rope, parts.kernels) for rope in spec.distinct_ropes]
        self._embed = InputEmbedding(spec, parts)
        self._embed_layers = LayerInputEmbedding(spec, parts) if spec.layer_inputs else None
        self._blocks = [make_block(spec, parts, layer) for layer in range(spec.num_layers)]
        self._norm = make_norm(spec, parts, "norm") if spec.final_norm else None
        width = self.prompt_width = spec.embedding_width
        is_projected = width != spec.hidden_size
        self._project = Replicated(parts, "embed_out", spec.hidden_size, width) if is_projected else None
        self._head = LMHead(parts, "head", spec.vocab_size, width)

    @torch.inference_mode()
    def embed(self, inputs: StepInputs, attention: Attention) -> tuple[Tensor, StepContext]:
        """Return the input of the first block, [num_tokens, hidden_size], and what all blocks share."""
        x = self._embed(inputs)
        angles = tuple(rotary(inputs.positions, inputs.is_long) for rotary in self._rotaries)
        scaling = self.spec.query_scaling
        factors = None
        if scaling is not None:
            numbers = scaling.beta, scaling.length, scaling.shift
            factors = self.parts.kernels.position_factors(inputs.positions, *numbers)
        layer_inputs = None if self._embed_layers is None else self._embed_layers(x, inputs)
        shared = (angles, inputs.adapters, factors, inputs.states, layer_inputs)
        return x, StepContext(attention, inputs.plan, *shared)

    @torch.inference_mode()
    def embed_tokens(self, token_ids: Tensor) -> Tensor:
        return self._embed.look_up(token_ids)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, attention: Attention) -> Tensor:
        return self.forward_tapped(inputs, attention, {})[0]

    @torch.inference_mode()
    def forward_tapped(
        self, inputs: StepInputs, attention: Attention, taps: Taps
    ) -> tuple[Tensor, Tensor | None]:
        add = self.parts.kernels.add
        x, context = self.embed(inputs, attention)
        delta: Tensor | None = None
        tapped: Tensor | None = None
        for number, block in enumerate(self._blocks):
            if (read := taps.get(number)) is not None:
                x = x if delta is None else add(x, delta)
                delta = None
                tapped = read(x) if tapped is None else add(tapped, read(x))
            x, delta = block(x, delta, context)
        return x if delta is None else add(x, delta), tapped

    @torch.inference_mode()
    def final_states(self, x: Tensor, adapters: TokenAdapters | None = None) -> Tensor:
        x = self._norm(x.contiguous()) if self._norm else x.contiguous()
        return self._project(x, adapters) if self._project else x

    @torch.inference_mode()
    def scores(self, states: Tensor, adapters: TokenAdapters | None = None) -> Tensor:
        return self._head(states, adapters)

    @torch.inference_mode()
    def logits(self, x: Tensor, adapters: TokenAdapters | None = None) -> Tensor:
        scores = self.scores(self.final_states(x, adapters), adapters)  # [n, vocab_size]
        if self.spec.logit_scale != 1:
            scores = self.parts.kernels.scale(scores, self.spec.logit_scale)
        if cap := self.spec.logit_soft_cap:
            scores = self.parts.kernels.soft_cap(scores, cap)
        return scores


class InputEmbedding:
    """Embedding of tokens and of learned positions: float32 [num_tokens, hidden_size]."""

    def __init__(self, spec: DecoderSpec, parts: Parts):
        self._kernels = parts.kernels
        # The scale is rounded to the weights' type, as in training.
        self._scale = torch.tensor(spec.embedding_scale, dtype=parts.dtype).item()
        self._virtual_scale = self._scale if spec.scales_virtual else 1.0
        width = spec.embedding_width
        is_projected = width != spec.hidden_size
        self._tokens = Embedding(parts, "embed", spec.vocab_size, width)
        self._project = Replicated(parts, "embed_in", width, spec.hidden_size) if is_projected else None
        self._norm = make_norm(spec, parts, "embed_norm") if spec.embedding_norm else None
        self._positions = make_positions(spec, parts, "positions")

    def look_up(self, token_ids: Tensor) -> Tensor:
        """Return the tokens' rows of the table, float32 [num_tokens, embedding_width]."""
        return self._tokens(token_ids, None)

    def __call__(self, inputs: StepInputs) -> Tensor:
        x = self._tokens(inputs.token_ids, inputs.adapters)
        if self._scale != 1:
            self._kernels.scale(x, self._scale)
        if inputs.virtual is not None:
            x[inputs.virtual.places] = inputs.virtual.embeddings * self._virtual_scale
        if self._project:
            x = self._project(x, inputs.adapters)
        if self._positions:
            self._kernels.add(x, self._positions(inputs.positions))
        return self._norm(x) if self._norm else x


def make_block(spec: DecoderSpec, parts: Parts, layer: int) -> AnyBlock:
    if spec.residual != "sequential":
        return ParallelBlock(spec, parts, layer)
    if spec.layer_inputs is not None or spec.layer_scalars:
        return ScaledBlock(spec, parts, layer)
    return (PostNormBlock if spec.norm_place == "sum" else Block)(spec, parts, layer)


def _make_norms(
    spec: DecoderSpec, parts: Parts, path: str, number: int, has_norm: bool = True
) -> tuple[Norm | None, Finish | None]:
    """Return the norm of a branch's input, if it has one, and the function that changes its output."""
    has_norm = has_norm and spec.norm_place != "after" and not (number == 1 and spec.side_by_side)
    before = make_norm(spec, parts, f"{path}.norm_{number}") if has_norm else None
    if spec.norm_place != "before":
        return before, make_norm(spec, parts, f"{path}.post_norm_{number}")
    scale = spec.residual_scale * (spec.feed_forward_scale if number == 2 else 1.0)
    return before, _scale_by(parts, scale) if scale != 1 else None


def _scale_by(parts: Parts, factor: float) -> Finish:
    kernels = parts.kernels
    return (lambda y: kernels.scale(y, factor)) if factor != 1 else (lambda y: y)


def _make_mixer(spec: DecoderSpec, parts: Parts, path: str, layer: int, finish: Finish | None) -> Mixer:
    if spec.side_by_side is not None:
        return MambaBesideAttention(spec, parts, path, layer)
    if spec.delta_net is not None and layer in spec.delta_net.layers:
        return LayerDeltaNet(spec, parts, path, layer, finish)
    is_recurrent = spec.mamba is not None and layer in spec.mamba.layers
    return (LayerMamba if is_recurrent else LayerAttention)(spec, parts, path, layer, finish)


def _make_feed_forward(
    spec: DecoderSpec, parts: Parts, path: str, layer: int, finish: Finish | None = None
) -> FeedForward:
    spec = spec.at(layer)
    is_sparse = spec.experts is not None and layer not in spec.experts.dense_layers
    if spec.experts is not None and spec.experts.beside_dense:
        return DenseWithExperts(spec, parts, f"{path}.mlp", finish)
    return (SparseMLP if is_sparse else MLP)(spec, parts, f"{path}.mlp", finish)
