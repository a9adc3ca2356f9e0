"""The public port with real certificates, and every combination of files that is refused."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from tests.router.conftest import Setup, start_router, stop_router
from tests.router.test_grpc_api import get, single, stopping
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub


@dataclass(frozen=True)
class Files:
    """Of an authority, a server it vouches for and a client it vouches for."""

    directory: Path
    client: grpc.ChannelCredentials
    stranger: grpc.ChannelCredentials

    def flags(self, *names: str) -> list[str]:
        files = {"cert": "tls-cert-path", "key": "tls-key-path", "ca": "tls-client-ca-cert-path"}
        return [part for name in names for part in (f"--{files[name]}", str(self.directory / f"{name}.pem"))]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    directory = tmp_path_factory.mktemp("pem")
    authority = trustme.CA()
    server = authority.issue_cert("127.0.0.1", "localhost")
    authority.cert_pem.write_to_path(directory / "ca.pem")
    server.private_key_pem.write_to_path(directory / "key.pem")
    server.cert_chain_pems[0].write_to_path(directory / "cert.pem")
    return Files(
        directory,
        _credentials(authority, authority.issue_cert("client@example.com")),
        _credentials(authority, trustme.CA().issue_cert("client@example.com")),
    )


def _credentials(server_authority: trustme.CA, own: trustme.LeafCert) -> grpc.ChannelCredentials:
    chain = b"".join(part.bytes() for part in own.cert_chain_pems)
    return grpc.ssl_channel_credentials(server_authority.cert_pem.bytes(), own.private_key_pem.bytes(), chain)


@pytest.fixture(params=[("cert", "key"), ("cert", "key", "ca")], ids=["tls", "mutual"])
def encrypted(
    files: Files, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[tuple[Setup, tuple[str, ...]]]:
    setup = start_router(tmp_path, 1, *files.flags(*request.param))
    yield setup, request.param
    assert stop_router(setup) == 0


def call(setup: Setup, credentials: grpc.ChannelCredentials | None) -> grpc.StatusCode:
    target = f"localhost:{setup.service.grpc_port}"
    channel = (
        grpc.secure_channel(target, credentials) if credentials is not None else grpc.insecure_channel(target)
    )
    with channel:
        try:
            GenerationServiceStub(channel).ModelInfo(pb.ModelInfoRequest(), timeout=5)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def test_who_gets_in(encrypted: tuple[Setup, tuple[str, ...]], files: Files) -> None:
    setup, given = encrypted
    refused = grpc.StatusCode.UNAVAILABLE
    ca = grpc.ssl_channel_credentials((files.directory / "ca.pem").read_bytes())
    is_mutual = "ca" in given
    assert call(setup, files.client) is grpc.StatusCode.OK
    assert call(setup, ca) is (refused if is_mutual else grpc.StatusCode.OK)
    assert call(setup, files.stranger) is (refused if is_mutual else grpc.StatusCode.OK)
    assert call(setup, None) is refused
    assert get(setup.http + "/health")[0] == 200  # the HTTP port stays in the clear


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
    copies = Files(tmp_path, files.client, files.stranger)
    for name in ("cert", "key", "ca"):
        content = broken.get(name, (files.directory / f"{name}.pem").read_bytes())
        if content is not None:
            (tmp_path / f"{name}.pem").write_bytes(content)
    with pytest.raises(AssertionError, match=f"error: {text}"):
        start_router(tmp_path, 1, *copies.flags(*given))


def wait_for(condition: Callable[[], bool], timeout_s: float = 8) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def issue(authority: trustme.CA, directory: Path, **more: Any) -> None:
    """As Kubernetes mounts a secret: real files in a new directory, a link to it that is swapped at once."""
    fresh = directory / f"..{len(list(directory.iterdir()))}"
    fresh.mkdir()
    server = authority.issue_cert("localhost", **more)
    server.private_key_pem.write_to_path(fresh / "key.pem")
    server.cert_chain_pems[0].write_to_path(fresh / "cert.pem")
    authority.cert_pem.write_to_path(fresh / "ca.pem")
    (directory / "..new").symlink_to(fresh)
    (directory / "..new").replace(directory / "..data")


def test_certificates_change_under_live_streams(tmp_path: Path) -> None:
    """Server's, key and clients' authority at once; what was open goes on, what comes needs the new ones."""
    first, second = trustme.CA(), trustme.CA()
    mount, home = tmp_path / "mount", tmp_path / "home"
    mount.mkdir()
    home.mkdir()
    issue(first, mount)
    files = Files(mount / "..data", *[_credentials(ca, ca.issue_cert("a@b.c")) for ca in (first, second)])
    setup = start_router(home, 1, *files.flags("cert", "key", "ca"))
    setup.shards[0].step_s = 0.02
    target = f"localhost:{setup.service.grpc_port}"
    try:
        with grpc.secure_channel(target, files.client) as channel:
            request = single("Once upon a time", stopping=stopping(100, min_new_tokens=100))
            stream = GenerationServiceStub(channel).GenerateStream(request)
            next(stream)
            issue(second, mount)
            assert call(setup, files.stranger) is grpc.StatusCode.OK
            assert call(setup, files.client) is grpc.StatusCode.UNAVAILABLE
            *_, last = stream
            assert last.generated_token_count == 100
            assert GenerationServiceStub(channel).ModelInfo(pb.ModelInfoRequest(), timeout=5)
    finally:
        assert stop_router(setup) == 0


def test_what_does_not_fit_together_is_not_taken(tmp_path: Path) -> None:
    authority = trustme.CA()
    mount, home = tmp_path / "mount", tmp_path / "home"
    mount.mkdir()
    home.mkdir()
    issue(authority, mount, not_after=datetime.now(UTC) + timedelta(days=2))
    files = Files(mount / "..data", *[_credentials(authority, authority.issue_cert("a@b.c"))] * 2)
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
            assert call(setup, files.client) is grpc.StatusCode.OK
            assert metric("tgi_tls_reload_failure_total") == number
        key.unlink()
        wait_for(lambda: metric("tgi_tls_reload_failure_total") == 4)  # nobody need call
        issue(authority, mount, not_after=datetime.now(UTC) + timedelta(days=20))
        assert call(setup, files.client) is grpc.StatusCode.OK
        assert metric("tgi_tls_certificate_seconds_left") > 19 * 86400
        assert authority.cert_pem.bytes() not in setup.service.output.encode()
    finally:
        assert stop_router(setup) == 0


def test_a_key_of_another_certificate_is_refused(files: Files, tmp_path: Path) -> None:
    other = trustme.CA().issue_cert("localhost")
    (tmp_path / "cert.pem").write_bytes((files.directory / "cert.pem").read_bytes())
    other.private_key_pem.write_to_path(tmp_path / "key.pem")
    copies = Files(tmp_path, files.client, files.stranger)
    with pytest.raises(AssertionError, match="error: tls configuration error"):
        start_router(tmp_path, 1, *copies.flags("cert", "key"))
