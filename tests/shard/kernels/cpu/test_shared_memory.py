"""Collectives in shared memory: the same bits as gloo's, in processes that are late, stopped or killed."""

import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.shard.driver import configure
from tests.support.shard.rank_forker import RankForker
from tests.support.shard.ranks import TIMEOUT_S, Ranks
from tgis.shard.collectives import ProcessGroup, ProcessGroupError, RendezvousPoint, connect
from tgis.shard.kernels.cpu.jit.compiler import capture
from tgis.shard.kernels.cpu.kernel_graph import KernelGraph, MemoryPool
from tgis.shard.kernels.cpu.shared_memory import region
from tgis.shard.kernels.cpu.shared_memory.collectives import SLOT_BYTES, open_collectives
from tgis.shard.startup.load import load
from tgis.shard.startup.ranks import group as group_module

FLOATS = SLOT_BYTES // 4  # that fit into a slot
LENGTHS = (0, 1, 3, 576, 4095, FLOATS - 1, FLOATS, FLOATS + 1, 3 * FLOATS + 7)
SPECIAL = (0.0, -0.0, float("inf"), 1e-42, 3e38)
GATHERED = ((1,), (3, 5), (2, 3, 7), (70, 8191), (0, 4))
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
NUM_ROUNDS = 2000


