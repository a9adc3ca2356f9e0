"""Check tensor-parallel ranks: sharding, collectives, timeouts, and the addresses they listen on."""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.shard.checkpoints import CASES
from tests.support.shard.ranks import ALONE, Ranks
from tests.support.shard.stepping import compute_mixed_steps, load
from tgis.logs import FIELDS
from tgis.shard.collectives import OpenLocal, ProcessGroup, ProcessGroupError, RendezvousPoint, connect
from tgis.shard.kernels.cpu.shared_memory.collectives import open_collectives


def in_threads(
    size: int,
    place: Path | list[RendezvousPoint],
    function: Callable[[ProcessGroup], Any],
    timeout_s: float = 30.0,
    open_local: OpenLocal | None = None,
) -> list[Any]:
    """Return what function(group) returns or raises on each rank.

    The ranks are threads that rendezvous in a file or at the given address."""
    points = [RendezvousPoint(str(place))] * size if isinstance(place, Path) else place
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            group = connect(rank, size, points[rank], timeout_s, open_local=open_local)
            results[rank] = function(group)
            group.leave()
        except Exception as error:
            results[rank] = error

    ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(60)
    return results


def listening() -> list[Any]:
    return [c.laddr for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]


def test_cuts_evenly() -> None:
    assert [ProcessGroup(rank, 4).slice(12) for rank in range(4)] == [
        slice(0, 3),
        slice(3, 6),
        slice(6, 9),
        slice(9, 12),
    ]
    assert [ProcessGroup(rank, 4).slice(6, 2) for rank in range(4)] == [slice(0, 3)] * 2 + [slice(3, 6)] * 2
    assert [ProcessGroup(rank, 2).slice(5, 1) for rank in range(2)] == [slice(0, 5)] * 2


def test_one_rank_is_alone() -> None:
    group = connect(0, 1, RendezvousPoint("/nowhere"), 1.0)
    x = torch.randn(2, 3)
    assert group.all_reduce(x) is x
    assert group.all_gather(x) is x
    assert group.min(7) == 7
    group.leave()


in_shared_memory = pytest.mark.parametrize(
    "open_local", [None, open_collectives], ids=["gloo", "shared memory"]
)


