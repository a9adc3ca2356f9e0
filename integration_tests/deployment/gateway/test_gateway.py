"""The real gateway serves a router with the arguments of its manifests: found by discovery, and by a list
with mutual TLS through HAProxy. `make deploy-check` fetches HAProxy and the gateway."""

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import trustme

from integration_tests.deployment.gateway.api_server import serve_pod, write_kubeconfig
from integration_tests.deployment.manifests.rendering import DEPLOYMENT, ROOT, Object, objects_of
from tests.support.http_exchange import HttpReply, exchange
from tests.support.link_files import free_ports
from tests.support.router.messages import PROMPT
from tests.support.router.router_process import Setup, start_router, stop_router

pytestmark = pytest.mark.deploy

FLAGS = ("--grpc-api", "fmaas,vllm-engine", "--served-model-name", "m", "--json-output")
KEYS = {"CLIENT_KEY": "client-key", "CONTROL_KEY": "control-key", "NAMESPACE": "inference"}
UNPACKED = ROOT / ".cache" / "haproxy"
READY_S = 60.0
NUM_TOKENS = 8


def need_gateway() -> str:
    return shutil.which("smg") or pytest.skip("NOT CHECKED, no smg here: the gateway with its arguments")


@contextmanager
def run(command: list[str], log: Path, **env: str) -> Iterator[None]:
    with log.open("w") as output:
        environment = os.environ | env
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            yield
        finally:
            process.terminate()
            process.wait(20)


def list_arguments(directory: str, changes: Mapping[str, str]) -> list[str]:
    """Return the arguments of the rendered gateway on loopback, with some of them replaced."""
    own = {"--host": "127.0.0.1", "--prometheus-port": str(free_ports()), **changes}
    deployments: list[Object] = [one for one in objects_of(directory) if one["kind"] == "Deployment"]
    [container] = deployments[0]["spec"]["template"]["spec"]["containers"]
    words = [re.sub(r"\$\((\w+)\)", lambda match: KEYS[match[1]], word) for word in container["args"]]
    return [own.get(word) or _replace(word, own) for word in words]


def _replace(word: str, values: Mapping[str, str]) -> str:
    name, _, value = word.partition("=")
    return f"{name}={values.get(name, value)}" if value else word


@contextmanager
def run_gateway(directory: str, changes: Mapping[str, str], log: Path, **env: str) -> Iterator[str]:
    """Run the gateway of a directory, and yield its URL once it has a replica."""
    port = str(free_ports())
    command = [need_gateway(), "launch", *list_arguments(directory, {"--port": port, **changes})]
    url = f"http://127.0.0.1:{port}"
    with run(command, log, **env):
        wait_until(url, is_ready=True, log=log)
        yield url


