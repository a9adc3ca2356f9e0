"""Models with Mamba layers behind the router's scheduler: snapshots of states, preemption and lost shards
never change a token or a log-probability."""

import random
from pathlib import Path

import pytest
import torch
import transformers

from tests.support.greedy import generate
from tests.support.shard.checkpoints import write_model
from tests.support.shard.driver import configure
from tests.support.shard.family_cases.hybrids import CASES
from tests.support.shard.family_cases.llamas import hybrid
from tests.support.shard.family_oracle import describe, load_model
from tests.support.shard.scheduled import (
    Service,
    check_graphs_of_steps,
    compute_alone,
    draw_ids,
    greedy,
    results,
)
from tests.support.shard.stepping import read_config
from tgis.shard.models.interface import UnsupportedModelError
from tgis.shard.models.registry import check_sharding, make_spec
from tgis.shard.runner.interface import ModelRunner
from tgis.shard.startup.load import load

BLOCK, INTERVAL, NEW_TOKENS = 4, 16, 5
KINDS = ["linear_attention", "full_attention", "linear_attention"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hybrid")
    config = transformers.GraniteMoeHybridConfig(
        **hybrid(num_hidden_layers=3, layer_types=KINDS, num_local_experts=0, mamba_n_heads=2)
    )
    write_model(directory, config)
    return directory


@pytest.fixture(scope="module")
def runner(checkpoint: Path) -> ModelRunner:
    return load(configure(checkpoint, block_size=BLOCK, kv_cache_tokens=1024, dtype="float32"))


def test_prompts_of_every_length_equal_transformers(checkpoint: Path, runner: ModelRunner) -> None:
    """At and around ends of blocks, intervals and transformers' chunks; the second time from a snapshot."""
    model = load_model(checkpoint, transformers.AutoConfig.from_pretrained(checkpoint))
    service = Service(runner, 200, 16, INTERVAL)
    for length in (1, 3, 4, 5, 8, 9, 15, 16, 17, 20, 31, 32, 33, 47, 64, 65):
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


@pytest.mark.parametrize("seed", range(4))
def test_results_never_depend_on_scheduling(runner: ModelRunner, seed: int) -> None:
    check_scheduling(runner, seed)


@pytest.mark.parametrize(
    "case",
    ["mamba2", *(pytest.param(case, marks=pytest.mark.slow) for case in ("nemotron_h_experts", "falcon_h1"))],
)
def test_results_of_other_families_never_depend_on_scheduling(case: str, tmp_path: Path) -> None:
    write_model(tmp_path, CASES[case]())
    options = {"block_size": BLOCK, "kv_cache_tokens": 1024, "dtype": "float32"}
    check_scheduling(load(configure(tmp_path, **options)), 1)


def check_scheduling(runner: ModelRunner, seed: int) -> None:
    """Compare with few blocks and slots, shared prefixes, random chunks, and a shard that is lost now and
    then."""
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
    scheduler = service.scheduler
    assert scheduler.num_preemptions
    assert scheduler.num_cache_hits
    states = scheduler.pool.states
    assert states is not None
    assert states.resource_count.is_balanced


def test_small_steps_are_replayed_as_kernel_graphs(runner: ModelRunner) -> None:
    check_graphs_of_steps(runner, INTERVAL)


def test_memory_holds_a_state_for_each_sequence_and_as_many_snapshots(runner: ModelRunner) -> None:
    states = runner._builder.states  # type: ignore[attr-defined]
    assert runner.info.num_states == states.num_slots == 16
    layers = 2 * 4 * ((2 * 32 * 16) + 3 * (64 + 2 * 16))
    assert states.shape.num_bytes == layers
    assert states.memory.nbytes == 16 * layers
    assert not torch.isnan(states.memory).any()


REFUSED = {
    "mamba_n_heads": (3, "3 Mamba heads in 1 groups do not divide 64 channels"),
    "mamba_n_groups": (3, "2 Mamba heads in 3 groups do not divide 64 channels"),
    "mamba_d_head": (16, "mamba_d_head 16 of the configuration is not supported"),
    "layer_types": (["linear_attention"] * 2, "layer_types .* of the configuration are not supported"),
    "hidden_act": ("gelu", "hidden_act 'gelu' of the configuration is not supported"),
    "position_embedding_type": ("alibi", "position_embedding_type 'alibi' of the configuration"),
    "time_step_limit": ([0.0], r"time_step_limit \[0.0\] of the configuration"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_refuses_what_it_cannot_compute(key: str, checkpoint: Path) -> None:
    value, text = REFUSED[key]
    config = read_config(checkpoint)
    make_spec(config)
    with pytest.raises(UnsupportedModelError, match=text):
        make_spec({**config, key: value})


def test_ranks_that_cannot_share_the_heads_are_refused(checkpoint: Path) -> None:
    with pytest.raises(
        UnsupportedModelError, match="2 Mamba heads in 1 groups cannot be split over 4 shards"
    ):
        check_sharding(make_spec(read_config(checkpoint)), 4)


def test_layer_types_of_older_configurations(checkpoint: Path) -> None:
    config = read_config(checkpoint)
    del config["layer_types"]
    older = {**config, "layers_block_type": ["mamba", "attention", "mamba"], "time_step_limit": None}
    assert make_spec(older) == make_spec(read_config(checkpoint))
