"""Choice of the experts that a token uses, and their weights."""

import torch
from torch import Tensor

from tgis.shard.layers.ops import Parts
from tgis.shard.models.spec import Experts

# Guards against a division by zero, as in training.
_TINY = 1e-20


class Router:
    """Chooses experts by scores. With `Experts.has_choice_bias`, reads the vector at `path`."""

    def __init__(self, experts: Experts, parts: Parts, path: str):
        self._spec = experts
        self._bias = read_choice_bias(parts, path, experts.num_experts) if experts.has_choice_bias else None

    def __call__(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and the numbers of the chosen experts, [num_tokens, num_active] each, for scores
        [num_tokens, num_experts]."""
        spec = self._spec
        weights = scores.softmax(-1) if spec.probabilities == "softmax" else scores.sigmoid()
        if self._bias is None and spec.num_groups == 1:
            weights, chosen = weights.topk(spec.num_active)
        else:
            ranked = weights if self._bias is None else weights + self._bias
            chosen = self._hide_groups(ranked).topk(spec.num_active).indices
            weights = weights.gather(1, chosen)
        if spec.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
        return weights if spec.weight_scale == 1 else weights * spec.weight_scale, chosen

    def _hide_groups(self, ranked: Tensor) -> Tensor:
        """Set the scores of experts outside the best groups to -inf. The two best experts of a group
        determine its rank."""
        spec = self._spec
        if spec.num_groups == 1:
            return ranked
        groups = ranked.view(len(ranked), spec.num_groups, -1)
        best = groups.topk(2).values.sum(-1).topk(spec.num_active_groups).indices
        is_hidden = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, False)
        return groups.masked_fill(is_hidden.unsqueeze(-1), -torch.inf).flatten(1)


def read_choice_bias(parts: Parts, path: str, num_experts: int) -> Tensor:
    """Read float32 [num_experts], not rounded to the weights' type: small differences choose experts."""
    bias = parts.weights.find(f"{path}.weight", (num_experts,)).read()
    return bias.to(parts.kernels.device, torch.float32, copy=True)
