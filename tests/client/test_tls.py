"""TLS and mutual TLS with certificates that are renewed while the client is in use."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from tests.support.blocking_clients import OpenClient
from tests.support.canned_service import CannedService, serve
from tests.support.tls_files import issue
from tgis_client import NO_RETRIES, Client, SettingsError, Tls, UnavailableError


class NamingService(CannedService):
    """Service that notes whose certificate each call shows."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.names: list[str] = []

    def _note(self, request: Any, context: Any) -> None:
        super()._note(request, context)
        [name] = context.auth_context().get("x509_subject_alternative_name", [b""])
        self.names.append(name.decode())


@contextmanager
def serve_mutual(service: CannedService, *authorities: trustme.CA) -> Iterator[str]:
    """Serve with a certificate of the first authority, for clients of all."""
    own = authorities[0].issue_cert("localhost")
    pair = (own.private_key_pem.bytes(), own.cert_chain_pems[0].bytes())
    trusted = b"".join(each.cert_pem.bytes() for each in authorities)
    credentials = grpc.ssl_server_credentials([pair], trusted, require_client_auth=True)
    with serve(service, credentials) as target:
        yield target


def write(directory: Path, authority: trustme.CA, name: str, trusted: trustme.CA) -> Tls:
    own = authority.issue_cert(name)
    own.private_key_pem.write_to_path(directory / "key.pem")
    own.cert_chain_pems[0].write_to_path(directory / "cert.pem")
    trusted.cert_pem.write_to_path(directory / "ca.pem")
    return Tls(ca_cert=directory / "ca.pem", cert=str(directory / "cert.pem"), key=str(directory / "key.pem"))


def test_renewed_files_are_used_without_a_restart(open_client: OpenClient, tmp_path: Path) -> None:
    """A stream continues on its connection."""
    authority, service = trustme.CA(), NamingService(delay=0.1)
    tls = write(tmp_path, authority, "first.example.com", authority)
    with serve_mutual(service, authority) as target, open_client(target, tls=tls) as client:
        stream = client.stream("a")
        next(stream)
        write(tmp_path, authority, "second.example.com", authority)
        client.model_info()
        client.model_info()
        assert "".join(part.text for part in stream) == "one two three"
    assert service.names == ["first.example.com", "second.example.com", "second.example.com"]


def test_a_client_that_was_refused_is_accepted_after_the_renewal(
    open_client: OpenClient, tmp_path: Path
) -> None:
    old, new = trustme.CA(), trustme.CA()
    tls = write(tmp_path, old, "client.example.com", new)
    with serve_mutual(CannedService(), new) as target:
        with open_client(target, tls=tls, retry=NO_RETRIES) as client:
            with pytest.raises(UnavailableError):
                client.model_info()
            write(tmp_path, new, "client.example.com", new)
            assert client.model_info().max_new_tokens == 128


def test_files_are_used_once_they_fit_together(open_client: OpenClient, tmp_path: Path) -> None:
    """Between two writes, the key is not the certificate's, or a file is missing: the old ones
    stay in use."""
    authority, service = trustme.CA(), NamingService()
    tls = write(tmp_path, authority, "first.example.com", authority)
    with serve_mutual(service, authority) as target, open_client(target, tls=tls) as client:
        client.model_info()
        later = authority.issue_cert("second.example.com")
        later.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
        client.model_info()
        (tmp_path / "key.pem").unlink()
        client.model_info()
        later.private_key_pem.write_to_path(tmp_path / "key.pem")
        client.model_info()
    assert service.names == ["first.example.com"] * 3 + ["second.example.com"]


def test_a_mounted_secret_that_is_swapped(open_client: OpenClient, tmp_path: Path) -> None:
    first, second = trustme.CA(), trustme.CA()
    issue(first, tmp_path)
    files = {name: tmp_path / "..data" / f"{name}.pem" for name in ("cert", "key")}
    own = second.issue_cert("localhost")
    (tmp_path / "trusted.pem").write_bytes(second.cert_pem.bytes())
    tls = Tls(ca_cert=tmp_path / "trusted.pem", **files)
    credentials = grpc.ssl_server_credentials(
        [(own.private_key_pem.bytes(), own.cert_chain_pems[0].bytes())], second.cert_pem.bytes(), True
    )
    with serve(CannedService(), credentials) as target:
        with open_client(target, tls=tls, retry=NO_RETRIES) as client:
            with pytest.raises(UnavailableError):
                client.model_info()
            issue(second, tmp_path)
            assert client.model_info().max_new_tokens == 128


def test_calls_of_many_threads_during_a_renewal(tmp_path: Path) -> None:
    authority, service = trustme.CA(), NamingService(delay=0.05)
    tls = write(tmp_path, authority, "first.example.com", authority)
    with serve_mutual(service, authority) as target, Client(target, tls=tls) as client:
        client.model_info()
        with ThreadPoolExecutor(8) as threads:
            pending = [threads.submit(client.generate, str(index)) for index in range(16)]
            write(tmp_path, authority, "second.example.com", authority)
            pending += [threads.submit(client.generate, str(index)) for index in range(16, 32)]
            texts = [each.result(20).text for each in pending]
    assert texts == [f"{index}: one two three" for index in range(32)]
    assert service.names[-1] == "second.example.com"


def test_a_file_of_cas_that_is_being_written(open_client: OpenClient, tmp_path: Path) -> None:
    """With an empty list, gRPC would trust the system's CAs, and refuse the service."""
    authority = trustme.CA()
    tls = write(tmp_path, authority, "client.example.com", authority)
    with serve_mutual(CannedService(), authority) as target:
        with open_client(target, tls=tls, retry=NO_RETRIES) as client:
            client.model_info()
            (tmp_path / "ca.pem").write_bytes(b"")
            client.model_info()
        with open_client(target, tls=tls) as client, pytest.raises(SettingsError, match=r"ca\.pem has no"):
            client.model_info()


def test_the_name_in_the_certificate(open_client: OpenClient, tmp_path: Path) -> None:
    authority = trustme.CA()
    own = authority.issue_cert("inside.example.com")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    pair = (own.private_key_pem.bytes(), own.cert_chain_pems[0].bytes())
    with serve(CannedService(), grpc.ssl_server_credentials([pair])) as target:
        for name, is_served in ((None, False), ("inside.example.com", True)):
            tls = Tls(ca_cert=tmp_path / "ca.pem", server_name=name)
            with open_client(target, tls=tls, retry=NO_RETRIES) as client:
                if is_served:
                    assert client.model_info().max_new_tokens == 128
                else:
                    with pytest.raises(UnavailableError, match="certificate is for another host name"):
                        client.model_info()


def test_a_certificate_of_another_authority_is_named(open_client: OpenClient, tmp_path: Path) -> None:
    own = trustme.CA().issue_cert("localhost")
    trustme.CA().cert_pem.write_to_path(tmp_path / "ca.pem")
    pair = (own.private_key_pem.bytes(), own.cert_chain_pems[0].bytes())
    with serve(CannedService(), grpc.ssl_server_credentials([pair])) as target:
        with open_client(target, tls=Tls(ca_cert=tmp_path / "ca.pem"), retry=NO_RETRIES) as client:
            with pytest.raises(UnavailableError, match="not from a CA that the client trusts"):
                client.model_info()


def test_files_that_cannot_be_used_are_an_error(open_client: OpenClient, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="together"):
        Tls(cert="a")
    with open_client("localhost:1", tls=Tls(ca_cert=tmp_path / "missing.pem")) as client:
        with pytest.raises(SettingsError, match=r"missing\.pem"):
            client.model_info()
