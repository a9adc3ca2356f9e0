"""Tests the public ports with real certificates: who is admitted, how connections are encrypted, files that
change, and every refused combination of files."""

import http.client
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
import trustme

from tests.support.router.http_port import get
from tests.support.router.messages import single, stopping
from tests.support.router.router_process import NUM_WORKERS, Setup, start_router, stop_router
from tests.support.tls_files import Files, credentials, issue
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

OK, REFUSED = grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE
SOON_S = 15.0  # a refusal comes at once, but the machine may be busy


SERVERS = {
    "plain": (),
    "TLS": ("cert", "key"),
    "mutual": ("cert", "key", "ca"),
}


@pytest.fixture(scope="module")
def servers(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Setup]]:
    """Yield one server of each kind."""

    def start(name: str) -> Setup:
        more = ["--http-tls"] if SERVERS[name] else []
        return start_router(tmp_path_factory.mktemp(name), 1, *files.flags(*SERVERS[name]), *more)

    with ThreadPoolExecutor(len(SERVERS)) as threads:
        by_name = dict(zip(SERVERS, threads.map(start, SERVERS), strict=True))
        yield by_name
        assert list(threads.map(stop_router, by_name.values())) == [0] * len(by_name)
    assert "ssl_transport_security" not in by_name["mutual"].service.output, "gRPC has no log of its own"


def call(setup: Setup, own: grpc.ChannelCredentials | None, expected_name: str = "") -> grpc.StatusCode:
    target = f"localhost:{setup.service.grpc_port}"
    options = [("grpc.ssl_target_name_override", expected_name)] if expected_name else []
    channel = grpc.insecure_channel(target) if own is None else grpc.secure_channel(target, own, options)
    with channel:
        try:
            GenerationServiceStub(channel).ModelInfo(pb.ModelInfoRequest(), timeout=2 * SOON_S)
        except grpc.RpcError as error:
            return error.code()
    return OK


def corrupted(files: Files) -> grpc.ChannelCredentials:
    """Return credentials with a certificate whose signature is no longer the authority's."""
    own = files.authority.issue_cert("client@example.com")
    der = bytearray(ssl.PEM_cert_to_DER_cert(own.cert_chain_pems[0].bytes().decode()))
    der[-3] ^= 0x5A
    chain = ssl.DER_cert_to_PEM_cert(bytes(der)).encode()
    return grpc.ssl_channel_credentials(files.authority.cert_pem.bytes(), own.private_key_pem.bytes(), chain)


DAY = timedelta(days=1)
# Credentials of each client, and the servers that admit it. A server that requires no certificate ignores it.
CLIENTS: dict[str, tuple[Callable[[Files], grpc.ChannelCredentials | None], set[str]]] = {
    "plain": (lambda files: None, {"plain"}),
    "the right certificate": (lambda files: files.client(), {"TLS", "mutual"}),
    "no certificate": (
        lambda files: grpc.ssl_channel_credentials(files.authority.cert_pem.bytes()),
        {"TLS"},
    ),
    "another authority's certificate": (
        lambda files: credentials(files.authority, trustme.CA().issue_cert("client@example.com")),
        {"TLS"},
    ),
    "trust in another authority": (
        lambda files: credentials(trustme.CA(), files.authority.issue_cert("client@example.com")),
        set(),
    ),
    "an expired certificate": (lambda files: files.client(not_after=datetime.now(UTC) - DAY), {"TLS"}),
    "a certificate of tomorrow": (lambda files: files.client(not_before=datetime.now(UTC) + DAY), {"TLS"}),
    "a corrupted certificate": (corrupted, {"TLS"}),
}


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("client", CLIENTS)
def test_accepted_client_certificates(
    servers: dict[str, Setup], files: Files, server: str, client: str
) -> None:
    show, lets_in = CLIENTS[client]
    own = show(files)
    started = time.monotonic()
    assert call(servers[server], own) is (OK if server in lets_in else REFUSED)
    assert time.monotonic() - started < SOON_S


@pytest.mark.parametrize("server", SERVERS)
def test_a_server_of_another_name_is_not_called(servers: dict[str, Setup], files: Files, server: str) -> None:
    started = time.monotonic()
    assert call(servers[server], files.client(), "elsewhere.example.com") is REFUSED
    assert time.monotonic() - started < SOON_S


