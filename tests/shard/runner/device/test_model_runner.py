"""Check rows of all kinds on a device that computes only when it is waited for, against a runner on the host.

The tests cover every pipeline depth, with and without graphs, preempted and cancelled rows, and answers from
another thread."""

import itertools
import math
import threading
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.cuda.late_device import LateDevice
from tests.support.cuda.runners import load_captured, load_late
from tests.support.shard import other_device
from tests.support.shard.checkpoints import write_llama
from tests.support.shard.driver import Request, Router, configure, opening, prompts
from tests.support.shard.messages import GREEDY, SAMPLE, Steps, integers, make_bias, open_row
from tests.support.shard.portable import plain
from tests.support.tokenizers.trained import write_byte_level
from tgis.pb import shard_pb2 as pb
from tgis.shard.kernels.cuda.step_state import MAX_TOP_N
from tgis.shard.runner.device.model_runner import DeviceModelRunner
from tgis.shard.runner.interface import Pending
from tgis.shard.startup.load import load

VOCAB_SIZE = 403
EOS = [2, 11, 30, 77, 150, 200, 301, 350]
MANY = [*EOS, *range(250, 400)]  # more stop IDs than the device holds
GRAMMAR = '%llguidance {"no_forcing": true}\nstart: /([a-c]{1,3} ){2,9}\\./'
SHORT_GRAMMAR = '%llguidance {"no_forcing": true}\nstart: /ab c/'
LOADERS: dict[str, Callable[..., DeviceModelRunner]] = {"late": load_late, "captured": load_captured}

# Parameters that the device samples itself.
FAST: list[dict[str, Any]] = [
    GREEDY,
    {**GREEDY, "repetition_penalty": 1.6},
    {**GREEDY, "presence_penalty": 1.5, "frequency_penalty": 0.75},
    {**GREEDY, **make_bias({7: 9.0, 2: -9.0, 90: 4.0}), "min_new_tokens": 5},
    SAMPLE,
    {**SAMPLE, "temperature": 0.6, "min_p": 0.05, "frequency_penalty": 0.5},
    {**SAMPLE, "repetition_penalty": 1.3, "length_penalty_start": 3, "length_penalty_factor": 1.3},
    {**SAMPLE, **make_bias({i: i / 80 for i in range(300)})},
    {**SAMPLE, "top_k": 5, "presence_penalty": 1.0},
    {**SAMPLE, "top_p": 0.8, "repetition_penalty": 1.4},
    {**SAMPLE, "top_k": 50, "top_p": 0.9, "typical_p": 0.7, "temperature": 1.5},
]
# Parameters whose masks the host draws.
MARKED: list[dict[str, Any]] = [
    {**GREEDY, "watermark_gamma": 0.5, "watermark_delta": 2.5, "frequency_penalty": 0.5},
    {**SAMPLE, "watermark_gamma": 0.3, "watermark_delta": 1.5, "top_p": 0.9},
]


pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("device")
    write_llama(directory, vocab_size=VOCAB_SIZE)
    write_byte_level(directory, VOCAB_SIZE - 3)
    return directory


@pytest.fixture(scope="module", params=LOADERS)
def either(request: pytest.FixtureRequest, directory: Path) -> DeviceModelRunner:
    return LOADERS[request.param](configure(directory))


@pytest.fixture
def runner(either: DeviceModelRunner) -> DeviceModelRunner:
    either.reset()
    return either


def make_requests(samplings: list[dict[str, Any]], count: int = 16) -> list[Request]:
    """Return rows of every kind, some with grammars, token details, input details and many stop IDs."""
    requests = []
    for i, prompt in enumerate(prompts(3, count, longest=25)):
        sampling = {**samplings[i % len(samplings)], "seed": i}
        requests.append(Request(prompt, 8 + i % 7, EOS if i % 4 else [], sampling))
    return requests


