"""Places the threads of a rank on the CPUs of one NUMA node. The rank's weights and cache are then in the
memory of that node, because Linux allocates a page on the node of the thread that first writes to it."""

import logging
import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tgis.process.control_groups import count_cores
from tgis.process.topology import NumaNode, format_list, read_nodes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CpuShare:
    """CPUs of one rank."""

    nodes: tuple[int, ...]
    cores: tuple[tuple[int, ...], ...]
    """CPUs of each physical core."""

    @property
    def cpus(self) -> frozenset[int]:
        return frozenset(cpu for core in self.cores for cpu in core)


def share_cpus(nodes: Sequence[NumaNode], num_ranks: int) -> list[CpuShare]:
    """Return the CPUs of each rank. Ranks on one node divide its cores. If there are more nodes than ranks, a
    rank has all cores of adjacent nodes."""
    if num_ranks < len(nodes):
        bounds = [rank * len(nodes) // num_ranks for rank in range(num_ranks + 1)]
        return [_join(nodes[begin:end]) for begin, end in pairwise(bounds)]
    counts = _count_ranks(nodes, num_ranks)
    return [
        _cut(node, index, count) for node, count in zip(nodes, counts, strict=True) for index in range(count)
    ]


def _count_ranks(nodes: Sequence[NumaNode], num_ranks: int) -> list[int]:
    """Return the number of ranks on each node. Each rank comes to the node where it has most cores."""
    counts = [0] * len(nodes)
    for _ in range(num_ranks):
        cores = [len(node.cores) / (count + 1) for node, count in zip(nodes, counts, strict=True)]
        counts[cores.index(max(cores))] += 1
    return counts


def _join(nodes: Sequence[NumaNode]) -> CpuShare:
    return CpuShare(
        tuple(node.number for node in nodes), tuple(core for node in nodes for core in node.cores)
    )


def _cut(node: NumaNode, index: int, count: int) -> CpuShare:
    """Return the part `index` of `count` parts of a node. If it has fewer cores, several parts share one."""
    num_cores = len(node.cores)
    begin, end = index * num_cores // count, (index + 1) * num_cores // count
    return CpuShare((node.number,), node.cores[begin : max(end, begin + 1)])


def place_threads(rank: int, num_ranks: int, root: Path = Path("/")) -> int:
    """Pin all threads of this process, and those that they start, to the CPUs of a rank of this machine, if
    the machine has several nodes and ranks. Return the number of compute threads for the rank: one for each
    physical core if they are pinned, and no more than the CPU quota allows."""
    num_threads = max(1, count_cores(root) // num_ranks)
    nodes = read_nodes(os.sched_getaffinity(0), root)
    if len(nodes) == 1:
        return num_threads
    if num_ranks == 1:
        logger.info(
            "the CPUs belong to %d NUMA nodes, and one shard uses the memory of all: with --num-shard %d, "
            "each shard would use one node and its memory",
            len(nodes),
            len(nodes),
        )
        return num_threads
    share = share_cpus(nodes, num_ranks)[rank]
    try:
        _pin(share.cpus)
    except OSError as error:
        logger.warning("threads are not pinned to the CPUs of a NUMA node: %s", error.strerror)
        return num_threads
    num_threads = min(num_threads, len(share.cores))
    logger.info(
        "rank %d runs on NUMA %s %s, CPUs %s, %d physical cores",
        rank,
        "node" if len(share.nodes) == 1 else "nodes",
        format_list(share.nodes),
        format_list(share.cpus),
        len(share.cores),
    )
    return num_threads


def _pin(cpus: Collection[int]) -> None:
    """Pin all threads of this process. Raises OSError."""
    os.sched_setaffinity(0, cpus)
    for task in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # a thread may have ended
            os.sched_setaffinity(int(task.name), cpus)
