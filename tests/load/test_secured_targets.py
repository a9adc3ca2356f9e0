"""`tgis bench` with a real router that needs certificates of clients and tokens."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme

from bench.service import free_ports
from tests.support.router.router_process import Setup, start_router, stop_router
from tests.support.tls_files import Files, issue

TOKEN = "secret-of-a-test"
APIS = ("fmaas", "engine", "completions", "lmi")
COMMON = ("--input-tokens", "20", "--output-tokens", "3", "--requests", "4", "--warm-up", "0", "--quiet")


@dataclass
class Secured:
    """Router, and the flags that a client of it needs."""

    router: Setup
    api_port: int
    directory: Path

    def target(self, api: str) -> str:
        is_grpc = api in ("fmaas", "engine")
        return f"localhost:{self.router.service.grpc_port if is_grpc else self.api_port}"

    def flags(self, *names: str) -> list[str]:
        return [part for name in names for part in (f"--{name}", str(self.directory / f"{name}.pem"))]

    def bench(
        self, api: str, *flags: str, token: str | None = TOKEN, target: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        report = self.directory / "report.json"
        report.unlink(missing_ok=True)
        command = [sys.executable, "-m", "tgis", "bench", "--target", target or self.target(api)]
        command += ["--api", api, *COMMON, *flags, "--report", str(report)]
        env = {**os.environ, **({"TGIS_TOKEN": token} if token else {})}
        return subprocess.run(command, capture_output=True, text=True, timeout=90, env=env)

    def requests(self) -> int:
        report = json.loads((self.directory / "report.json").read_text())
        [level] = report["levels"]
        assert TOKEN not in (self.directory / "report.json").read_text()
        assert (level["errors"], level["faults"]) == ({}, {})
        return int(level["succeeded"])


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    directory, tls, authority = (
        tmp_path_factory.mktemp("router"),
        tmp_path_factory.mktemp("tls"),
        trustme.CA(),
    )
    for name in ("cert", "key", "ca"):
        (tls / f"{name}.pem").symlink_to(Path("..data") / f"{name}.pem")
    issue(authority, tls)
    client = tmp_path_factory.mktemp("client")
    own = authority.issue_cert("client@example.com")
    own.private_key_pem.write_to_path(client / "key.pem")
    own.cert_chain_pems[0].write_to_path(client / "cert.pem")
    authority.cert_pem.write_to_path(client / "ca-cert.pem")
    (directory / "tokens").write_text(f"{TOKEN}\n")
    [api_port] = free_ports(1)
    flags = [
        *Files(tls, authority).flags("cert", "key", "ca"),
        "--auth-tokens-path",
        str(directory / "tokens"),
    ]
    flags += ["--grpc-api", "fmaas,vllm-engine", "--http-api", "openai,lmi", "--http-api-port", str(api_port)]
    router = start_router(directory, 1, *flags)
    yield Secured(router, api_port, client)
    assert stop_router(router) == 0


@pytest.mark.slow
@pytest.mark.parametrize("api", APIS)
def test_calls_have_the_certificate_and_the_token(api: str, secured: Secured) -> None:
    done = secured.bench(api, *secured.flags("ca-cert", "cert", "key"))
    assert done.returncode == 0, done.stderr
    assert secured.requests() == 4


@pytest.mark.slow
def test_a_url_with_https_needs_no_other_flag(secured: Secured) -> None:
    url = f"https://{secured.target('completions')}/v1"
    done = secured.bench("completions", *secured.flags("ca-cert", "cert", "key"), target=url)
    assert done.returncode == 0, done.stderr
    assert secured.requests() == 4


@pytest.mark.slow
@pytest.mark.parametrize("api", ["fmaas", "completions"])
def test_what_is_missing_is_named(api: str, secured: Secured, tmp_path: Path) -> None:
    """Without a token, without a certificate, with another authority, with a file that is none."""
    whole = secured.flags("ca-cert", "cert", "key")
    trustme.CA().cert_pem.write_to_path(tmp_path / "other.pem")
    (tmp_path / "none.pem").write_text("none")
    other, none = str(tmp_path / "other.pem"), str(tmp_path / "none.pem")
    is_grpc = api == "fmaas"
    lost = "UNAVAILABLE" if is_grpc else "connection"
    cases = [
        (whole, None, "UNAUTHENTICATED" if is_grpc else "HTTP 401"),
        (whole[:2], TOKEN, lost),
        (["--ca-cert", other, *whole[2:]], TOKEN, lost),
        ([*whole[:2], "--cert", none, "--key", none], TOKEN, "a TLS file cannot be used"),
        ([*whole[2:], "--ca-cert", str(tmp_path / "absent.pem")], TOKEN, "a TLS file cannot be used"),
    ]
    for flags, token, why in cases:
        done = secured.bench(api, *flags, token=token)
        assert done.returncode == 1, (why, done.stdout)
        assert why in done.stderr
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
        assert "secret" not in done.stderr
