"""Latent attention: bits of results, the size of its cache, and configurations that are refused. The tests of
every family compare results with transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.shard.checkpoints import write_model
from tests.support.shard.family_cases.llamas import CASES
from tests.support.shard.stepping import Stepper, load
from tgis.shard.collectives import ProcessGroup
from tgis.shard.memory.kv_cache import bytes_per_block
from tgis.shard.models import registry
from tgis.shard.models.interface import UnsupportedModelError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("latent")
    write_model(directory, CASES["deepseek_v3"]())
    return directory


@pytest.mark.parametrize(("block_size", "length"), [(4, 23), (16, 35)])
def test_bits_do_not_depend_on_how_a_prompt_is_cut(block_size: int, length: int, checkpoint: Path) -> None:
    """Cut at every length around the ends of blocks, and computed with another sequence."""
    model = load(checkpoint)
    torch.manual_seed(0)
    ids, other = torch.randint(3, 99, (2, length)).tolist()
    stepper = Stepper(model, block_size=block_size)
    whole = stepper.step({0: (ids, 0)})[0]
    for cut in {1, 3, 4, 5, 15, 16, 17, 31, 32, 33, 34} & {*range(length)}:
        stepper = Stepper(model, block_size=block_size)
        first = stepper.step({0: (ids[:cut], 0)})[0]
        last = stepper.step({1: (other[:9], 0), 0: (ids, cut)})[0]
        assert torch.equal(torch.cat([first, last]), whole)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_caches_one_head(size: int) -> None:
    """The key is the rotated part of 8 channels and the latent of 20. The value has as many channels."""
    spec = registry.make_spec(CASES["deepseek_v3"]().to_dict())
    registry.check_sharding(spec, size)
    assert bytes_per_block(spec, ProcessGroup(0, size), 16, torch.bfloat16) == 3 * 16 * 2 * (8 + 20) * 2


# A published configuration of DeepSeek V3, in the form of transformers 4.
PUBLISHED: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "max_position_embeddings": 163840,
    "num_nextn_predict_layers": 1,
    "rope_theta": 10000,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
}


def test_a_token_of_deepseek_v3_has_576_numbers() -> None:
    spec = registry.make_spec(PUBLISHED)
    assert (spec.num_kv_heads, spec.head_dim) == (1, 576)
    assert spec.score_scale == pytest.approx(192**-0.5 * 1.3688879454**2)
    assert spec.rope.amplitude == 1
    defaults = ("kv_lora_rank", "n_group", "topk_group", "first_k_dense_replace", "num_experts_per_tok")
    assert registry.make_spec({k: v for k, v in PUBLISHED.items() if k not in defaults}) == spec


REFUSED = {
    "attention_bias without q_lora_rank is not supported": {"attention_bias": True, "q_lora_rank": None},
    "scoring_func 'softmax' of the configuration is not supported": {"scoring_func": "softmax"},
    "topk_method 'noaux_tc' of the configuration is not supported": {"model_type": "deepseek_v2"},
    "tokens cannot use 8 of 256 experts from 9 of 8 groups": {"topk_group": 9},
    "mlp_layer_types ['dense'] is not a list of 61 known kinds": {
        "model_type": "glm4_moe_lite",
        "mlp_layer_types": ["dense"],
    },
    "rope parameters [1] are not supported": {"rope_scaling": [1]},
}


@pytest.mark.parametrize("text", REFUSED)
def test_refused_configurations(text: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        registry.make_spec({**PUBLISHED, **REFUSED[text]})
    assert str(caught.value) == text
