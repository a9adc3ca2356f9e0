"""A real router and a real shard, linked over TCP: equal responses, no access for others, and a broken link
is reconnected with the current certificate files."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
import trustme

from integration_tests.support.greedy_answers import MAX_SEQUENCE_LENGTH, Model, check, request
from integration_tests.support.service import Client
from tests.support.link_files import LinkFiles, Relay, free_ports, is_refused
from tests.support.processes import Service
from tgis.net.framing import frame
from tgis.pb import generation_pb2 as pb
from tgis.pb import shard_pb2
from tgis.pb.shard_pb2_grpc import ShardServiceStub

NUM_STREAMS = 3
LENGTH = 80
NUM_SILENT = 40  # more than the number of simultaneous handshakes
OVER = "router disconnected"


@dataclass
class Linked:
    authority: trustme.CA
    shard_files: LinkFiles
    router_files: LinkFiles
    shard: Service
    port: int
    client: Client
    relay: Relay
    known: dict[str, str] = field(default_factory=dict)

    def num_over(self) -> int:
        return sum(OVER in line for line in self.shard.lines)

    def read(self, text: str, running: threading.Barrier | None = None) -> str:
        """Return the text of a whole stream; `running` is met after the first token."""
        criteria = pb.StoppingCriteria(max_new_tokens=LENGTH, min_new_tokens=LENGTH)
        request = pb.GenerationRequest(text=text)
        parameters = pb.Parameters(stopping=criteria)
        parts = self.client.stub.GenerateStream(
            pb.SingleGenerationRequest(request=request, params=parameters)
        )
        texts = [next(parts).text, next(parts).text]
        if running is not None:
            running.wait(30)
        return "".join([*texts, *(part.text for part in parts)])

    def undisturbed(self, text: str) -> str:
        if text not in self.known:
            self.known[text] = self.read(text)
        return self.known[text]


@pytest.fixture(scope="module")
def linked(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Linked]:
    """Connect the router through a relay."""
    home, authority, port = tmp_path_factory.mktemp("linked"), trustme.CA(), free_ports()
    shard_files = LinkFiles(home / "shard").write(authority, "localhost")
    router_files = LinkFiles(home / "router").write(authority, "router.example.com")
    own = ["--model-path", str(model.directory), "--dtype", "float32", "--uds-path", str(home / "uds")]
    own += ["--max-batch-size", "8", "--cpu-threads", "1", "--log-level", "debug"]
    shard = Service(["serve", *own, "--listen-address", f"127.0.0.1:{port}", *shard_files.flags])
    relay = Relay(port)
    command = ["router", "--tokenizer-path", str(model.directory), "--bind", "127.0.0.1", "--port", "0"]
    command += ["--grpc-port", "0", "--max-sequence-length", str(MAX_SEQUENCE_LENGTH)]
    addresses = ["--shard-addresses", f"localhost:{relay.port}"]
    addresses += ["--failpoints", "router.before_step=sleep:0.005"]  # so that streams last long enough
    router = Service([*command, *addresses, *router_files.flags])
    try:
        client = Client(router.wait_until_serving())
        yield Linked(authority, shard_files, router_files, shard, port, client, relay)
        client.channel.close()
    finally:
        codes = [router.end(), shard.end()]
        relay.stop()
    assert codes == [0, 0], router.output + shard.output


def test_tokens_are_those_of_unix_sockets(linked: Linked, model: Model) -> None:
    """transformers' results are the same."""
    for expected in model.expected[:NUM_STREAMS]:
        parameters = pb.Parameters(**request(expected))
        text = pb.BatchedGenerationRequest(
            requests=[pb.GenerationRequest(text=expected.prompt)], params=parameters
        )
        check(expected, linked.client.stub.Generate(text).responses[0])
    assert not list(linked.shard_files.directory.parent.glob("uds*-0*")), "there is no Unix socket"


