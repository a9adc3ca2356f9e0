"""`python -m bench`: starts the service on a model of a named shape, measures it, then transformers on the
same model; prints Markdown and writes JSON."""

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import shapes
from bench.children import run_child
from bench.figures import median_figures, summarize
from bench.load import Answer, Job, Mode
from bench.report import format_report
from bench.service import BenchError, launch

MODES: tuple[Mode, ...] = ("stream", "unary")
CHILD_START_S = 60.0
PEER_TIMEOUT_S = 1200.0
LOADING_TIMEOUT_S = 600.0


def main() -> None:
    options = parse_options(sys.argv[1:])
    # As an exception, so that the service is stopped on the way out.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        result = measure(options)
    except BenchError as error:
        sys.exit(f"error: {error}")
    print(format_report(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "--shape", choices=list(shapes.SHAPES), default="135m", help="model (default %(default)s)"
    )
    parser.add_argument("--dtype", default="bfloat16", help="type of the weights (default %(default)s)")
    parser.add_argument(
        "--clients", type=_counts, default=[1, 8, 32], help="numbers of clients (default 1,8,32)"
    )
    parser.add_argument("--modes", type=_modes, default=list(MODES), help="of stream,unary (default both)")
    parser.add_argument("--repeat", type=int, default=3, help="the median of so many (default %(default)s)")
    parser.add_argument(
        "--requests", type=int, default=2, help="of each client each time (default %(default)s)"
    )
    parser.add_argument("--input-tokens", type=int, default=128, help="(default %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=64, help="(default %(default)s)")
    parser.add_argument("--time-limit", type=float, default=300.0, help="seconds of one measurement")
    parser.add_argument("--skip-peers", action="store_true", help="leave transformers out")
    parser.add_argument(
        "--attach", metavar="HOST:PORT", help="measure a running service; implies --skip-peers"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench"), help="where models are kept")
    parser.add_argument("launcher", nargs="*", help="further options of the launcher, after --")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything, as the JSON file holds it. Raises BenchError."""
    attached = options.attach is not None
    model = None if attached else shapes.ensure_checkpoint(options.shape, options.cache)
    before = os.getloadavg()
    # Before the service is there: they must not share the machine.
    (machine,) = run_child("bench.machine", None, CHILD_START_S)
    loading = None if model is None else _measure_loading(options, model)
    with _target(options, model) as (target, command):
        service = [
            _measure_service(options, target, clients, mode)
            for clients in options.clients
            for mode in options.modes
        ]
    peers = [] if attached or options.skip_peers else _measure_peers(options, model)
    return {
        "model": options.attach or f"{options.shape} {options.dtype}",
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "bench_command": sys.argv,
        "service_command": command,
        "input_tokens": options.input_tokens,
        "new_tokens": options.new_tokens,
        "repeat": options.repeat,
        "shape": None if attached else shapes.describe(options.shape),
        "machine": machine,
        "load_average": {"before": before, "after": os.getloadavg()},
        "service": service,
        "peers": peers,
        "loading": loading,
    }


@contextlib.contextmanager
def _target(options: argparse.Namespace, model: Path | None) -> Iterator[tuple[str, list[str]]]:
    """Address and command of the service to measure; an attached one stays."""
    if model is None:
        yield options.attach, []
        return
    with launch(
        model, options.cache / "service.log", ["--dtype", options.dtype, *options.launcher]
    ) as launched:
        yield launched


def _measure_service(options: argparse.Namespace, target: str, clients: int, mode: Mode) -> dict[str, Any]:
    repeats = []
    for index in range(options.repeat):
        job = Job(
            target=target,
            mode=mode,
            clients=clients,
            requests_per_client=options.requests,
            input_tokens=options.input_tokens,
            new_tokens=options.new_tokens,
            # New prompts every time, also for a service that was measured before.
            seed=time.time_ns() + index,
            time_limit=options.time_limit,
        )
        (raw,) = run_child("bench.load", job, options.time_limit + CHILD_START_S)
        figures = summarize(job, [Answer(**answer) for answer in raw["answers"]])
        repeats.append({"seed": job.seed, "figures": figures, **raw})
    median = median_figures([repeat["figures"] for repeat in repeats])
    print(f"{clients} {mode}: {median['output_tokens_per_s']:.1f} tokens/s", file=sys.stderr, flush=True)
    return {"clients": clients, "mode": mode, "figures": median, "repeats": repeats}


def _measure_loading(options: argparse.Namespace, model: Path) -> dict[str, Any]:
    from bench.memory import MemoryJob

    (figures,) = run_child("bench.memory", MemoryJob(str(model), options.dtype), LOADING_TIMEOUT_S)
    return figures


def _measure_peers(options: argparse.Namespace, model: Path | None) -> list[dict[str, Any]]:
    """Those batch sizes that were done in time."""
    from bench.peers import PeerJob

    job = PeerJob(
        str(model), options.clients, options.input_tokens, options.new_tokens, options.repeat, seed=0
    )
    return run_child("bench.peers", job, PEER_TIMEOUT_S)


def _counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _modes(text: str) -> list[str]:
    chosen = text.split(",")
    if not set(chosen) <= set(MODES):
        raise argparse.ArgumentTypeError(f"of {','.join(MODES)}")
    return chosen


if __name__ == "__main__":
    main()
