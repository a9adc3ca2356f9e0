"""Measures the table of clients: the latency and throughput of each of several closed-loop clients."""

import contextlib
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.children import run_child
from bench.figures import median_figures, summarize
from bench.load import Answer, Job, Mode
from bench.service import launch

CHILD_START_S = 60.0


def measure(options: Namespace, model: Path | None) -> dict[str, Any]:
    """Return the table for the attached service, or for a service launched on the model. Raises
    BenchError."""
    with _target(options, model) as (target, command):
        service = [
            _measure_service(options, target, clients, mode)
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


def _measure_service(options: Namespace, target: str, clients: int, mode: Mode) -> dict[str, Any]:
    repeats = []
    for index in range(options.rounds):
        job = Job(
            target=target,
            mode=mode,
            clients=clients,
            requests_per_client=options.requests,
            input_tokens=options.input_tokens,
            new_tokens=options.new_tokens,
            # Prompts are new every time, also for a service that was measured before.
            seed=time.time_ns() + index,
            time_limit=options.time_limit,
        )
        (raw,) = run_child("bench.load", job, options.time_limit + CHILD_START_S)
        figures = summarize(job, [Answer(**answer) for answer in raw["answers"]])
        repeats.append({"seed": job.seed, "figures": figures, **raw})
    median = median_figures([repeat["figures"] for repeat in repeats])
    print(f"{clients} {mode}: {median['output_tokens_per_s']:.1f} tokens/s", file=sys.stderr, flush=True)
    return {"clients": clients, "mode": mode, "figures": median, "repeats": repeats}
