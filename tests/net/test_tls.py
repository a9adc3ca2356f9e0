"""Messages about files that cannot be used, and about expiring certificates: which file, and since when."""

import asyncio
import logging
import ssl
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives.asymmetric.dsa import generate_private_key
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from tests.support.lacks import no_descriptor_left, no_thread_left
from tgis.net import tls
from tgis.net.tls import (
    CertificateError,
    Certificates,
    Pem,
    TlsFiles,
    mutual_client_context,
    mutual_server_context,
)
from tgis.router.shards.link import TcpShardLink


def issue(directory: Path, **more: object) -> TlsFiles:
    authority = trustme.CA()
    leaf = authority.issue_cert("localhost", **more)  # type: ignore[arg-type]
    leaf.private_key_pem.write_to_path(directory / "key.pem")
    leaf.cert_chain_pems[0].write_to_path(directory / "cert.pem")
    authority.cert_pem.write_to_path(directory / "ca.pem")
    return TlsFiles(*(str(directory / f"{name}.pem") for name in ("cert", "key", "ca")))


def encrypt(path: Path) -> None:
    key = load_pem_private_key(path.read_bytes(), None)
    encryption = BestAvailableEncryption(b"a password")
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))


def replace_key(path: Path) -> None:
    trustme.CA().issue_cert("localhost").private_key_pem.write_to_path(path)


def write_dsa(path: Path) -> None:
    """Create a key of a type that is not supported."""
    key = generate_private_key(2048)
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def cut(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])


def copy(name: str) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(path.with_name(name).read_bytes())


def empty(path: Path) -> None:
    path.write_bytes(b"")


def make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


# Damage of each file, and the message besides the file's path.
DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "no certificate": ("cert", Path.unlink, "No such file or directory"),
    "no key": ("key", Path.unlink, "No such file or directory"),
    "no authority": ("ca", Path.unlink, "No such file or directory"),
    "a directory": ("key", make_directory, "Is a directory"),
    "an empty certificate": ("cert", empty, "the cert "),
    "half a certificate": ("cert", cut, "the cert "),
    "half a key": ("key", cut, "key"),
    "an empty authority": ("ca", empty, "the ca cert "),
    "half an authority": ("ca", cut, "the ca cert "),
    "garbage for a key": ("key", lambda path: path.write_bytes(b"\xff\x00garbage"), "key"),
    "a certificate for a key": ("key", copy("ca.pem"), "key"),
    "a key for a certificate": ("cert", copy("key.pem"), "cert"),
    "an encrypted key": ("key", encrypt, "is encrypted; provide one without a password"),
    "a key that fits nothing": ("key", write_dsa, "does not belong to the cert"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["TLS", "link"])
def test_unreadable_files_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str, name: str
) -> None:
    """The error is raised at start-up and logged later; the previous files stay in use."""
    file, spoil, text = DAMAGES[damage]
    files = issue(tmp_path)
    loaded = Certificates(files, mutual_server_context, name)
    before, path = loaded.context, tmp_path / f"{file}.pem"
    spoil(path)
    with pytest.raises(CertificateError) as refused:
        Certificates(files, mutual_server_context, name)
    line = str(refused.value)
    assert str(path) in line
    assert text in line
    assert "PRIVATE" not in line
    assert "\n" not in line
    others = {files.cert, files.key, str(files.ca)} - {str(path)}
    assert not any(other in line for other in others) or damage == "a key that fits nothing"
    with caplog.at_level(logging.ERROR):
        loaded.refresh()
    assert loaded.context is before
    assert [record.getMessage() for record in caplog.records] == [
        f"the changed {name} files are not used; the previous ones stay in use: {line}"
    ]


WITHOUT_RIGHTS = """
import os, sys
# The other user may not be able to read it.
import cryptography.x509, cryptography.exceptions
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from tgis.net.tls import Certificates, CertificateError, TlsFiles

if os.getuid() == 0:  # who may read everything
    os.setuid(65534)
try:
    Certificates(TlsFiles(*sys.argv[1:]))
except CertificateError as error:
    print(error)
"""


@pytest.mark.parametrize(("file", "what"), [("cert", "cert"), ("key", "key"), ("ca", "client ca cert")])
def test_files_without_read_permission_are_named(tmp_path: Path, file: str, what: str) -> None:
    issue(tmp_path)
    tmp_path.chmod(0o755)
    names = [f"{name}.pem" for name in ("cert", "key", "ca")]
    for name in names:
        (tmp_path / name).chmod(0 if name == f"{file}.pem" else 0o444)
    command = [sys.executable, "-c", WITHOUT_RIGHTS, *names]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True, cwd=tmp_path)
    assert result.stdout == f"couldn't load {what} from {file}.pem: Permission denied\n"


