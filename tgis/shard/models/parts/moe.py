"""Mixture-of-experts layer. Each expert is split over all ranks, so ranks have equal work whichever experts a
step uses."""

from dataclasses import replace

import torch
from torch import Tensor

from tgis.shard.layers.linear import ColumnParallel, Replicated
from tgis.shard.layers.lora import TokenAdapters
from tgis.shard.layers.ops import Parts, normalise
from tgis.shard.models.parts.blocks import MLP, BranchInput, Finish, make_norm
from tgis.shard.models.parts.routing import ExpertRouter, read_router_norm, sigmoid
from tgis.shard.models.spec import DecoderSpec


class SparseMLP:
    def __init__(self, spec: DecoderSpec, parts: Parts, path: str, finish: Finish | None = None):
        experts = spec.experts
        assert experts is not None, "only models with experts have this layer"
        self._group = parts.group
        self._kernels = parts.kernels
        self._spec = experts
        self._finish = finish
        self._score = Replicated(
            parts, f"{path}.router", spec.hidden_size, experts.num_experts, experts.router_bias
        )
        self._score_norm = read_router_norm(spec, parts, path) if experts.has_router_norm else None
        self._route = ExpertRouter(experts, parts, f"{path}.choice")
        self._shared = SharedExpert(spec, parts, path) if experts.shared_size else None
        self._latents = ExpertLatents(spec, parts, path) if experts.latent_size else None
        sizes = replace(
            spec,
            hidden_size=experts.latent_size or spec.hidden_size,
            intermediate_size=experts.intermediate_size,
            mlp_bias=experts.bias,
        )
        self._experts = [MLP(sizes, parts, f"{path}.experts.{e}") for e in range(experts.num_experts)]
        products = [expert.products for expert in self._experts]
        activation = self._experts[0].activation
        gate_scale = sizes.gate_scale
        self._mix_all = parts.kernels.join_experts(products, activation, gate_scale, experts.scales_input)

    def __call__(self, x: Tensor, source: BranchInput, adapters: TokenAdapters | None) -> Tensor:
        """Return the output still to be added to x, the residual stream."""
        normed = normalise(self._kernels, *source)
        scores = self._score(normed if self._score_norm is None else self._score_norm(x), adapters)
        out = self._compute(normed, scores, adapters)
        return out if self._finish is None else self._finish(out)

    def _compute(self, x: Tensor, scores: Tensor, adapters: TokenAdapters | None) -> Tensor:
        """Return the sum of the chosen experts and the shared one, over all ranks."""
        shared = None if self._shared is None else self._shared(x, adapters)
        if self._latents is None:
            out = self._mix(x, scores, adapters)
            return self._group.all_reduce(out if shared is None else out.add_(shared))
        latents = self._latents.narrow(x, adapters)
        out = self._latents.widen(self._group.all_reduce(self._mix(latents, scores, adapters)), adapters)
        return out if shared is None else out.add_(self._group.all_reduce(shared))

    def _mix(self, x: Tensor, scores: Tensor, adapters: TokenAdapters | None) -> Tensor:
        """Return this rank's summand of the chosen experts. Each token's experts are added in the order of
        their numbers, so that its bits do not depend on other tokens."""
        weights, chosen = self._route(scores)  # [num_tokens, num_active]
        if self._mix_all is not None and not any(expert.is_adapted(adapters) for expert in self._experts):
            return self._mix_all(x, weights, chosen).to(x.dtype)
        order = chosen.flatten().argsort(stable=True)  # indices in flattened `chosen`, sorted by expert
        counts = chosen.flatten().bincount(minlength=self._spec.num_experts).tolist()
        out = torch.zeros_like(x)
        for expert, places in zip(self._experts, torch.split(order, counts), strict=True):
            if len(places):
                tokens = places // self._spec.num_active
                expert_adapters = adapters and adapters.take(tokens)
                own = weights.flatten()[places].unsqueeze(-1)  # [len(places), 1]
                taken = (x[tokens] * own).to(x.dtype) if self._spec.scales_input else x[tokens]
                y = expert.partial(taken, expert_adapters)  # [len(places), hidden_size]
                out.index_add_(0, tokens, y if self._spec.scales_input else y * own)
        return out


class ExpertLatents:
    """Projections between the hidden states and the latents that the chosen experts read and write, whole on
    every rank."""

    def __init__(self, spec: DecoderSpec, parts: Parts, path: str):
        experts = spec.experts
        assert experts is not None, "only models with experts have this layer"
        assert experts.latent_size is not None, "only models with latents have this layer"
        width, size = spec.hidden_size, experts.latent_size
        self.narrow = ColumnParallel(parts, f"{path}.narrow", width, [size], spec.mlp_bias, [1])
        self.widen = ColumnParallel(parts, f"{path}.widen", size, [width], spec.mlp_bias, [1])


class SharedExpert:
    """Expert that all tokens use."""

    def __init__(self, spec: DecoderSpec, parts: Parts, path: str):
        experts = spec.experts
        assert experts is not None, "only models with experts have this layer"
        sizes = replace(spec, intermediate_size=experts.shared_size)
        self._mlp = MLP(sizes, parts, f"{path}.shared")
        has_gate = experts.has_shared_gate
        self._gate = Replicated(parts, f"{path}.shared_gate", spec.hidden_size, 1) if has_gate else None

    def __call__(self, x: Tensor, adapters: TokenAdapters | None) -> Tensor:
        """Return this rank's summand of the output, [num_tokens, hidden_size]."""
        y = self._mlp.partial(x, adapters)
        return y if self._gate is None else y * sigmoid(self._gate(x, adapters))


class DenseWithExperts:
    """Sum of an MLP and of experts. Both read x through norms of their own, and both outputs have a norm."""

    def __init__(self, spec: DecoderSpec, parts: Parts, path: str, finish: Finish | None = None):
        self._kernels = parts.kernels
        self._finish = finish
        self._dense = MLP(spec, parts, path, make_norm(spec, parts, f"{path}.dense_post_norm"))
        self._norm = make_norm(spec, parts, f"{path}.sparse_norm")
        self._sparse = SparseMLP(spec, parts, path, make_norm(spec, parts, f"{path}.sparse_post_norm"))

    def __call__(self, x: Tensor, source: BranchInput, adapters: TokenAdapters | None) -> Tensor:
        """Return the output still to be added to x, the residual stream."""
        if source.delta is not None:
            self._kernels.add(x, source.delta)
        dense = self._dense(x, BranchInput(x, None, source.norm), adapters)
        assert dense is not None, "a branch with a norm of its output does not add it"
        out = self._kernels.add(dense, self._sparse(x, BranchInput(x, None, self._norm), adapters))
        return out if self._finish is None else self._finish(out)
