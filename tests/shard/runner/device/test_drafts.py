"""Check drafts that a device verifies: against the host's answers to the same steps, in steps that overlap,
and with graphs. `test_verify_drafts` has the outputs."""

import math
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.cuda.capturing_device import CapturingDevice
from tests.support.cuda.late_device import LateDevice
from tests.support.cuda.runners import load_captured, load_late
from tests.support.shard import other_device
from tests.support.shard.checkpoints import write_llama, write_model
from tests.support.shard.drafting import DraftingRouter, Foreseen
from tests.support.shard.driver import Request, Router, configure, opening, prompts
from tests.support.shard.family_cases.all import CASES
from tests.support.shard.messages import (
    EVERY_PARAMETER,
    GREEDY,
    SAMPLE,
    Steps,
    floats,
    integers,
    make_bias,
    rows_of_tokens,
    top_tokens,
)
from tests.support.shard.pipelined import PipelinedService
from tests.support.tokenizers.trained import write_byte_level
from tgis.pb import shard_pb2 as pb
from tgis.router.scheduling.step import NO_DRAFTS, DraftResult, Drafts, Step
from tgis.router.sequence import Sampling, Sequence, Stopping
from tgis.shard.runner.device.model_runner import DeviceModelRunner
from tgis.shard.runner.graph_sizes import GraphSize
from tgis.shard.runner.interface import ModelRunner, Pending
from tgis.shard.runner.model_runner import ComputedStep
from tgis.shard.startup.load import load

VOCAB_SIZE = 403
EOS = [2, 11, 30, 77, 150, 200, 301, 350]
GRAMMAR = '%llguidance {"no_forcing": true}\nstart: /([a-c]{1,3} ){2,9}\\./'
SAMPLINGS: list[dict[str, Any]] = [
    GREEDY,
    {**GREEDY, "repetition_penalty": 1.6, "min_new_tokens": 5},
    {**GREEDY, "presence_penalty": 1.5, "frequency_penalty": 0.75, **make_bias({7: 9.0, 2: 3.0})},
    {**GREEDY, "length_penalty_start": 3, "length_penalty_factor": 1.5},
    {**GREEDY, "watermark_gamma": 0.5, "watermark_delta": 6.0},
    SAMPLE,
    EVERY_PARAMETER,
    {**SAMPLE, "temperature": 0.6, "min_p": 0.05, "frequency_penalty": 0.5, "min_new_tokens": 4},
    {**SAMPLE, "top_k": 5, "top_p": 0.9, "typical_p": 0.9, "repetition_penalty": 1.3},
]
EVERYTHING = {"logprobs": True, "ranks": True, "top_n": 3}
DETAILS: list[dict[str, Any]] = [EVERYTHING, {}, {**EVERYTHING, "raw": True}, {"logprobs": True}]
# With a draft graph for each size. The last two also compute prompts.
SIZES = (GraphSize(3), GraphSize(8), GraphSize(3, 16), GraphSize(8, 48))
DECODERS = ("llama", "gpt2", "gemma2", "bloom")
PREFIX = list(range(40, 59))


pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("drafts")
    write_llama(directory, vocab_size=VOCAB_SIZE)
    write_byte_level(directory, VOCAB_SIZE - 3)
    return directory


def make_requests(is_guided: bool, is_encoder_decoder: bool = False) -> list[Foreseen]:
    requests = []
    for i, prompt in enumerate(prompts(3, 14, longest=25)):
        ids, encoder = ([0], prompt) if is_encoder_decoder else (prompt, [])
        sampling = {**SAMPLINGS[i % len(SAMPLINGS)], "seed": i}
        grammar = GRAMMAR if is_guided and i % 3 == 0 else None
        eos = EOS if i % 4 else []
        requests.append(Foreseen(ids, 8 + i, eos, sampling, DETAILS[i % 4], grammar, encoder))
    return requests


@dataclass
class BothRunners:
    """Runner that checks the device's answer to each step against the host's."""

    host: ModelRunner
    device: ModelRunner
    max_pending: int = 1

    @property
    def info(self) -> pb.InfoResponse:
        return self.host.info

    def launch(self, request: pb.StepRequest) -> ComputedStep:
        answer, expected = (each.launch(request).answer() for each in (self.device, self.host))
        assert read(answer) == read(expected)
        assert read_details(answer) == pytest.approx(read_details(expected), abs=1e-4, nan_ok=True)
        assert bool(answer.num_tokens) == bool(expected.num_tokens)
        work = zip(integers(request.starts), integers(request.ends), strict=True)
        if all(end - start == 1 for start, end in work):  # otherwise, the device computes prompts last
            assert answer.digest == expected.digest
        return ComputedStep(answer)


def read(response: pb.StepResponse) -> tuple[dict[int, list[tuple[int, bool]]], list[tuple[int, str]]]:
    """Return the tokens of each row, with its end, and the errors."""
    tokens = dict[int, list[tuple[int, bool]]]()
    for (row, ended), token in zip(rows_of_tokens(response), integers(response.token_ids), strict=True):
        tokens.setdefault(row, []).append((token, ended))
    return tokens, [(error.row, error.message) for error in response.errors]


