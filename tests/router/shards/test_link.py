"""Check a router whose shards are reached over TCP: shard authentication, refusals in the log, and its own
certificate."""

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
import trustme

from tests.support.link_files import LinkFiles, free_ports
from tests.support.processes import Service
from tests.support.router.fake_shard import FakeShard, ShardServer
from tests.support.router.messages import batch
from tests.support.router.model_of_contents import Item, Library
from tests.support.router.router_process import Setup, router_command, write_usual
from tests.support.router.streams import Streams
from tgis.config.processes import RouterConfig, ShardConfig
from tgis.errors import OperatorError
from tgis.net.addresses import AddressError, parse_all
from tgis.pb import shard_pb2 as pb
from tgis.router.shards.client import ShardClient
from tgis.router.shards.link import UnixShardLink, open_link
from tgis.shard.transport.link import choose_endpoint

RIGHT, WRONG = "localhost", "elsewhere.example.com"
NOT_CALLED = "Hostname Verification Check failed"
NO_STREAM = "Hostname mismatch, certificate is not valid for 'localhost'"


class CallersShard(FakeShard):
    """A shard that records the callers of Find."""

    callers: tuple[bytes, ...] = ()

    def Find(self, request: pb.FindRequest, context: grpc.ServicerContext) -> pb.FindResponse:
        self.callers += tuple(context.auth_context()["x509_subject_alternative_name"])
        return super().Find(request, context)


class TcpShardServer(ShardServer):
    """Serve a shard on two TCP ports with a certificate."""

    def __init__(self, shard: FakeShard, port: int, files: LinkFiles, of_steps: LinkFiles) -> None:
        self._files = files
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(of_steps.path("cert"), of_steps.path("key"))
        self._context.load_verify_locations(files.path("ca"))
        self._context.verify_mode = ssl.CERT_REQUIRED
        super().__init__(shard, str(port))

    def _open(self, path: str) -> socket.socket:
        port = int(path.partition("-")[0])
        key, cert, ca = (self._files.path(name).read_bytes() for name in ("key", "cert", "ca"))
        own = grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=True)
        self._server.add_secure_port(f"127.0.0.1:{port}", own)
        return socket.create_server(("127.0.0.1", port + 1))

    def _answer(self, connection: socket.socket) -> None:
        with suppress(OSError), self._context.wrap_socket(connection, server_side=True) as encrypted:
            self._connections.append(encrypted)
            super()._answer(encrypted)


class Linked(Setup):
    """A router and two shards, one of which had the wrong name at first."""

    authority: trustme.CA
    own: LinkFiles


@pytest.fixture(scope="module")
def linked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Linked]:
    home, authority, library = tmp_path_factory.mktemp("linked"), trustme.CA(), Library()
    library.put(Item("p0", 3), "prompt")
    own = LinkFiles(home / "router").write(authority, "first.example.com")
    named = {name: LinkFiles(home / name).write(authority, name) for name in (RIGHT, WRONG)}
    room = pb.InfoResponse(prompt_cache_bytes=1 << 20)
    shards: list[FakeShard] = [CallersShard(rank, 1, room, library, 2) for rank in range(2)]
    ports = [free_ports() for _ in shards]

    def serve(rank: int, name: str, name_of_steps: str) -> ShardServer:
        return TcpShardServer(shards[rank], ports[rank], named[name], named[name_of_steps])

    servers = [serve(0, RIGHT, RIGHT), serve(1, WRONG, RIGHT)]
    tokenizer = write_usual(home)
    addresses = ",".join(f"localhost:{port}" for port in ports)
    service = Service(router_command(home, "--shard-addresses", addresses, *own.flags))
    try:
        for reason, names in ((NOT_CALLED, (RIGHT, WRONG)), (NO_STREAM, (RIGHT, RIGHT))):
            service.wait_for_line(reason, 20)
            time.sleep(0.4)  # time for further attempts
            assert service.grpc_port == 0, "it waits for the right one"
            servers[1].stop()
            servers[1] = serve(1, *names)
        setup = Linked(service.wait_until_serving(20), shards, servers, tokenizer, "", library)
        setup.authority, setup.own = authority, own
        yield setup
        setup.channel.close()
    finally:
        code = service.end()
        for server in servers:
            server.stop()
    assert code == 0, service.output
    assert "ssl_transport_security" not in service.output, "gRPC has no log of its own"


def test_a_shard_of_another_name_is_refused_in_one_line(linked: Linked) -> None:
    """Check both ports."""
    for reason in (NOT_CALLED, NO_STREAM):
        [line] = [line for line in linked.service.lines if reason in line]
        assert " WARNING " in line
        assert "shard 1 at localhost:" in line


def test_a_cut_stream_is_made_again(linked: Linked) -> None:
    streams = Streams(linked, count=2, step_s=0.005)
    linked.servers[1].cut()
    assert streams.results() == streams.expected()
    assert linked.shards[1].num_streams == 2