LEGACY = ":@SECLEVEL=0"  # lets OpenSSL offer weak suites
SUITES = {
    "1.3": (ssl.TLSVersion.TLSv1_3, "DEFAULT", True),
    "1.2, AES-128-GCM": (ssl.TLSVersion.TLSv1_2, "ECDHE-RSA-AES128-GCM-SHA256", True),
    "1.2, AES-256-GCM": (ssl.TLSVersion.TLSv1_2, "ECDHE-RSA-AES256-GCM-SHA384", True),
    "1.2, CBC": (ssl.TLSVersion.TLSv1_2, "ECDHE+AES:!AESGCM:!AESCCM" + LEGACY, False),
    "1.2, without ECDHE": (ssl.TLSVersion.TLSv1_2, "kRSA+AESGCM:DHE+AESGCM" + LEGACY, False),
    "1.2, all the rest": (ssl.TLSVersion.TLSv1_2, "ALL:!AESGCM" + LEGACY, False),
    "1.1": (ssl.TLSVersion.TLSv1_1, "ALL" + LEGACY, False),
    "1.0": (ssl.TLSVersion.TLSv1, "ALL" + LEGACY, False),
}


def agree(port: int, version: ssl.TLSVersion, ciphers: str) -> bool:
    """Return True if both ends support a common suite."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = context.maximum_version = version
    context.set_ciphers(ciphers)
    context.set_alpn_protocols(["h2", "http/1.1"])
    with socket.create_connection(("127.0.0.1", port), timeout=SOON_S) as plain:
        try:
            with context.wrap_socket(plain):
                return True
        except (ssl.SSLError, ConnectionResetError):
            return False


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
@pytest.mark.parametrize("suite", SUITES)
def test_how_it_is_encrypted(servers: dict[str, Setup], suite: str) -> None:
    version, ciphers, is_served = SUITES[suite]
    for port in (servers["TLS"].service.grpc_port, servers["TLS"].service.http_port):
        assert agree(port, version, ciphers) is is_served


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_refused_cipher_suites_are_available_to_the_client(files: Files) -> None:
    """A server that supports everything accepts these suites, so the refusals above prove something."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1
    context.set_ciphers("ALL" + LEGACY)
    context.load_cert_chain(files.directory / "cert.pem", files.directory / "key.pem")
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        for version, ciphers, _ in SUITES.values():
            agreed = threads.submit(agree, listener.getsockname()[1], version, ciphers)
            connection, _ = listener.accept()
            context.wrap_socket(connection, server_side=True).close()
            assert agreed.result()


def https(setup: Setup, path: str, authority: trustme.CA) -> int:
    """Return the status for a probe without a certificate."""
    context = ssl.create_default_context(cadata=authority.cert_pem.bytes().decode())
    with urllib.request.urlopen(
        f"https://localhost:{setup.service.http_port}{path}", timeout=SOON_S, context=context
    ) as answer:
        return int(answer.status)


@pytest.mark.parametrize("server", ["TLS", "mutual"])
def test_the_http_port_has_the_same_certificate_and_asks_for_none(
    servers: dict[str, Setup], files: Files, server: str
) -> None:
    assert [https(servers[server], path, files.authority) for path in ("/health", "/live", "/metrics")] == [
        200
    ] * 3
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        https(servers[server], "/health", trustme.CA())
    with pytest.raises((OSError, http.client.HTTPException)):
        urllib.request.urlopen(servers[server].http + "/health", timeout=SOON_S)
    assert https(servers[server], "/health", files.authority) == 200


@pytest.mark.parametrize(
    ("given", "broken", "text"),
    [
        (("cert",), {}, "tls: must provide both cert and key"),
        (("key",), {}, "tls: must provide both cert and key"),
        (("key", "ca"), {}, "tls: must provide both cert and key"),
        (("ca",), {}, "tls: cannot provide client ca cert without keypair"),
        (("cert", "key"), {"cert": None}, "couldn't load cert from "),
        (("cert", "key"), {"key": None}, "couldn't load key from "),
        (("cert", "key", "ca"), {"ca": None}, "couldn't load client ca cert from "),
        (("cert", "key"), {"cert": b"nonsense"}, "tls configuration error"),
        (("cert", "key"), {"key": b"nonsense"}, "tls configuration error"),
        (("cert", "key", "ca"), {"ca": b"nonsense"}, "tls configuration error"),
    ],
)
def test_refused_at_start(
    files: Files, tmp_path: Path, given: tuple[str, ...], broken: dict[str, bytes | None], text: str
) -> None:
    copies = Files(tmp_path, files.authority)
    for name in ("cert", "key", "ca"):
        content = broken.get(name, (files.directory / f"{name}.pem").read_bytes())
        if content is not None:
            (tmp_path / f"{name}.pem").write_bytes(content)
    with pytest.raises(AssertionError, match=f"error: {text}"):
        start_router(tmp_path, 1, *copies.flags(*given))


