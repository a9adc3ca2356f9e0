"""Share of sensitive weights, against the matrices of built models."""

from math import prod
from pathlib import Path

import pytest
import torch
import transformers

from tests.support.shard import stepping
from tests.support.shard.checkpoints import SMALL, write_model
from tests.support.shard.family_cases.hybrids import CASES as HYBRIDS
from tests.support.shard.family_cases.llamas import CASES
from tgis.shard.models import registry
from tgis.shard.models.sensitive_weights import describe_sensitivity, measure_sensitive_share
from tgis.shard.models.skeleton import build_skeleton

T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "vocab_size": 99, "num_layers": 3}
CONFIGS = {
    "llama": transformers.LlamaConfig(**{**SMALL, "num_hidden_layers": 4}),
    "mixtral": transformers.MixtralConfig(**{**SMALL, "num_local_experts": 3, "num_experts_per_tok": 2}),
    "gemma4": CASES["gemma4_text"](),
    "gemma4_experts": CASES["gemma4_text_experts"](),
    "deepseek_v3": CASES["deepseek_v3"](),
    "qwen3_next": CASES["qwen3_next"](),
    "nemotron_h": HYBRIDS["nemotron_h_latent_experts_biases"](),
    "falcon_h1": HYBRIDS["falcon_h1"](),
    "mamba2": HYBRIDS["mamba2"](),
    "t5": transformers.T5Config(**T5, num_decoder_layers=2, decoder_start_token_id=0),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_share_is_that_of_the_models_matrices(name: str, tmp_path: Path) -> None:
    write_model(tmp_path, CONFIGS[name])
    config = stepping.read_config(tmp_path)
    spec = registry.make_spec(config)
    rule = describe_sensitivity(spec)
    cuts = build_skeleton(tmp_path, config, torch.float32).parts.cuts
    total, sensitive = 0, 0
    for path, cut in cuts.items():
        if "blocks" in path and not path.endswith(("router", "keys", "values", "shared_gate", "gates")):
            total += prod(cut.shape)
            rows = range(cut.shape[0])[rule.find_rows(path, cut.shape[0])]
            sensitive += len(rows) * cut.shape[1]
    assert 0.1 < sensitive / total < 0.9
    assert measure_sensitive_share(spec) == sensitive / total
