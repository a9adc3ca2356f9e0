"""One group of ranks on two nodes: the same responses as on one machine, prompts and adapters that only node
0 has, and streams that survive a lost shard, a lost node and the end of a worker."""

import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import trustme

from integration_tests.deployment.cluster.two_nodes import NAME, TwoNodes
from integration_tests.support import oracle
from integration_tests.support.adapter_requests import TEXTS, Tuned, asks
from integration_tests.support.greedy_answers import Model, check, request
from integration_tests.support.live_streams import live_streams, read
from integration_tests.support.served_models import FLAGS, write_fallback
from integration_tests.support.service import Client
from tests.support.link_files import LinkFiles, free_ports, is_refused
from tests.support.processes import Service, children_of
from tgis.pb import generation_pb2 as pb

pytestmark = pytest.mark.deploy


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    home = tmp_path_factory.mktemp("n")
    served = write_fallback(home / "model")
    nodes = TwoNodes(home, served.directory, *FLAGS, *served.flags)
    yield nodes
    codes = nodes.end()
    assert codes == [0, 0], nodes.nodes[0].output + nodes.nodes[1].output
    assert not nodes.left_over()


@pytest.fixture(scope="module")
def tuned(nodes: TwoNodes) -> Iterator[Tuned]:
    served = write_fallback(nodes.home / "again")
    client = nodes.serve()
    yield Tuned(client, served, oracle.Oracle(served))
    client.channel.close()


def health(nodes: TwoNodes, rank: int) -> int:
    port = nodes.nodes[rank].http_port
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_answers_are_those_of_one_machine(tuned: Tuned) -> None:
    """Prompts and adapters are read on node 0, and copied to the other."""
    with ThreadPoolExecutor(8) as threads:
        everything = asks()
        for ask, answer in zip(everything, threads.map(lambda ask: ask.send(tuned), everything), strict=True):
            ask.check(tuned, answer)


def test_streams_outlive_a_shard_of_the_other_node(tuned: Tuned, nodes: TwoNodes) -> None:
    [shard] = children_of(nodes.nodes[1].process.pid)["serve"]  # finding it takes as long as many tokens
    with live_streams(tuned.client, TEXTS):
        os.kill(shard, signal.SIGKILL)
    assert nodes.nodes[1].process.poll() is None
    nodes.nodes[0].wait_for_line("node 1: shard 1 was killed by SIGKILL")


def test_streams_outlive_the_other_node(tuned: Tuned, nodes: TwoNodes) -> None:
    """The new node starts empty, and gets copies of the prompts and adapters in use."""
    with live_streams(tuned.client, TEXTS):
        nodes.nodes[1].end(signal.SIGKILL)
        nodes.clear(1)
        nodes.start(1)
    everything = asks()[:6]
    for ask in everything:
        ask.check(tuned, ask.send(tuned))


@pytest.mark.slow
def test_streams_finish_before_a_terminated_worker_ends(tuned: Tuned, nodes: TwoNodes) -> None:
    """Streams complete before the time limit or a second signal; then the node's successor joins."""
    client, running, node = tuned.client, threading.Barrier(2), nodes.nodes[0]
    num_lost = node.output.count("is lost")
    expected = read(client, TEXTS[0])
    with ThreadPoolExecutor(1) as threads:
        stream = threads.submit(read, client, TEXTS[0], running)
        running.wait(30)
        nodes.nodes[1].process.terminate()
        assert stream.result(60) == expected
    assert node.output.count("is lost") == num_lost
    assert nodes.nodes[1].end(timeout_s=60) == 0, nodes.nodes[1].output
    nodes.start(1)
    assert read(client, TEXTS[0]) == expected


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--dtype", "bfloat16"), "dtype is bfloat16 on node 1 and float32 on node 0"),
        (("--num-shard", "2"), "num_shard is 2 on node 1 and 1 on node 0"),
    ],
)
def test_a_node_that_does_not_fit_is_refused(
    nodes: TwoNodes, tuned: Tuned, flags: tuple[str, ...], reason: str
) -> None:
    worker = nodes.nodes[1]
    other = nodes.start(1, *flags)
    nodes.nodes[1] = worker
    assert other.process.wait(60) == 1
    other.end()
    assert other.lines[-1] == f"error: node 0 refused this node: {reason}"
    assert health(nodes, 0) == 200


def context_of(files: LinkFiles | None, authority: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority))
    context.check_hostname = False
    if files is not None:
        context.load_cert_chain(files.path("cert"), files.path("key"))
    return context