def test_both_files_of_a_pair_that_does_not_fit_are_named(tmp_path: Path) -> None:
    files = issue(tmp_path)
    replace_key(tmp_path / "key.pem")
    with pytest.raises(CertificateError) as refused:
        Certificates(files)
    text = f"tls configuration error: the key {files.key} does not belong to the cert {files.cert}"
    assert str(refused.value) == text


EXPIRED = {
    "not_before": datetime(2020, 1, 1, tzinfo=UTC),
    "not_after": datetime(2021, 1, 31, 12, tzinfo=UTC),
}


def expired_line(files: TlsFiles) -> tuple[int, str]:
    since = f"the link certificate {files.cert} expired at 2021-01-31T12:00:00Z"
    return logging.ERROR, f"{since}: peers refuse it; renew it"


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(record.levelno, record.getMessage()) for record in caplog.records]


def test_an_expired_certificate_is_an_error_until_it_is_renewed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is logged once a minute; for a certificate that expires soon, a warning once a day."""
    caplog.set_level(logging.WARNING)
    files = issue(tmp_path, **EXPIRED)
    loaded = Certificates(files, name="link")
    loaded.refresh()
    assert said(caplog) == [expired_line(files)]
    assert tls.EXPIRED_EVERY_S == 60
    monkeypatch.setattr(tls, "EXPIRED_EVERY_S", 0.0)
    loaded.refresh()
    assert said(caplog) == [expired_line(files)] * 2
    issue(tmp_path, not_after=datetime.now(UTC) + timedelta(days=2))
    for _ in range(3):
        loaded.refresh()
    assert said(caplog)[2:] == [(logging.WARNING, "the link certificate expires in 2.0 days")]


async def test_the_files_are_watched_after_a_lack_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "REFRESH_S", 0.01)
    loaded = Certificates(issue(tmp_path))
    watching = asyncio.create_task(loaded.watch())
    with no_thread_left():
        await asyncio.sleep(0.1)
    issue(tmp_path)
    async with asyncio.timeout(10):
        while loaded.pem.cert != (tmp_path / "cert.pem").read_bytes():
            assert not watching.done()
            await asyncio.sleep(0.01)
    watching.cancel()


def test_changed_files_are_read_again_after_a_lack_of_descriptors(tmp_path: Path) -> None:
    loaded = Certificates(issue(tmp_path))
    before = loaded.pem
    issue(tmp_path)
    with no_descriptor_left():
        loaded.refresh()
    assert loaded.pem is before
    assert loaded.num_refusals == 0, "the files are valid"
    loaded.refresh()
    assert loaded.pem.cert == (tmp_path / "cert.pem").read_bytes()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_each_handshake_of_a_port_uses_the_files_of_its_time(
    tmp_path: Path, version: ssl.TLSVersion
) -> None:
    """This includes the CA of clients: clients of only the former CA are refused."""
    certificates = Certificates(issue(tmp_path), mutual_server_context)
    former = certificates.pem

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"welcome")
        writer.close()

    async def greeting(authority: bytes | None, own: Pem) -> bytes:
        """Connect with the client's certificate and the CA, and return the response; empty if refused."""
        context = mutual_client_context(Pem(own.cert, own.key, authority))
        context.maximum_version = version
        address = server.sockets[0].getsockname()
        try:
            reader, writer = await asyncio.open_connection(*address, ssl=context, server_hostname="localhost")
            with closing(writer):
                return await reader.read()
        except ssl.SSLCertVerificationError:
            raise
        except OSError:  # in TLS 1.2 the handshake fails
            return b""

    async with await asyncio.start_server(greet, "127.0.0.1", ssl=certificates.renewing_context()) as server:
        assert await greeting(former.ca, former) == b"welcome"
        issue(tmp_path)
        with pytest.raises(ssl.SSLCertVerificationError):
            await greeting(former.ca, former)
        newer = certificates.pem
        assert newer is not former
        assert await greeting(newer.ca, newer) == b"welcome"
        assert await greeting(newer.ca, former) == b""


class Signal(logging.Handler):
    """Handler that sets an event at the second record."""

    def __init__(self) -> None:
        super().__init__()
        self.loop, self.event, self.num_records = asyncio.get_running_loop(), asyncio.Event(), 0

    def emit(self, record: logging.LogRecord) -> None:
        self.num_records += 1
        if self.num_records == 2:
            self.loop.call_soon_threadsafe(self.event.set)


async def test_the_certificate_of_a_link_is_looked_at_without_a_call(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "REFRESH_S", 0.01)
    monkeypatch.setattr(tls, "EXPIRED_EVERY_S", 0.01)
    files = issue(tmp_path, **EXPIRED)
    link, signal = TcpShardLink(list, Certificates(files, mutual_client_context, "link")), Signal()
    tls.logger.addHandler(signal)
    watching = asyncio.create_task(link.watch())
    try:
        await asyncio.wait_for(signal.event.wait(), 30)
    finally:
        tls.logger.removeHandler(signal)
        watching.cancel()
    assert len(caplog.records) > 1
    assert {*said(caplog)} == {expired_line(files)}
