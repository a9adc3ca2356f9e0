"""Models with gated DeltaNet behind the router's scheduler: snapshots of states, preemption and lost shards
never change a token or a log-probability; configurations of any age."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.greedy import generate
from tests.support.shard.checkpoints import write_model
from tests.support.shard.driver import configure
from tests.support.shard.family_cases.llamas import CASES, delta_net
from tests.support.shard.family_oracle import describe, load_model
from tests.support.shard.scheduled import (
    Service,
    check_graphs_of_steps,
    compute_alone,
    draw_ids,
    greedy,
    results,
)
from tests.support.shard.smoothed import compute
from tests.support.shard.stepping import ALONE, read_config
from tgis.shard.models.interface import UnsupportedModelError
from tgis.shard.models.registry import check_sharding, make_spec
from tgis.shard.runner.interface import ModelRunner
from tgis.shard.startup.load import load

BLOCK, INTERVAL, NEW_TOKENS = 4, 16, 5
KINDS = ["linear_attention", "full_attention", "linear_attention"]
EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
WIDTHS = {"linear_num_value_heads": 2, "linear_num_key_heads": 1, "linear_value_head_dim": 32}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("delta_net")
    config = delta_net(num_hidden_layers=3, layer_types=KINDS, **WIDTHS)
    write_model(directory, transformers.Qwen3_5TextConfig(**config))
    return directory


@pytest.fixture(scope="module")
def runner(checkpoint: Path) -> ModelRunner:
    return load(configure(checkpoint, block_size=BLOCK, kv_cache_tokens=1024, dtype="float32"))


def test_prompts_of_every_length_equal_transformers(checkpoint: Path, runner: ModelRunner) -> None:
    """At and around ends of blocks, intervals and transformers' chunks; the second time from a snapshot."""
    model = load_model(checkpoint, transformers.AutoConfig.from_pretrained(checkpoint))
    service = Service(runner, 200, 16, INTERVAL)
    for length in (1, 4, 5, 16, 17, 33, 64, 65):
        prompt = draw_ids(length, length)
        expected = describe(prompt, *generate(model, prompt, max_new_tokens=NEW_TOKENS))
        sequences = [greedy(prompt, NEW_TOKENS) for _ in range(2)]
        before = service.num_computed
        service.run(sequences[:1])
        middle = service.num_computed
        service.run(sequences[1:])
        saved = middle - before - (service.num_computed - middle)
        assert saved == (length - 1) // BLOCK * BLOCK, "all full blocks are found with a state"
        first, second = results(service, sequences)
        assert first == second
        certain = expected.certain
        assert certain
        assert first[0][length:][:certain] == expected.token_ids[:certain]
        assert first[1][:certain] == pytest.approx(expected.logprobs[:certain], rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.slow) for seed in range(3)])
def test_results_never_depend_on_scheduling(runner: ModelRunner, seed: int) -> None:
    """Few blocks and slots, shared prefixes, random chunks, and a shard that is lost now and then."""
    rng = random.Random(seed)
    prefixes = [draw_ids(seed + i, 40) for i in range(2)]
    prompts = [rng.choice(prefixes)[: rng.randint(1, 40)] + draw_ids(i, rng.randint(1, 9)) for i in range(10)]
    expected = {tuple(prompt): compute_alone(runner, prompt, 12) for prompt in prompts}
    runner.reset()
    service = Service(runner, num_blocks=24, num_states=6, interval=8, seed=seed)
    sequences = [greedy(prompt, 12) for prompt in prompts]
    service.run(sequences, loss=0.01 * seed)
    for sequence, result in zip(sequences, results(service, sequences), strict=True):
        assert result == expected[tuple(sequence.token_ids[: sequence.prompt_len])]
    assert service.scheduler.num_preemptions
    assert service.scheduler.num_cache_hits


def test_small_steps_are_replayed_as_kernel_graphs(runner: ModelRunner) -> None:
    check_graphs_of_steps(runner, INTERVAL)