def sum_twice(group: ProcessGroup) -> list[bool]:
    """Return, for each length, whether the bits of a sum are those of the backend's sum."""
    assert group.local is not None
    torch.manual_seed(group.rank)
    plain, equal = replace(group, local=None), []
    for length in LENGTHS:
        x = torch.randn(length) * torch.logspace(-3, 3, length)
        for index, value in enumerate(SPECIAL[: length // 2]):
            x[index] = value  # in all ranks, so that -0.0 and the infinity meet themselves
        expected = plain.all_reduce(x.clone())
        assert group.all_reduce(x) is x
        equal.append(torch.equal(x.view(torch.int32), expected.view(torch.int32)))
    return equal


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_have_the_bits_of_the_backend(size: int, ranks: Ranks) -> None:
    for equal in ranks.run(size, sum_twice):
        assert equal == [True] * len(LENGTHS)


def sum_other_types(group: ProcessGroup) -> list[Tensor]:
    """Return sums of tensors that gloo adds."""
    ones = torch.ones(3, 4)
    columns = ones[:, ::2]
    return [group.all_reduce(x) for x in (ones.bfloat16(), ones.long(), columns.contiguous())]


def test_other_types_are_summed_by_the_backend(ranks: Ranks) -> None:
    for sums in ranks.run(3, sum_other_types):
        assert [x.dtype for x in sums] == [torch.bfloat16, torch.int64, torch.float32]
        assert all(x.eq(3).all() for x in sums)


def gather_twice(group: ProcessGroup) -> list[bool]:
    torch.manual_seed(group.rank)
    plain = replace(group, local=None)
    given = [torch.randint(0, 100, shape).to(dtype) for shape in GATHERED for dtype in DTYPES]
    given += [x.transpose(0, -1) for x in given]
    given.append(torch.rand(1, FLOATS + 1))  # does not fit into a slot
    equal = [torch.equal(group.all_gather(x), plain.all_gather(x)) for x in given]
    return [*equal, group.min(10 - group.rank) == 11 - group.size]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_gathered_tensors_equal_the_backend_s(size: int, ranks: Ranks) -> None:
    for equal in ranks.run(size, gather_twice):
        assert all(equal)


def sum_with_delays(group: ProcessGroup) -> int:
    """Return the number of wrong sums. Each rank is late at other times; all add the same lengths."""
    lengths, delays = random.Random(1), random.Random(2 + group.rank)
    num_wrong = 0
    for number in range(NUM_ROUNDS):
        length = lengths.choice((1, 7, 64, 1000, 20000))
        x = torch.arange(length, dtype=torch.float32).mul_(group.rank + 1).add_(number)
        factor = group.size * (group.size + 1) // 2
        expected = torch.arange(length, dtype=torch.float32).mul_(factor).add_(group.size * number)
        if delays.random() < 0.01:
            time.sleep(delays.choice((0.0, 1e-4, 1e-3, 5e-3)))
        num_wrong += not torch.equal(group.all_reduce(x), expected)
    return num_wrong


@pytest.mark.parametrize("size", [2, 4])
def test_delays_change_no_sum(size: int, ranks: Ranks) -> None:
    assert ranks.run(size, sum_with_delays) == [0] * size


def lose_rank_1(group: ProcessGroup, number: int, is_captured: bool) -> None:
    """End or stop rank 1 between two sums. The next one fails, changes nothing, and later ones fail too."""
    x = torch.zeros(100)
    with capture(MemoryPool().empty) as launches:
        group.all_reduce(x)
    run = KernelGraph(launches).replay if is_captured else lambda: group.all_reduce(x)
    x.fill_(1.0)
    for _ in range(5):
        run()
    assert x.eq(32.0).all()
    if group.rank == 1:
        os.kill(os.getpid(), number)
    began = time.monotonic()
    try:
        run()
    finally:
        assert time.monotonic() - began < TIMEOUT_S / 2
        assert x.eq(32.0).all()
        with pytest.raises(ProcessGroupError):
            group.all_gather(x)


@pytest.mark.parametrize(
    ("number", "timeout_s", "is_captured", "reason"),
    [
        (signal.SIGKILL, TIMEOUT_S, False, "a rank has ended"),
        (signal.SIGKILL, TIMEOUT_S, True, "a rank has ended"),
        (signal.SIGSTOP, 1.0, False, "rank 1 did not come within 1 s"),
    ],
)
def test_a_lost_rank_is_noticed(
    number: int, timeout_s: float, is_captured: bool, reason: str, rank_forker: RankForker
) -> None:
    text = f"^a rank was lost or does not respond: {reason}$"
    with Ranks(rank_forker, timeout_s) as ranks, pytest.raises(ProcessGroupError, match=text):
        ranks.run(2, lose_rank_1, number, is_captured)


def in_threads(size: int, function: Callable[[int], Any]) -> list[Any]:
    """Return what function(rank) returns or raises on each rank."""
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = function(rank)
        except Exception as error:
            results[rank] = error

    threads = [Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_different_tensors_are_an_error(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        point = RendezvousPoint(str(tmp_path / "rendezvous"))
        group = connect(rank, 2, point, 5.0, open_local=open_collectives)
        group.all_reduce(torch.ones(3))
        try:
            group.all_reduce(torch.ones(3 + rank))
        finally:
            group.leave()

    errors = in_threads(2, run)
    assert all(isinstance(error, ProcessGroupError) for error in errors)
    assert "another tensor" in "".join(map(str, errors))


class OtherMachine:
    """Store of a rank on another machine, where the first rank's process and files are others."""

    def __init__(self, store: Any, token: str | None) -> None:
        self._store, self._token = store, token
        self.set = store.set

    def get(self, key: str) -> bytes:
        value: bytes = self._store.get(key)
        if key != region.OFFER.format(0):
            return value
        pid, reader, memory, _ = json.loads(value)
        return json.dumps([pid, reader, memory if self._token else 1 << 20, self._token or ""]).encode()


@pytest.mark.parametrize("token", [None, "00" * 16], ids=["no such file", "another file"])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_of_several_machines_share_nothing(size: int, token: str | None) -> None:
    before, store = open_files(), dist.HashStore()

    def run(rank: int) -> Any:
        return open_collectives(OtherMachine(store, token) if rank == 1 else store, rank, size, 5.0)

    assert in_threads(size, run) == [None] * size
    assert open_files() <= before


def log_of_start(group: ProcessGroup, directory: Path, place: Path) -> str:
    """Load a model as a shard does, which connects its own group. Return the lines about activations."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(group_module.__name__)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    load(configure(directory, rank=group.rank, world_size=group.size, rendezvous=str(place)))
    logger.removeHandler(handler)
    return "".join(line for line in lines if "activations" in line)


def test_shards_use_shared_memory(ranks: Ranks, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    lines = ranks.run(2, log_of_start, checkpoint("biases"), tmp_path / "rendezvous")
    assert lines == ["the ranks exchange activations in shared memory", ""]


COMPILE = """
import sys
from tests.support.shard.arm import target
target.use("neoverse-n1")
from tgis.shard.kernels.cpu.jit import cache
cache._bases[:] = []
from tgis.shard.kernels.cpu.shared_memory import kernels
print(kernels.all_reduce._compiled._library.get_asm_str())
"""


@pytest.mark.slow
def test_memory_is_ordered_on_arm() -> None:
    """The number of a round is stored after the part, and loaded before it."""
    done = subprocess.run([sys.executable, "-c", COMPILE], check=True, capture_output=True, text=True)
    instructions = re.findall(r"^\t(\w+)", done.stdout, re.MULTILINE)
    assert "stlr" in instructions
    assert {"ldar", "ldapr"} & set(instructions)


def open_files() -> set[str]:
    """Return names of this process's open pipes and files in memory."""
    links = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # other tests' groups may close theirs meanwhile
            links.add(os.readlink(f"/proc/self/fd/{fd}"))
    return {link for link in links if link.startswith(("pipe:", "/memfd:"))}


def test_nothing_is_left_over(tmp_path: Path) -> None:
    before, store = open_files(), dist.HashStore()

    def run(rank: int) -> None:
        collectives = open_collectives(store, rank, 3, 5.0)
        assert collectives is not None
        x = torch.ones(3)
        collectives.all_reduce(x)
        collectives.leave()
        with pytest.raises(ProcessGroupError):
            collectives.all_reduce(x)

    assert in_threads(3, run) == [None] * 3
    assert open_files() <= before
