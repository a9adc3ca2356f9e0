"""Check which steps are captured, and which graph serves a number of rows."""

import gc
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from threading import Barrier

import pytest
import torch
from torch import Tensor

from tests.support.cuda.fake_graph import FakeGraph, FakeStream
from tests.support.cuda.graph_sizes import of_rows
from tgis.shard.runner.device.graphs import (
    MAX_CAPTURE_S,
    MAX_PROMPT_CAPTURE_S,
    CaptureLimits,
    StepGraphs,
    StepParts,
)
from tgis.shard.runner.graph_sizes import MAX_PROMPT_TOKENS, GraphSize, add_adapter_sizes, graph_sizes

GRAPH_BYTES, FREE_BYTES = 10 << 20, 1000 << 20


class Device(FakeStream):
    """A device whose captures take time and memory, and fail if `error` is set."""

    def __init__(self, capture_s: float = 0.0, error: Callable[[int], Exception | None] | None = None):
        super().__init__()
        self.now, self.num_captures, self._capture_s, self._error = 0.0, 0, capture_s, error

    def capture(self, work: Callable[[], None]) -> FakeGraph:
        error = self._error and self._error(self.num_captures)
        if error:
            raise error
        self.now += self._capture_s
        self.num_captures += 1
        return super().capture(work)

    def memory_left(self) -> int:
        return FREE_BYTES - GRAPH_BYTES * self.num_captures


class Steps:
    """Steps that add 1 to each row and then copy the rows to the answers."""

    def __init__(self) -> None:
        self.rows, self.logits, self.answers, self.details = torch.zeros(4, 16).unbind()
        self.made: list[int] = []

    def make(self, size: GraphSize) -> StepParts:
        num_rows = size.num_tokens
        self.made.append(num_rows)
        rows, logits = self.rows[:num_rows], self.logits[:num_rows]

        def sample() -> None:
            self.answers[:num_rows].copy_(logits)
            logits.fill_(torch.nan)

        def sample_detailed() -> None:
            self.details[:num_rows].copy_(logits)

        return StepParts(lambda: logits.copy_(rows + 1), sample, sample_detailed)


def test_sampling_after_drafts_is_captured_if_drafts_are_expected() -> None:
    steps, device = Steps(), Device()

    def make(size: GraphSize) -> StepParts:
        return steps.make(size)._replace(
            sample_next=lambda: steps.answers.add_(10), sample_next_detailed=lambda: steps.answers.add_(100)
        )

    plain = StepGraphs(device, make, CaptureLimits(device.memory_left))
    plain.capture(of_rows(2))
    found = plain.find(1)
    assert found is not None
    assert found.sample_next is None
    graphs = StepGraphs(device, make, CaptureLimits(device.memory_left), has_drafts=True)
    graphs.capture(of_rows(2))
    step = graphs.find(1)
    assert step is not None
    assert step.sample_next is not None
    steps.rows.fill_(1.0)
    after, after_detailed = step.sample_next
    for graph in (step.forward, step.sample, after, after, after_detailed):
        graph.replay()
    assert steps.answers[:2].tolist() == [122.0, 122.0]


def graphs_on(device: Device, steps: Steps | None = None) -> StepGraphs:
    return StepGraphs(
        device, (steps or Steps()).make, CaptureLimits(device.memory_left, clock=lambda: device.now)
    )


@pytest.mark.parametrize(
    ("asked", "max_rows", "sizes"),
    [
        (None, 1, [1]),
        (None, 2, [1, 2]),
        (None, 5, [1, 2, 4, 5]),
        (None, 24, [1, 2, 4, 8, 12, 16, 24]),
        (None, 70, [1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 70]),
        ([0], 64, []),
        ([], 64, []),
        ([32, 4, 4, 1, 65], 64, [1, 4, 32]),
    ],
)
def test_sizes(asked: Sequence[int] | None, max_rows: int, sizes: list[int]) -> None:
    assert graph_sizes(asked, max_rows) == of_rows(*sizes)


