"""Routing with biases and groups of experts against transformers' router of DeepSeek V3."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from tgis.shard.models.parts import routing
from tgis.shard.models.spec import Experts

NUM_EXPERTS, NUM_ACTIVE = 16, 4
PLAIN = Experts(NUM_EXPERTS, NUM_ACTIVE, 8, probabilities="sigmoid", has_choice_bias=True)


def route(experts: Experts, bias: Tensor, scores: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Return the weights of all experts, [num_tokens, NUM_EXPERTS], 0 for those that are not chosen."""
    monkeypatch.setattr(routing, "read_choice_bias", lambda *_: bias)
    weights, chosen = routing.ExpertRouter(experts, None, "")(scores)  # type: ignore[arg-type]
    return torch.zeros_like(scores).scatter(1, chosen, weights)


@pytest.mark.parametrize("groups", [(1, 1), (4, 1), (4, 2), (8, 2)])
def test_equals_transformers(groups: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    for seed, (is_normalised, scale) in enumerate(itertools.product((False, True), (1.0, 2.5))):
        torch.manual_seed(seed)
        scores, bias = torch.randn(40, NUM_EXPERTS), torch.randn(NUM_EXPERTS) * 0.3
        config = DeepseekV3Config(
            hidden_size=NUM_EXPERTS,
            n_routed_experts=NUM_EXPERTS,
            num_experts_per_tok=NUM_ACTIVE,
            n_group=groups[0],
            topk_group=groups[1],
            norm_topk_prob=is_normalised,
            routed_scaling_factor=scale,
        )
        oracle = DeepseekV3TopkRouter(config)
        with torch.no_grad():
            oracle.weight.copy_(torch.eye(NUM_EXPERTS))
            oracle.e_score_correction_bias.copy_(bias)
            _, weights, chosen = oracle(scores)
        names = ("num_groups", "num_active_groups", "normalised", "weight_scale")
        given = dict(zip(names, (*groups, is_normalised, scale), strict=True))
        actual = route(replace(PLAIN, **given), bias, scores, monkeypatch)
        torch.testing.assert_close(actual, torch.zeros_like(scores).scatter(1, chosen, weights))


def test_bias_chooses_but_does_not_weigh(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, bias = torch.zeros(1, NUM_EXPERTS), torch.zeros(NUM_EXPERTS)
    bias[5:9] = torch.arange(1.0, 5.0)
    actual = route(replace(PLAIN, normalised=False), bias, scores, monkeypatch)
    assert actual.nonzero()[:, 1].tolist() == [5, 6, 7, 8]
    assert actual[0, 5:9].tolist() == [0.5] * 4
