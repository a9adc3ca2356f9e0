"""Check several ranks on emulated devices: their collectives are part of the graphs, and their tokens are
those of one rank."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.cuda.capturing_device import CapturingDevice
from tests.support.cuda.fake_graph import FakeStream
from tests.support.cuda.late_platform import late_platform
from tests.support.cuda.queued_gloo import connect_queued
from tests.support.shard.drafting import DraftingRouter, Foreseen
from tests.support.shard.driver import Request, Router, configure
from tests.support.shard.messages import GREEDY, SAMPLE
from tests.support.shard.ranks import ALONE, Ranks
from tests.support.shard.relay import Relay, follow, share
from tgis.pb import shard_pb2 as pb
from tgis.shard.collectives import MAX_GATHERED_BYTES, ProcessGroup
from tgis.shard.runner.device.graphs import CaptureLimits, StepGraphs, StepParts
from tgis.shard.runner.graph_sizes import GraphSize
from tgis.shard.startup.load import load
from tgis.shard.startup.platforms.gpu.capture_probe import find_rank_obstacle

KINDS: list[dict[str, Any]] = [
    GREEDY,
    {**SAMPLE, "seed": 3},
    {**SAMPLE, "temperature": 2.0, "top_k": 40, "top_p": 0.95, "seed": 4},
    {**GREEDY, "repetition_penalty": 1.4},
]


class Served(NamedTuple):
    tokens: list[list[int]]  # empty on all ranks but the first
    digests: list[int]  # of all steps
    paths: list[int]  # of the first rank's steps
    graph_sizes: list[int]


def make_requests() -> list[Request]:
    details = {"logprobs": True, "ranks": True, "top_n": 2}
    requests = [Request(list(range(3 + i, 9 + 3 * i)), 8, [5], kind) for i, kind in enumerate(KINDS)]
    return [*requests, Request([11, 12, 13], 4, [5], GREEDY, details)]


def foresee(tokens: list[list[int]]) -> list[Foreseen]:
    requests = [Foreseen(**vars(request)) for request in make_requests()]
    for request, truth in zip(requests, tokens, strict=True):
        request.truth = truth
    return requests


def serve(
    group: ProcessGroup,
    directory: Path,
    place: Path,
    graphs: str = "4",
    truths: list[list[int]] | None = None,
    uses_few: bool = False,
) -> Served:
    """Generate tokens on an emulated device, with drafts if the tokens are known."""
    mine = ALONE if group.size == 1 else connect_queued(group.rank, group.size, place)
    options = {"rank": group.rank, "world_size": group.size, "kv_cache_tokens": 2048, "dtype": "float32"}
    speculate = 0 if truths is None else 6
    config = configure(directory, cuda_graphs=graphs, max_step_tokens=16, speculate=speculate, **options)
    runner = load(config, mine, late_platform(CapturingDevice(), uses_few=uses_few))
    sizes = list(runner.info.graph_sizes)
    if group.rank:
        return Served([], list(follow(group, runner)), [], sizes)
    relay = Relay(runner, group)
    requests: Sequence[Request] = make_requests() if truths is None else foresee(truths)
    router = Router(relay, 0) if truths is None else DraftingRouter(relay, 0.8, 0)  # type: ignore[arg-type]
    router.run(list(requests))
    share(group, b"")
    if isinstance(router, DraftingRouter):
        assert 0 < router.num_right < router.num_guessed
    paths = [response.path for response in router.responses]
    return Served([request.generated for request in requests], relay.digests, paths, sizes)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_captured_steps_of_several_ranks(
    size: int, ranks: Ranks, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = checkpoint("grouped_queries")  # with 99 tokens, which are not divisible by the ranks
    first, *others = ranks.run(size, serve, directory, tmp_path / "captured")
    alone = serve(ALONE, directory, tmp_path, "0")
    assert first.tokens == alone.tokens
    assert len({tuple(tokens) for tokens in first.tokens}) == len(KINDS) + 1, "requests differ"
    for other in others:
        assert other.digests == first.digests
        assert other.graph_sizes == first.graph_sizes == [4]
    assert first.paths.count(pb.STEP_PATH_GRAPH) >= 6


@pytest.mark.slow
def test_products_of_few_rows_of_several_ranks(
    ranks: Ranks, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Sums over ranks follow them, so that no norm adds their parts."""
    directory = checkpoint("grouped_queries")
    first, other = ranks.run(2, serve, directory, tmp_path / "captured", "4", None, True)
    alone = serve(ALONE, directory, tmp_path, "0")
    assert first.tokens == alone.tokens
    assert other.digests == first.digests
    assert first.paths.count(pb.STEP_PATH_GRAPH) >= 6


