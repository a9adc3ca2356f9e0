"""`python -m bench.collectives`: measure sums of activations over the ranks of one machine, through gloo and
in shared memory, in turns in one run. Each rank is a process with one thread."""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.report import format_table
from tgis.shard.collectives import ProcessGroup, RendezvousPoint, connect
from tgis.shard.kernels.cpu.shared_memory.collectives import open_collectives
from tgis.shard.startup.platforms.interface import configure_torch

SHAPES = ((1, 576), (1, 4096), (32, 576), (32, 4096), (512, 576), (512, 4096))
ROUNDS, ROUND_S, WARM_UP = 9, 0.05, 20
TIMEOUT_S = 60.0
COLUMNS = ("tensor", "gloo µs", "shared memory µs", "gloo / shared memory", "lowest and highest round")

Times = dict[tuple[int, int], list[float]]
"""Seconds of a sum in each round, by shape."""


def main() -> None:
    options = parse_options()
    gloo, shared = measure(options.ranks, options.rounds)
    print(format_results(options.ranks, gloo, shared))


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.collectives", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="(default %(default)s)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="(default %(default)s)")
    return parser.parse_args(arguments)


def measure(num_ranks: int, rounds: int) -> tuple[Times, Times]:
    """Return the times with gloo and in shared memory."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        arguments = (num_ranks, rounds, Path(directory))
        others = [context.Process(target=_measure, args=(rank, *arguments)) for rank in range(1, num_ranks)]
        for process in others:
            process.start()
        try:
            return _measure(0, *arguments)
        finally:
            for process in others:
                process.join(TIMEOUT_S)
                process.kill()


def _measure(rank: int, num_ranks: int, rounds: int, directory: Path) -> tuple[Times, Times]:
    configure_torch(1)
    points = [RendezvousPoint(str(directory / name)) for name in ("gloo", "shared")]
    gloo = connect(rank, num_ranks, points[0], TIMEOUT_S)
    shared = connect(rank, num_ranks, points[1], TIMEOUT_S, open_local=open_collectives)
    times: tuple[Times, Times] = ({shape: [] for shape in SHAPES}, {shape: [] for shape in SHAPES})
    for _ in range(rounds):
        for shape in SHAPES:
            for group, results in zip((gloo, shared), times, strict=True):
                results[shape].append(_time(group, torch.zeros(shape)))
    gloo.leave()
    shared.leave()
    return times


def _time(group: ProcessGroup, x: torch.Tensor) -> float:
    """Return the seconds of a sum, the mean of a round. The ranks agree on the number of sums that fit."""
    warm_up = _run(group, x, WARM_UP)
    count = group.min(max(1, int(ROUND_S / warm_up)))
    return _run(group, x, count)


def _run(group: ProcessGroup, x: torch.Tensor, count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        group.all_reduce(x)
    return (time.perf_counter() - begin) / count


def format_results(num_ranks: int, gloo: Times, shared: Times) -> str:
    rows = []
    for shape in SHAPES:
        ratios = [slow / fast for slow, fast in zip(gloo[shape], shared[shape], strict=True)]
        times = [f"{1e6 * statistics.median(results[shape]):.1f}" for results in (gloo, shared)]
        spread = f"{min(ratios):.1f} to {max(ratios):.1f}"
        rows.append([str(list(shape)), *times, f"{statistics.median(ratios):.1f}", spread])
    return f"{num_ranks} ranks\n\n{format_table(COLUMNS, rows)}"


if __name__ == "__main__":
    main()
