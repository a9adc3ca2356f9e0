"""Measures the table of clients: the latency and throughput of each of several closed-loop clients."""

import contextlib
import statistics
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.generator import Generator, closed_loop, load_processes, new_prompts
from bench.service import launch
from tgis.load.figures import Figures, summarize_level
from tgis.load.job import LoadJob

STREAM, UNARY = MODES = ("stream", "unary")


@dataclass(frozen=True, kw_only=True)
class Calls:
    """Requests of closed-loop clients, with a connection each."""

    mode: str
    clients: int
    requests: int
    """Number of requests of each client."""
    input_tokens: int
    new_tokens: int
    time_limit: float
    """Time in seconds after which no request is sent, and after which each ends."""
    more: dict[str, Any] = field(default_factory=dict)
    """Further properties of the workload."""

    def make_job(self, target: str) -> LoadJob:
        """Return the job of a run, with new prompts and a warm-up."""
        workload = new_prompts(
            self.input_tokens, self.new_tokens, unary_share=float(self.mode == UNARY), **self.more
        )
        return closed_loop(
            target,
            workload,
            self.clients,
            warm_up=self.clients,
            num_conversations=self.clients * self.requests,
            duration_s=self.time_limit,
            timeout_s=self.time_limit,
        )


def measure(options: Namespace, model: Path | None) -> dict[str, Any]:
    """Return the table for the attached service, or for a service launched on the model. Raises
    BenchError."""
    with _target(options, model) as (target, command), load_processes() as generator:
        service = [
            _measure_service(options, generator, target, clients, mode)
            for clients in options.clients
            for mode in options.modes
        ]
    return {"service_command": command, "service": service}


@contextlib.contextmanager
def _target(options: Namespace, model: Path | None) -> Iterator[tuple[str, list[str]]]:
    """Yield the address and command of the service to measure. An attached service keeps running."""
    if model is None:
        yield options.attach, []
        return
    with launch(
        model, options.cache / "service.log", ["--dtype", options.dtype, *options.launcher]
    ) as launched:
        yield launched


def _measure_service(
    options: Namespace, generator: Generator, target: str, clients: int, mode: str
) -> dict[str, Any]:
    calls = Calls(
        mode=mode,
        clients=clients,
        requests=options.requests,
        input_tokens=options.input_tokens,
        new_tokens=options.new_tokens,
        time_limit=options.time_limit,
    )
    figures = measure_calls(generator, target, calls, options.rounds)
    print(f"{clients} {mode}: {figures['output_tokens_per_s']:.1f} tokens/s", file=sys.stderr, flush=True)
    return {"clients": clients, "mode": mode, "figures": figures}


def measure_calls(generator: Generator, target: str, calls: Calls, rounds: int = 1) -> Figures:
    """Return the figures of all rounds, with the medians of their rates. Raises BenchError."""
    runs = [generator.run(calls.make_job(target)) for _ in range(rounds)]
    figures = summarize_level(runs, None, {})
    repeats = figures["repeats"]
    rates = {name: statistics.median(each[name] for each in repeats) for name in repeats[0]}
    between_s = figures["tpot"].get("p50")
    return {**figures, **rates, "decode_tokens_per_s": calls.clients / between_s if between_s else None}
