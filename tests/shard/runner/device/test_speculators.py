"""Compares speculators on an emulated device with plain models of them, and outputs with those of the CPU
without a speculator."""

import logging
import random
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.cuda.capturing_device import CapturingDevice
from tests.support.cuda.fake_graph import FakeStream
from tests.support.cuda.late_device import LateDevice
from tests.support.cuda.late_platform import late_platform
from tests.support.cuda.queued_gloo import connect_queued
from tests.support.shard import other_device
from tests.support.shard.adapted_drafts import check_adapted_outputs, write_adapters
from tests.support.shard.checkpoints import write_model
from tests.support.shard.draft_heads import States
from tests.support.shard.draft_models import AlwaysDrafts, Oracle, SwitchedDrafts
from tests.support.shard.drafting import Foreseen, run_on_rank
from tests.support.shard.driver import Request, Router, configure
from tests.support.shard.eagle3_heads import make_eagle3
from tests.support.shard.eagle_heads import make_eagle
from tests.support.shard.family_cases.all import CASES as FAMILIES
from tests.support.shard.messages import Steps, open_row
from tests.support.shard.mtp_heads import write_mtp
from tests.support.shard.pipelined import PipelinedService
from tests.support.shard.portable import plain
from tests.support.shard.ranks import ALONE, Ranks
from tests.support.shard.scheduled import draw_ids, greedy
from tests.support.shard.speculator_scene import (
    HEADS,
    VOCAB_SIZE,
    Base,
    Proposals,
    Recorder,
    check_outputs,
    check_proposals,
    make_requests,
    write_base,
)
from tgis.pb import shard_pb2 as pb
from tgis.router.scheduling.proposers.shard_drafts import ShardDrafts
from tgis.router.scheduling.step import Drafts
from tgis.router.sequence import Sequence as Row
from tgis.router.shards.codec import decode_answer
from tgis.shard.collectives import CPU, ProcessGroup
from tgis.shard.kernels.cuda.step_state import MAX_TOPS
from tgis.shard.runner.device.drafts.captured_speculator import CapturedSpeculator
from tgis.shard.runner.device.drafts.proposal_graphs import ProposalGraphs, Propose
from tgis.shard.runner.device.model_runner import DeviceModelRunner
from tgis.shard.runner.interface import Pending
from tgis.shard.runner.proposer import FollowedWork, TakeStates
from tgis.shard.speculators.interface import SpeculatorError
from tgis.shard.startup.load import load
from tgis.shard.startup.prepare import prepare

# Emulated kernels round sums of steps of different sizes differently.
TOLERANCE = 1e-4


class Speculating(NamedTuple):
    """Speculator, and the check of its proposals for known tokens."""

    path: Path
    check: Callable[[Proposals], None]


pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return write_base(tmp_path_factory.mktemp("base"), plain(CPU), num_hidden_layers=4)


def make_stateless(kind: str, base: Base, directory: Path) -> Speculating:
    heads = HEADS[kind](base)
    return Speculating(heads.write(directory), partial(check_proposals, base, heads))


def make_head(kind: str, base: Base, directory: Path) -> Speculating:
    states, texts = States.load(base.directory), [text.token_ids for text in base.texts]
    heads, oracle = make_eagle(states, texts, 2) if kind == "eagle" else make_eagle3(states, texts, [1, 2, 3])
    return Speculating(heads.write(directory), oracle.check)


def make_draft_model(_: str, base: Base, directory: Path) -> Speculating:
    shutil.copytree(base.directory, directory)
    oracle = Oracle(directory, VOCAB_SIZE)

    def check(proposals: Proposals) -> None:
        for known, proposed in proposals:
            oracle.check(known, proposed)

    return Speculating(directory, check)


MAKERS: dict[str, Callable[[str, Base, Path], Speculating]] = {
    **dict.fromkeys(HEADS, make_stateless),
    **dict.fromkeys(("eagle3", "eagle"), make_head),
    "draft_model": make_draft_model,
}


KINDS = [pytest.param(kind, marks=[pytest.mark.slow] * (kind != "mlp")) for kind in MAKERS]


def make(kind: str, base: Base, directory: Path) -> Speculating:
    return MAKERS[kind](kind, base, directory / "speculator")


def load_runner(
    base: Base, speculator: Path, device: LateDevice | None = None, **options: Any
) -> DeviceModelRunner:
    options = {"speculator": str(speculator), "max_step_tokens": 64} | options
    runner = load(configure(base.directory, **options), on=late_platform(device or LateDevice()))
    assert isinstance(runner, DeviceModelRunner)
    return runner