def make_guided() -> list[Request]:
    """Return rows of which most have grammars; some grammars allow only the end token before it is
    permitted."""
    requests = make_requests([*FAST, {**GREEDY, "min_new_tokens": 12}], 18)
    for i, request in enumerate(requests):
        request.grammar = [GRAMMAR, SHORT_GRAMMAR, None][i % 3] if i % 9 != 8 else SHORT_GRAMMAR
        request.eos, request.max_new_tokens = EOS, 14
    return requests


def make_crowd() -> list[Request]:
    requests = make_requests([*FAST, *MARKED], 22)
    for i, request in enumerate(requests):
        request.grammar = GRAMMAR if i % 5 == 4 else None
        if i % 7 == 3:
            request.details = {"logprobs": True, "ranks": True, "top_n": 2, "input_tokens": i % 2 == 1}
        if i % 7 == 5:
            request.details = {"logprobs": True, "ranks": True, "top_n": 5, "raw": True}
        if i % 9 == 8:
            request.eos = MANY
    return requests


@pytest.fixture(scope="module")
def expected(directory: Path) -> dict[str, list[Request]]:
    """Return the answers of a runner on the host, which serves one request after the other."""
    host = load(configure(directory), on=plain(torch.device("cpu")))
    result = {"fast": make_requests(FAST), "guided": make_guided(), "crowd": make_crowd()}
    for request in itertools.chain(*result.values()):
        Router(host, depth=1, whole=True).run([request])
        host.reset()
    assert any(len(request.generated) < request.max_new_tokens for request in result["fast"])
    return result


def check(requests: list[Request], expected: list[Request]) -> None:
    for request, known in zip(requests, expected, strict=True):
        assert request.generated == known.generated
        assert request.ranks == known.ranks
        assert request.logprobs == pytest.approx(known.logprobs, abs=1e-4, nan_ok=True)
        for top, known_top in zip(request.tops, known.tops, strict=True):
            assert [token for token, _ in top] == [token for token, _ in known_top]
            assert [value for _, value in top] == pytest.approx([value for _, value in known_top], abs=1e-4)


def check_tokens(requests: list[Request], expected: list[Request]) -> None:
    assert [each.generated for each in requests] == [each.generated for each in expected]


def again(requests: list[Request]) -> list[Request]:
    """Return the requests as they were before they were answered."""
    requests = deepcopy(requests)
    for request in requests:
        request.generated, request.logprobs, request.ranks, request.tops = [], [], [], []
        request.row, request.ended = -1, False
    return requests


