"""Compares draft heads with plain models of them over transformers' states, and checks that they change no
output."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.shard.adapted_drafts import check_adapted_outputs, write_adapters
from tests.support.shard.draft_heads import PlainHead, States
from tests.support.shard.draft_models import AlwaysDrafts
from tests.support.shard.drafting import draft_on_rank
from tests.support.shard.driver import configure
from tests.support.shard.eagle3_heads import make_eagle3
from tests.support.shard.eagle_heads import make_eagle
from tests.support.shard.ranks import Ranks
from tests.support.shard.relay import serve
from tests.support.shard.scheduled import Service, draw_ids, greedy
from tests.support.shard.speculator_scene import Base, Recorder, check_outputs, make_requests, write_base
from tests.support.shard.speculators import Heads, add_nan, remove, set_config, spoil
from tgis.shard.runner.model_runner import HostModelRunner
from tgis.shard.runner.proposers.draft_head import DraftHeadProposer
from tgis.shard.runner.proposers.graph_head_forward import GraphHeadForward
from tgis.shard.speculators.eagle3 import find_layers
from tgis.shard.speculators.interface import SpeculatorError
from tgis.shard.startup.load import load

Maker = Callable[[States, list[list[int]]], tuple[Heads, PlainHead]]
MAKERS: dict[str, Maker] = {
    "eagle3": lambda states, texts: make_eagle3(states, texts, [1, 2, 3]),
    "eagle3_vllm": lambda states, texts: make_eagle3(states, texts, [0, 1, 3], None, is_vllm=True),
    "eagle": make_eagle,
    "eagle_vllm": lambda states, texts: make_eagle(states, texts, 2, is_vllm=True),
}
LIKELY = ("eagle3", "eagle3_vllm", "eagle_vllm")
SLOW = ("eagle3_vllm", "eagle", "eagle_vllm")
CASES = [pytest.param(kind, marks=[pytest.mark.slow] * (kind in SLOW)) for kind in MAKERS]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return write_base(tmp_path_factory.mktemp("base"), num_hidden_layers=4)


@pytest.fixture(scope="module")
def states(base: Base) -> States:
    return States.load(base.directory)


def make(kind: str, base: Base, states: States) -> tuple[Heads, PlainHead]:
    return MAKERS[kind](states, [text.token_ids for text in base.texts])


def load_runner(base: Base, directory: Path, **options: Any) -> HostModelRunner:
    runner = load(configure(base.directory, speculator=str(directory), **options))
    assert isinstance(runner, HostModelRunner)
    assert isinstance(runner._speculator, DraftHeadProposer)
    return runner


def is_captured(runner: HostModelRunner) -> bool:
    """Return True if the head's steps and their scores are replayed as kernel graphs."""
    proposer = runner._speculator
    assert isinstance(proposer, DraftHeadProposer)
    forward = proposer._forward
    return isinstance(forward, GraphHeadForward) and bool(forward._steps and forward._scores)


@pytest.mark.parametrize("kind", CASES)
def test_proposals_are_the_plain_models_and_outputs_do_not_change(
    base: Base, states: States, kind: str, tmp_path: Path
) -> None:
    heads, plain = make(kind, base, states)
    runner = load_runner(base, heads.write(tmp_path))
    assert runner.info.max_drafts == heads.num_tokens
    recorder = Recorder(runner)
    router = check_outputs(runner, base)
    assert any(map(runner.forward.find_graph, range(1, 65)))  # type: ignore[attr-defined]
    assert is_captured(runner)
    assert router.num_right > 15 or kind not in LIKELY
    assert all(proposed or len(known) == 1 for known, proposed in recorder.proposed)
    plain.check(recorder.proposed)


@pytest.mark.parametrize("num_blocks", [60, pytest.param(14, marks=pytest.mark.slow)])
def test_shared_and_preempted_sequences(base: Base, states: States, num_blocks: int, tmp_path: Path) -> None:
    """Check proposals of sequences that share a prefix, also when blocks are few and sequences begin anew.
    Some sequences differ from each other at the first token of a block."""
    heads, plain = make("eagle3", base, states)
    runner = load_runner(base, heads.write(tmp_path), block_size=8)
    recorder = Recorder(runner)
    prefix = draw_ids(1, 40)
    texts = [(prefix if seed % 2 else prefix[:37]) + draw_ids(seed, 5) for seed in range(6)]
    truth = [greedy(text, 24) for text in texts]
    Service(runner, 60, 0, 1, max_prompt_tokens=64).run(truth)
    runner.reset()
    service = Service(runner, num_blocks, 0, 1, max_prompt_tokens=64, proposer=AlwaysDrafts())
    drafted = [greedy(text, 24) for text in texts]
    service.run(drafted)
    assert [each.token_ids for each in drafted] == [each.token_ids for each in truth]
    assert (service.scheduler.num_preemptions > 0) == (num_blocks == 14)
    # A new sequence, whose first step has only the newest token, begins with the states of another.
    service.run([greedy([*drafted[0].token_ids], 8)])
    assert len(recorder.proposed) > 80
    assert all(proposed for known, proposed in recorder.proposed)
    plain.check(recorder.proposed)


@pytest.mark.slow
def test_lost_shards(base: Base, states: States, tmp_path: Path) -> None:
    heads, plain = make("eagle3", base, states)
    runner = load_runner(base, heads.write(tmp_path), block_size=8)
    recorder = Recorder(runner)
    texts = [draw_ids(seed, 30) for seed in range(5)]
    truth = [greedy(text, 24) for text in texts]
    Service(runner, 60, 0, 1).run(truth)
    service = Service(runner, 60, 0, 1, proposer=AlwaysDrafts())
    drafted = [greedy(text, 24) for text in texts]
    service.run(drafted, loss=0.1)
    assert [each.token_ids for each in drafted] == [each.token_ids for each in truth]
    plain.check(recorder.proposed)


