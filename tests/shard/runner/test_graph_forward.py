"""Kernels of prompts are recorded, and replayed for other prompts of the same length."""

import pytest

from tests.support.shard.checkpoints import write_model
from tests.support.shard.driver import configure
from tests.support.shard.family_cases.llamas import CASES
from tests.support.shard.scheduled import Result, Service, draw_ids, greedy, results
from tgis.shard.runner import graph_forward
from tgis.shard.runner.forward import Forward
from tgis.shard.runner.graph_forward import GraphForward
from tgis.shard.runner.interface import ModelRunner
from tgis.shard.runner.model_runner import HostModelRunner
from tgis.shard.startup.load import load

LENGTH = 70  # more tokens than in a step of which all parts are recorded


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    path = tmp_path_factory.mktemp("model")
    write_model(path, CASES["ministral3"]())
    return load(configure(path))


@pytest.fixture
def forward(runner: ModelRunner) -> GraphForward:
    """The runner's forward pass, without recorded kernels."""
    assert isinstance(runner, HostModelRunner)
    forward = GraphForward(runner.model, runner.forward.attention)
    runner.forward = forward
    return forward


def compute(runner: ModelRunner, *prompts: list[int]) -> list[Result]:
    """Return the results of sequences, of whose prompts LENGTH tokens are computed at once."""
    runner.reset()
    service = Service(runner, runner.info.num_blocks, 0, 1 << 20, max_prompt_tokens=LENGTH)
    sequences = [greedy(prompt, 3) for prompt in prompts]
    service.run(sequences)
    return results(service, sequences)


def compute_unrecorded(runner: ModelRunner, prompts: list[list[int]]) -> list[Result]:
    """Return the results of sequences that are computed alone, layer by layer."""
    assert isinstance(runner, HostModelRunner)
    recording = runner.forward
    runner.forward = Forward(recording.model, recording.attention)
    answers = [result for prompt in prompts for result in compute(runner, prompt)]
    runner.forward = recording
    return answers


def test_prompts_of_a_length_replay_the_same_kernels(runner: ModelRunner, forward: GraphForward) -> None:
    prompts = [draw_ids(seed, LENGTH) for seed in range(3)]
    graphs = []
    for prompt, expected in zip(prompts, compute_unrecorded(runner, prompts), strict=True):
        assert compute(runner, prompt) == [expected]
        graphs.append(forward.find_graph(LENGTH))
    assert graphs[0] is not None
    assert all(graph is graphs[0] for graph in graphs)


def test_steps_of_a_length_have_other_sequences_and_contexts(
    runner: ModelRunner, forward: GraphForward
) -> None:
    prompts = [draw_ids(seed, 2 * LENGTH + seed) for seed in range(4)]
    expected = compute_unrecorded(runner, prompts)
    assert compute(runner, *prompts) == expected
    assert forward.find_graph(LENGTH) is not None


def test_the_sizes_used_last_are_kept(
    runner: ModelRunner, forward: GraphForward, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_forward, "_MAX_KEPT", 2)
    for length in (LENGTH, LENGTH - 1, LENGTH, LENGTH - 2):
        compute(runner, draw_ids(0, length))
    kept = [forward.find_graph(LENGTH - less) is not None for less in range(3)]
    assert kept == [True, False, True]


def test_prompts_of_other_lengths_use_the_memory_of_the_longest(
    runner: ModelRunner, forward: GraphForward
) -> None:
    compute(runner, draw_ids(0, LENGTH))
    pool = forward._recorder.pool
    num_bytes = pool.num_bytes
    for length in (LENGTH - 1, LENGTH // 2, LENGTH // 4):
        compute(runner, draw_ids(0, length))
        assert forward.find_graph(length) is not None
    assert pool.num_bytes == num_bytes
