"""`python -m bench.router_workers`: measure router workers beside one router process, in turns in one run:
CPU time per streamed token, latency, the engine process's step, the distribution of connections, and the
pause when the engine process is killed. Shards are fakes, so that the router takes all the time."""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench import router_latency, router_losses, router_rates, router_spread, router_step
from bench.api_clients import GRPC
from bench.apis import WARM_STEPS, Bench, running
from bench.contest import Spread, turns
from bench.report import format_table
from bench.service import BenchError, exit_on_sigterm
from tgis.process.control_groups import count_cores

BEFORE, ONE = "one process, before", "one process"
NUM_WORKERS = {BEFORE: 0, ONE: 0, "engine + 1 worker": 1, "engine + 3 workers": 3}
SUM_GOAL, WORKER_GOAL_US, ENGINE_GOAL_US = 1.25, 80, 15
STEP_GOALS_MS = {256: 1.5, 512: 3.0}
STEP_VOCAB_SIZE = 32_000


@dataclass(frozen=True)
class Cost:
    """CPU time per streamed token, in microseconds."""

    router: str
    streams: int
    round: int
    workers_us: float
    """Time of the workers, or of the only process."""
    engine_us: float

    @property
    def sum_us(self) -> float:
        return self.workers_us + self.engine_us


def measure_costs(options: argparse.Namespace) -> str:
    """Measure all routers. Raises BenchError."""
    with ExitStack() as stack:
        benches = dict(_start_all(stack, options))
        costs = []
        for num_streams in options.streams:
            for bench in benches.values():
                bench.watch(GRPC, num_streams, WARM_STEPS)
            for number in range(options.rounds):
                for name in turns(list(benches), number):
                    costs.append(_measure_cost(benches[name], name, num_streams, options.steps, number))
                    print(costs[-1], file=sys.stderr, flush=True)
    return format_costs(costs)


def _start_all(stack: ExitStack, options: argparse.Namespace) -> Iterator[tuple[str, Bench]]:
    for name, num_workers in NUM_WORKERS.items():
        if name == BEFORE and options.before is None:
            continue
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="router-workers-")))
        tree = options.before if name == BEFORE else None
        max_streams = max(options.streams)
        yield name, stack.enter_context(running(directory, max_streams, [GRPC], None, tree, num_workers))


def _measure_cost(bench: Bench, name: str, num_streams: int, num_steps: int, number: int) -> Cost:
    times = bench.watch(GRPC, num_streams, num_steps).cpu_s
    num_workers = NUM_WORKERS[name] or 1
    workers_us, engine_us = (
        1e6 * sum(part) / (num_streams * num_steps) for part in (times[:num_workers], times[num_workers:])
    )
    return Cost(name, num_streams, number, workers_us, engine_us)


def format_costs(costs: Sequence[Cost]) -> str:
    """Return a Markdown table of medians. Ratios to the first router are computed per round."""
    rows = []
    base = {(each.streams, each.round): each.sum_us for each in costs if each.router == costs[0].router}
    for streams, name in dict.fromkeys((each.streams, each.router) for each in costs):
        chosen = [each for each in costs if (each.streams, each.router) == (streams, name)]
        workers, engine, whole, ratio = (
            Spread.of(values)
            for values in (
                [each.workers_us for each in chosen],
                [each.engine_us for each in chosen],
                [each.sum_us for each in chosen],
                [each.sum_us / base[streams, each.round] for each in chosen],
            )
        )
        cells = [f"{workers:.1f}", f"{engine:.1f}" if NUM_WORKERS[name] else "", f"{whole:.1f}"]
        cells.append("" if name == costs[0].router else f"{ratio:.2f}")
        rows.append([str(streams), name, *cells])
    head = ["streams", "router", "workers, us a token", "engine process", "sum", f"x {costs[0].router}"]
    goals = f"workers <= {WORKER_GOAL_US} us, engine process <= {ENGINE_GOAL_US} us, sum <= {SUM_GOAL} x"
    return f"{format_table(head, rows)}\n\nTargets: {goals}."


def measure_steps(options: argparse.Namespace) -> str:
    rounds = router_step.time_engine(options.rounds, STEP_VOCAB_SIZE)
    rows = [
        [str(size), f"{Spread.of([1e3 * each[size] for each in rounds]):.2f}", f"<= {goal}"]
        for size, goal in STEP_GOALS_MS.items()
    ]
    return format_table(["sequences", "engine process's step, ms", "target"], rows)


SECTIONS: dict[str, tuple[str, Callable[[argparse.Namespace], str]]] = {
    "cpu": ("CPU time per streamed token (gRPC)", measure_costs),
    "latency": ("Latency of one client", router_latency.measure),
    "step": ("Engine process's step, with the messages to three workers", measure_steps),
    "spread": ("Streams over workers", router_spread.measure),
    "losses": ("Engine process killed under 64 streams", router_losses.measure),
    "rates": ("Tokens per second of several workers", router_rates.measure),
}


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.router_workers", description=__doc__)
    parser.add_argument("--before", type=Path, help="another checkout whose CPU time is measured too")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--rounds", type=int, default=5, help="measurements per figure (default %(default)s)")
    parser.add_argument(
        "--steps", type=int, default=120, help="measured steps per round (default %(default)s)"
    )
    parser.add_argument(
        "--streams", type=int, nargs="+", default=[64, 256], help="numbers of streams (default 64 256)"
    )
    return parser.parse_args(arguments)


def main() -> None:
    options = parse_options(sys.argv[1:])
    exit_on_sigterm()
    print(f"{count_cores()} cores")
    for name in options.only:
        title, measure = SECTIONS[name]
        try:
            print(f"\n### {title}\n\n{measure(options)}", flush=True)
        except BenchError as error:
            sys.exit(f"error: {name}: {error}")


if __name__ == "__main__":
    main()