@contextlib.contextmanager
def live(linked: Linked, model: Model) -> Iterator[list[Future[str]]]:
    """Run streams meanwhile, which must equal undisturbed ones."""
    texts = [expected.prompt[:20] for expected in model.expected[:NUM_STREAMS]]
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        undisturbed = list(threads.map(linked.undisturbed, texts))
        running = threading.Barrier(NUM_STREAMS + 1)
        streams = [threads.submit(linked.read, text, running) for text in texts]
        running.wait(30)
        yield streams
        assert [stream.result(60) for stream in streams] == undisturbed


def client_context(files: LinkFiles, authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=authority.cert_pem.bytes().decode())
    context.load_cert_chain(files.path("cert"), files.path("key"))
    return context


def info(port: int, own: grpc.ChannelCredentials | None) -> grpc.StatusCode:
    target = f"localhost:{port}"
    with grpc.insecure_channel(target) if own is None else grpc.secure_channel(target, own) as channel:
        try:
            ShardServiceStub(channel).Info(shard_pb2.InfoRequest(), timeout=10)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_strangers_neither_connect_nor_disturb(linked: Linked, model: Model, tmp_path: Path) -> None:
    refused, calls, steps = grpc.StatusCode.UNAVAILABLE, linked.port, linked.port + 1
    authority, name, yesterday = linked.authority, "router.example.com", datetime.now(UTC) - timedelta(days=1)
    others = [
        LinkFiles(tmp_path / "stranger").write(trustme.CA(), name, authority),
        LinkFiles(tmp_path / "late").write(authority, name, not_after=yesterday),
    ]
    nothing = ssl.create_default_context(cadata=authority.cert_pem.bytes().decode())
    old = client_context(linked.router_files, authority)
    old.set_ciphers("ALL:@SECLEVEL=0")
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    num_over = linked.num_over()
    with live(linked, model) as streams, contextlib.ExitStack() as stack:
        for files in others:
            assert info(calls, files.credentials) is refused
        assert info(calls, grpc.ssl_channel_credentials(authority.cert_pem.bytes())) is refused
        assert info(calls, None) is refused
        for context in (*[client_context(files, authority) for files in others], nothing, old):
            assert is_refused(steps, context)
        assert is_refused(calls, old)
        with socket.create_connection(("127.0.0.1", steps), timeout=10) as plain:
            plain.sendall(frame(shard_pb2.StepRequest(step_id=1)))
            with contextlib.suppress(ConnectionResetError):
                assert len(plain.recv(99)) < 8, "it is closed, with an alert at most"
                assert plain.recv(99) == b""
        for _ in range(NUM_SILENT):
            silent = stack.enter_context(socket.create_connection(("127.0.0.1", steps)))
            silent.sendall(b"\x16\x03\x01")
        assert not any(stream.done() for stream in streams), "they must be running meanwhile"
    assert linked.num_over() == num_over
    assert info(calls, linked.router_files.credentials) is grpc.StatusCode.OK
    right = client_context(linked.router_files, authority)
    with (
        socket.create_connection(("127.0.0.1", steps), timeout=10) as plain,
        right.wrap_socket(plain, server_hostname="localhost"),
    ):
        linked.shard.wait_for_line(f"{OVER}: a newer connection replaces this one", 10)


def test_a_cut_link_is_made_again_with_the_files_of_then(linked: Linked, model: Model) -> None:
    old, new = LinkFiles(linked.router_files.directory.parent / "old"), trustme.CA()
    old.write(linked.authority, "router.example.com")
    assert info(linked.port, old.credentials) is grpc.StatusCode.OK
    num_over = linked.num_over()
    with live(linked, model) as streams:
        linked.shard_files.write(new, "localhost")
        linked.router_files.write(new, "router.example.com")
        assert not any(stream.done() for stream in streams), "they must be running when the link is cut"
        linked.relay.cut()
    assert linked.num_over() == num_over + 1
    assert info(linked.port, old.credentials) is grpc.StatusCode.UNAVAILABLE
    assert info(linked.port, linked.router_files.credentials) is grpc.StatusCode.OK
