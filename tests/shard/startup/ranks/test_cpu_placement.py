"""Division of a machine's CPUs among its ranks, and pinning of real threads, on copies of sysfs."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.sysfs import pairs, singles, write_machine
from tgis.process.topology import NumaNode, format_list, read_nodes
from tgis.shard.startup.ranks.cpu_placement import share_cpus

TWO_SOCKETS = {0: "0-3,8-11", 1: "4-7,12-15"}
CLUSTERS = {0: "0-1", 1: "2-3", 2: "4-5", 3: "6-7"}


def share(root: Path, nodes: Mapping[int, str], cores: Mapping[int, str], num_ranks: int) -> list[object]:
    shares = share_cpus(read_nodes(set(cores), write_machine(root, nodes, cores)), num_ranks)
    return [(each.nodes, sorted(each.cpus)) for each in shares]


def test_each_socket_has_a_rank(tmp_path: Path) -> None:
    expected = [((0,), [0, 1, 2, 3, 8, 9, 10, 11]), ((1,), [4, 5, 6, 7, 12, 13, 14, 15])]
    assert share(tmp_path, TWO_SOCKETS, pairs(8), 2) == expected


def test_ranks_of_one_socket_divide_its_cores(tmp_path: Path) -> None:
    expected = [((0,), [0, 1, 8, 9]), ((0,), [2, 3, 10, 11]), ((1,), [4, 5, 12, 13]), ((1,), [6, 7, 14, 15])]
    assert share(tmp_path, TWO_SOCKETS, pairs(8), 4) == expected


def test_more_ranks_than_cores_share_cores(tmp_path: Path) -> None:
    expected = [((0,), [0]), ((0,), [0]), ((1,), [1]), ((1,), [1])]
    assert share(tmp_path, {0: "0", 1: "1"}, singles(2), 4) == expected


def test_fewer_ranks_than_nodes_have_adjacent_nodes(tmp_path: Path) -> None:
    assert share(tmp_path, CLUSTERS, singles(8), 2) == [((0, 1), [0, 1, 2, 3]), ((2, 3), [4, 5, 6, 7])]
    assert share(tmp_path, CLUSTERS, singles(8), 3) == [
        ((0,), [0, 1]),
        ((1,), [2, 3]),
        ((2, 3), [4, 5, 6, 7]),
    ]


def test_no_rank_is_put_on_a_node_with_few_of_the_cores() -> None:
    nodes = [NumaNode(0, tuple((cpu,) for cpu in range(8))), NumaNode(1, ((8,),))]
    assert [len(each.cores) for each in share_cpus(nodes, 2)] == [4, 4]


def test_no_team_crosses_a_node_if_there_are_enough_ranks() -> None:
    for sizes in ((1,), (3, 5), (4, 4), (2, 2, 2, 2), (7, 1, 4)):
        nodes = [
            NumaNode(number, tuple((10 * number + core,) for core in range(size)))
            for number, size in enumerate(sizes)
        ]
        for num_ranks in range(len(sizes), 12):
            shares = share_cpus(nodes, num_ranks)
            assert len(shares) == num_ranks
            for each in shares:
                assert each.cores
                assert {cpu // 10 for cpu in each.cpus} == set(each.nodes)
                assert len(each.nodes) == 1


# Places the threads of this process as the last rank, after torch has started some. Prints the number of
# threads to use, the CPUs of all threads, among them some that are started later, and the log.
PLACE = """
import json, logging, os, sys
from pathlib import Path
import torch
from tgis.shard.startup.ranks.cpu_placement import place_threads
logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
torch.set_num_threads(2)
x = torch.ones(1 << 20).exp_()
num_threads = place_threads(int(sys.argv[2]) - 1, int(sys.argv[2]), Path(sys.argv[1]))
torch.set_num_threads(4)
x.exp_()
tasks = [int(task) for task in os.listdir("/proc/self/task")]
assert len(tasks) >= 4
print(num_threads)
print(json.dumps([sorted(os.sched_getaffinity(task)) for task in tasks]))
"""
HERE = sorted(os.sched_getaffinity(0))
FIRST, SECOND = HERE[: len(HERE) // 2], HERE[len(HERE) // 2 :]
several_cpus = pytest.mark.skipif(len(HERE) < 2, reason="there is one CPU only")


def place(root: Path, nodes: Mapping[int, str], num_ranks: int) -> tuple[str, int, list[list[int]]]:
    """Return the log, the number of compute threads, and the CPUs of each thread."""
    write_machine(root, nodes, {cpu: str(cpu) for cpu in HERE})
    command = [sys.executable, "-c", PLACE, str(root), str(num_ranks)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    *lines, num_threads, cpus = done.stdout.splitlines()
    return "\n".join(lines), int(num_threads), json.loads(cpus)


@several_cpus
def test_all_threads_are_pinned_to_the_node_of_their_rank(tmp_path: Path) -> None:
    log, num_threads, cpus = place(tmp_path, {0: format_list(FIRST), 1: format_list(SECOND)}, 2)
    assert num_threads == len(HERE) // 2
    assert all(each == SECOND for each in cpus)
    cores = f"{len(SECOND)} physical cores"
    assert log == f"rank 1 runs on NUMA node 1, CPUs {format_list(SECOND)}, {cores}"


def test_nothing_is_pinned_on_one_node(tmp_path: Path) -> None:
    log, num_threads, cpus = place(tmp_path, {0: format_list(HERE)}, 2)
    assert num_threads == max(1, len(HERE) // 2)
    assert all(each == HERE for each in cpus)
    assert log == ""


@several_cpus
def test_one_rank_uses_all_nodes(tmp_path: Path) -> None:
    log, num_threads, cpus = place(tmp_path, {0: format_list(FIRST), 1: format_list(SECOND)}, 1)
    assert num_threads == len(HERE)
    assert all(each == HERE for each in cpus)
    assert "--num-shard 2" in log