def test_new_files_are_shown_to_shards_that_are_connected(linked: Linked) -> None:
    """Check that new calls show a new certificate while the step stream stays open."""
    shard = linked.shards[0]
    assert isinstance(shard, CallersShard)
    request, num_streams = batch("a"), shard.num_streams
    request.prefix_id = "prompt"
    linked.stub.Generate(request)
    linked.own.write(linked.authority, "second.example.com")
    linked.stub.Generate(request)
    assert shard.callers == (b"first.example.com", b"second.example.com")
    assert shard.num_streams == num_streams, "the stream of steps goes on"


def options_of(files: LinkFiles) -> dict[str, str]:
    cert, key, ca = (str(files.path(name)) for name in ("cert", "key", "ca"))
    return {"link_cert_path": cert, "link_key_path": key, "link_ca_cert_path": ca}


def test_files_and_addresses_that_cannot_be_used(tmp_path: Path) -> None:
    """Check refusals on both ends."""
    files, authority = LinkFiles(tmp_path / "own"), trustme.CA()

    def refusals(address: str = "localhost:1") -> set[str]:
        router = RouterConfig(tokenizer_path="", shard_addresses=address, **options_of(files))
        shard = ShardConfig(model_path="", listen_address=address, **options_of(files))
        result = set()
        for open_it in (lambda: open_link(router), lambda: choose_endpoint(shard)):
            with pytest.raises(OperatorError) as caught:
                open_it()
            result.add(str(caught.value))
        return result

    other = LinkFiles(tmp_path / "other").write(authority, "a.example.com").path("cert").read_bytes()
    cert, key, ca = (files.path(name) for name in ("cert", "key", "ca"))
    for name, content, reason in (
        ("cert", other, f"link configuration error: the key {key} does not belong to the cert {cert}"),
        ("cert", b"nonsense", f"link configuration error: the cert {cert} is damaged"),
        ("ca", b"nonsense", f"link configuration error: the ca cert {ca} is damaged"),
        ("key", None, f"couldn't load key from {key}: No such file or directory"),
    ):
        files.write(authority, "a.example.com")
        files.path(name).unlink()
        if content is not None:
            files.path(name).write_bytes(content)
        [refusal] = refusals()
        assert refusal.startswith(reason)
    files.write(authority, "a.example.com")
    for address in ("localhost", "localhost:", ":8000", "localhost:0", "localhost:65535", "::1:80", "a b:80"):
        assert refusals(address) == {f"{address!r} is not HOST:PORT with a port from 1 to 65534"}
    with pytest.raises(OperatorError, match="contains an address twice"):
        parse_all("a:1,b:1, a:1")
    assert [str(one) for one in parse_all("a-1.example:1, [::1]:65534")] == ["a-1.example:1", "[::1]:65534"]


async def test_addresses_in_a_file_may_change(tmp_path: Path) -> None:
    """Check that invalid addresses in a file are ignored and disturb no connection."""
    path = tmp_path / "addresses"
    files = LinkFiles(tmp_path / "tls").write(trustme.CA(), "a.example.com")
    cert, key, ca = (str(files.path(name)) for name in ("cert", "key", "ca"))
    config = RouterConfig(
        tokenizer_path="",
        shard_addresses=str(path),
        link_cert_path=cert,
        link_key_path=key,
        link_ca_cert_path=ca,
    )
    link = open_link(config)
    for text, names in (
        (None, []),
        ("a:1,b:1", ["a:1", "b:1"]),
        ("c:1,d:1", ["c:1", "d:1"]),
        ("c:1,", ["c:1", "d:1"]),
    ):
        if text is not None:
            path.write_text(text)
        channels = link.open_channels()
        assert len(channels) == len(names)
        for channel in channels:
            await channel.close()
        assert link.names == names
    with pytest.raises(AddressError):
        open_link(config)


async def refuse_to_connect(link: ShardClient, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    """Let the client try until it logs the reason, and longer."""
    with caplog.at_level(logging.DEBUG):
        connecting = asyncio.create_task(link.connect())
        async with asyncio.timeout(60):
            while reason not in caplog.text:  # noqa: ASYNC110 - the log tells nobody
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
    assert not connecting.done()
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting


async def test_shards_of_a_larger_group_are_not_connected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shards = [FakeShard(rank, world_size=3) for rank in (0, 1)]
    servers = [ShardServer(shard, str(tmp_path / "shard")) for shard in shards]
    link = ShardClient(UnixShardLink(str(tmp_path / "shard"), 2))
    await refuse_to_connect(link, "it belongs to 3 shards, but 2 are expected", caplog)
    await link.close()
    for server in servers:
        server.stop()


async def test_addresses_in_another_order_than_the_ranks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shards = [FakeShard(rank, world_size=2) for rank in (0, 1)]
    for shard, other in zip(shards, (1, 0), strict=True):
        shard.info.rank = other
    servers = [ShardServer(shard, str(tmp_path / "shard")) for shard in shards]
    link = ShardClient(UnixShardLink(str(tmp_path / "shard"), 2))
    await refuse_to_connect(link, "rank 1 answers there", caplog)
    for rank, shard in enumerate(shards):
        shard.info.rank = rank
    assert (await asyncio.wait_for(link.connect(), 60)).rank == 0
    await link.close()
    for server in servers:
        server.stop()
    assert [shard.num_streams for shard in shards] == [1, 1]