def test_strangers_are_no_nodes(nodes: TwoNodes, tuned: Tuned, tmp_path: Path) -> None:
    """A client without the right certificate is refused; with it, invalid messages are answered, or end the
    connection."""
    port, group = nodes.port, LinkFiles(nodes.home / "link")
    others = LinkFiles(tmp_path / "others").write(trustme.CA(), NAME)
    num_lost = nodes.nodes[0].output.count("is lost")
    expected = read(tuned.client, TEXTS[2])
    for files in (None, others):
        assert is_refused(port, context_of(files, group.path("ca")))
    with socket.create_connection(("127.0.0.1", port), timeout=10) as plain:
        plain.sendall(b'{"kind": "hello", "node_rank": 1}\n')
        with contextlib.suppress(ConnectionResetError):
            assert b"kind" not in plain.recv(1 << 16)
    right = context_of(group, group.path("ca"))
    for said, answer in (
        (b'{"kind": "hello", "node_rank": 7, "common": {}, "addresses": []}\n', b"node_rank 7 is out of"),
        (b'{"kind": "hello", "node_rank": 1, "common": {}, "addresses": []}\n', b" is None on node 1 and "),
        (b'{"kind": "hello"}\n', b"its first message is invalid"),
        (b"[1, 2]\n", b""),
        (b"x" * (1 << 20), b""),
    ):
        with (
            socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
            right.wrap_socket(plain) as connection,
        ):
            with contextlib.suppress(OSError):  # the connection may be closed meanwhile, in several ways
                connection.sendall(said)
            assert answer in received(connection)
    assert read(tuned.client, TEXTS[2]) == expected
    assert nodes.nodes[0].output.count("is lost") == num_lost


def received(connection: ssl.SSLSocket) -> bytes:
    """Read until the connection is closed."""
    body = b""
    with contextlib.suppress(OSError):
        while data := connection.recv(1 << 16):
            body += data
    return body


@pytest.mark.slow
def test_the_other_node_outlives_node_0(nodes: TwoNodes, tuned: Tuned) -> None:
    """The group ends, and the ports serve the next one; this is the last test of the group."""
    expected, worker = read(tuned.client, TEXTS[1]), nodes.nodes[1]
    nodes.nodes[0].end(signal.SIGKILL)
    nodes.clear(0)
    worker.wait_for_line("no connection to node 0")
    again = Client(nodes.start(0).wait_until_serving())
    assert read(again, TEXTS[1]) == expected
    again.channel.close()
    assert nodes.nodes[1] is worker
    assert worker.process.poll() is None


def test_shards_alone_serve_a_router_elsewhere(model: Model, tmp_path: Path) -> None:
    """Their addresses follow from the order of the ports; they serve health over HTTPS."""
    files, port = LinkFiles(tmp_path / "link").write(trustme.CA(), NAME), free_ports()
    common = ["--bind", "127.0.0.1", *files.flags, "--link-server-name", NAME]
    own = ["--model-name", str(model.directory), "--dtype", "float32", "--headless"]
    own += ["--master-addr", "127.0.0.1", "--master-port", str(port), "--port", str(port + 4), "--http-tls"]
    own += ["--tls-cert-path", str(files.path("cert")), "--tls-key-path", str(files.path("key"))]
    shards = Service(["launcher", *common, *own, "--termination-log", str(tmp_path / "end")])
    own = [
        "--tokenizer-path",
        str(model.directory),
        "--max-sequence-length",
        "256",
        "--grpc-port",
        "0",
        "--port",
        "0",
    ]
    router = Service(["router", *common, *own, "--shard-addresses", f"127.0.0.1:{port + 1}"])
    client = Client(router.wait_until_serving())
    expected = model.expected[0]
    batch = pb.BatchedGenerationRequest(
        requests=[pb.GenerationRequest(text=expected.prompt)], params=pb.Parameters(**request(expected))
    )
    check(expected, client.stub.Generate(batch, timeout=60).responses[0])
    client.channel.close()
    url, context = f"https://127.0.0.1:{port + 4}/metrics", context_of(None, files.path("ca"))
    with urllib.request.urlopen(url, context=context, timeout=10) as answer:
        assert "\ntgi_ready 1\n" in answer.read().decode()
    probe = ["health-probe", "--port", str(port + 4), "--http-tls"]
    assert subprocess.run([sys.executable, "-m", "tgis", *probe], timeout=60).returncode == 0
    assert (router.end(), shards.end()) == (0, 0), shards.output


@pytest.mark.slow
def test_a_node_may_be_lost_while_all_load(model: Model, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A refusal ends the service only if the shard itself fails."""
    nodes = TwoNodes(tmp_path_factory.mktemp("n"), model.directory, "--dtype", "float32")
    first, lost = nodes.start(0), nodes.start(1)
    lost.wait_for_line("start 1 of the group")
    lost.end(signal.SIGKILL)
    nodes.clear(1)
    first.wait_for_line("node 1 is lost")
    nodes.start(1)
    client = Client(first.wait_until_serving())
    assert read(client, TEXTS[0])
    client.channel.close()
    assert nodes.end() == [0, 0], first.output
    failing = TwoNodes(tmp_path_factory.mktemp("n"), model.directory, "--dtype", "float32")
    first = failing.start(0)
    failing.start(1, "--failpoints", "shard.before_loading[rank=1]=raise")
    assert first.process.wait(60) == 1
    assert first.lines[-1].startswith("error: node 1: shard 1")
    failing.nodes[1].end()
    first.end()