@pytest.mark.parametrize("max_rows", [256, 257, 1000])
def test_few_rows_of_a_step_are_idle(max_rows: int) -> None:
    sizes = [size.num_rows for size in graph_sizes(None, max_rows)]
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_rows
    assert len(sizes) <= 40
    for before, size in pairwise(sizes):
        assert size <= before + max(4, before // 2)


def test_steps_are_captured_largest_first_and_found_by_their_rows() -> None:
    steps = Steps()
    graphs = graphs_on(Device(), steps)
    assert graphs.find(1) is None
    graphs.capture(of_rows(1, 4, 2, 8))
    assert steps.made == [8, 4, 2, 1]
    assert graphs.sizes == of_rows(1, 2, 4, 8)
    results = [graphs.find(n) for n in range(1, 10)]
    assert [step and step.size.num_rows for step in results] == [1, 2, 4, 4, 8, 8, 8, 8, None]


def test_prompts_have_sizes_of_their_own() -> None:
    assert graph_sizes([0], 64, 512) == []
    assert graph_sizes([1, 2], 64, 20) == [GraphSize(1), GraphSize(2), GraphSize(2, 16)]
    sizes = graph_sizes(None, 1000, 8192)
    assert [size.num_tokens for size in sizes] == sorted(size.num_tokens for size in sizes)
    assert max(size.num_prompt_tokens for size in sizes) == MAX_PROMPT_TOKENS
    prompts = [size for size in sizes if size.num_prompt_tokens]
    assert max(size.num_rows for size in prompts) <= 256
    assert 6 <= len(prompts) <= 30


def test_prompts_are_captured_first_and_found_by_both_numbers() -> None:
    steps, small, large = Steps(), GraphSize(2, 4), GraphSize(4, 12)
    graphs = graphs_on(Device(), steps)
    graphs.capture([GraphSize(1), small, GraphSize(8), large])
    assert steps.made == [16, 6, 8, 1], "the largest step first, and of each kind"
    result = {asked: graphs.find(*asked) for asked in [(2, 4), (0, 1), (3, 1), (2, 5), (4, 13), (5, 1)]}
    assert [step and step.size for step in result.values()] == [small, small, large, large, None, None]
    assert [step and step.size for step in map(graphs.find, (1, 2, 3, 8, 9))] == [
        *(GraphSize(1), small, GraphSize(8), GraphSize(8), None)
    ]


def test_prompts_that_cannot_be_captured_cost_no_other_graphs(caplog: pytest.LogCaptureFixture) -> None:
    device = Device(error=lambda number: RuntimeError("not permitted") if number == 3 else None)
    graphs = graphs_on(device)
    graphs.capture([GraphSize(2, 4), GraphSize(1, 2)])
    assert graphs.sizes == []
    assert "no CUDA graphs: steps of 1 rows and 2 prompt tokens cannot be captured" in caplog.text
    device = Device(error=lambda number: RuntimeError("not permitted") if number == 6 else None)
    graphs = graphs_on(device)
    graphs.capture([GraphSize(2, 4), GraphSize(1, 2), GraphSize(1)])
    assert graphs.sizes == [GraphSize(1, 2), GraphSize(2, 4)]


def test_prompts_leave_time_for_other_steps() -> None:
    graphs = graphs_on(Device(capture_s=MAX_PROMPT_CAPTURE_S / 6))
    graphs.capture([*of_rows(1, 2, 4), *(GraphSize(1, count) for count in (2, 4, 8))])
    assert graphs.sizes == [*of_rows(1, 2, 4), GraphSize(1, 4), GraphSize(1, 8)], "three captures each"


def test_all_parts_are_replayed() -> None:
    steps = Steps()
    graphs = graphs_on(Device(), steps)
    graphs.capture(of_rows(2, 4))
    for n, filled in ((2, 2), (3, 4)):
        step = graphs.find(n)
        assert step is not None
        steps.rows.fill_(n)
        steps.answers.fill_(-1)
        step.forward.replay()
        assert steps.logits[:filled].tolist() == [n + 1] * filled
        assert steps.answers.eq(-1).all(), "the part that waits for masks is a separate graph"
        step.sample_detailed.replay()
        assert steps.details[:filled].tolist() == [n + 1] * filled
        assert steps.answers.eq(-1).all(), "one of both samples"
        step.sample.replay()
        assert steps.answers[:filled].tolist() == [n + 1] * filled
        assert steps.answers[filled:].eq(-1).all()


def test_memory_of_the_parts_is_kept() -> None:
    answers: list[Tensor] = []

    def make(size: GraphSize) -> StepParts:
        answers[:] = [torch.zeros(size.num_rows)]
        rows, answer = torch.ones(size.num_rows), answers[0]
        return StepParts(lambda: answer.copy_(rows), lambda: answer.add_(rows), lambda: answer.zero_())

    graphs = StepGraphs(FakeStream(), make, CaptureLimits(lambda: 0))
    graphs.capture(of_rows(2))
    step = graphs.find(2)
    assert step is not None
    step.forward.replay()
    step.sample.replay()
    assert answers[0].tolist() == [2, 2]


def test_captures_end_when_their_time_is_over(caplog: pytest.LogCaptureFixture) -> None:
    graphs = graphs_on(Device(capture_s=MAX_CAPTURE_S / 8))
    graphs.capture(of_rows(1, 2, 4, 8, 16))
    assert graphs.sizes == of_rows(4, 8, 16), "three captures each"
    step = graphs.find(1)
    assert step is not None
    assert step.size == GraphSize(4)
    assert "2 rows and fewer use larger CUDA graphs: 3 graphs took 34 s and 90 MiB" in caplog.text


def test_captures_end_when_there_is_no_memory(caplog: pytest.LogCaptureFixture) -> None:
    graphs = graphs_on(Device(error=lambda count: torch.OutOfMemoryError("7 GiB") if count == 4 else None))
    graphs.capture(of_rows(1, 2, 4))
    assert graphs.sizes == of_rows(4)
    assert "no memory for CUDA graphs of steps of 2 rows: smaller steps use larger graphs" in caplog.text


def test_a_model_that_cannot_be_captured_has_no_graphs(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.ones(4)

    def make(size: GraphSize) -> StepParts:
        def route() -> Tensor:
            return x[: size.num_rows][x[: size.num_rows] > 0]

        add = lambda: x.add_(1)  # noqa: E731
        return StepParts(add, route if size.num_rows == 2 else add, add)

    device = Device()
    graphs = StepGraphs(device, make, CaptureLimits(device.memory_left))
    with caplog.at_level(logging.WARNING):
        graphs.capture(of_rows(1, 2, 4))
    assert graphs.sizes == []
    [record] = caplog.records
    assert "no CUDA graphs: steps of 2 rows cannot be captured: captured work looks for" in record.message


def test_a_trial_can_be_dropped_and_repeated() -> None:
    device, steps = Device(), Steps()
    graphs = graphs_on(device, steps)
    graphs.capture(of_rows(4))
    graphs.capture(of_rows(1))
    assert graphs.sizes == of_rows(1, 4)
    graphs.clear()
    assert graphs.find(1) is None
    graphs.capture(of_rows(1, 2, 4))
    assert steps.made == [4, 1, 4, 2, 1], "parts are captured again, because their memory may have moved"


@pytest.mark.parametrize("error", [None, RuntimeError("operation not permitted when stream is capturing")])
def test_no_garbage_is_collected_meanwhile(error: Exception | None) -> None:
    """Check that garbage collection is off during a capture.

    A cycle may own device memory, and freeing it would end the capture."""
    collected: list[int] = []
    meanwhile: list[int] = []

    def capture(number: int) -> Exception | None:
        collected.clear()
        for _ in range(gc.get_threshold()[0] * 2):
            cycle: list[object] = []
            cycle.append(cycle)
        meanwhile.extend(collected)
        return error

    def note(phase: str, about: dict[str, int]) -> None:
        collected.append(about["generation"])

    device = Device(error=capture)
    gc.callbacks.append(note)
    try:
        graphs_on(device).capture(of_rows(1, 2))
    finally:
        gc.callbacks.remove(note)
    assert device.num_captures or error
    assert not meanwhile
    assert gc.isenabled()


def test_why_nothing_is_captured_is_known() -> None:
    device = Device(error=lambda number: RuntimeError("not permitted\nadvice") if number == 3 else None)
    graphs = graphs_on(device)
    graphs.capture(of_rows(4))
    assert graphs.refusal is None
    graphs.capture(of_rows(1, 2))
    assert (graphs.refusal, graphs.sizes) == ("not permitted", [])


def test_steps_with_adapters_have_graphs_of_their_own() -> None:
    steps, bare, tuned = Steps(), GraphSize(4), GraphSize(8, has_adapters=True)
    graphs = graphs_on(Device(), steps)
    assert not graphs.have_adapters
    graphs.capture([bare, tuned])
    assert graphs.have_adapters
    found = [graphs.find(3), graphs.find(5), graphs.find(3, 0, True), graphs.find(9, 0, True)]
    assert [step and step.size for step in found] == [bare, None, tuned, None]


def test_sizes_with_adapters() -> None:
    assert add_adapter_sizes([]) == []
    sizes = add_adapter_sizes(graph_sizes([1, 2, 3, 6], 8, 128))
    assert sizes[-1] == GraphSize(6, 128, has_adapters=True)
    plain, tuned = ([each for each in sizes if each.has_adapters is kind] for kind in (False, True))
    assert plain == graph_sizes([1, 2, 3, 6], 8, 128)
    assert [each.num_rows for each in tuned if not each.num_prompt_tokens] == [1, 2, 6]
    assert [each[:2] for each in tuned if each.num_prompt_tokens] == [(6, 16), (6, 128)]


def test_graphs_with_adapters_are_dropped_alone() -> None:
    """The fourth capture fails: the first of steps with adapters."""
    device = Device(error=lambda done: RuntimeError("an error") if done == 3 else None)
    graphs = graphs_on(device)
    graphs.capture([GraphSize(4), GraphSize(4, has_adapters=True)])
    assert graphs.sizes == [GraphSize(4)]


def test_a_failed_capture_is_repeated_with_simpler_launches(caplog: pytest.LogCaptureFixture) -> None:
    is_simple, asked = [False], []

    def simplify() -> bool:
        asked.append(is_simple[0])
        was_simple, is_simple[0] = is_simple[0], True
        return not was_simple

    def refuse(number: int) -> Exception | None:
        return None if is_simple[0] else RuntimeError("programmatic edges are not supported")

    steps, device = Steps(), Device(error=refuse)
    graphs = StepGraphs(device, steps.make, CaptureLimits(device.memory_left), simplify=simplify)
    with caplog.at_level(logging.WARNING):
        graphs.capture(of_rows(2, 4))
    assert graphs.sizes == of_rows(2, 4)
    assert graphs.refusal is None
    assert asked == [False]
    assert (
        "kernels start one by one, because steps of 4 rows cannot be captured otherwise: pro" in caplog.text
    )


def test_a_capture_that_fails_with_simpler_launches_too_is_given_up() -> None:
    answers = iter([True, False])
    steps, device = Steps(), Device(error=lambda number: RuntimeError("it waits"))
    graphs = StepGraphs(device, steps.make, CaptureLimits(device.memory_left), simplify=lambda: next(answers))
    graphs.capture(of_rows(2))
    assert graphs.sizes == []
    assert graphs.refusal == "it waits"


class Meeting:
    """Ranks in threads that agree on the smallest of their values."""

    def __init__(self, num_ranks: int):
        self._values = [0] * num_ranks
        self._barrier = Barrier(num_ranks, timeout=10)

    def agree(self, rank: int, value: int) -> int:
        self._values[rank] = value
        self._barrier.wait()
        smallest = min(self._values)
        self._barrier.wait()  # nobody writes before all have read
        return smallest


def test_ranks_repeat_a_capture_if_one_simplifies_launches() -> None:
    """Launches of the first rank are simple already."""
    is_simple, meeting = [True, False], Meeting(2)

    def simplify(rank: int) -> bool:
        was_simple, is_simple[rank] = is_simple[rank], True
        return not was_simple

    def refuse(rank: int, number: int) -> Exception | None:
        return None if is_simple[rank] else RuntimeError("programmatic edges are not supported")

    def capture(rank: int) -> StepGraphs:
        steps, device = Steps(), Device(error=partial(refuse, rank))
        limits = CaptureLimits(device.memory_left, partial(meeting.agree, rank))
        graphs = StepGraphs(device, steps.make, limits, simplify=partial(simplify, rank))
        graphs.capture(of_rows(2, 4))
        return graphs

    with ThreadPoolExecutor(2) as threads:
        both = list(threads.map(capture, range(2)))
    assert [graphs.sizes for graphs in both] == [of_rows(2, 4)] * 2
    assert [graphs.refusal for graphs in both] == [None, None]
