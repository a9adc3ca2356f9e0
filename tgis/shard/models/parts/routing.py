"""Choice of the experts that a token uses, and their weights."""

from collections.abc import Callable

import torch
from torch import Tensor

from tgis.shard.layers.ops import Parts
from tgis.shard.models.spec import DecoderSpec, Experts

# Guards against a division by zero, as in training.
_TINY = 1e-20


class ExpertRouter:
    """Chooses experts by scores. Reads the vectors at `path` that `Experts` says there are."""

    def __init__(self, experts: Experts, parts: Parts, path: str):
        self._spec = experts
        self._bias = read_choice_bias(parts, path, experts.num_experts) if experts.has_choice_bias else None
        self._scales: Tensor | None = None
        if experts.has_expert_scales:
            self._scales = parts.read_vector(f"{path}.per_expert_scale", experts.num_experts)

    def __call__(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and the numbers of the chosen experts, [num_tokens, num_active] each, for scores
        [num_tokens, num_experts]."""
        spec = self._spec
        weights = scores.softmax(-1) if spec.probabilities == "softmax" else sigmoid(scores)
        if self._bias is None and spec.num_groups == 1:
            weights, chosen = weights.topk(spec.num_active)
        else:
            ranked = weights if self._bias is None else weights + self._bias
            chosen = self._hide_groups(ranked).topk(spec.num_active).indices
            weights = weights.gather(1, chosen)
        if spec.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
        if self._scales is not None:
            weights = weights * self._scales[chosen]
        return weights if spec.weight_scale == 1 else weights * spec.weight_scale, chosen

    def _hide_groups(self, ranked: Tensor) -> Tensor:
        """Set the scores of experts outside the best groups to -inf. The best experts of a group determine
        its rank."""
        spec = self._spec
        if spec.num_groups == 1:
            return ranked
        groups = ranked.view(len(ranked), spec.num_groups, -1)
        best = groups.topk(spec.num_ranking).values.sum(-1).topk(spec.num_active_groups).indices
        is_hidden = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, False)
        return groups.masked_fill(is_hidden.unsqueeze(-1), -torch.inf).flatten(1)


def read_choice_bias(parts: Parts, path: str, num_experts: int) -> Tensor:
    """Read float32 [num_experts], not rounded to the weights' type: small differences choose experts."""
    bias = parts.weights.find(f"{path}.weight", (num_experts,)).read()
    return bias.to(parts.kernels.device, torch.float32, copy=True)


def read_router_norm(spec: DecoderSpec, parts: Parts, path: str) -> Callable[[Tensor], Tensor]:
    """Return the RMS norm of a router's input, whose weights are a learned factor over the root of the
    width."""
    weight = parts.read_vector(f"{path}.choice.scale", spec.hidden_size) * spec.hidden_size**-0.5
    return lambda x: parts.kernels.rms_norm(x, None, weight, spec.norm_eps)


def sigmoid(x: Tensor) -> Tensor:
    """Return the sigmoid of each element. torch's own operator rounds an element differently if it is among
    the last ones of a tensor, so a token's bits would depend on the other tokens of the step."""
    return torch.stack([x, torch.zeros_like(x)], -1).softmax(-1)[..., 0]
