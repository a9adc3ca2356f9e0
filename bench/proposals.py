"""`python -m bench.proposals`: measure the CPU time of a speculator's proposals and of the steps that it
follows, for one or more rows, on a model runner in this process with one thread."""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench import shapes
from bench.speculator_cost import write_wrong
from bench.steps import Rows, load_runner
from tgis.pb import shard_pb2 as pb
from tgis.shard.runner.model_runner import HostModelRunner
from tgis.shard.runner.proposer import FollowingProposer

CONTEXT = 128
MAX_DRAFTS = 3
WARM_STEPS = 8


class Timed:
    """Wrapper of a function that keeps the CPU time of each call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.seconds: list[float] = []

    def __call__(self, *args: Any) -> Any:
        began = time.process_time()
        result = self._function(*args)
        self.seconds.append(time.process_time() - began)
        return result


@contextmanager
def timing(proposer: FollowingProposer, name: str) -> Iterator[Timed]:
    timed = Timed(getattr(proposer, name))
    setattr(proposer, name, timed)
    try:
        yield timed
    finally:
        delattr(proposer, name)


def measure(runner: HostModelRunner, batch: int, steps: int) -> dict[str, float]:
    """Return the median milliseconds of a proposal, and of following a step, for all rows together."""
    proposer = runner._speculator
    assert proposer is not None, "there is a speculator"
    runner.reset()
    rows = Rows(runner, batch, CONTEXT, 4 * (steps + WARM_STEPS), max_drafts=MAX_DRAFTS)
    times: dict[str, float] = {}
    for request in rows.prefill(512):
        launch(runner, request)
    for name in ("follow", "propose"):
        with timing(proposer, name) as timed:
            for _ in range(steps + WARM_STEPS):
                request = rows.decode()
                launch(runner, request, MAX_DRAFTS if name == "propose" else 0)
        times[name] = 1000 * statistics.median(timed.seconds[WARM_STEPS:])
    return times


def launch(runner: HostModelRunner, request: pb.StepRequest, max_drafts: int = 0) -> None:
    num_rows = len(request.rows) // 4
    request.followed = bytes([1] * num_rows)
    if max_drafts:
        request.max_drafts = max_drafts.to_bytes(4, "little") * num_rows
    runner.launch(request).answer()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.proposals", description=__doc__)
    parser.add_argument("kinds", nargs="*", default=["eagle3"], help="mlp, medusa, eagle3 (default eagle3)")
    parser.add_argument("--shape", choices=list(shapes.SHAPES), default="135m", help="(default %(default)s)")
    parser.add_argument("--dtype", default="float16", help="type of the weights (default %(default)s)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=40, help="(default %(default)s)")
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench"), help="(default %(default)s)")
    options = parser.parse_args(arguments)
    shape = shapes.SHAPES[options.shape]
    model = shapes.ensure_checkpoint(options.shape, options.cache)
    for kind in options.kinds:
        heads = write_wrong(kind, shape, options.cache / f"wrong-{kind}-{options.shape}")
        runner = load_runner(model, options.dtype, 65536, speculator=str(heads), cpu_threads=1)
        assert isinstance(runner, HostModelRunner), "the CPU's runner"
        for batch in options.batch:
            times = measure(runner, batch, options.steps)
            named = ", ".join(f"{name} {value:.3f} ms" for name, value in times.items())
            print(f"{kind}, {batch} rows: {named}", flush=True)


if __name__ == "__main__":
    main()
