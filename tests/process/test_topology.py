"""NUMA nodes and physical cores, from copies of sysfs."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.sysfs import pairs, singles, write_machine
from tgis.process.topology import NumaNode, format_list, read_nodes

TWO_SOCKETS = {0: "0-3,8-11", 1: "4-7,12-15"}


def read(root: Path, allowed: range | set[int], nodes: Mapping[int, str], cores: Mapping[int, str]) -> object:
    found = read_nodes(set(allowed), write_machine(root, nodes, cores))
    return {node.number: node.cores for node in found}


def test_one_socket(tmp_path: Path) -> None:
    cores = ((0, 2), (1, 3))
    assert read(tmp_path, range(4), {0: "0-3"}, pairs(2)) == {0: cores}


def test_two_sockets_with_hyperthreads(tmp_path: Path) -> None:
    first, second = ((0, 8), (1, 9), (2, 10), (3, 11)), ((4, 12), (5, 13), (6, 14), (7, 15))
    assert read(tmp_path, range(16), TWO_SOCKETS, pairs(8)) == {0: first, 1: second}


def test_sub_numa_clusters(tmp_path: Path) -> None:
    nodes = {0: "0-1", 1: "2-3", 2: "4-5", 3: "6-7"}
    expected = {node: ((2 * node,), (2 * node + 1,)) for node in range(4)}
    assert read(tmp_path, range(8), nodes, singles(8)) == expected


def test_nodes_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    nodes = {number: str(index) for index, number in enumerate((0, 2, 8, 10, 11))}
    found = read_nodes(set(range(5)), write_machine(tmp_path, nodes, singles(5)))
    assert [node.number for node in found] == [0, 2, 8, 10, 11]


def test_cpus_that_are_offline_or_not_allowed_are_left_out(tmp_path: Path) -> None:
    # CPUs 10 and 13 are offline: they are on no node, have no files, and are no siblings.
    cores = {cpu: text for cpu, text in pairs(8).items() if cpu not in (10, 13)}
    cores |= {2: "2", 5: "5"}
    nodes = {0: "0-3,8-9,11", 1: "4-7,12,14-15"}
    allowed = {1, 2, 3, 5, 9, 10, 13}
    assert read(tmp_path, allowed, nodes, cores) == {0: ((1, 9), (2,), (3,)), 1: ((5,),)}


def test_a_control_group_allows_a_part_of_one_node(tmp_path: Path) -> None:
    assert read(tmp_path, {4, 5, 12}, TWO_SOCKETS, pairs(8)) == {1: ((4, 12), (5,))}


def test_nodes_without_cpus(tmp_path: Path) -> None:
    """Memory of other kinds, such as HBM or CXL, is on nodes of its own."""
    nodes = {0: "0-1", 1: "2-3", 2: "", 3: ""}
    assert read(tmp_path, range(4), nodes, singles(4)) == {0: ((0,), (1,)), 1: ((2,), (3,))}


@pytest.mark.parametrize("nodes", [{}, {0: ""}])
def test_without_nodes_all_cpus_are_on_one(nodes: Mapping[int, str], tmp_path: Path) -> None:
    assert read(tmp_path, range(4), nodes, pairs(2)) == {0: ((0, 2), (1, 3))}


def test_without_any_file_each_cpu_is_a_core(tmp_path: Path) -> None:
    assert read_nodes({0, 3}, tmp_path) == [NumaNode(0, ((0,), (3,)))]


def test_siblings_before_linux_5_3(tmp_path: Path) -> None:
    root = write_machine(tmp_path, {0: "0-3"}, pairs(2), "thread_siblings_list")
    assert read_nodes(set(range(4)), root) == [NumaNode(0, ((0, 2), (1, 3)))]


def test_lists_are_written_as_linux_does() -> None:
    assert format_list({0, 1, 2, 3, 8, 10, 11}) == "0-3,8,10-11"
    assert format_list(()) == ""
