"""Measures the whole service on a model from files: its start, one stream, 64 streams and 256 unary calls,
and the router's CPU use."""

import contextlib
import os
import time
from pathlib import Path

from bench.children import run_child
from bench.figures import summarize
from bench.gpu.inputs.checkpoint import written_checkpoint
from bench.gpu.target import Target
from bench.load import Answer, Job, Mode
from bench.service import BenchError, launch

LOAD_TIMEOUT_S, MIN_LOAD_S = 40.0, 5.0
TICKS = os.sysconf("SC_CLK_TCK")
# Method of the calls, number of clients, calls per client, and whether tokens are sampled.
CALLS: tuple[tuple[Mode, int, int, bool], ...] = (
    ("stream", 1, 2, False),
    ("stream", 64, 4, False),
    ("stream", 64, 2, True),
    ("unary", 256, 3, False),
)
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
    target: Target, name: str, address: str, mode: Mode, clients: int, count: int, is_sampled: bool
) -> None:
    limit = min(LOAD_TIMEOUT_S, target.seconds_left - MIN_LOAD_S)
    key = f"{name} {mode} {clients}" + (", top_k and top_p" if is_sampled else "")
    if limit < MIN_LOAD_S:
        target.recorder.problem(key, "no time was left")
        return
    tokens = (24, 8) if target.is_rehearsal else (INPUT_TOKENS, NEW_TOKENS)
    job = Job(address, mode, clients, count, *tokens, seed=clients, time_limit=limit, is_sampled=is_sampled)
    before = router_seconds()
    [result] = run_child("bench.load", job, limit + MIN_LOAD_S)
    spent, answers = router_seconds() - before, [Answer(**answer) for answer in result["answers"]]
    figures = summarize(job, answers)
    detail = f"{figures['answer_ms_p50']:.0f} ms an answer"
    if mode == "stream":
        detail += (
            f", first token {figures['first_token_ms_p50']:.0f} ms, then {figures['token_ms_p50']:.2f} ms"
        )
    target.recorder.figure(f"{key}: output", figures["output_tokens_per_s"], "tokens/s", detail)
    target.recorder.check(f"{key}: no call failed", figures["failed"] == 0)
    share = spent / max(answer.ended for answer in answers)
    target.recorder.figure(f"{key}: router's share of a core", share, "")


def router_seconds() -> float:
    """Return the CPU time of the router's process. Raises BenchError."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended in the meantime
            if b"router" in (process / "cmdline").read_bytes().split(b"\0"):
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                return (int(fields[11]) + int(fields[12])) / TICKS  # user and system
    raise BenchError("the router is gone")