def read_details(response: pb.StepResponse) -> dict[tuple[int, int, int], float]:
    """Return the log-probability, the rank and the scores of the top tokens of each row's tokens."""
    numbers = dict[tuple[int, int, int], float]()
    rows, count = rows_of_tokens(response), Counter[int]()
    logprobs = floats(response.logprobs) or [math.nan] * len(rows)
    ranks = integers(response.ranks) or [0] * len(rows)
    tops = top_tokens(response.top_tokens) or [[]] * len(rows)
    for (row, _), logprob, rank, top in zip(rows, logprobs, ranks, tops, strict=True):
        for i, number in enumerate([logprob, rank, *(score for _, score in top)]):
            numbers[row, count[row], i] = number
        count[row] += 1
    return numbers


@pytest.mark.parametrize(
    ("case", "is_captured"),
    [
        ("llama", False),
        *(pytest.param(case, True, marks=pytest.mark.slow) for case in (*DECODERS, "t5")),
    ],
)
def test_answers_are_those_of_the_host(directory: Path, tmp_path: Path, case: str, is_captured: bool) -> None:
    """Check each step of rows with every parameter, right and wrong drafts, prompts beside them, and ends."""
    if case != "llama":
        write_model(tmp_path, CASES[case]())
    config = configure(directory if case == "llama" else tmp_path, speculate=6)
    host = load(config)
    device = load_late(config, CapturingDevice() if is_captured else LateDevice())
    device.graphs.capture(SIZES[: len(SIZES) if case in DECODERS else 2] if is_captured else [])
    device.reset()
    has_encoder = host.model.spec.is_encoder_decoder
    count = 8 if is_captured and case != "llama" else 10  # emulated graphs are slow
    plain, guessed = (make_requests(case == "llama", has_encoder)[:count] for _ in range(2))
    Router(host, seed=1).run(list(plain))
    for request, known in zip(guessed, plain, strict=True):
        request.truth = known.generated
    host.reset()
    router = DraftingRouter(BothRunners(host, device), luck=0.7, seed=2)  # type: ignore[arg-type]
    router.run([*guessed])
    assert [each.generated for each in guessed] == [each.generated for each in plain]
    assert router.num_guessed > router.num_right > count
    paths = {response.path for response in router.responses} - {pb.STEP_PATH_UNSPECIFIED}
    if is_captured:  # some steps have more drafts than the largest batch has rows
        assert pb.STEP_PATH_GRAPH in paths
        assert paths <= {pb.STEP_PATH_GRAPH, pb.STEP_PATH_SIZE, pb.STEP_PATH_PROMPT}
    else:
        assert paths <= {pb.STEP_PATH_MODEL, pb.STEP_PATH_PROMPT}


class KnownTexts:
    """Proposer of drafts from the texts that sequences will generate, with one wrong token of four."""

    def __init__(self, truths: list[list[int]]) -> None:
        self.truths = truths
        self.left = 0

    def begin(self, num_sequences: int, max_drafts: int) -> bool:
        self.left = max_drafts
        return True

    def propose(self, sequence: Sequence, max_drafts: int) -> Drafts:
        known = sequence.token_ids
        allowed = min(self.left, max_drafts, 3)
        if allowed <= 0 or len(known) % 3 == 0:
            return NO_DRAFTS
        [truth, *_] = [truth for truth in self.truths if truth[: len(known)] == known]
        ids = [7 if place % 4 == 0 else truth[place] for place in range(len(known), len(truth))][:allowed]
        self.left -= 0 if sequence.num_unanswered else len(ids)
        return Drafts(ids) if ids else NO_DRAFTS

    def follows(self, sequence: Sequence, num_sequences: int) -> bool:
        return False

    def observe(self, step: Step, results: Iterable[DraftResult], seconds: float, follow_s: float) -> None:
        pass


@dataclass
class WatchedRunner:
    """Runner that checks that launches do not wait for the device."""

    runner: DeviceModelRunner
    device: LateDevice
    paths: list[pb.StepPath]
    num_overlapping: int = 0
    """Number of steps with drafts that were launched while another was not computed."""

    @property
    def info(self) -> pb.InfoResponse:
        return self.runner.info

    def launch(self, request: pb.StepRequest) -> Pending:
        before, is_busy = self.device._num_done, self.device._num_done < self.device._num_queued
        pending = self.runner.launch(request)
        assert self.device._num_done == before, "the launch waited for the device"
        self.num_overlapping += is_busy and bool(request.draft_ids)
        self.paths.append(pending._response.path)  # type: ignore[attr-defined]
        return pending

    def reset(self) -> None:
        self.runner.reset()


def make_sequences() -> list[Sequence]:
    """Return sequences of which most share blocks of their prompts in the prefix cache."""
    rng = random.Random(5)
    sequences = []
    for i in range(12):
        ids = [*(PREFIX if i % 3 else []), *(rng.randrange(3, 99) for _ in range(1 + i % 5))]
        sampling = Sampling(greedy=i % 2 == 0, seed=i, repetition_penalty=1.2 if i % 5 == 0 else 1.0)
        sequences.append(Sequence(ids, Stopping(10 + i), sampling))
    return sequences


