"""`python -m bench.tuning`: measure the cost of soft prompts and adapters. A thousand prompts and two hundred
adapters are cycled under load through caches for a few of them, and batches with adapters are timed."""

import argparse
import json
import statistics
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from bench import shapes
from bench.children import run_child
from bench.clients import STREAM, Calls, measure_calls
from bench.generator import Generator, closed_loop, load_processes, new_prompts
from bench.service import BenchError, exit_on_sigterm, launch
from bench.store import ensure_store
from tgis.load.records import AnswerRecord
from tgis.load.statistics import quantile

MACHINE_TIMEOUT_S = 60.0
CYCLE_TIMEOUT_S = 1800.0
SAMPLE_S = 0.2
MIB = 1 << 20
BATCHES = (0, 1, 4, 16)  # adapters in a batch
LINES = ("entries", "bytes", "hits", "misses", "evictions")


def main() -> None:
    options = parse_options(sys.argv[1:])
    exit_on_sigterm()
    try:
        result = measure(options)
    except BenchError as error:
        sys.exit(f"error: {error}")
    print(format_result(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.tuning", description=__doc__)
    parser.add_argument("--shape", choices=list(shapes.SHAPES), default="135m", help="(default %(default)s)")
    parser.add_argument("--dtype", default="float16", help="type of the weights (default %(default)s)")
    parser.add_argument("--prompts", type=int, default=1000, help="(default %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=50, help="(default %(default)s)")
    parser.add_argument("--adapters", type=int, default=200, help="(default %(default)s)")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters (default %(default)s)")
    parser.add_argument("--prompt-cache-mb", type=int, default=16, help="(default %(default)s)")
    parser.add_argument("--adapter-cache-mb", type=int, default=256, help="(default %(default)s)")
    parser.add_argument("--clients", type=int, default=16, help="(default %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="of the cycle (default %(default)s)")
    parser.add_argument("--repeat", type=int, default=5, help="the median of so many (default %(default)s)")
    parser.add_argument(
        "--cache", type=Path, default=Path(".cache/bench"), help="directory of models (default %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="JSON file for all figures")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return all figures, as written to the JSON file. Raises BenchError."""
    shape = shapes.SHAPES[options.shape]
    model = shapes.ensure_checkpoint(options.shape, options.cache)
    store = options.cache / f"{options.shape}-store-{options.rank}"
    prompts, adapters = ensure_store(
        shape, store, options.prompts, options.prompt_tokens, options.adapters, options.rank
    )
    sizes = [
        "--prompt-cache-size-mb",
        options.prompt_cache_mb,
        "--adapter-cache-size-mb",
        options.adapter_cache_mb,
    ]
    flags = ["--dtype", options.dtype, "--prefix-store-path", store.absolute(), *sizes]
    log = options.cache / "tuning.log"
    with launch(model, log, list(map(str, flags))) as (target, command), load_processes() as generator:
        http = f"http://127.0.0.1:{command[command.index('--port') + 1]}/metrics"
        (machine,) = run_child("bench.machine", None, MACHINE_TIMEOUT_S)
        return {
            "service_command": command,
            "machine": machine,
            "batches": _measure_batches(options, generator, target, adapters),
            "waits": _measure_waits(generator, target, prompts, adapters),
            "cycle": _measure_cycle(options, generator, target, prompts, adapters, http),
        }


def _measure_batches(
    options: argparse.Namespace, generator: Generator, target: str, adapters: list[str]
) -> dict[str, float]:
    rates: dict[int, list[float]] = {count: [] for count in BATCHES}
    for _ in range(options.repeat):
        for count in BATCHES:
            calls = Calls(
                mode=STREAM,
                clients=options.clients,
                requests=1,
                input_tokens=32,
                new_tokens=64,
                time_limit=300.0,
                more={"adapter_ids": tuple(adapters[:count])},
            )
            rates[count].append(measure_calls(generator, target, calls)["decode_tokens_per_s"])
            print(f"{count} adapters: {rates[count][-1]:.0f} tokens/s", file=sys.stderr, flush=True)
    return {str(count): statistics.median(values) for count, values in rates.items()}


def _measure_waits(
    generator: Generator, target: str, prompts: list[str], adapters: list[str]
) -> dict[str, float]:
    """Return median milliseconds from a request to its acceptance for a single client: without adapter, with
    one that was not loaded, and with a loaded one."""
    waits = {"nothing": _wait_ms(generator, target, 20)}
    for kind, ids in (("soft_prompt", prompts[-20:]), ("adapter", adapters[-8:])):
        # All that the second round uses were loaded by the first.
        more = {f"{kind}_ids": tuple(ids)}
        first, second = (_wait_ms(generator, target, len(ids), **more) for _ in range(2))
        name = kind.removeprefix("soft_")
        waits |= {f"{name} load": first, f"{name} hit": second}
    return waits


def _wait_ms(generator: Generator, target: str, count: int, **more: Any) -> float:
    job = closed_loop(target, new_prompts(16, 1, **more), clients=1, num_conversations=count)
    return statistics.median(_accepted_ms(answer) for answer in generator.answers(job))


def _accepted_ms(answer: AnswerRecord) -> float:
    return 1e3 * ((answer.ended if answer.accepted is None else answer.accepted) - answer.sent)


def _measure_cycle(
    options: argparse.Namespace,
    generator: Generator,
    target: str,
    prompts: list[str],
    adapters: list[str],
    http: str,
) -> dict[str, Any]:
    """Use all prompts and adapters in turn, several times, with many simultaneous clients."""
    ids = {"soft_prompt_ids": tuple(prompts), "adapter_ids": tuple(adapters)}
    count = options.rounds * max(len(prompts), len(adapters))
    job = closed_loop(target, new_prompts(16, 4, **ids), options.clients, timeout_s=CYCLE_TIMEOUT_S)
    with _watching_memory(target) as memory:
        answers = generator.run(replace(job, num_conversations=count)).records
    waits = sorted(map(_accepted_ms, answers))
    return {
        "requests": count,
        "prompts": len(prompts),
        "adapters": len(adapters),
        "seconds": max(answer.ended for answer in answers),
        "accepted_ms": {percent: quantile(waits, percent / 100) for percent in (50, 90, 99)},
        "failed": sum(bool(answer.error) for answer in answers),
        "memory_mib": {"before": memory[0], "most": max(memory), "after": memory[-1], "samples": memory},
        "series": _read_series(http),
    }


@contextmanager
def _watching_memory(target: str) -> Iterator[list[float]]:
    """Sample MiB of the first shard's own memory until the block is left."""
    port = int(target.rpartition(":")[2])
    shard = _find_shard(port)
    samples, done = [_own_memory(shard)], threading.Event()

    def watch() -> None:
        while not done.wait(SAMPLE_S):
            samples.append(_own_memory(shard))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield samples
    finally:
        done.set()
        watcher.join()


def _find_shard(port: int) -> psutil.Process:
    """Return the process of the shard of the service on this port."""
    for process in psutil.Process().children(recursive=True):
        command = process.cmdline()
        if "serve" in command and any(str(port) in part for part in process.parents()[0].cmdline()):
            return process
    raise BenchError("there is no shard to be watched")


def _own_memory(process: psutil.Process) -> float:
    """Return the process's memory without pages of files, which the system can reclaim."""
    info = process.memory_info()
    return float(info.rss - info.shared) / MIB


def _read_series(http: str) -> dict[str, float]:
    """Return the service's metrics of its caches."""
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(http, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    wanted = {f"tgi_{kind}_cache_{line}" for kind in ("prompt", "adapter") for line in LINES}
    wanted |= {
        f"tgi_{kind}_load_duration_{part}" for kind in ("prompt", "adapter") for part in ("sum", "count")
    }
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs if name in wanted}


def format_result(result: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    batches, cycle, memory = result["batches"], result["cycle"], result["cycle"]["memory_mib"]
    base = batches["0"]
    rows = [f"| {count} | {rate:.0f} | {rate / base:.2f} |" for count, rate in batches.items()]
    waits = ", ".join(f"{name} {value:.1f}" for name, value in result["waits"].items())
    series = ", ".join(f"{name} {value:g}" for name, value in sorted(cycle["series"].items()))
    return "\n".join(
        [
            "| adapters in the batch | decode tok/s | of none |",
            "| --- | --- | --- |",
            *rows,
            "",
            f"Until a request is accepted, ms, one client: {waits}.",
            _format_cycle(cycle, memory),
            f"Series: {series}.",
        ]
    )


def _format_cycle(cycle: dict[str, Any], memory: dict[str, Any]) -> str:
    accepted = " / ".join(f"{value:.0f}" for value in cycle["accepted_ms"].values())
    return (
        f"Cycle: {cycle['seconds']:.0f} s, {cycle['failed']} failed, accepted after {accepted} ms "
        f"(p50 / p90 / p99); the shard's own memory {memory['before']:.0f} MiB before, "
        f"{memory['most']:.0f} at most, {memory['after']:.0f} after."
    )


if __name__ == "__main__":
    main()