@pytest.mark.parametrize(
    ("graphs", "is_recorded"),
    [("8", False), *(pytest.param(*each, marks=pytest.mark.slow) for each in (("0", False), ("3,8", True)))],
)
@pytest.mark.parametrize("kind", KINDS)
def test_proposals_are_the_plain_models_and_outputs_do_not_change(
    base: Base, kind: str, graphs: str, is_recorded: bool, tmp_path: Path
) -> None:
    """Check every kind with every sampling parameter, grammars and details, with steps launched one by one,
    with graphs that run the work again, and with those that replay exactly what was captured."""
    speculating = make(kind, base, tmp_path)
    device = CapturingDevice() if is_recorded else LateDevice()
    runner = load_runner(base, speculating.path, device, cuda_graphs=graphs)
    recorder = Recorder(runner)
    router = check_outputs(runner, base, tolerance=TOLERANCE)
    assert router.num_right > 30 or kind == "eagle"
    assert all(proposed or len(known) == 1 for known, proposed in recorder.proposed)
    speculating.check(recorder.proposed)
    paths = {response.path for response in router.responses} - {pb.STEP_PATH_UNSPECIFIED}
    sampled = {pb.STEP_PATH_GRAPH, pb.STEP_PATH_SIZE} if graphs != "0" else {pb.STEP_PATH_MODEL}
    assert sampled <= paths <= sampled | {pb.STEP_PATH_PROMPT}
    proposer = recorder._proposer
    if isinstance(proposer, CapturedSpeculator):
        assert (proposer.graphs.find(8, 1) is not None) == (graphs != "0")


class SomeDrafts(AlwaysDrafts):
    """`Proposer` of the router that also requests drafts of sequences whose answers have not arrived."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def propose(self, sequence: Row, max_drafts: int) -> Drafts:
        drafts = super().propose(sequence, max_drafts)
        if self._random.random() < 0.2:
            return Drafts(waits=self._random.random() < 0.5)
        return drafts._replace(waits=self._random.random() < 0.7)


class RarelySwitchedDrafts(SwitchedDrafts):
    """`SwitchedDrafts` for a scheduler that is asked for a step more often than there is one."""

    def begin(self, num_sequences: int, max_drafts: int) -> bool:
        is_asked = self._random.random() < 0.05
        return super().begin(num_sequences, max_drafts) if is_asked else max_drafts > 0


@dataclass
class WatchedSteps:
    """Runner that checks that launches without new drafts do not wait for the device, although the speculator
    follows rows, unless a row is closed."""

    runner: DeviceModelRunner
    device: LateDevice
    num_overlapping: int = 0

    @property
    def info(self) -> pb.InfoResponse:
        return self.runner.info

    def reset(self) -> None:
        self.runner.reset()

    def launch(self, request: pb.StepRequest) -> Pending:
        done = self.device._num_done
        is_busy = done < self.device._num_queued
        pending = self.runner.launch(request)
        if not request.max_drafts and not request.closed_rows:
            assert self.device._num_done == done, "the launch waited for the device"
            self.num_overlapping += is_busy and any(request.followed)
        return pending


class Overlap(NamedTuple):
    """Service whose steps overlap."""

    num_blocks: int = 60
    losing: float = 0.0
    cancelling: float = 0.0
    is_switched: bool = False  # the speculator follows only some sequences


OVERLAPS = {
    "preempted": Overlap(14),
    "lost": Overlap(losing=0.03, cancelling=0.02),
    "switched": Overlap(is_switched=True),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "preempted")) for name in OVERLAPS]
)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_that_overlap(base: Base, kind: str, name: str, tmp_path: Path) -> None:
    """Run the router's scheduler with two steps in flight, sequences that share a prefix, are preempted, are
    cancelled or lost, and a speculator that follows some of them."""
    overlap, device = OVERLAPS[name], LateDevice()
    speculating = make(kind, base, tmp_path)
    runner = load_runner(base, speculating.path, device, block_size=8, cuda_graphs="8")
    prefix = draw_ids(1, 40)
    texts = [(prefix if seed % 2 else prefix[:37]) + draw_ids(seed, 5) for seed in range(8)]
    truth, drafted = ([greedy(text, 20) for text in texts] for _ in range(2))
    host = load(configure(base.directory, block_size=8), on=plain(CPU))
    PipelinedService(host, 60, 0, 0, depth=1).run_all(truth)
    runner.reset()
    recorder = Recorder(runner)
    proposer = RarelySwitchedDrafts(3) if overlap.is_switched else SomeDrafts(3)
    faults = {"losing": overlap.losing, "cancelling": overlap.cancelling}
    watched = WatchedSteps(runner, device)
    options = {"seed": 2, "proposer": proposer, **faults}
    service = PipelinedService(watched, overlap.num_blocks, 0, 0, **options)  # type: ignore[arg-type]
    service.run_all(drafted)
    assert watched.num_overlapping > 3
    for sequence, known in zip(drafted, truth, strict=True):
        assert sequence.token_ids == known.token_ids or sequence in service.cancelled
    assert service.scheduler.num_accepted_drafts > 20 or kind != "draft_model"
    assert (service.scheduler.num_preemptions > 0) == (name == "preempted")
    assert sum(bool(proposed) for _, proposed in recorder.proposed) > 10
    if isinstance(recorder._proposer, CapturedSpeculator):
        return  # the plain model knows the states of other texts
    speculating.check([each for each in recorder.proposed if each[1]])


FOLLOW_S = 0.004


@pytest.fixture
def slow_runner(base: Base, tmp_path: Path) -> DeviceModelRunner:
    """Runner with a speculator that follows each step for at least `FOLLOW_S`."""
    runner = load_runner(base, make("mlp", base, tmp_path).path, cuda_graphs="8")
    runner.reset()
    assert runner._followed is not None
    proposer: Any = runner._followed._speculator
    follow = proposer.follow

    def follow_slowly(work: FollowedWork, take: TakeStates) -> None:
        time.sleep(FOLLOW_S)
        follow(work, take)

    proposer.follow = follow_slowly
    return runner


@pytest.mark.parametrize("is_sampled_by_host", [False, True])
def test_the_time_of_following_is_reported(slow_runner: DeviceModelRunner, is_sampled_by_host: bool) -> None:
    """Check that a step reports the time of following the earlier steps whose answers are applied before it,
    unless they have prompts."""
    runner = slow_runner
    steps = Steps(runner.info.block_size, runner.info.num_blocks)
    details = {"top_n": MAX_TOPS + 1} if is_sampled_by_host else {}
    row = open_row(0, [5, 6, 7], max_new_tokens=20, **details)
    launched = [runner.launch(steps.step([(0, 0, 3)], [row]))]
    launched += [runner.launch(steps.step([(0, end, end + 1)])) for end in range(3, 9)]
    responses = [pending.answer() for pending in launched]
    depth = 0 if is_sampled_by_host else runner.max_pending - 1
    are_timed = [i > 1 + depth for i in range(len(responses))]
    assert [response.follow_ns > 0 for response in responses] == are_timed
    assert all(response.follow_ns >= 1e9 * FOLLOW_S for response in responses if response.follow_ns)


@dataclass
class LearningService(PipelinedService):
    """Service whose proposer learns from the answers, like the engine's."""

    def _receive(self) -> None:
        step, pending = self.pending[0]
        answer = decode_answer(step, pending.answer())
        assert isinstance(self.proposer, ShardDrafts)
        self.proposer.observe(step, answer.drafts, answer.forward_s, answer.follow_s)
        super()._receive()


