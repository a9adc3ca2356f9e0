"""The service under test: two ranks, mutual TLS with certificates behind links that can be swapped, a store
of soft prompts, and failpoints that end some of its starts."""

import contextlib
import functools
import http.client
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import grpc
import trustme

from bench.generator import Generator, closed_loop, load_processes
from bench.service import free_ports
from integration_tests.chaos.losses import Breaks, Losses
from integration_tests.chaos.tls_proxy import TlsProxy
from integration_tests.support.greedy_answers import MAX_SEQUENCE_LENGTH, VOCAB_SIZE
from integration_tests.support.router_workers import number_of_worker
from integration_tests.support.service import launch
from integration_tests.support.tuned_files import LINEAR, WIDTH, write_adapter
from tests.support.accounts import differences, scrape
from tests.support.connections import OWN_CONNECTION
from tests.support.processes import children_of
from tests.support.prompt_files import random_prompt, save_prompt
from tests.support.shard.checkpoints import write_llama
from tests.support.tokenizers.trained import write_byte_level
from tgis.load.apis.catalogue import HTTP_APIS
from tgis.load.apis.interface import LoadTarget
from tgis.load.job import LoadJob
from tgis.load.records import AnswerRecord
from tgis.load.workload.conversations import Workload

TIMEOUT_S = 120.0
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
MAX_REQUESTS = 32
SLOW_READER_S = 4.0
SHARDS, ENGINE = "shards", "engine"  # names of losses
STEADY, CHANGING = "steady", "changing"  # prompts: one that never changes, one that does
ADAPTER = "sql"
NUM_LOAD_PROCESSES = 5  # of faults
# Failpoints at one start of the group each, at random times: the first after the answers without faults.
FAILPOINTS = (
    "shard.before_answer[epoch=1]=garbage@2000",
    "shard.before_forward[epoch=2;rank=1]=raise@1500",
    "shard.before_forward[epoch=4;rank=0]=oom@1500",
    "shard.after_answer[epoch=6;rank=1]=kill@1500",
    "shard.before_answer[epoch=7;rank=0]=garbage@500",
)


