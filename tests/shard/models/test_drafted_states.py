"""Models that keep a state, with right and wrong drafts: states after drafts that are not accepted are
dropped, so tokens and log-probabilities are those without drafts, with snapshots, preemption and lost
shards."""

import math
import random
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests.support.shard.checkpoints import write_llama, write_model
from tests.support.shard.driver import Request, Router, configure
from tests.support.shard.family_cases.all import CASES
from tests.support.shard.messages import Steps, integers, open_row
from tests.support.shard.pipelined import PipelinedService
from tests.support.shard.proposers import ProposerInShard
from tests.support.shard.scheduled import compute_alone, draw_ids, greedy, results
from tgis.router.scheduling.step import DraftResult, Drafts, Step
from tgis.router.sequence import Sequence
from tgis.shard.memory.state_cache import StateCache, StateShape, StateSizes
from tgis.shard.runner.model_runner import HostModelRunner
from tgis.shard.startup.load import load

FAMILIES = [
    "qwen3_5_text",
    pytest.param("granitemoehybrid", marks=pytest.mark.slow),
    pytest.param("mamba2", marks=pytest.mark.slow),
    pytest.param("falcon_h1", marks=pytest.mark.slow),
]
NUM_TOKENS = 14
Loader = Callable[[str], HostModelRunner]