def test_trials_know_the_cost_of_following(
    slow_runner: DeviceModelRunner, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    proposer = ShardDrafts(slow_runner.info.max_drafts, lambda _: FOLLOW_S)
    service = LearningService(slow_runner, 60, 0, 0, seed=2, proposer=proposer)
    service.run_all([greedy(draw_ids(seed, 5), 40) for seed in range(4)])
    [text] = [message for message in caplog.messages if message.startswith("drafts of the speculator")]
    assert text.startswith("drafts of the speculator do not pay")
    [taken] = re.findall(r"of which the speculator takes ([0-9.]+) ms", text)
    assert float(taken) >= 0.9e3 * FOLLOW_S


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mlp", "eagle3", "draft_model"])
def test_nothing_is_left_on_the_host(base: Base, kind: str, tmp_path: Path) -> None:
    speculating = make(kind, base, tmp_path)
    with other_device.present() as device:
        on = late_platform(LateDevice(device))
        options = {"speculator": str(speculating.path), "kv_cache_tokens": 1024, "cuda_graphs": "0"}
        runner = load(configure(base.directory, **options), ProcessGroup(0, 1, device=device), on)
        check_outputs(runner, base, tolerance=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mlp", "eagle3"])
def test_rows_with_adapters_and_soft_prompts(base: Base, kind: str, tmp_path: Path) -> None:
    """Check rows with adapters in captured steps, and soft prompts."""
    copies, options = write_adapters(base, tmp_path)
    host = load(configure(base.directory, **options), on=plain(CPU))
    runner = load_runner(base, make(kind, base, tmp_path).path, cuda_graphs="8", **options)
    check_adapted_outputs(host, runner, copies)


@pytest.mark.slow
def test_a_head_for_multi_token_prediction(tmp_path: Path) -> None:
    oracle = write_mtp(tmp_path, "mimo")
    requests: list[Request] = [*make_requests()]
    Router(load(configure(tmp_path), on=plain(CPU)), 3).run(list(requests))
    runner = load_runner(Base(tmp_path, requests, []), Path("mtp"), cuda_graphs="8")
    recorder = Recorder(runner)
    check_outputs(runner, Base(tmp_path, requests, []), tolerance=TOLERANCE)
    oracle.check(recorder.proposed)


def draft_on_rank(
    group: ProcessGroup, place: Path, directory: Path, speculator: Path, requests: list[Foreseen]
) -> tuple[list[list[int]], list[int]]:
    """Run requests with drafts of the shard. Return their tokens, on the first rank, and the digests of all
    steps."""
    mine = ALONE if group.size == 1 else connect_queued(group.rank, group.size, place)
    options = {"rank": group.rank, "world_size": group.size, "kv_cache_tokens": 2048, "dtype": "float32"}
    options |= {"speculator": str(speculator), "cuda_graphs": "4", "max_step_tokens": 16}
    runner = load(configure(directory, **options), mine, late_platform(CapturingDevice()))
    return run_on_rank(runner, group, requests)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mlp", "medusa", "eagle3", "draft_model"])
def test_ranks_propose_the_same(base: Base, kind: str, ranks: Ranks, tmp_path: Path) -> None:
    speculating = make(kind, base, tmp_path)
    what = base.directory, speculating.path, make_requests()[:8]
    [(generated, digests), (_, theirs)] = ranks.run(2, draft_on_rank, tmp_path / "place", *what)
    assert digests == theirs
    assert generated == [request.generated for request in base.requests[:8]]


def test_what_gpus_cannot_run_is_refused_by_name(base: Base, tmp_path: Path) -> None:
    on = replace(late_platform(LateDevice()), device=torch.device("cuda", 0))
    recurrent, draft = tmp_path / "recurrent", tmp_path / "draft"
    write_model(recurrent, FAMILIES["qwen3_next"]())
    write_model(draft, FAMILIES["deepseek_v3"]())
    with pytest.raises(SpeculatorError) as error:
        prepare(configure(recurrent, speculator="mtp"), on)
    assert str(error.value) == (
        "--speculator mtp: GPUs cannot use it: the model keeps a state, which drafts cannot roll back there: "
        "set --device cpu"
    )
    with pytest.raises(SpeculatorError, match="its latent attention has not been tried on GPUs"):
        prepare(configure(base.directory, speculator=str(draft)), on)


def propose_next(rows: torch.Tensor, token_ids: torch.Tensor, num_tokens: int) -> torch.Tensor:
    return (rows * 100 + token_ids)[:, None] + torch.arange(num_tokens)


def propose_with_values(rows: torch.Tensor, token_ids: torch.Tensor, num_tokens: int) -> torch.Tensor:
    return propose_next(rows, token_ids, num_tokens) + int(rows.max())


def test_proposals_are_captured_by_numbers_of_rows_and_drafts(caplog: pytest.LogCaptureFixture) -> None:
    graphs = ProposalGraphs(FakeStream(), propose_next, num_tokens=2, idle_row=9)
    graphs.capture([2, 4, 300])
    assert not caplog.messages
    proposal = graphs.find(3, 2)
    assert proposal is not None
    graphs.inputs[:, :3] = torch.tensor([[5, 1, 2], [7, 8, 9]])
    proposal.graph.replay()
    assert proposal.drafts[:3].tolist() == [[507, 508], [108, 109], [209, 210]]
    found = [graphs.find(num_rows, 1) for num_rows in (1, 4, 5, 64, 65)]
    assert [each and each.num_rows for each in found] == [2, 4, 64, 64, None]
    assert graphs.find(1, 3) is None
    graphs.clear()
    assert graphs.find(1, 1) is None


@pytest.mark.parametrize(
    ("propose", "agreed", "text"),
    [
        (propose_with_values, 1, "values on the host"),
        (propose_next, 0, "another rank cannot capture them"),
    ],
)
def test_proposals_that_cannot_be_captured(
    propose: Propose, agreed: int, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    graphs = ProposalGraphs(FakeStream(), propose, 2, 9, agree=lambda value: min(value, agreed))
    graphs.capture([2, 4])
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("proposals of the speculator for 4 rows have no CUDA graph: ")
    assert text in caplog.messages[0]
    assert graphs.find(1, 1) is None
