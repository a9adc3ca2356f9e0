"""Mixture-of-experts layer. Each expert is split over all ranks, so ranks have equal work whichever experts a
step uses."""

from dataclasses import replace

import torch
from torch import Tensor

from tgis.shard.layers.linear import Replicated
from tgis.shard.layers.lora import TokenAdapters
from tgis.shard.layers.ops import Parts, normalise
from tgis.shard.models.parts.blocks import MLP, BranchInput, Finish
from tgis.shard.models.spec import DecoderSpec


class SparseMLP:
    def __init__(self, spec: DecoderSpec, parts: Parts, path: str, finish: Finish | None = None):
        experts = spec.experts
        assert experts is not None, "only models with experts have this layer"
        self._group = parts.group
        self._kernels = parts.kernels
        self._spec = experts
        self._finish = finish
        self._score = Replicated(parts, f"{path}.router", spec.hidden_size, experts.num_experts)
        sizes = replace(spec, intermediate_size=experts.intermediate_size)
        self._shared = None
        if experts.shared_size:
            shared = replace(spec, intermediate_size=experts.shared_size)
            self._shared = MLP(shared, parts, f"{path}.shared")
        self._experts = [MLP(sizes, parts, f"{path}.experts.{e}") for e in range(experts.num_experts)]

    def __call__(self, x: Tensor, source: BranchInput, adapters: TokenAdapters | None) -> Tensor:
        """Return the output still to be added to x, the residual stream."""
        out = self._mix(normalise(self._kernels, *source), adapters)
        return out if self._finish is None else self._finish(out)

    def _mix(self, x: Tensor, adapters: TokenAdapters | None) -> Tensor:
        """Add each token's experts in the order of their numbers, so that its bits do not depend on other
        tokens."""
        weights = self._score(x, adapters).softmax(-1)  # [num_tokens, num_experts]
        weights, chosen = weights.topk(self._spec.num_active)  # [num_tokens, num_active]
        if self._spec.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)  # indices in flattened `chosen`, sorted by expert
        counts = chosen.flatten().bincount(minlength=self._spec.num_experts).tolist()
        out = torch.zeros_like(x) if self._shared is None else self._shared.partial(x, adapters)
        for expert, places in zip(self._experts, torch.split(order, counts), strict=True):
            if len(places):
                tokens = places // self._spec.num_active
                expert_adapters = adapters and adapters.take(tokens)
                y = expert.partial(x[tokens], expert_adapters)  # [len(places), hidden_size]
                out.index_add_(0, tokens, y * weights.flatten()[places].unsqueeze(-1))
        return self._group.all_reduce(out)
