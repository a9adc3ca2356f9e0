"""The whole service on an 8B model from files: its start, one stream, 64 streams and 256 unary calls, and the
share of a core that the router takes meanwhile."""

import contextlib
import os
import time
from pathlib import Path

from bench.children import run_child
from bench.figures import summarize
from bench.gpu.checkpoint import written_checkpoint
from bench.gpu.target import Target, parse_target
from bench.load import Answer, Job, Mode
from bench.service import BenchError, launch

LOAD_TIMEOUT_S = 60.0
TICKS = os.sysconf("SC_CLK_TCK")
CALLS: tuple[tuple[Mode, int], ...] = (("stream", 1), ("stream", 64), ("unary", 256))
INPUT_TOKENS, NEW_TOKENS = 512, 256


def main() -> None:
    target = parse_target("service")
    with written_checkpoint(target, "8b") as model:
        measure(target, model)


def measure(target: Target, model: Path) -> None:
    size = 384 if target.is_rehearsal else 1024
    options = ["--max-sequence-length", str(size), "--max-batch-size", "256"]
    options += ["--device", target.device.type, "--dtype", "bfloat16"]
    log, start = model / "service.log", time.perf_counter()
    try:
        with launch(model, log, options) as (address, _):
            target.recorder.figure("start of 8b", time.perf_counter() - start, "s", "kernels as found")
            for mode, clients in CALLS:
                measure_calls(target, address, mode, clients)
    except BenchError as error:
        target.recorder.problem("service", str(error))


def measure_calls(target: Target, address: str, mode: Mode, clients: int) -> None:
    if target.seconds_left < LOAD_TIMEOUT_S / 2:
        target.recorder.problem(f"8b {mode} {clients}", "no time was left")
        return
    tokens = (24, 8) if target.is_rehearsal else (INPUT_TOKENS, NEW_TOKENS)
    job = Job(address, mode, clients, 1, *tokens, seed=clients, time_limit=LOAD_TIMEOUT_S)
    began, before = time.perf_counter(), router_seconds()
    [found] = run_child("bench.load", job, LOAD_TIMEOUT_S + 30)
    share = (router_seconds() - before) / (time.perf_counter() - began)
    figures = summarize(job, [Answer(**answer) for answer in found["answers"]])
    key = f"8b {mode} {clients}"
    target.recorder.figure(f"{key}: output", figures["output_tokens_per_s"], "tokens/s")
    target.recorder.check(f"{key}: no call failed", figures["failed"] == 0)
    target.recorder.figure(f"{key}: router's share of a core", share, "")


def router_seconds() -> float:
    """Return the processor time of the router's process. Raises BenchError."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if b"router" in (process / "cmdline").read_bytes().split(b"\0"):
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                return (int(fields[11]) + int(fields[12])) / TICKS  # user and system
    raise BenchError("the router is gone")


if __name__ == "__main__":
    main()