def test_a_row_without_states_gets_no_drafts(base: Base, states: States, tmp_path: Path) -> None:
    """A block whose tokens the head never computed makes the rows that share it unknown, and only these."""
    heads, plain = make("eagle3", base, states)
    runner = load_runner(base, heads.write(tmp_path), block_size=8)
    proposer = runner._speculator
    assert isinstance(proposer, DraftHeadProposer)
    service = Service(runner, 60, 0, 1, max_prompt_tokens=64, proposer=AlwaysDrafts())
    prefix = draw_ids(4, 32)
    service.run([greedy(prefix, 4)])
    proposer._cached.reset()
    recorder = Recorder(runner)
    service.run([greedy([*prefix, 7], 12)])
    assert not any(proposed for _, proposed in recorder.proposed)
    service.run([greedy(draw_ids(5, 33), 12)])
    assert any(proposed for _, proposed in recorder.proposed)
    plain.check(recorder.proposed)


@pytest.mark.slow
def test_wrong_proposals_change_nothing(base: Base, states: States, tmp_path: Path) -> None:
    heads, _ = make("eagle3", base, states)
    heads.tensors["lm_head.weight"].neg_()
    assert check_outputs(load_runner(base, heads.write(tmp_path)), base).num_right < 5


def add_norm(heads: Heads) -> None:
    heads.tensors["layers.0.input_layernorm.weight"] = torch.ones(64)


FAULTS: dict[str, tuple[str, Callable[[Heads], None], str]] = {
    "vocabulary": ("eagle3", set_config(vocab_size=400), "vocab_size 400 differs from the model's 403"),
    "width": ("eagle3", set_config(hidden_size=32), "has shape [64, 192], expected [32, 192]"),
    "target": ("eagle3", set_config(target_hidden_size=32), "target_hidden_size 32"),
    "layers": ("eagle3", set_config(num_hidden_layers=2), "num_hidden_layers 2"),
    "states": ("eagle3", set_config(eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state"),
    "no layer": ("eagle3", set_config(eagle_aux_hidden_state_layer_ids=[1, 2, 4]), "[1, 2, 4] are not 3"),
    "two layers": ("eagle3", set_config(eagle_aux_hidden_state_layer_ids=[1, 2]), "[1, 2] are not 3"),
    "default layers": ("eagle3", set_config(eagle_config=None), "[2, 2, 1] are not 3 of the model's 4"),
    "shape": ("eagle3", spoil("fc.weight", lambda x: x[:, :-1]), "expected [64, 192]"),
    "NaN": ("eagle3", spoil("midlayer.mlp.up_proj.weight", add_nan), "values that are not finite"),
    "infinite": ("eagle3", spoil("norm.weight", lambda x: x / 0), "norm.weight has values"),
    "missing": ("eagle3", remove("midlayer.hidden_norm.weight"), "midlayer.hidden_norm.weight is missing"),
    "no map": ("eagle3", remove("d2t"), "tensor d2t is missing: draft_vocab_size 250"),
    "map": ("eagle3", spoil("d2t", lambda x: x + 300), "d2t has tokens that the model's 403 do not include"),
    "other map": ("eagle3", spoil("t2d", lambda x: ~x), "d2t and t2d name different tokens"),
    "type of map": ("eagle3", spoil("d2t", lambda x: x.float()), "d2t is stored as float32"),
    "width of states": ("eagle", set_config(hidden_size=32), "hidden_size 32 differs from the model's 64"),
    "a norm": ("eagle", add_norm, "tensor layers.0.input_layernorm.weight is not read"),
    "bias": ("eagle", spoil("fc.bias", add_nan), "fc.bias has values that are not finite"),
    "length of map": ("eagle3", spoil("d2t", lambda x: x[1:]), "d2t has shape [249], expected [250]"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_head_that_does_not_fit_is_refused(base: Base, states: States, fault: str, tmp_path: Path) -> None:
    kind, change, text = FAULTS[fault]
    heads, _ = make(kind, base, states)
    change(heads)
    with pytest.raises(SpeculatorError) as error:
        load_runner(base, heads.write(tmp_path))
    assert text in str(error.value)
    assert str(error.value).startswith(f"--speculator {tmp_path}: ")
    assert "\n" not in str(error.value)


def test_layers_are_those_of_the_authors_by_default() -> None:
    assert find_layers({}, 32) == [2, 16, 29]
    key = "eagle_aux_hidden_state_layer_ids"
    assert find_layers({key: [1, 5, 9]}, 32) == [1, 5, 9]
    # vLLM counts inputs of layers, SGLang outputs.
    assert find_layers({"eagle_config": {key: [1, 46, 90]}}, 94) == find_layers({}, 94)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
def test_ranks_propose_the_same(base: Base, states: States, kind: str, ranks: Ranks, tmp_path: Path) -> None:
    """Two ranks sum in another order than one, so their outputs are compared with their own."""
    heads, _ = make(kind, base, states)
    [(generated, digests), (_, theirs)] = ranks.run(
        2, draft_on_rank, base.directory, heads.write(tmp_path), make_requests()
    )
    assert digests == theirs
    [(served, _), _] = ranks.run(2, serve, base.directory, 1, [[*make_requests()]], 16)
    assert generated == [request.generated for request in served[0]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
def test_rows_with_adapters_and_soft_prompts(base: Base, states: States, kind: str, tmp_path: Path) -> None:
    copies, options = write_adapters(base, tmp_path)
    heads, _ = make(kind, base, states)
    runner = load_runner(base, heads.write(tmp_path / "head"), **options)
    check_adapted_outputs(runner, runner, copies)
