"""A group on two nodes, each in a separate network: listening sockets, and streams that survive a cut cable
and a suspended node."""

import os
import signal
import time
from collections.abc import Iterator

import pytest

from integration_tests.deployment.cluster.two_nodes import HOSTS, TwoNetworks
from integration_tests.support.greedy_answers import Model, check, request
from integration_tests.support.live_streams import live_streams
from integration_tests.support.service import Client
from tests.support.processes import children_of
from tgis.pb import generation_pb2 as pb

pytestmark = pytest.mark.deploy

PAUSE_S = 15.0  # longer than a node may be silent
SILENT = "tgis.launcher.nodes.remote_nodes: node 1 is lost: silent for 10 s"


@pytest.fixture(scope="module")
def networks(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNetworks]:
    networks = TwoNetworks(tmp_path_factory.mktemp("n"), model.directory, "--dtype", "float32")
    try:
        yield networks
        if networks.nodes:
            assert networks.end() == [0, 0], "\n".join(node.output for node in networks.nodes.values())
            assert not networks.left_over()
    finally:
        networks.remove()


@pytest.fixture(scope="module")
def client(networks: TwoNetworks) -> Iterator[Client]:
    client = networks.serve()
    yield client
    client.channel.close()


def texts_of(model: Model) -> list[str]:
    return [expected.prompt[:20] for expected in model.expected[:4]]


def test_answers(client: Client, model: Model) -> None:
    for expected in model.expected[:4]:
        text = pb.BatchedGenerationRequest(
            requests=[pb.GenerationRequest(text=expected.prompt)],
            params=pb.Parameters(**request(expected)),
        )
        check(expected, client.stub.Generate(text, timeout=60).responses[0])


def test_nodes_listen_on_one_address_each(client: Client, networks: TwoNetworks) -> None:
    """These listen besides the configured ports on loopback."""
    for rank, host in enumerate(HOSTS):
        assert networks.listening(rank) == {"127.0.0.1", host}


@pytest.mark.slow
def test_streams_outlive_a_cut_cable(client: Client, model: Model, networks: TwoNetworks) -> None:
    with live_streams(client, texts_of(model), timeout_s=120):
        networks.cut()
        time.sleep(PAUSE_S)
        networks.mend()
    networks.nodes[0].wait_for_line(SILENT)
    assert networks.nodes[1].process.poll() is None


def test_streams_outlive_a_node_that_stands_still(
    client: Client, model: Model, networks: TwoNetworks
) -> None:
    """Suspend launcher and shard; their later messages are ignored."""
    launcher = networks.nodes[1].process.pid
    num_lost = networks.nodes[0].output.count(SILENT)
    pids = [launcher, *children_of(launcher)["serve"]]  # finding them takes as long as many tokens
    with live_streams(client, texts_of(model), timeout_s=120):
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(PAUSE_S)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert networks.nodes[0].output.count(SILENT) == num_lost + 1
