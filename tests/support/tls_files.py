"""Certificates and keys of the public ports."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import trustme


@dataclass(frozen=True)
class Files:
    """Files of an authority and of a server certificate that it has signed."""

    directory: Path
    authority: trustme.CA

    def flags(self, *names: str) -> list[str]:
        files = {"cert": "tls-cert-path", "key": "tls-key-path", "ca": "tls-client-ca-cert-path"}
        return [part for name in names for part in (f"--{files[name]}", str(self.directory / f"{name}.pem"))]

    def client(self, **more: Any) -> grpc.ChannelCredentials:
        """Return the credentials of a client whose certificate the authority has signed."""
        return credentials(self.authority, self.authority.issue_cert("client@example.com", **more))


def issue(authority: trustme.CA, directory: Path, **more: Any) -> None:
    """Write certificates like a Kubernetes secret mount: real files in a new directory, and a link to it that
    is swapped atomically."""
    fresh = directory / f"..{len(list(directory.iterdir()))}"
    fresh.mkdir()
    server = authority.issue_cert("localhost", **more)
    server.private_key_pem.write_to_path(fresh / "key.pem")
    server.cert_chain_pems[0].write_to_path(fresh / "cert.pem")
    authority.cert_pem.write_to_path(fresh / "ca.pem")
    (directory / "..new").symlink_to(fresh)
    (directory / "..new").replace(directory / "..data")


def credentials(server_authority: trustme.CA, own: trustme.LeafCert) -> grpc.ChannelCredentials:
    chain = b"".join(part.bytes() for part in own.cert_chain_pems)
    return grpc.ssl_channel_credentials(server_authority.cert_pem.bytes(), own.private_key_pem.bytes(), chain)
