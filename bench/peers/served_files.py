"""Measures the service and llama.cpp on the same GGUF file, in turns in one run: decode, prefill, and the
time from the command to the first response."""

import contextlib
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import worker
from bench.contest import Asked, Case, Contender, Sample, Spread, play, turns
from bench.generator import Loaded, load_processes
from bench.peers import environments
from bench.peers.environments import Environment, list_cores
from bench.probe import probing
from bench.rates import find_ratio, list_sizes
from bench.service import BenchError, launch
from bench.targets import Figure
from bench.variants import OURS

ROUNDED = f"{OURS}, activations int8"
LLAMA_CPP = "llama-cpp-gguf"
TITLES = {
    OURS: "ours: the file, through the service",
    ROUNDED: "ours: the file with `--activations int8`, through the service",
    LLAMA_CPP: "llama.cpp: the file, as a library",
}
WITHOUT_AMX = "built without AMX, because it crashes with AMX on this machine"
FLAGS = {OURS: (), ROUNDED: ("--activations", "int8")}
PREFILLS = (512, 1024)
START_TIMEOUT_S = 300.0


def measure_file(options: Namespace, file: Path) -> dict[str, Any]:
    """Return figures in the format of `bench.peers`. Raises BenchError."""
    options.cache.mkdir(parents=True, exist_ok=True)
    llama_cpp = _choose_environment(options, file)
    with contextlib.ExitStack() as stack:
        probe = stack.enter_context(probing())
        contenders: list[Contender] = [stack.enter_context(_serve(options, file, name)) for name in FLAGS]
        contenders.append(stack.enter_context(_load_with_llama_cpp(options, file, llama_cpp)))
        sizes = (options.input_tokens, options.new_tokens)
        cases = [Case("decode", count, *sizes) for count in options.clients]
        cases += [Case("prefill", 1, length, 1) for length in PREFILLS]
        samples = play([(case, contenders) for case in cases], probe, options.rounds)
    names = [case.name for case in cases]
    return {
        "started": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "shape": file.stem,
        "rounds": options.rounds,
        "titles": _titles(llama_cpp),
        "figures": [*_compare_rates(samples, names), *_compare_starts(options, file, llama_cpp)],
        "samples": samples,
        "failures": {},
    }


@contextlib.contextmanager
def _serve(options: Namespace, file: Path, name: str) -> Iterator[Loaded]:
    """Start a service and its clients."""
    log = options.cache / f"gguf-{'-'.join(name.replace(',', '').split())}.log"
    flags = [*list_sizes(), *FLAGS[name], *options.launcher]
    with launch(file, log, flags) as (target, _), load_processes() as generator:
        yield Loaded(name, generator, target)


def _choose_environment(options: Namespace, file: Path) -> Environment:
    """Return the build of llama.cpp for this machine. With AMX, version 0.3.36 of its bindings computes with
    weights in a layout of its own, and ends with SIGSEGV on some processors."""
    with contextlib.suppress(BenchError), _load_with_llama_cpp(options, file, environments.LLAMA_CPP):
        return environments.LLAMA_CPP
    return environments.LLAMA_CPP_WITHOUT_AMX


def _titles(llama_cpp: Environment) -> dict[str, str]:
    if llama_cpp is environments.LLAMA_CPP:
        return TITLES
    return TITLES | {LLAMA_CPP: f"{TITLES[LLAMA_CPP]}, {WITHOUT_AMX}"}


@contextlib.contextmanager
def _load_with_llama_cpp(options: Namespace, file: Path, environment: Environment) -> Iterator[Asked]:
    python = environments.ensure(environment, options.peers).absolute()
    arguments = (str(file.absolute()), str(len(list_cores())))
    log = options.peers / f"{LLAMA_CPP}.log"
    with worker.start("bench.peers.llama_cpp", *arguments, python=python, log=log) as child:
        asked = Asked(LLAMA_CPP, child, START_TIMEOUT_S)
        asked.generate(1, 16, 1, seed=0)
        yield asked


def _compare_rates(samples: list[Sample], cases: list[str]) -> list[Figure]:
    figures = [
        find_ratio(samples, f"{key} {case}", (name, case), (LLAMA_CPP, case))
        for name, key in ((OURS, "gguf"), (ROUNDED, "gguf int8"))
        for case in cases
    ]
    return [figure for figure in figures if figure is not None]


def _compare_starts(options: Namespace, file: Path, llama_cpp: Environment) -> Iterator[Figure]:
    """Yield the service's time to readiness as a multiple of llama.cpp's time to its first response."""
    seconds: dict[str, list[float]] = {OURS: [], LLAMA_CPP: []}
    starts = {
        OURS: _serve,
        LLAMA_CPP: lambda options, file, _: _load_with_llama_cpp(options, file, llama_cpp),
    }
    for number in range(options.rounds):
        for name in turns(list(seconds), number):
            begin = time.perf_counter()
            with starts[name](options, file, name) as asked:
                asked.generate(1, 16, 1, seed=number)
                seconds[name].append(time.perf_counter() - begin)
    medians = [Spread.of(times).median for times in seconds.values()]
    ratios = Spread.of([ours / theirs for ours, theirs in zip(*seconds.values(), strict=True)])
    yield Figure("gguf start", ratios, f"{medians[0]:.1f} to {medians[1]:.1f} s")
