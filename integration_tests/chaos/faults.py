"""Faults to cause in the service at random times.

A fault returns when it is over, and raises AssertionError if the service did not react as required; further
effects are checked by the traffic."""

import contextlib
import http.client
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
from random import Random

import grpc

from integration_tests.chaos.http_traffic import make_http_cases
from integration_tests.chaos.target import CHANGING, MAX_REQUESTS, Target
from integration_tests.chaos.traffic import OVERLOADED, Case
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

Fault = Callable[[Target, Random, list[Case]], None]
NUM_CALLS = 40  # of a storm
# Client that opens streams, prints that it has, and does nothing else.
CLIENT = """
import sys, time
from integration_tests.chaos.client import open_streams
streams = open_streams(sys.argv[1], sys.argv[2], 8)
print("open", flush=True)
time.sleep(60)
"""


def kill_shard(target: Target, random: Random, cases: list[Case]) -> None:
    _signal_shard(target, random, signal.SIGKILL)


def stop_shard(target: Target, random: Random, cases: list[Case]) -> None:
    """Stop a shard; only the heartbeat can detect this."""
    _signal_shard(target, random, signal.SIGSTOP)


def kill_shard_that_starts(target: Target, random: Random, cases: list[Case]) -> None:
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
    deadline = time.monotonic() + 60
    while len(pids := target.shard_pids()) < target.num_shards:
        assert time.monotonic() < deadline, "shards are missing"
        time.sleep(0.05)
    victim, num_losses = random.choice(pids), target.num_losses
    os.kill(victim, number)
    # Until the router notices, the service reports that it is ready, and the next fault would come too early.
    while victim in target.shard_pids() or target.num_losses == num_losses:
        assert time.monotonic() < deadline, f"a shard that got {number.name} is still there"
        time.sleep(0.05)


def cancel_streams(target: Target, random: Random, cases: list[Case]) -> None:
    """Cancel calls, early, late, by closing the channel, and by deadlines."""

    def leave(seed: int) -> None:
        own = Random(seed)
        with target.connect() as channel, contextlib.suppress(grpc.RpcError, StopIteration):
            timeout_s = own.choice((60.0, 0.005, 0.2))
            stream = own.choice(cases).start(GenerationServiceStub(channel), timeout_s)
            for _ in range(own.randint(0, 20)):
                next(stream)
            if own.random() < 0.5:
                stream.cancel()

    _storm(leave, random)


def cut_http(target: Target, random: Random, cases: list[Case]) -> None:
    """Reset connections to OpenAI's API: before a response, early in it and late."""

    def leave(seed: int) -> None:
        own = Random(seed)
        case = own.choice([case for case in make_http_cases(own, 4) if case.is_stream])
        connection = target.connect_http()
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("POST", case.path, case.body)
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if own.random() < 0.7:
                with connection.getresponse() as response:
                    for _ in range(own.randint(0, 20)):
                        response.readline()

    _storm(leave, random)


def overload(target: Target, random: Random, cases: list[Case]) -> None:
    """Send four times the allowed requests: the rest is refused at once, and health checks continue to
    pass."""
    long = [case for case in cases if case.is_stream]

    def ask(seed: int) -> None:
        with target.connect() as channel:
            try:
                Random(seed).choice(long).ask(GenerationServiceStub(channel))
            except grpc.RpcError as error:
                if (error.code(), error.details()) != OVERLOADED:
                    raise

    _storm(ask, random, 4 * MAX_REQUESTS)


def kill_client(target: Target, random: Random, cases: list[Case]) -> None:
    """Kill a client process with eight streams."""
    credentials = target.write_client_files()
    command = [sys.executable, "-c", CLIENT, f"localhost:{target.service.grpc_port}", str(credentials)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "open\n", "the client that is to be killed has not begun"
        client.kill()


def swap_certificate(target: Target, random: Random, cases: list[Case]) -> None:
    """Swap the certificate; the next handshake presents the new one."""
    before = target.served_certificate()
    target.swap_certificate()
    assert target.served_certificate() != before, "the certificate of before is served"


def break_certificate(target: Target, random: Random, cases: list[Case]) -> None:
    """Install a mismatched pair until the service notices it."""
    name = "tgi_tls_reload_failure_total"
    before = target.metrics().get(name, 0.0)
    target.swap_certificate(is_broken=True)
    deadline = time.monotonic() + 30
    while target.metrics().get(name, 0.0) <= before:
        assert time.monotonic() < deadline, "nobody has noticed a broken certificate"
        time.sleep(0.2)
    target.swap_certificate()


def change_prompt(target: Target, random: Random, cases: list[Case]) -> None:
    """Replace, remove and half-copy a prompt while requests use it: they get responses or
    INVALID_ARGUMENT."""
    with target.connect() as channel:
        stub = GenerationServiceStub(channel)
        for seed in range(6):
            change = random.choice(("replace", "remove", "cut"))
            if change == "replace":
                target.set_prompt(CHANGING, seed)
            elif change == "remove":
                shutil.rmtree(target.store / CHANGING, ignore_errors=True)
            elif (file := target.store / CHANGING / "decoder.pt").is_file():
                file.write_bytes(file.read_bytes()[: random.randint(0, 200)])
            request = pb.SingleGenerationRequest(
                request=pb.GenerationRequest(text="girl"), prefix_id=CHANGING
            )
            try:
                list(stub.GenerateStream(request, timeout=60))
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.INVALID_ARGUMENT and (
                    (error.code(), error.details()) != OVERLOADED
                ):
                    raise


def scrape(target: Target, random: Random, cases: list[Case]) -> None:
    _storm(lambda _: target.metrics(), random, 100)


def _storm(act: Callable[[int], object], random: Random, count: int = NUM_CALLS) -> None:
    """Send this many at once."""
    seeds = [random.getrandbits(32) for _ in range(count)]
    with ThreadPoolExecutor(count) as threads:
        list(threads.map(act, seeds))


FATAL: tuple[Fault, ...] = (kill_shard, stop_shard, kill_shard_that_starts)
OTHERS: tuple[Fault, ...] = (
    cancel_streams,
    cut_http,
    overload,
    kill_client,
    swap_certificate,
    break_certificate,
    change_prompt,
    scrape,
)
