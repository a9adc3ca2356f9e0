"""Check how the largest step is determined and its memory measured, on steps with known memory."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from tgis.pb import shard_pb2 as pb
from tgis.shard.collectives import ProcessGroup
from tgis.shard.runner.model_runner import ComputedStep
from tgis.shard.runner.row_table import RowLimits, find_problem
from tgis.shard.startup.memory import warm_up
from tgis.shard.startup.memory.memory_plan import Demand
from tgis.shard.startup.memory.warm_up import StepSize, WarmUp, extrapolate, largest_step

MIB = 1 << 20


@dataclass
class Steps:
    """A stand-in for an engine; a step uses memory by its number of tokens."""

    limits: RowLimits
    bytes_per_token: int
    info: pb.InfoResponse = field(default_factory=pb.InfoResponse)
    tokens: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    steps: list[pb.StepRequest] = field(default_factory=list)

    def launch(self, step: pb.StepRequest) -> ComputedStep:
        assert [find_problem(row, self.limits) for row in step.opened_rows] == [None] * len(step.opened_rows)
        num_tokens = integers(step.ends).sum() - integers(step.starts).sum()
        num_tokens += sum(len(row.encoder_token_ids) // 4 for row in step.opened_rows)
        self.tokens.append(int(num_tokens))
        self.rows.append(len(integers(step.rows)))
        self.steps.append(step)
        np.ones(int(num_tokens) * self.bytes_per_token, np.uint8)
        return ComputedStep(pb.StepResponse())

    def reset(self) -> None:
        pass


def integers(column: bytes) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.frombuffer(column, "<i4")


def prepare(demand: Demand, bytes_per_token: int = 1) -> tuple[WarmUp, Steps]:
    limits = RowLimits(demand.max_sequence_length, demand.block_size, 99, 0, demand.is_encoder_decoder)
    steps = Steps(limits, bytes_per_token)
    return WarmUp(steps, ProcessGroup(0, 1), demand), steps  # type: ignore[arg-type]


def test_the_largest_step() -> None:
    assert largest_step(Demand(16, 100, 8, None), 2048) == StepSize(8, 8 * 99)
    assert largest_step(Demand(16, 1000, 8, None), 2048) == StepSize(8, 2048)
    assert largest_step(Demand(16, 1000, 256, None), 64) == StepSize(64, 64)
    assert largest_step(Demand(16, 1000, 8, None, is_encoder_decoder=True), 512) == StepSize(8, 999)


@pytest.mark.parametrize("is_encoder_decoder", [False, True])
@pytest.mark.parametrize(("length", "block_size", "max_batch_size"), [(2, 16, 3), (21, 19, 8), (700, 16, 5)])
def test_steps_are_such_as_the_router_sends(
    length: int, block_size: int, max_batch_size: int, is_encoder_decoder: bool
) -> None:
    demand = Demand(block_size, length, max_batch_size, None, is_encoder_decoder)
    warm, steps = prepare(demand)
    warm.compile()
    assert sum(steps.tokens) == min(20, length - 1) + is_encoder_decoder
    largest = largest_step(demand, 2048)
    warm.measure(largest, lambda step: False, 1 << 50)
    num_tokens = largest.num_tokens + (largest.num_rows if is_encoder_decoder else 0)
    assert (steps.rows[-1], steps.tokens[-1]) == (largest.num_rows, num_tokens)
    held = dict.fromkeys(range(max_batch_size), 0)
    for step in steps.steps:
        for opened in step.opened_rows:
            held[opened.row] = 0
        assert not step.max_drafts
        rows, ends, new = integers(step.rows), integers(step.ends), integers(step.num_new_blocks)
        for row, end, count in zip(rows.tolist(), ends.tolist(), new.tolist(), strict=True):
            held[row] += count
            assert held[row] == -(-end // block_size)
        assert len(integers(step.new_blocks)) == new.sum()


@pytest.mark.parametrize(("length", "expected"), [(100, 5), (26, 4), (23, 1), (22, 0)])
def test_drafts_are_proposed_where_they_fit(length: int, expected: int) -> None:
    warm, steps = prepare(Demand(16, length, 1, None))
    steps.info.max_drafts = 5
    warm.compile()
    [opened] = steps.steps[0].opened_rows
    drafts = [integers(step.max_drafts).tolist() for step in steps.steps]
    assert drafts == [[], [], [expected]] if expected else [[], []]
    assert opened.prompt_len + opened.max_new_tokens <= length
    if expected:
        last = steps.steps[-1]
        assert (*integers(last.starts), *integers(last.ends)) == (20, 21)
        assert 21 + expected < opened.prompt_len + opened.max_new_tokens
        num_blocks = sum(integers(step.num_new_blocks).sum() for step in steps.steps)
        assert num_blocks == -(-(21 + expected) // 16)


def test_the_memory_of_the_largest_step_is_measured() -> None:
    demand = Demand(16, 2049, 4, None)
    warm, steps = prepare(demand, bytes_per_token=MIB // 8)
    used = warm.measure(largest_step(demand, 512), lambda step: False, 1 << 50)
    assert steps.tokens == [32, 128, 512]
    assert used == pytest.approx(64 * MIB, rel=0.2)


def test_no_larger_step_is_run_than_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    demand = Demand(16, 2049, 4, None)
    warm, steps = prepare(demand, bytes_per_token=MIB // 8)
    upper_bounds: list[int] = []
    warm.measure(largest_step(demand, 512), lambda step: bool(upper_bounds.append(step) or True), 1 << 50)
    assert steps.tokens == [32]
    assert upper_bounds[0] > 60 * MIB
    # A step that would not fit is not tried, nor a step that would take long.
    steps.tokens.clear()
    assert warm.measure(largest_step(demand, 512), lambda step: False, 10 * MIB) > 50 * MIB
    assert steps.tokens == [32]
    steps.tokens.clear()
    monkeypatch.setattr(warm_up, "MAX_STEP_S", 0.0)
    assert warm.measure(largest_step(demand, 512), lambda step: False, 1 << 50) > 50 * MIB
    assert steps.tokens == [32, 128]


def test_memory_grows_along_a_line() -> None:
    assert extrapolate({32: 100}, 64) == 200
    assert extrapolate({32: 100, 128: 196}, 512) == 580
    assert extrapolate({32: 100, 128: 196, 512: 300}, 512) == 300
    assert extrapolate({32: 100, 128: 90}, 512) == 90, "noise"
