"""Mixture-of-experts layer. Each expert is split over all ranks, so ranks have equal work whichever experts a
step uses."""

from dataclasses import replace

import torch
from torch import Tensor

from tgis.shard.layers.linear import Replicated
from tgis.shard.layers.lora import TokenAdapters
from tgis.shard.layers.ops import Parts, normalise
from tgis.shard.models.parts.blocks import MLP, BranchInput, Finish
from tgis.shard.models.parts.routing import Router
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
        self._route = Router(experts, parts, f"{path}.choice")
        self._shared = SharedExpert(spec, parts, path) if experts.shared_size else None
        sizes = replace(spec, intermediate_size=experts.intermediate_size, mlp_bias=experts.bias)
        self._experts = [MLP(sizes, parts, f"{path}.experts.{e}") for e in range(experts.num_experts)]

    def __call__(self, x: Tensor, source: BranchInput, adapters: TokenAdapters | None) -> Tensor:
        """Return the output still to be added to x, the residual stream."""
        out = self._mix(normalise(self._kernels, *source), adapters)
        return out if self._finish is None else self._finish(out)

    def _mix(self, x: Tensor, adapters: TokenAdapters | None) -> Tensor:
        """Add each token's experts in the order of their numbers, so that its bits do not depend on other
        tokens."""
        weights, chosen = self._route(self._score(x, adapters))  # [num_tokens, num_active]
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
        if self._shared is not None:
            out += self._shared(x, adapters)
        return self._group.all_reduce(out)


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
        return y if self._gate is None else y * self._gate(x, adapters).sigmoid()
