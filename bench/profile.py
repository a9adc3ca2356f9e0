"""`python -m bench.profile`: show where the time of a step goes, part by part, beside the machine's limit for
each, for decode steps and prompts, on a model runner in this process."""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench import shapes
from bench.limits import WIDTHS, Rates
from bench.machine import Limits
from bench.profile_report import Profile, Work, format_profile
from bench.shapes import Shape
from bench.steps import MAX_LENGTH, Rows, load_runner
from bench.stopwatch import Stopwatch, WatchedForward, profile_graph, timing_kernels, watching
from tgis.pb import shard_pb2 as pb
from tgis.shard.kernels.cpu import kernel_graph
from tgis.shard.kernels.cpu.kernel_graph import KernelGraph
from tgis.shard.runner.graph_forward import GraphForward
from tgis.shard.runner.interface import ModelRunner

STEPS, WARM_STEPS = 20, 4
PROMPTS = 3


def main() -> None:
    options = parse_options()
    shape = shapes.SHAPES[options.shape]
    model = shapes.ensure_checkpoint(options.shape, options.cache)
    quantize = "int8" if options.int8 else None
    cache_tokens = count_cache_tokens(options.batch, options.context, options.prefill)
    types = options.dtype, cache_tokens, quantize, options.kv_cache_dtype, options.cpu_arithmetic
    runner = load_runner(model, *types)
    machine = Limits()
    width = WIDTHS[quantize or options.dtype]
    works = [Work(batch, 1, options.context) for batch in options.batch]
    works += [Work(1, length, length) for length in options.prefill]
    for work in works:
        profile = measure(runner, shape, work)
        print(format_profile(profile, shape, width, measure_rates(machine)), end="\n\n", flush=True)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.profile", description=__doc__)
    parser.add_argument("--shape", choices=list(shapes.SHAPES), default="135m", help="(default %(default)s)")
    parser.add_argument("--dtype", default="float16", help="type of the weights (default %(default)s)")
    parser.add_argument("--int8", action="store_true", help="quantize the weights")
    parser.add_argument("--cpu-arithmetic", default="float32", help="(default %(default)s)")
    parser.add_argument(
        "--kv-cache-dtype", default="auto", help="type of keys and values (default %(default)s)"
    )
    parser.add_argument(
        "--batch", type=_counts, default=[1, 8, 32], help="batch sizes of decode steps (default 1,8,32)"
    )
    parser.add_argument(
        "--context",
        type=int,
        default=128,
        help="tokens in the cache before a decode step (default %(default)s)",
    )
    parser.add_argument("--prefill", type=_counts, default=[512], help="prompt lengths (default 512)")
    parser.add_argument(
        "--cache", type=Path, default=Path(".cache/bench"), help="directory of models (default %(default)s)"
    )
    return parser.parse_args(arguments)


def count_cache_tokens(batches: Sequence[int], context: int, prompts: Sequence[int]) -> int:
    """Return the number of tokens for which the cache needs room: those of every step, and one request of the
    longest length."""
    return max(MAX_LENGTH, max(batches, default=1) * (max([context, *prompts]) + 32))


def measure_rates(machine: Limits) -> Rates:
    return Rates(machine.read(0.3), machine.gemm(0.5))


def measure(runner: ModelRunner, shape: Shape, work: Work) -> Profile:
    """Measure steps as in service, then their kernels one by one: those of the kernel graph, and the others
    of the same steps repeated."""
    run = _run_decode if work.new_tokens == 1 else _run_prefill
    with watching(runner) as model:
        step_s = statistics.median(run(runner, work))
        model_s = statistics.median(model.seconds[-STEPS if work.new_tokens == 1 else -PROMPTS :])
        graph = _find_graph(model, work)
        # While the operands exist to which the arguments of the graph refer.
        captured = {} if graph is None else profile_graph(graph, shape, STEPS)
    runner.reset()
    watch = Stopwatch(shape)
    with timing_kernels(watch):
        run(runner, work, watch.begin_step)
    runner.reset()
    others = {name: part for name, part in watch.read().items() if name != kernel_graph.replay.name}
    kernels = {**others, **captured}
    return Profile(work, step_s, model_s, kernels, is_captured=graph is not None)


def _find_graph(model: WatchedForward, work: Work) -> KernelGraph | None:
    if not isinstance(model.forward, GraphForward):
        return None
    return model.forward.find_graph(work.batch * work.new_tokens)


def _run_decode(runner: ModelRunner, work: Work, begin: Callable[[], None] | None = None) -> list[float]:
    """Return the seconds of each step; the last one has the context of `work`."""
    rows = Rows(runner, work.batch, work.context - STEPS - WARM_STEPS, STEPS + WARM_STEPS + 1)
    runner.launch(rows.resume()).answer()
    for _ in range(WARM_STEPS):
        runner.launch(rows.decode()).answer()
    return [_time_step(runner, rows.decode(), begin) for _ in range(STEPS)]


def _run_prefill(runner: ModelRunner, work: Work, begin: Callable[[], None] | None = None) -> list[float]:
    """Return the seconds of each whole prompt, after a warm-up."""
    seconds = []
    for index in range(1 + PROMPTS):
        runner.reset()
        [step] = Rows(runner, 1, work.new_tokens, 2, seed=index).prefill(work.new_tokens)
        seconds.append(_time_step(runner, step, begin if index else None))
    return seconds[1:]


def _time_step(runner: ModelRunner, request: pb.StepRequest, begin: Callable[[], None] | None) -> float:
    if begin is not None:
        begin()
    start = time.perf_counter()
    runner.launch(request).answer()
    return time.perf_counter() - start


def _counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",")] if text else []


if __name__ == "__main__":
    main()