@in_shared_memory
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_collectives(size: int, open_local: OpenLocal | None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    values = torch.randn(size, 5, 300) * torch.logspace(-3, 3, 300)

    def function(group: ProcessGroup) -> tuple[Tensor, Tensor, int]:
        x = values[group.rank].clone()
        total = group.all_reduce(x)
        assert total is x
        return total, group.all_gather(values[group.rank, :, :3].t()), group.min(10 - group.rank)

    expected = values[0]
    for other in values[1:]:
        expected = expected + other
    for total, gathered, least in in_threads(size, tmp_path / "rendezvous", function, open_local=open_local):
        assert torch.equal(total, expected), "not summed in the order of ranks"
        assert torch.equal(gathered, torch.cat([v[:, :3].t() for v in values], -1))
        assert least == 11 - size


def test_listens_on_loopback_only(tmp_path: Path) -> None:
    before = set(listening())

    def function(group: ProcessGroup) -> set[Any]:
        group.min(0)
        result = set(listening()) - before
        group.min(0)  # no rank leaves before all have looked
        return result

    for result in in_threads(2, tmp_path / "rendezvous", function):
        assert {address.ip for address in result} == {"127.0.0.1"}
    assert set(listening()) == before


def test_ranks_meet_at_a_port(tmp_path: Path) -> None:
    """Check that the ranks use the given listener and listen only at their own addresses."""
    before = set(listening())
    with socket.create_server(("127.0.0.2", 0)) as listener:
        place, fd = f"127.0.0.2:{listener.getsockname()[1]}", os.dup(listener.fileno())
    points = [RendezvousPoint(place, f"127.0.0.{2 + rank}", fd if rank == 0 else None) for rank in range(3)]

    def function(group: ProcessGroup) -> tuple[Tensor, set[Any]]:
        total = group.all_reduce(torch.tensor([2.0**group.rank]))
        result = {address.ip for address in set(listening()) - before}
        group.min(0)
        return total, result

    for total, result in in_threads(3, points, function):
        assert total.tolist() == [7.0]
        assert result == {"127.0.0.2", "127.0.0.3", "127.0.0.4"}


@in_shared_memory
def test_a_rank_that_hangs_is_noticed(open_local: OpenLocal | None, tmp_path: Path) -> None:
    def function(group: ProcessGroup) -> float:
        began = time.monotonic()
        if group.rank:
            time.sleep(2.0)
            return 0.0
        with pytest.raises(ProcessGroupError, match=r"^a rank was lost or does not respond: .+") as caught:
            group.all_reduce(torch.ones(3))
        assert "\n" not in str(caught.value)
        return time.monotonic() - began

    waited, _ = in_threads(2, tmp_path / "rendezvous", function, 0.5, open_local)
    assert 0.4 < waited < 1.5


def test_a_rank_that_never_comes_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(
        ProcessGroupError, match=r"^rank 1 could not connect to all 2 ranks within 0\.3 s: "
    ) as caught:
        connect(1, 2, RendezvousPoint(str(tmp_path / "rendezvous")), 0.3)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one(case: str, ranks: Ranks, checkpoint: Callable[[str], Path]) -> None:
    mine, theirs = ranks.run(2, compute_mixed_steps, checkpoint(case), torch.float32)
    torch.testing.assert_close(
        mine, compute_mixed_steps(ProcessGroup(0, 1), checkpoint(case), torch.float32), rtol=1e-4, atol=1e-4
    )
    assert torch.equal(mine, theirs), "ranks disagree"


def test_two_ranks_equal_one_in_half_precision(ranks: Ranks, checkpoint: Callable[[str], Path]) -> None:
    mine, theirs = ranks.run(2, compute_mixed_steps, checkpoint("biases"), torch.bfloat16)
    expected = compute_mixed_steps(ProcessGroup(0, 1), checkpoint("biases"), torch.bfloat16)
    torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(mine, theirs), "ranks disagree"


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_two_ranks_equal_one_with_a_cache_of_8_bits(
    cache_dtype: torch.dtype, ranks: Ranks, checkpoint: Callable[[str], Path]
) -> None:
    step = (checkpoint("grouped_queries"), torch.float32)
    mine, theirs = ranks.run(2, compute_mixed_steps, *step, cache_dtype)
    assert torch.equal(mine, theirs), "ranks disagree"
    alone, exact = (compute_mixed_steps(ALONE, *step, dtype) for dtype in (cache_dtype, torch.float32))
    torch.testing.assert_close(mine, alone, rtol=1e-4, atol=1e-4)
    assert (alone - exact).abs().max() > (1e-4 if cache_dtype == torch.int8 else 1e-2)


def count_bytes_read(group: ProcessGroup, directory: Path) -> int:
    """Return the number of bytes read, as the log reports it at the end."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("tgis.shard.checkpoint.progress")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        load(directory, group)
    finally:
        logger.removeHandler(handler)
    return int(getattr(records[-1], FIELDS)["bytes"])


@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_rank_reads_its_slices_only(size: int, ranks: Ranks, checkpoint: Callable[[str], Path]) -> None:
    """Check the bytes that each rank reads.

    Norms and summed biases are replicated, and the last rank has fewer vocabulary rows."""
    directory = checkpoint("biases")
    expected = [0] * size
    for name, tensor in load_file(directory / "model.safetensors").items():
        num_bytes = tensor.nbytes
        is_whole = "norm" in name or name.endswith(("o_proj.bias", "down_proj.bias"))
        for rank in range(size):
            share = -(-num_bytes // size)
            if "embed" in name or "lm_head" in name:
                rows, width = 99, num_bytes // 99
                begin = rank * -(-rows // size)
                share = (min(rows, begin + -(-rows // size)) - begin) * width
            elif size == 4 and ("k_proj" in name or "v_proj" in name):
                share = num_bytes // 2  # two heads: neighbouring ranks have the same one
            expected[rank] += num_bytes if is_whole else share
    assert ranks.run(size, count_bytes_read, directory) == expected