def wait_until(url: str, is_ready: bool, log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while _is_ready(url) != is_ready:
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


def _is_ready(url: str) -> bool:
    try:
        return exchange(f"{url}/readiness").status == 200
    except OSError:
        return False


def complete(url: str, key: str = KEYS["CLIENT_KEY"]) -> HttpReply:
    body = {"model": "m", "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0}
    return exchange(f"{url}/v1/completions", body, {"authorization": f"Bearer {key}"})


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Setup]:
    need_gateway()
    setup = start_router(tmp_path, 1, *FLAGS)
    yield setup
    assert stop_router(setup) == 0, setup.service.output


def test_discovered_replicas_are_served_until_their_pods_end(plain: Setup, tmp_path: Path) -> None:
    log, config = tmp_path / "smg.log", tmp_path / "kubeconfig"
    changes = {"--service-discovery-port": str(plain.service.grpc_port)}
    with serve_pod(KEYS["NAMESPACE"], {"app": "inference-server"}) as server:
        write_kubeconfig(server, config)
        with run_gateway("gateway/discovery", changes, log, KUBECONFIG=str(config)) as url:
            assert complete(url).json["usage"]["completion_tokens"] == NUM_TOKENS
            statuses = [complete(url, key).status for key in ("", KEYS["CONTROL_KEY"])]
            assert statuses == [401, 401]
            keys = (KEYS["CLIENT_KEY"], KEYS["CONTROL_KEY"])
            headers = [{"authorization": f"Bearer {key}"} for key in keys]
            assert [exchange(f"{url}/workers", None, one).status for one in headers] == [401, 200]
            server.delete_pod()
            wait_until(url, is_ready=False, log=log)
            assert complete(url).status == 503
    assert (server.selectors, server.refused) == ({"app=inference-server"}, [])


def find_haproxy() -> tuple[str, dict[str, str]]:
    """Return the program and its environment."""
    if installed := shutil.which("haproxy"):
        return installed, {}
    unpacked = UNPACKED / "usr" / "sbin" / "haproxy"
    if not unpacked.exists():
        pytest.skip("NOT CHECKED, no haproxy (scripts/fetch_debian.sh): mutual TLS of the gateway")
    libraries = [*UNPACKED.glob("usr/lib/*-linux-gnu"), *UNPACKED.glob("lib/*-linux-gnu")]
    return str(unpacked), {"LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries))}


def write_certificates(directory: Path) -> list[str]:
    """Write the secrets of gateway and replicas, and return the flags of the replicas."""
    authority = trustme.CA()
    for name, leaf in (
        ("gateway", authority.issue_cert(common_name="inference-gateway")),
        ("server", authority.issue_cert("inference-server")),
    ):
        (directory / name).mkdir()
        authority.cert_pem.write_to_path(directory / name / "ca.crt")
        leaf.private_key_pem.write_to_path(directory / name / "tls.key")
        leaf.cert_chain_pems[0].write_to_path(directory / name / "tls.crt")
    files = {"cert": "tls.crt", "key": "tls.key", "client-ca-cert": "ca.crt"}
    pairs = [(f"--tls-{name}-path", str(directory / "server" / file)) for name, file in files.items()]
    return [word for pair in pairs for word in pair]


def test_listed_replicas_are_served_with_mutual_tls(tmp_path: Path) -> None:
    """Of the two replicas in the list, the second one does not exist."""
    need_gateway()
    haproxy, env = find_haproxy()
    setup = start_router(tmp_path, 1, *FLAGS, *write_certificates(tmp_path))
    ports = {"127.0.0.1:9000": free_ports(), "127.0.0.1:9001": free_ports()}
    text = (
        (DEPLOYMENT / "gateway/mutual-tls/haproxy.cfg").read_text().replace("/tls/", f"{tmp_path}/gateway/")
    )
    text = text.replace(" resolvers cluster init-addr none", "")  # names on loopback are in no name server
    text = re.sub(r"inference-server-0\S+:8033", f"127.0.0.1:{setup.service.grpc_port}", text)
    text = re.sub(r"inference-server-1\S+:8033", f"127.0.0.1:{free_ports()}", text)
    for bind, port in ports.items():
        text = text.replace(bind, f"127.0.0.1:{port}")
    (tmp_path / "haproxy.cfg").write_text(text)
    changes = {f"grpc://{bind}": f"grpc://127.0.0.1:{port}" for bind, port in ports.items()}
    log = tmp_path / "smg.log"
    try:
        with (
            run([haproxy, "-W", "-db", "-f", str(tmp_path / "haproxy.cfg")], tmp_path / "haproxy.log", **env),
            run_gateway("gateway/mutual-tls", changes, log) as url,
        ):
            reply = complete(url)
            assert reply.json["usage"]["completion_tokens"] == NUM_TOKENS, reply.text
    finally:
        assert stop_router(setup) == 0, setup.service.output
    lines = [json.loads(line) for line in setup.service.output.splitlines()]
    assert {line["tenant"] for line in lines if "output_tokens" in line} == {"inference-gateway"}