def test_memory_holds_states_of_queries_keys_and_values(runner: ModelRunner) -> None:
    states = runner._builder.states  # type: ignore[attr-defined]
    sums, window = 2 * 32 * 12, 3 * (64 + 2 * 12)
    aligned = -(-window // 16) * 16
    assert states.shape.num_bytes == 2 * 4 * (sums + aligned)
    assert not torch.isnan(states.memory).any()


REFUSED = {
    "linear_num_key_heads": (3, "2 value heads cannot share 3 key heads of linear attention"),
    "layer_types": (["linear_attention"] * 3, "a model of only linear attention, without full attention"),
    "hidden_act": ("gelu", "hidden_act 'gelu' of the configuration is not supported"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_refuses_what_it_cannot_compute(key: str, checkpoint: Path) -> None:
    value, text = REFUSED[key]
    with pytest.raises(UnsupportedModelError, match=text):
        make_spec({**read_config(checkpoint), key: value})


def test_unknown_layers_are_refused(checkpoint: Path) -> None:
    text = r"layer_types \['mamba', .*\] of the configuration are not supported"
    with pytest.raises(UnsupportedModelError, match=text):
        make_spec({**read_config(checkpoint), "layer_types": ["mamba", *KINDS[1:]]})


def test_ranks_that_cannot_share_the_heads_are_refused(checkpoint: Path) -> None:
    text = "2 value heads and 1 key heads of linear attention cannot be split over 4 shards"
    with pytest.raises(UnsupportedModelError, match=text):
        check_sharding(make_spec(read_config(checkpoint)), 4)


@pytest.mark.parametrize("is_packed", [False, True])
def test_experts_in_one_tensor_or_in_many(is_packed: bool, tmp_path: Path) -> None:
    """Published checkpoints have one tensor; transformers saves one tensor per expert."""
    write_model(tmp_path, CASES["qwen3_5_moe_text"]())
    expected = compute(ALONE, tmp_path, has_factors=False, has_adapter=False)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        if is_packed:
            pack_experts(tensors, prefix)
        else:
            unpack_experts(tensors, prefix)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert torch.equal(compute(ALONE, tmp_path, has_factors=False, has_adapter=False), expected)


def pack_experts(tensors: dict[str, Tensor], prefix: str) -> None:
    for packed, names in EXPERTS.items():
        if f"{prefix}.{packed}" not in tensors:
            parts = ([tensors.pop(f"{prefix}.{e}.{name}.weight") for name in names] for e in range(4))
            tensors[f"{prefix}.{packed}"] = torch.stack([torch.cat(each) for each in parts])


def unpack_experts(tensors: dict[str, Tensor], prefix: str) -> None:
    for packed, names in EXPERTS.items():
        if f"{prefix}.{packed}" in tensors:
            for e, whole in enumerate(tensors.pop(f"{prefix}.{packed}")):
                for name, part in zip(names, whole.chunk(len(names)), strict=True):
                    tensors[f"{prefix}.{e}.{name}.weight"] = part.contiguous()


# Keys of config.json as they were published.
PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3_next_80b": {
        "model_type": "qwen3_next",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mlp_only_layers": [],
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "num_attention_heads": 16,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "shared_expert_intermediate_size": 512,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "qwen3_5_multimodal": {
        "model_type": "qwen3_5",
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "qwen3_5_text",
            "attn_output_gate": True,
            "full_attention_interval": 2,
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "linear_num_value_heads": 16,
            "mamba_ssm_dtype": "float32",
            "mtp_num_hidden_layers": 1,
            "num_attention_heads": 8,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
                "partial_rotary_factor": 0.25,
                "rope_theta": 10000000,
                "rope_type": "default",
            },
            "vocab_size": 248320,
        },
    },
    "qwen3_5_moe": {"model_type": "qwen3_5_moe_text", "num_attention_heads": 16, "num_hidden_layers": 8},
    "qwen3_5_defaults": {"model_type": "qwen3_5_text"},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_configurations_are_read_as_transformers_reads_them(name: str) -> None:
    config = PUBLISHED[name]
    complete = transformers.AutoConfig.for_model(**config).to_dict()
    assert make_spec(config) == make_spec(complete)