class RandomDrafts:
    """Proposer that leaves a random number of drafts to the shards."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def begin(self, num_sequences: int, max_drafts: int) -> bool:
        return max_drafts > 0

    def propose(self, sequence: Sequence, max_drafts: int) -> Drafts:
        count = self._random.randint(0, 5)
        return Drafts(max_proposed=max(0, min(count, max_drafts)), waits=count > 0)

    def follows(self, sequence: Sequence, num_sequences: int) -> bool:
        return False

    def observe(self, step: Step, results: Iterable[DraftResult], seconds: float, follow_s: float) -> None:
        pass


def load_drafting(directory: Path, draft: Path) -> HostModelRunner:
    """Load a model with a speculator, whose drafts the test replaces."""
    options = {"block_size": 4, "kv_cache_tokens": 1024, "dtype": "float32"}
    runner = load(configure(directory, speculator=str(draft), **options))
    assert isinstance(runner, HostModelRunner)
    runner._builder._proposer = ProposerInShard(wrong=3)
    return runner


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("draft")
    write_llama(directory)
    return directory


@pytest.fixture(scope="module")
def load_family(draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Loader:
    loaded: dict[str, HostModelRunner] = {}

    def find(family: str) -> HostModelRunner:
        if family not in loaded:
            directory = tmp_path_factory.mktemp(family)
            write_model(directory, CASES[family]())
            loaded[family] = load_drafting(directory, draft)
        return loaded[family]

    return find


@pytest.mark.parametrize("family", FAMILIES)
def test_results_are_those_without_drafts(family: str, load_family: Loader) -> None:
    runner = load_family(family)
    proposer = runner._builder._proposer
    assert isinstance(proposer, ProposerInShard)
    num_accepted = num_proposed = num_preempted = 0
    for seed in range(4):
        rng = random.Random(seed)
        prefixes = [draw_ids(seed + i, 40) for i in range(2)]
        prompts = [
            rng.choice(prefixes)[: rng.randint(1, 40)] + draw_ids(i, rng.randint(1, 9)) for i in range(8)
        ]
        expected = {tuple(prompt): compute_alone(runner, prompt, NUM_TOKENS) for prompt in prompts}
        # These begin with snapshots that were taken in steps with drafts.
        continued = [[*tokens, 5] for tokens, _ in expected.values()]
        expected |= {tuple(prompt): compute_alone(runner, prompt, NUM_TOKENS) for prompt in continued}
        proposer.truths = [tokens for tokens, _ in expected.values()]
        runner.reset()
        service = PipelinedService(
            runner,
            num_blocks=24 if seed < 2 else 220,
            num_states=3 if seed < 2 else 16,
            interval=4,
            seed=seed,
            proposer=RandomDrafts(seed),
            depth=1 + seed % 2,
            losing=0.01 * (seed % 2),
        )
        first, second = ([greedy(each, NUM_TOKENS) for each in some] for some in (prompts, continued))
        service.run_all(first)
        service.run_all(second)
        sequences = first + second
        for sequence, result in zip(sequences, results(service, sequences), strict=True):
            assert result == expected[tuple(sequence.token_ids[: sequence.prompt_len])]
        num_accepted += service.scheduler.num_accepted_drafts
        num_proposed += service.scheduler.num_drafts
        num_preempted += service.scheduler.num_preemptions
    assert 20 < num_accepted < num_proposed - 20
    assert num_preempted
    states = runner._builder.states
    assert states is not None
    places = np.sort(np.concatenate((states.places, states.spares)))
    assert places.tolist() == [*range(len(states.memory))], "every place belongs to one slot or is spare"


def test_steps_with_drafts_are_replayed_as_kernel_graphs(load_family: Loader) -> None:
    """A captured step has the same number of tokens for any numbers of sequences and drafts."""
    runner = load_family("qwen3_5_text")
    proposer = runner._builder._proposer
    assert isinstance(proposer, ProposerInShard)
    runner.reset()
    prompts = [draw_ids(3, 5), draw_ids(4, 6)]
    plain = [Request(prompt, NUM_TOKENS) for prompt in prompts]
    Router(runner).run([*plain])
    truths = proposer.truths = [request.prompt + request.generated for request in plain]
    runner.reset()
    steps = Steps(runner.info.block_size, runner.info.num_blocks)
    opened = []
    for row, prompt in enumerate(prompts):
        opened.append(open_row(row, prompt, max_new_tokens=NUM_TOKENS))
        opened[-1].state_slot, opened[-1].state_source = row, -1
    runner.launch(steps.step([(0, 0, 5), (1, 0, 6)], opened)).answer()
    lengths = [6, 7]
    for limits in ({0: 1, 1: 2}, {0: 2, 1: 1}, {0: 3}, {1: 3}, {0: 1, 1: 2}):
        work = [(row, lengths[row] - 1, lengths[row]) for row in (0, 1)]
        response = runner.launch(steps.step(work, max_drafts=limits)).answer()
        counts = integers(response.num_tokens)
        assert sum(integers(response.num_drafts)) == 3
        ids = integers(response.token_ids)
        for row, count in enumerate(counts):
            assert ids[:count] == truths[row][lengths[row] : lengths[row] + count]
            ids = ids[count:]
            lengths[row] += count
    assert runner.forward.find_graph(5) is not None  # type: ignore[attr-defined]


def test_a_draft_that_spoils_logits_changes_no_state(draft: Path, tmp_path: Path) -> None:
    """The last token is computed again without the draft, from the state before it."""
    write_model(tmp_path, CASES["qwen3_5_text"]())
    plain = load_drafting(tmp_path, draft)
    known = Request([5, 6, 7], NUM_TOKENS, row=0)
    Router(plain).run([known])
    poison = next(token for token in range(3, 99) if token not in known.prompt + known.generated)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.embed_tokens.weight"][poison] = math.nan
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    runner = load_drafting(tmp_path, draft)
    proposer = runner._builder._proposer
    assert isinstance(proposer, ProposerInShard)
    proposer.truths, proposer.wrong, proposer.wrong_id = [known.prompt + known.generated], 1, poison
    steps = Steps(runner.info.block_size, runner.info.num_blocks)
    opened = open_row(0, known.prompt, max_new_tokens=NUM_TOKENS)
    opened.state_source = -1
    sampled = integers(runner.launch(steps.step([(0, 0, 3)], [opened])).answer().token_ids)
    recomputed = 0
    while len(sampled) < NUM_TOKENS - 4:
        length = 3 + len(sampled)
        response = runner.launch(steps.step([(0, length - 1, length)], max_drafts={0: 3})).answer()
        assert not response.errors
        sampled += integers(response.token_ids)
        recomputed += len(runner._recomputed)
    assert sampled == known.generated[: len(sampled)]
    assert recomputed, "drafts spoil the logits before them"


def test_sequences_share_the_spare_places() -> None:
    states = StateCache(StateShape(1, StateSizes(1, 1, 1, 1, 2)), 4, num_spares=6)
    for asked, given in (
        ([2, 2, 1], [2, 2, 0]),
        ([0, 5, 1], [0, 5, 0]),
        ([9, 0], [5, 0]),
        ([1, 1, 1, 1], [1, 1, 1, 0]),
        ([3, 4, 0], [3, 1, 0]),
        ([4, 1, 1], [4, 0, 0]),
    ):
        assert states.limit_drafts(np.array(asked)).tolist() == given


def test_the_memory_of_states_includes_those_after_drafts(load_family: Loader) -> None:
    runner = load_family("qwen3_5_text")
    states = runner._builder.states
    assert states is not None
    assert runner.info.max_drafting_rows == 8
    assert len(states.spares) == 8 * (runner.info.max_drafts + 1)
    assert states.num_slots == runner.info.num_states == 16