@pytest.mark.slow
def test_launched_steps_of_several_ranks(
    ranks: Ranks, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = checkpoint("grouped_queries")
    captured, _ = ranks.run(2, serve, directory, tmp_path / "captured")
    launched, other = ranks.run(2, serve, directory, tmp_path / "launched", "0")
    assert launched.tokens == captured.tokens
    assert other.digests == launched.digests == captured.digests
    assert pb.STEP_PATH_GRAPH not in launched.paths


@pytest.mark.slow
@pytest.mark.parametrize("graphs", ["8", "0"])
def test_drafts_of_several_ranks(
    graphs: str, ranks: Ranks, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Every rank verifies the same drafts."""
    directory = checkpoint("grouped_queries")
    alone = serve(ALONE, directory, tmp_path, "0")
    first, other = ranks.run(2, serve, directory, tmp_path / "drafts", graphs, alone.tokens)
    assert first.tokens == alone.tokens
    assert other.digests == first.digests
    assert pb.STEP_PATH_DRAFTS not in first.paths
    assert (pb.STEP_PATH_GRAPH in first.paths) == (graphs == "8")


def sum_rows(group: ProcessGroup, place: Path, dtype: torch.dtype) -> list[bool]:
    """Return whether sums of a few rows, of many, which the ranks compute in parts, and of a number of
    elements that is not divisible by the ranks have the bits of a sum in the order of ranks."""
    mine = connect_queued(group.rank, group.size, place)
    generator = torch.Generator().manual_seed(1)
    width = 256
    num_rows = MAX_GATHERED_BYTES // width
    values = torch.randn(group.size, num_rows, width, generator=generator)
    values *= torch.logspace(-2, 2, num_rows)[:, None]
    values = values.to(dtype)
    many = mine.all_reduce(values[group.rank].clone())
    few = mine.all_reduce(values[group.rank, :3].clone())
    odd = mine.all_reduce(values[group.rank].reshape(-1)[1:].clone())  # not divisible by the ranks
    expected = values[0].float()
    for other in values[1:]:
        expected = expected + other.float()
    expected = expected.to(dtype)
    pairs = ((few, expected[:3]), (many, expected), (odd, expected.view(-1)[1:]))
    return [torch.equal(*pair) for pair in pairs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_do_not_depend_on_the_number_of_rows(dtype: torch.dtype, ranks: Ranks, tmp_path: Path) -> None:
    for result in ranks.run(3, sum_rows, tmp_path / "place", dtype):
        assert result == [True] * 3


def probe(group: ProcessGroup, place: Path, is_broken_on: int | None) -> str | None:
    mine = connect_queued(group.rank, group.size, place)
    device = CapturingDevice()
    if group.rank == is_broken_on:

        def fail(_: object) -> None:
            raise RuntimeError("operation not permitted when stream is capturing")

        device.capture = fail  # type: ignore[assignment, method-assign]
    elif is_broken_on is not None:
        # As with NCCL, a capture does not run the collectives of a rank that does not come.
        device.capture = Replaying  # type: ignore[assignment, method-assign]
    return find_rank_obstacle(device, mine)


class Replaying:
    """Graph that computes nothing."""

    def __init__(self, _: object) -> None:
        pass

    def replay(self) -> None:
        """Queue nothing, so that the sums are wrong."""


def test_all_ranks_agree_whether_collectives_are_captured(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, probe, tmp_path / "good", None) == [None, None]
    assert ranks.run(2, probe, tmp_path / "bad", 1) == [
        "replayed sums are wrong",
        "operation not permitted when stream is capturing",
    ]


def test_ranks_with_different_kernels_capture_nothing(ranks: Ranks, tmp_path: Path) -> None:
    """Their graphs would have different sizes."""
    reason = "the ranks have replaced different kernels"
    assert ranks.run(2, probe_replaced, tmp_path / "one", [["gate"], []]) == [reason] * 2
    assert ranks.run(2, probe_replaced, tmp_path / "both", [["gate", "norm"], ["norm", "gate"]]) == [None] * 2


def probe_replaced(group: ProcessGroup, place: Path, replaced: list[list[str]]) -> str | None:
    mine = connect_queued(group.rank, group.size, place)
    return find_rank_obstacle(CapturingDevice(), mine, replaced[group.rank])


def test_collectives_of_the_host_are_not_captured(ranks: Ranks) -> None:
    """gloo's collectives, for which the host waits, cannot be captured; the probe does not try."""
    assert ranks.run(2, capture_gloo) == ["captured work waits for other ranks on the host"] * 2


def capture_gloo(group: ProcessGroup) -> str:
    assert group.backend is not None
    backend = group.backend
    assert find_rank_obstacle(FakeStream(), group) == "the host waits for them"
    with pytest.raises(RuntimeError) as caught:
        FakeStream().capture(lambda: backend.all_reduce(torch.ones(2)))
    return str(caught.value)


class Agreement:
    """Another rank, whose captures have the given outcomes."""

    def __init__(self, others: Sequence[int]) -> None:
        self.others = list(others)

    def agree(self, mine: int) -> int:
        return min(mine, self.others.pop(0))


@pytest.mark.parametrize(
    ("others", "sizes", "text"),
    [
        # For each size: whether the other rank has time left, then the outcome of its capture, and after a
        # failure -1 if it launches kernels more simply, else 0.
        ([1, 2, 1, 2], [2, 4], None),
        ([1, 2, 0], [4], "use larger CUDA graphs"),
        ([1, 2, 1, 1], [4], "no memory for CUDA graphs of steps of 2 rows"),
        ([1, 2, 1, 0, 0], [], "cannot be captured: another rank cannot capture them"),
    ],
)
def test_ranks_have_the_same_graphs(
    others: list[int], sizes: list[int], text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.zeros(4)

    def make_parts(_: GraphSize) -> StepParts:
        return StepParts(lambda: x.add_(1), lambda: x.mul_(2), lambda: x.mul_(2))  # type: ignore[arg-type, return-value]

    agreement = Agreement(others)
    graphs = StepGraphs(FakeStream(), make_parts, CaptureLimits(lambda: 0, agreement.agree))
    with caplog.at_level(logging.WARNING):
        graphs.capture([GraphSize(2), GraphSize(4)])
    assert [size.num_rows for size in graphs.sizes] == sizes
    assert not agreement.others
    assert len(caplog.messages) == (text is not None)
    assert text is None or text in caplog.messages[0]
