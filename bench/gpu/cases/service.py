"""Measures the whole service on a model from files: its start, one stream, 64 streams and 256 unary calls,
and the router's CPU use."""

import contextlib
import os
import time
from pathlib import Path

from bench import clients as bench_clients
from bench.clients import STREAM, UNARY, Calls
from bench.generator import load_processes
from bench.gpu.inputs.checkpoint import written_checkpoint
from bench.gpu.target import Target
from bench.service import BenchError, launch

LOAD_TIMEOUT_S, MIN_LOAD_S = 40.0, 5.0
TICKS = os.sysconf("SC_CLK_TCK")
# Method of the calls, number of clients, calls per client, and whether tokens are sampled.
CALLS: tuple[tuple[str, int, int, bool], ...] = (
    (STREAM, 1, 2, False),
    (STREAM, 64, 4, False),
    (STREAM, 64, 2, True),
    (UNARY, 256, 3, False),
)
SAMPLING = {"temperature": 0.8, "top_k": 50, "top_p": 0.9}
INPUT_TOKENS, NEW_TOKENS = 512, 256


def measure(target: Target, name: str) -> None:
    with written_checkpoint(target, name) as model:
        size = 384 if target.is_rehearsal else 1024
        options = ["--max-sequence-length", str(size), "--max-batch-size", "256"]
        options += ["--device", "cpu" if target.is_rehearsal else "cuda", "--dtype", "bfloat16"]
        log, start = model / "service.log", time.perf_counter()
        try:
            with launch(model, log, options) as (address, _):
                seconds = time.perf_counter() - start
                target.recorder.figure(f"start of {name}", seconds, "s", "kernels as found")
                for calls in CALLS[:1] if target.is_rehearsal else CALLS:
                    measure_calls(target, name, address, *calls)
        except BenchError as error:
            target.recorder.problem("service", str(error))
        finally:
            print(log.read_text(errors="replace") if log.exists() else "the service has no log")


def measure_calls(
    target: Target, name: str, address: str, mode: str, clients: int, count: int, is_sampled: bool
) -> None:
    limit = min(LOAD_TIMEOUT_S, target.seconds_left - MIN_LOAD_S)
    key = f"{name} {mode} {clients}" + (", top_k and top_p" if is_sampled else "")
    if limit < MIN_LOAD_S:
        target.recorder.problem(key, "no time was left")
        return
    tokens = (24, 8) if target.is_rehearsal else (INPUT_TOKENS, NEW_TOKENS)
    calls = Calls(
        mode=mode,
        clients=clients,
        requests=count,
        input_tokens=tokens[0],
        new_tokens=tokens[1],
        time_limit=limit,
        more=SAMPLING if is_sampled else {},
    )
    with load_processes() as generator:
        before = router_seconds()
        figures = bench_clients.measure_calls(generator, address, calls)
    spent, count = router_seconds() - before, figures["succeeded"]
    detail = "no answer"
    if count:
        detail = f"{1e3 * figures['total']['p50']:.0f} ms an answer"
    if count and mode == STREAM:
        first_s, between_s = figures["ttft"]["p50"], figures["tpot"]["p50"]
        detail += f", first token {1e3 * first_s:.0f} ms, then {1e3 * between_s:.2f} ms"
    target.recorder.figure(f"{key}: output", figures["output_tokens_per_s"], "tokens/s", detail)
    target.recorder.check(f"{key}: no call failed", count == figures["requests"])
    share = spent / figures["window_s"]
    target.recorder.figure(f"{key}: router's share of a core", share, "")


def router_seconds() -> float:
    """Return the CPU time of the router's process. Raises BenchError."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended in the meantime
            if b"router" in (process / "cmdline").read_bytes().split(b"\0"):
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                return (int(fields[11]) + int(fields[12])) / TICKS  # user and system
    raise BenchError("the router is gone")