@pytest.mark.parametrize("depth", [1, pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("kind", ["fast", "guided", "crowd"])
def test_tokens_are_those_of_the_host(
    runner: DeviceModelRunner, expected: dict[str, list[Request]], kind: str, depth: int
) -> None:
    requests = again(expected[kind])
    Router(runner, seed=depth, depth=depth).run(list(requests))
    check(requests, expected[kind])


def test_blocks_that_are_reserved_change_nothing(
    runner: DeviceModelRunner, expected: dict[str, list[Request]]
) -> None:
    """Check that rows are given blocks for 96 tokens at their first step, even for a prompt of one token."""
    requests, router = again(expected["crowd"]), Router(runner, seed=5)
    router.steps.reserved_len = 96
    router.run(list(requests))
    check(requests, expected["crowd"])
    short = Request([5], 4)
    Router(runner).run([one := deepcopy(short)])
    router = Router(runner)
    router.steps.reserved_len = 96
    router.run([short])
    assert short.generated == one.generated


def test_interrupted_rows_go_on(runner: DeviceModelRunner, expected: dict[str, list[Request]]) -> None:
    requests = again(expected["crowd"])
    Router(runner, seed=2).run(list(requests), stop_after=9)
    assert any(0 < len(request.generated) < 8 for request in requests)
    runner.reset()
    Router(runner, seed=3).run([request for request in requests if not request.ended])
    check_tokens(requests, expected["crowd"])


class Canceller(Router):
    """Close rows at random times and request the rest of their tokens later.

    Other requests reuse the rows at once."""

    num_cancelled = 0

    def __init__(self, runner: DeviceModelRunner, waiting: list[Request], seed: int) -> None:
        super().__init__(runner, seed)
        self.waiting, self.owners = waiting, dict[int, dict[int, Request]]()
        self.latest = list(waiting)
        """Return what each request has become."""

    def send(self, running: list[Request], fresh: list[Request]) -> None:
        super().send(running, fresh)
        self.owners[self.steps.step_id] = {request.row: request for request in running}
        if running and self.rng.random() < 0.4:
            self.cancel(running.pop(self.rng.randrange(len(running))))

    def cancel(self, request: Request) -> None:
        rest = deepcopy(request)
        self.num_cancelled += 1
        self.latest = [rest if each is request else each for each in self.latest]
        self.rows.append(request.row)
        self.closed.append(request.row)
        self.release(request.row)
        self.waiting.append(rest)

    def read(self, response: pb.StepResponse, running: list[Request]) -> None:
        assert not response.errors
        owners = self.owners.pop(response.step_id)
        for row, token, ended in zip(
            integers(response.rows), integers(response.token_ids), response.ended, strict=True
        ):
            request = owners[row]
            if not any(request is each for each in running):
                continue
            request.generated.append(token)
            if ended:
                request.ended = True
                running.remove(request)
                self.rows.append(row)
                self.closed.append(row)
                self.release(row)


def test_rows_change_hands_while_steps_are_in_flight(
    runner: DeviceModelRunner, expected: dict[str, list[Request]]
) -> None:
    known = [*expected["fast"], *expected["crowd"]]
    waiting = again(known)
    router = Canceller(runner, waiting, seed=1)
    router.run(waiting)
    assert router.num_cancelled > 20
    check_tokens(router.latest, known)


@pytest.mark.parametrize("ends", [True, False])
def test_answers_for_a_sequence_that_is_gone(runner: DeviceModelRunner, ends: bool) -> None:
    """Check that a late token neither ends the row's next sequence nor writes to its prompt."""
    steps = Steps(runner.info.block_size, runner.info.num_blocks)
    says_20 = {**GREEDY, **make_bias({20: 500.0})}
    gone, other = Request([5, 6], 5, [20] if ends else [], says_20), Request([7, 8, 9, 10], 5)
    gone.row = other.row = 0
    Router(runner, depth=1, whole=True).run([alone := Request([7, 8, 9, 10], 5)])
    runner.reset()
    first = runner.launch(steps.step([(0, 0, 2)], [opening(gone)]))
    second = runner.launch(steps.step([(0, 0, 2)], [opening(other)], closed=[0]))
    response = first.answer()
    assert (integers(response.token_ids), list(response.ended)) == ([20], [int(ends)])
    assert not second.answer().rows
    third = runner.launch(steps.step([(0, 2, 4)])).answer()
    assert integers(third.token_ids) == alone.generated[:1]


def test_blocks_of_a_sequence_that_has_ended_are_not_its_successor_s(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a block table entry is uploaded once, because a GPU may keep either of two values."""
    runner, uploaded = load_late(configure(directory)), list[list[tuple[int, int]]]()
    take = runner._table.take_blocks

    def watch() -> Any:
        blocks = take()
        uploaded.append([(row, place) for row, place, _ in blocks.tolist()])
        return blocks

    monkeypatch.setattr(runner._table, "take_blocks", watch)
    size = runner.info.block_size
    steps = Steps(size, runner.info.num_blocks)
    ends = Request([5] * size, 5, [20], {**GREEDY, **make_bias({20: 500.0})}, row=0)
    runner.launch(steps.step([(0, 0, size)], [opening(ends)])).answer()
    late = runner.launch(steps.step([(0, size, size + 1)]))  # the router has not read the end yet
    assert not late.answer().rows
    heir = Request([6] * (2 * size), 5, row=0)
    runner.launch(steps.step([(0, 0, 2 * size)], [opening(heir)], closed=[0])).answer()
    assert uploaded[-1] == [(0, 0), (0, 1)]


def test_the_host_samples_no_row_that_has_ended_in_flight(runner: DeviceModelRunner) -> None:
    steps = Steps(runner.info.block_size, runner.info.num_blocks)
    ends = Request([5, 6], 5, [20], {**GREEDY, **make_bias({20: 500.0})}, row=0)
    goes_on = Request([7, 8], 5, [], {**SAMPLE, "watermark_gamma": 0.5}, row=1)
    first = runner.launch(steps.step([(0, 0, 2), (1, 0, 1)], [opening(ends), opening(goes_on)]))
    second = runner.launch(steps.step([(0, 2, 3), (1, 1, 2)]))
    assert integers(first.answer().token_ids) == [20]
    assert integers(second.answer().rows) == [1]


class AnsweringThread:
    """A runner whose steps are answered by another thread as soon as they are launched, as in a server."""

    def __init__(self, runner: DeviceModelRunner) -> None:
        self.info, self.max_pending, self._runner = runner.info, 10, runner
        self._free = threading.Semaphore(runner.max_pending)
        self._steps = SimpleQueue[Any]()
        threading.Thread(target=self._answer_all, daemon=True).start()

    def launch(self, request: pb.StepRequest) -> "AnsweredStep":
        self._free.acquire()
        step = AnsweredStep(self._runner.launch(request))
        self._steps.put(step)
        return step

    def close(self) -> None:
        self._steps.put(None)

    def _answer_all(self) -> None:
        while step := self._steps.get():
            step.responses.put(step.pending.answer())
            self._free.release()


class AnsweredStep:
    def __init__(self, pending: Pending) -> None:
        self.pending, self.responses = pending, SimpleQueue[pb.StepResponse]()

    def answer(self) -> pb.StepResponse:
        return self.responses.get(timeout=60)


def test_another_thread_answers(runner: DeviceModelRunner, expected: dict[str, list[Request]]) -> None:
    """Check that a launch may have to finish earlier steps while the other thread does so as well."""
    answered, requests = AnsweringThread(runner), again(expected["crowd"])
    Router(answered, seed=4, depth=4).run(list(requests))  # type: ignore[arg-type]
    answered.close()
    check(requests, expected["crowd"])


def test_paths_are_reported(either: DeviceModelRunner) -> None:
    either.reset()
    is_captured = bool(either.graphs.sizes)
    alone, prompt = pb.STEP_PATH_MODEL, pb.STEP_PATH_PROMPT
    if is_captured:
        alone = prompt = pb.STEP_PATH_GRAPH
    cases = {
        pb.STEP_PATH_DETAILS: {"details": {"top_n": MAX_TOP_N + 1}},
        pb.STEP_PATH_LISTS: {"eos": MANY},
    }
    steps = Steps(either.info.block_size, either.info.num_blocks)
    for row, (path, options) in enumerate(cases.items()):
        request = Request([5, 6, 7], 5, row=row, **options)  # type: ignore[arg-type]
        work = [[(row, 0, 2)], [(row, 2, 3)], [(row, 3, 4)]]
        opened = [[opening(request)], [], []]
        answers = [either.launch(steps.step(*step)).answer() for step in zip(work, opened, strict=True)]
        assert [answer.path for answer in answers] == [prompt, path, path]
    filters = {**SAMPLE, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9}
    for sampling in GREEDY, filters, {**SAMPLE, "watermark_gamma": 0.5}:
        sampled = steps.step([(7, 0, 1)], [opening(Request([5], 5, sampling=sampling, row=7))], closed=[7])
        assert either.launch(sampled).answer().path == alone
    for kind in {"ranks": True}, {"top_n": MAX_TOP_N, "raw": True}:
        request = Request([5], 5, row=7, details=kind)
        sampled = steps.step([(7, 0, 1)], [opening(request)], closed=[7])
        assert either.launch(sampled).answer().path == alone
    request = Request([5, 6], 5, row=6, details={"logprobs": True, "input_tokens": True})
    scored = steps.step([(6, 0, 2)], [opening(request)])
    assert either.launch(scored).answer().path == pb.STEP_PATH_PROMPT
    drafted = steps.step([(7, 1, 2)], drafts={7: [9, 9]})
    assert either.launch(drafted).answer().path == (pb.STEP_PATH_DRAFTS if is_captured else alone)
    assert either.launch(steps.step([])).answer().path == pb.STEP_PATH_UNSPECIFIED


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLE])
@pytest.mark.parametrize("kind", LOADERS)
def test_scores_that_are_no_numbers_end_their_row(
    directory: Path, tmp_path: Path, kind: str, sampling: dict[str, Any]
) -> None:
    """Check that a row whose logits are NaN fails, and that the next step in flight does not sample it."""
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    tensors = load_file(directory / "model.safetensors")
    tensors["model.embed_tokens.weight"][50] = math.nan
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    runner = LOADERS[kind](configure(tmp_path))
    steps = Steps(runner.info.block_size, runner.info.num_blocks)
    good = Request([5, 6, 7], row=1)
    opened = [open_row(0, [4, 50], sampling=sampling), opening(good)]
    first = runner.launch(steps.step([(0, 0, 2), (1, 0, 3)], opened))
    second = runner.launch(steps.step([(0, 2, 3), (1, 3, 4)]))
    response = first.answer()
    assert [error.row for error in response.errors] == [0]
    assert "finite" in response.errors[0].message
    assert integers(response.rows) == [1]
    response = second.answer()
    assert (integers(response.rows), list(response.errors)) == ([1], [])
    after = runner.launch(steps.step([(0, 3, 4), (1, 4, 5)])).answer()
    assert integers(after.rows) == [1]


def test_a_row_that_cannot_be_served_fails_alone(runner: DeviceModelRunner) -> None:
    steps, good = Steps(runner.info.block_size, runner.info.num_blocks), Request([5, 6, 7], row=1)
    opened = [open_row(0, [5, VOCAB_SIZE]), opening(good), open_row(2, [5] * 500)]
    response = runner.launch(steps.step([(0, 0, 2), (1, 0, 3)], opened)).answer()
    assert [error.row for error in response.errors] == [0, 2]
    assert integers(response.rows) == [1]


def test_a_grammar_that_cannot_be_followed_ends_its_row(runner: DeviceModelRunner) -> None:
    """Check a grammar error in a step that was launched before its predecessor was answered."""
    steps = Steps(runner.info.block_size, runner.info.num_blocks)
    bad, good = (Request([5, 6], row=row, grammar=GRAMMAR) for row in (0, 1))
    bad.grammar = "start: nothing"
    first = runner.launch(steps.step([(0, 0, 2), (1, 0, 2)], [opening(bad), opening(good)]))
    second = runner.launch(steps.step([(0, 2, 3), (1, 2, 3)]))
    response = first.answer()
    assert [(error.row, error.cause) for error in response.errors] == [(0, pb.RowError.CAUSE_GRAMMAR)]
    assert integers(response.rows) == [1]
    response = second.answer()
    assert (integers(response.rows), list(response.errors)) == ([1], [])


def test_nothing_is_left_on_the_host(directory: Path, expected: dict[str, list[Request]]) -> None:
    """Check that every operator's tensors are on the device."""
    torch.use_deterministic_algorithms(False)
    requests = again(expected["crowd"])[:10]
    with other_device.present() as device:
        runner = load_late(configure(directory, kv_cache_tokens=1024), LateDevice(device))
        Router(runner, seed=1).run(list(requests))
    check_tokens(requests, expected["crowd"][:10])
