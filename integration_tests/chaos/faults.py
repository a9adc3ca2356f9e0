"""Faults to cause in the service at random times.

A fault returns when it is over, and raises AssertionError if the service did not react as required; further
effects are checked by the traffic."""

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from random import Random

import grpc

from bench.generator import FMAAS
from integration_tests.chaos.http_streams import HTTP_STREAMS
from integration_tests.chaos.tally import is_overload
from integration_tests.chaos.target import CHANGING, MAX_REQUESTS, Target
from tgis.load.apis.catalogue import HTTP_APIS
from tgis.load.worker import MODULE
from tgis.load.workload.conversations import Workload
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

Fault = Callable[[Target, Random], None]
NUM_CALLS = 40  # of a storm
NUM_STREAMS = 8  # of a client that is killed
LONG = Workload(texts=("girl",), output_tokens="150", may_end_early=True)


def kill_shard(target: Target, random: Random) -> None:
    _signal_shard(target, random, signal.SIGKILL)


def stop_shard(target: Target, random: Random) -> None:
    """Stop a shard; only the heartbeat can detect this."""
    _signal_shard(target, random, signal.SIGSTOP)


def kill_shard_that_starts(target: Target, random: Random) -> None:
    """Kill a shard again while the group restarts."""
    before = set(target.shard_pids())
    _signal_shard(target, random, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while not (fresh := set(target.shard_pids()) - before):
        assert time.monotonic() < deadline, "the shards are not started again"
        time.sleep(0.05)
    time.sleep(random.random())
    with contextlib.suppress(ProcessLookupError):
        os.kill(random.choice(sorted(fresh)), signal.SIGKILL)


def _signal_shard(target: Target, random: Random, number: signal.Signals) -> None:
    victim, num_losses = random.choice(target.serving_shard_pids()), target.num_losses
    os.kill(victim, number)
    deadline = time.monotonic() + 60
    # Until the router notices, the service reports that it is ready, and the next fault would come too early.
    while victim in target.shard_pids() or target.num_losses == num_losses:
        assert time.monotonic() < deadline, f"a shard that got {number.name} is still there"
        time.sleep(0.05)


def cancel_streams(target: Target, random: Random) -> None:
    """Cancel streams of every API, early and late, and close their connections."""
    workload = replace(LONG, cancel_share=1.0, seed=random.getrandbits(32))
    jobs = [target.make_job(api, workload, NUM_CALLS // 5) for api in (FMAAS, *HTTP_APIS)]
    target.load(*(replace(job, target=replace(job.target, calls_per_connection=1)) for job in jobs))


def pass_deadlines(target: Target, random: Random) -> None:
    """Send calls whose deadlines pass, early and late."""

    def leave(seed: int) -> None:
        request = pb.SingleGenerationRequest(request=pb.GenerationRequest(text="girl"))
        with target.connect() as channel, contextlib.suppress(grpc.RpcError):
            timeout_s = Random(seed).choice((0.005, 0.2))
            list(GenerationServiceStub(channel).GenerateStream(request, timeout=timeout_s))

    _storm(leave, random)


def cut_http(target: Target, random: Random) -> None:
    """Reset connections to the HTTP APIs: before a response, early in it and late."""

    def leave(seed: int) -> None:
        own = Random(seed)
        path, body = own.choice(HTTP_STREAMS)
        connection = target.connect_http()
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("POST", path, body)
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if own.random() < 0.7:
                with connection.getresponse() as response:
                    for _ in range(own.randint(0, 20)):
                        response.readline()

    _storm(leave, random)


def overload(target: Target, random: Random) -> None:
    """Send four times the allowed requests: the rest is refused at once, and health checks continue to
    pass."""
    jobs = [target.make_job(api, LONG, MAX_REQUESTS) for api in (FMAAS, *HTTP_APIS)]
    records = target.load(*jobs)
    failed = [record for record in records if record.error is not None and not is_overload(record)]
    assert not failed, f"{len(failed)} calls of an overload failed: {failed[0].error} {failed[0].message}"


def kill_client(target: Target, random: Random) -> None:
    """Kill a load process with eight streams."""
    job = replace(target.make_job(FMAAS, LONG, NUM_STREAMS), num_conversations=None)
    command = [sys.executable, "-m", MODULE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        for order, answer in ((job.to_json(), "ready"), ({"start": time.monotonic()}, "open")):
            client.stdin.write(json.dumps(order) + "\n")
            client.stdin.flush()
            received = json.loads(client.stdout.readline())
            assert answer in received, f"the client that is to be killed has not begun: {received}"
        assert received["open"] == NUM_STREAMS
        client.kill()


def swap_certificate(target: Target, random: Random) -> None:
    """Swap the certificate; the next handshake presents the new one."""
    before = target.served_certificate()
    target.swap_certificate()
    assert target.served_certificate() != before, "the certificate of before is served"


def break_certificate(target: Target, random: Random) -> None:
    """Install a mismatched pair until the service notices it."""
    name = "tgi_tls_reload_failure_total"
    before = target.metrics().get(name, 0.0)
    target.swap_certificate(is_broken=True)
    deadline = time.monotonic() + 30
    while target.metrics().get(name, 0.0) <= before:
        assert time.monotonic() < deadline, "nobody has noticed a broken certificate"
        time.sleep(0.2)
    target.swap_certificate()


def change_prompt(target: Target, random: Random) -> None:
    """Replace, remove and half-copy a prompt while requests use it: they get responses or
    INVALID_ARGUMENT."""
    workload = replace(LONG, output_tokens="20", soft_prompt_ids=(CHANGING,))
    for seed in range(6):
        change = random.choice(("replace", "remove", "cut"))
        if change == "replace":
            target.set_prompt(CHANGING, seed)
        elif change == "remove":
            shutil.rmtree(target.store / CHANGING, ignore_errors=True)
        elif (file := target.store / CHANGING / "decoder.pt").is_file():
            file.write_bytes(file.read_bytes()[: random.randint(0, 200)])
        [record] = target.load(target.make_job(FMAAS, workload, 1))
        is_right = record.error in (None, grpc.StatusCode.INVALID_ARGUMENT.name) or is_overload(record)
        assert is_right, f"a changed prompt: {record.error} {record.message}"


def scrape(target: Target, random: Random) -> None:
    _storm(lambda _: target.metrics(), random, 100)


def _storm(act: Callable[[int], object], random: Random, count: int = NUM_CALLS) -> None:
    """Send this many at once."""
    seeds = [random.getrandbits(32) for _ in range(count)]
    with ThreadPoolExecutor(count) as threads:
        list(threads.map(act, seeds))


FATAL: tuple[Fault, ...] = (kill_shard, stop_shard, kill_shard_that_starts)
OTHERS: tuple[Fault, ...] = (
    cancel_streams,
    pass_deadlines,
    cut_http,
    overload,
    kill_client,
    swap_certificate,
    break_certificate,
    change_prompt,
    scrape,
)