def wait_for(condition: Callable[[], bool], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_certificates_change_under_live_streams(tmp_path: Path) -> None:
    """The server's certificate, its key and the clients' authority change together. Open connections
    continue; new ones need the new files."""
    first, second = trustme.CA(), trustme.CA()
    mount, home = tmp_path / "mount", tmp_path / "home"
    mount.mkdir()
    home.mkdir()
    issue(first, mount)
    files, later = (Files(mount / "..data", authority) for authority in (first, second))
    setup = start_router(home, 1, *files.flags("cert", "key", "ca"), "--http-tls")
    setup.shards[0].step_s = 0.02
    target = f"localhost:{setup.service.grpc_port}"
    try:
        assert https(setup, "/health", first) == 200
        with grpc.secure_channel(target, files.client()) as channel:
            request = single("Once upon a time", stopping=stopping(100, min_new_tokens=100))
            stream = GenerationServiceStub(channel).GenerateStream(request)
            next(stream)
            issue(second, mount)
            assert https(setup, "/health", second) == 200
            assert call(setup, later.client()) is OK
            assert call(setup, files.client()) is REFUSED
            *_, last = stream
            assert last.generated_token_count == 100
            assert GenerationServiceStub(channel).ModelInfo(pb.ModelInfoRequest(), timeout=5)
    finally:
        assert stop_router(setup) == 0


def test_mismatched_certificate_and_key_are_refused(tmp_path: Path) -> None:
    """Each change counts once, however many workers read the files."""
    authority = trustme.CA()
    mount, home = tmp_path / "mount", tmp_path / "home"
    mount.mkdir()
    home.mkdir()
    issue(authority, mount, not_after=datetime.now(UTC) + timedelta(days=2))
    files = Files(mount / "..data", authority)
    setup = start_router(home, 1, *files.flags("cert", "key"))

    def metric(name: str) -> float:
        lines = get(setup.http + "/metrics")[1].splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(name + " "))

    try:
        setup.service.wait_for_line("the TLS certificate expires in 2.0 days", 8)
        assert 1.9 < metric("tgi_tls_certificate_seconds_left") / 86400 < 2
        cert, key = mount / "..data" / "cert.pem", mount / "..data" / "key.pem"
        whole = cert.read_bytes()
        for number, broken in enumerate((whole[: len(whole) // 2], b"", trustme.CA().cert_pem.bytes()), 1):
            cert.write_bytes(broken)
            assert call(setup, files.client()) is OK
            wait_for(lambda number=number: metric("tgi_tls_reload_failure_total") == number)
        key.unlink()  # noticed without calls
        wait_for(lambda: setup.service.output.count(f"{key}: No such file") == NUM_WORKERS)
        assert metric("tgi_tls_reload_failure_total") == 4
        issue(authority, mount, not_after=datetime.now(UTC) + timedelta(days=20))
        assert call(setup, files.client()) is OK
        wait_for(lambda: metric("tgi_tls_certificate_seconds_left") > 19 * 86400)
        assert authority.cert_pem.bytes() not in setup.service.output.encode()
    finally:
        assert stop_router(setup) == 0


def test_a_key_of_another_certificate_is_refused(files: Files, tmp_path: Path) -> None:
    other = trustme.CA().issue_cert("localhost")
    (tmp_path / "cert.pem").write_bytes((files.directory / "cert.pem").read_bytes())
    other.private_key_pem.write_to_path(tmp_path / "key.pem")
    copies = Files(tmp_path, files.authority)
    with pytest.raises(AssertionError, match="error: tls configuration error"):
        start_router(tmp_path, 1, *copies.flags("cert", "key"))
