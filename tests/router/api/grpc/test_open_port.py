"""Tests the single warning about a gRPC port that anyone may call."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import Service
from tests.support.router.router_process import Setup, router_command
from tests.support.tokenizers.trained import write_byte_level
from tgis.config.network import PortOptions
from tgis.net.ports import reserve
from tgis.router.api.grpc.interceptors.auth_interceptor import warn_if_unprotected

WARNING = "may call the gRPC port"
NOT_ENCRYPTED = "which is not encrypted"
TLS = {"tls_cert_path": "c", "tls_key_path": "k"}
ALONE = ["unshare", "--user", "--map-root-user", "--net"]  # a network without other machines


@pytest.mark.parametrize(
    ("bind", "options", "said"),
    [
        ("0.0.0.0", {}, [WARNING, NOT_ENCRYPTED]),
        ("::", {}, [WARNING, NOT_ENCRYPTED]),
        ("0.0.0.0", TLS, [WARNING]),
        ("0.0.0.0", TLS | {"tls_client_ca_cert_path": "a"}, []),
        ("0.0.0.0", TLS | {"auth_tokens_path": "t"}, []),
        ("0.0.0.0", {"auth_tokens_path": "t"}, []),
        ("127.0.0.1", {}, []),
        ("127.8.8.8", {}, []),
        ("localhost", {}, []),
        ("::1", {}, []),
    ],
)
def test_log_lines_of_an_open_port(
    bind: str, options: dict[str, str], said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with reserve(bind, 0) as reserved:  # it does not listen
        warn_if_unprotected(PortOptions(bind=bind, **options), reserved.getsockname()[0])  # type: ignore[arg-type]
    assert [text for text in (WARNING, NOT_ENCRYPTED) if text in caplog.text] == said
    assert len(caplog.records) == bool(said)


def test_at_the_start(router: Setup, tmp_path: Path) -> None:
    assert WARNING not in router.service.output, "it is on loopback"
    if shutil.which("unshare") is None or subprocess.run([*ALONE, "true"], check=False).returncode:
        pytest.skip("no network of its own can be made here")
    write_byte_level(tmp_path)
    command = router_command(tmp_path, "--bind", "0.0.0.0", "--shard-uds-path", str(tmp_path / "nobody"))
    service = Service(command, python=[*ALONE, sys.executable])
    service.wait_for_line(WARNING)
    assert service.end() == 0, service.output
    assert sum(WARNING in line for line in service.lines) == 1, service.output