@pytest.mark.parametrize("is_captured", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_steps_of_other_rows_are_not_delayed(directory: Path, is_captured: bool) -> None:
    """Run the router's scheduler with two steps in flight. Check that no launch waits for the device, that
    steps with drafts overlap others, and that tokens are those without drafts."""
    config = configure(directory, speculate=3, cuda_graphs=None if is_captured else "0", block_size=8)
    host = load(config)
    plain, drafted = make_sequences(), make_sequences()
    PipelinedService(host, 60, 0, 0, seed=1).run_all(plain)
    device = LateDevice()
    runner = load_captured(config, device=device) if is_captured else load_late(config, device)
    runner.reset()
    watched = WatchedRunner(runner, device, [])
    proposer = KnownTexts([each.token_ids for each in plain])
    service = PipelinedService(watched, 60, 0, 0, seed=2, proposer=proposer)  # type: ignore[arg-type]
    service.run_all(drafted)
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
    assert service.scheduler.num_drafts > service.scheduler.num_accepted_drafts > 20
    assert service.scheduler.num_cache_hits > len(PREFIX)
    assert watched.num_overlapping > 5
    assert set(watched.paths) <= {pb.STEP_PATH_UNSPECIFIED, pb.STEP_PATH_GRAPH} if is_captured else True


def start(runner: DeviceModelRunner) -> tuple[Steps, list[int]]:
    """Open row 0. Return the steps, and the tokens that the row generates."""
    runner.reset()
    known = Request([5, 6, 7], 12, row=0)
    Router(runner).run([known])
    runner.reset()
    steps = Steps(runner.info.block_size, runner.info.num_blocks)
    row = opening(Request([5, 6, 7], 12, row=0))
    assert integers(runner.launch(steps.step([(0, 0, 3)], [row])).answer().token_ids) == known.generated[:1]
    return steps, known.generated


@pytest.fixture(scope="module")
def late(directory: Path) -> DeviceModelRunner:
    return load_late(configure(directory))


def test_a_step_that_needs_the_accepted_drafts_waits(late: DeviceModelRunner) -> None:
    """Check a rank whose answers are late: the router has those of another rank, and sends the next step."""
    steps, tokens = start(late)
    first = late.launch(steps.step([(0, 3, 4)], drafts={0: [*tokens[1:3], 9, 9]}))
    second = late.launch(steps.step([(0, 6, 7)], drafts={0: tokens[4:6]}))
    third = late.launch(steps.step([(0, 9, 10)]))
    fourth = late.launch(steps.step([(0, 10, 11)]))
    answers = [each.answer() for each in (first, second, third, fourth)]
    expected = [tokens[1:4], tokens[4:7], tokens[7:8], tokens[8:9]]
    assert [integers(each.token_ids) for each in answers] == expected
    assert [integers(each.num_tokens) for each in answers] == [[3], [3], [], []]


def test_a_row_changes_hands_while_its_drafts_are_in_flight(late: DeviceModelRunner) -> None:
    steps, tokens = start(late)
    other = Request([9, 8, 7, 6], 5, row=0)
    first = late.launch(steps.step([(0, 3, 4)], drafts={0: tokens[1:4]}))
    second = late.launch(steps.step([(0, 0, 4)], [opening(other)], closed=[0]))
    third = late.launch(steps.step([(0, 4, 5)]))
    assert not late._launched[0].is_finished, "the next sequence does not depend on the drafts"
    assert integers(first.answer().token_ids) == tokens[1:5]
    got = [token for each in (second, third) for token in integers(each.answer().token_ids)]
    late.reset()
    Router(late).run([alone := Request([9, 8, 7, 6], 5)])
    assert got == alone.generated[:2]


def test_more_drafts_than_rows_need_no_graph(directory: Path) -> None:
    """Check a step with more tokens than the largest batch has rows."""
    runner = load_captured(configure(directory, speculate=10))
    steps, tokens = start(runner)
    response = runner.launch(steps.step([(0, 3, 4)], drafts={0: tokens[1:11]})).answer()
    assert integers(response.token_ids) == tokens[1:12]
    assert response.path == pb.STEP_PATH_SIZE


@pytest.mark.slow
def test_nothing_is_left_on_the_host(directory: Path) -> None:
    """Check that every operator's tensors are on the device, also with masks after drafts."""
    host = load(configure(directory))
    plain, guessed = make_requests(is_guided=True)[:4], make_requests(is_guided=True)[:4]
    Router(host, seed=1).run(list(plain))
    for request, known in zip(guessed, plain, strict=True):
        request.truth = known.generated
    with other_device.present() as device:
        runner = load_late(configure(directory, kv_cache_tokens=1024), LateDevice(device))
        router = DraftingRouter(runner, luck=0.8, seed=1)
        router.run([*guessed])
    assert [each.generated for each in guessed] == [each.generated for each in plain]
    assert router.num_right > 3