class Target:
    """Wait until the service is ready. Raises AssertionError if it fails."""

    num_shards = 2

    def __init__(self, directory: Path, num_workers: int = 1) -> None:
        self.num_workers = num_workers
        self.losses, self.breaks = Losses(), Breaks()
        self.model, self.store, self._tls = (directory / name for name in ("model", "store", "tls"))
        write_llama(self.model, vocab_size=VOCAB_SIZE, max_position_embeddings=MAX_SEQUENCE_LENGTH)
        write_byte_level(self.model, 400)
        self.set_prompt(STEADY, seed=1)
        write_adapter(self.store / ADAPTER, self.model, 3, LINEAR)
        self._authority = trustme.CA()
        identity = self._authority.issue_cert("client@example.com")
        self._key, self._chain = identity.private_key_pem.bytes(), identity.cert_chain_pems[0].bytes()
        self._tls.mkdir()
        for name in ("cert", "key", "ca"):
            (self._tls / f"{name}.pem").symlink_to(Path("..data") / f"{name}.pem")
        self._num_versions = 0
        self.swap_certificate()
        self._template = directory / "template.jinja"
        self._template.write_text(TEMPLATE)
        [self.api_port] = free_ports(1)
        self.service = launch(self.model, *self._flags()).wait_until_serving()
        self.pid = self.service.process.pid
        self._num_losses_noted = 0
        self._http_context = self.tls_context("http/1.1")  # once, for files that other threads may write
        self.proxy = TlsProxy(self.address, self.tls_context())
        self._stack = contextlib.ExitStack()
        self._generator: Generator = self._stack.enter_context(load_processes(NUM_LOAD_PROCESSES))

    def _flags(self) -> list[str]:
        files = {"tls-cert-path": "cert", "tls-key-path": "key", "tls-client-ca-cert-path": "ca"}
        tls = [part for flag, name in files.items() for part in (f"--{flag}", str(self._tls / f"{name}.pem"))]
        limits = ["--max-concurrent-requests", str(MAX_REQUESTS), "--prefix-store-path", str(self.store)]
        limits += ["--adapter-cache", str(self.store), "--grpc-api", "fmaas,vllm-engine"]
        limits += ["--slow-reader-timeout", str(SLOW_READER_S), "--failpoints", ",".join(FAILPOINTS)]
        api = ["--http-api", "tgi,lmi,openai", "--http-api-port", str(self.api_port)]
        limits += [*api, "--chat-template", str(self._template), "--router-workers", str(self.num_workers)]
        return ["--dtype", "float32", "--num-shard", str(self.num_shards), *tls, *limits]

    def end(self) -> int:
        """Stop the service, and return its exit code."""
        self._stack.close()
        self.proxy.close()
        return self.service.end()

    @property
    def address(self) -> tuple[str, int]:
        return "localhost", self.service.grpc_port

    def connect(self) -> grpc.Channel:
        """Open a channel with a new connection."""
        credentials = grpc.ssl_channel_credentials(self._authority.cert_pem.bytes(), self._key, self._chain)
        return grpc.secure_channel(f"localhost:{self.service.grpc_port}", credentials, OWN_CONNECTION)

    def connect_http(self) -> http.client.HTTPSConnection:
        """Open a connection to the port of the HTTP APIs."""
        return http.client.HTTPSConnection(
            "localhost", self.api_port, timeout=TIMEOUT_S, context=self._http_context
        )

    def make_job(self, api: str, workload: Workload, clients: int) -> LoadJob:
        """Return the job of clients of an API, with a connection each, that send one request each."""
        files = self.client_files
        port = self.api_port if api in HTTP_APIS else self.service.grpc_port
        target = LoadTarget(
            address=f"localhost:{port}",
            is_tls=True,
            ca_cert=str(files / "ca.pem"),
            cert=str(files / "chain.pem"),
            key=str(files / "key.pem"),
            num_channels=clients,
        )
        job = closed_loop(target.address, workload, clients, api=api, timeout_s=TIMEOUT_S)
        return replace(job, target=target)

    def load(self, *jobs: LoadJob) -> list[AnswerRecord]:
        """Send requests for a fault, of a load process per job. Raises BenchError."""
        return self._generator.run(*jobs).records

    def tls_context(self, protocol: str = "h2") -> ssl.SSLContext:
        """Return the credentials of an authorized client."""
        files = self.client_files
        context = ssl.create_default_context(cafile=str(files / "ca.pem"))
        context.load_cert_chain(files / "chain.pem", files / "key.pem")
        context.set_alpn_protocols([protocol])
        return context

    @functools.cached_property
    def client_files(self) -> Path:
        """Directory of the clients' files, written once, because load processes read them at any time."""
        directory = self._tls.parent / "client"
        directory.mkdir(exist_ok=True)
        contents = {"ca": self._authority.cert_pem.bytes(), "key": self._key, "chain": self._chain}
        for name, content in contents.items():
            (directory / f"{name}.pem").write_bytes(content)
        return directory

    def served_certificate(self) -> bytes:
        """Return the certificate that a new connection is presented."""
        with socket.create_connection(self.address, timeout=20) as plain:
            with self.tls_context().wrap_socket(plain, server_hostname="localhost") as connection:
                return connection.getpeercert(binary_form=True) or b""

    def swap_certificate(self, is_broken: bool = False) -> None:
        """Swap the certificate as Kubernetes does. A broken one is the new certificate with another key."""
        self._num_versions += 1
        fresh = self._tls / f"..{self._num_versions}"
        fresh.mkdir()
        server = self._authority.issue_cert("localhost")
        other = self._authority.issue_cert("localhost") if is_broken else server
        other.private_key_pem.write_to_path(fresh / "key.pem")
        server.cert_chain_pems[0].write_to_path(fresh / "cert.pem")
        self._authority.cert_pem.write_to_path(fresh / "ca.pem")
        (self._tls / "..new").symlink_to(fresh)
        (self._tls / "..new").replace(self._tls / "..data")

    def set_prompt(self, name: str, seed: int) -> None:
        """Publish the prompt atomically, as a renamed copy."""
        save_prompt(self.store / f"..{name}", random_prompt(6, WIDTH, seed) * 0.4)
        (self.store / name).mkdir(exist_ok=True)
        (self.store / f"..{name}" / "decoder.pt").replace(self.store / name / "decoder.pt")

    def metrics(self) -> dict[str, float]:
        return scrape(self.service.http)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.service.http + path, timeout=20) as response:
            text: str = response.read().decode()
            return text

    @property
    def num_losses(self) -> int:
        """Number of shard losses that the router has noticed."""
        return int(self.metrics().get("tgi_shard_restarts_total", 0))

    def note_shard_losses(self) -> None:
        """Record the losses of shards since the last time, some of which are due to failpoints."""
        total = self.num_losses
        self.losses.note(SHARDS, total - self._num_losses_noted)
        self._num_losses_noted = total

    @property
    def worker_names(self) -> list[str]:
        return [f"worker {number}" for number in range(self.num_workers)]

    def router_pids(self) -> dict[str, int]:
        """Return the live router processes by name."""
        children = children_of(self.pid)
        if self.num_workers == 1:
            return dict(zip(["router"], children.get("router", []), strict=False))
        numbers = {pid: number_of_worker(pid) for pid in children.get("router", [])}
        workers = {f"worker {number}": pid for pid, number in numbers.items() if number is not None}
        return dict(zip([ENGINE], children.get("engine", []), strict=False)) | workers

    def shard_pids(self) -> list[int]:
        return sorted(children_of(self.pid).get("serve", []))

    def serving_shard_pids(self) -> list[int]:
        """Return the shards of a group that serves. A failpoint may end them at any time, and a shard that
        stops while it loads is noticed only after minutes."""
        while True:
            pids = self.shard_pids()
            self.wait_until_ready()
            if len(pids) == self.num_shards and pids == self.shard_pids():
                return pids

    def processes(self) -> dict[str, int]:
        shards = {f"shard {i}": pid for i, pid in enumerate(self.shard_pids())}
        return {"launcher": self.pid, **self.router_pids(), **shards}

    def wait_until_ready(self, timeout_s: float = 90.0) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            assert self.service.process.poll() is None, f"the service has ended:\n{self.service.output}"
            self.get("/live")
            try:
                self.get("/health")
            except urllib.error.HTTPError as error:
                error.close()
            else:
                return
            assert time.monotonic() < deadline, f"not ready again:\n{self.service.output}"
            time.sleep(0.1)

    def wait_until_settled(self, baseline: Mapping[str, float], timeout_s: float = 60.0) -> dict[str, float]:
        """Wait up to this time, and return the resources that are held now and were not before."""
        deadline = time.monotonic() + timeout_s
        while (left := differences(self.service.http, baseline)) and time.monotonic() < deadline:
            time.sleep(0.5)
        return left
