"""Runs the parts of the benchmark that have their own modules, and collects figures and pages of text."""

import importlib.util
import json
import statistics
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench import rates
from bench.children import run_child
from bench.contest import Spread
from bench.limits import WIDTHS
from bench.memory import MemoryJob
from bench.service import BenchError, first_line
from bench.targets import TARGETS, Figure

LOADING_TIMEOUT_S = 600.0
MIB = 1 << 20
FILE_WIDTH = 2  # bytes of a weight in a checkpoint's files
# By section; each module has a function `run(options, model)`.
MODULES = {
    "prefix": "bench.shared_prefix",
    "long": "bench.long_context",
    "interruption": "bench.interruption",
    "engine-loss": "bench.engine_loss",
    "overload": "bench.overload",
    "flood": "bench.flood",
    "startup": "bench.startup",
    "router": "bench.router_step",
    "speculation": "bench.speculation",
}


@dataclass(frozen=True)
class Outcome:
    figures: list[Figure] = field(default_factory=list)
    raw: Any = None
    """Figures for the JSON file."""
    failures: dict[str, str] = field(default_factory=dict)
    """Reasons why figures could not be measured, by section."""


def measure_memory(options: Namespace, model: Path) -> Outcome:
    job, loadings = MemoryJob(str(model), options.dtype), []
    for _ in range(options.rounds):
        loadings += run_child("bench.memory", job, LOADING_TIMEOUT_S)
    return Outcome([find_memory(loadings, WIDTHS[options.dtype])], loadings)


def find_memory(loadings: Sequence[dict[str, float]], width: float) -> Figure:
    """Return the peak memory while loading, relative to all weights with `width` bytes each."""
    peaks = [loading["peak_bytes"] for loading in loadings]
    weights = loadings[0]["file_bytes"] * width / FILE_WIDTH
    kept = statistics.median(loading["kept_bytes"] for loading in loadings)
    seconds = statistics.median(loading["seconds"] for loading in loadings)
    detail = (
        f"{max(peaks) / MIB:.0f} MiB at most for {weights / MIB:.0f} of weights; {kept / MIB:.0f} stay; "
        f"read in {seconds:.1f} s"
    )
    return Figure("memory", Spread.of([peak / weights for peak in peaks]), detail)


def measure_module(section: str, options: Namespace, model: Path) -> Outcome:
    """Run the section. Raises BenchError."""
    if importlib.util.find_spec(MODULES[section]) is None:
        raise BenchError(f"there is no {MODULES[section]}")
    result = importlib.import_module(MODULES[section]).run(options, model)
    figures = [
        Figure(key, Spread.of(each["values"]), each["detail"]) for key, each in result["figures"].items()
    ]
    return Outcome(figures, result)


def recall_peers(options: Namespace) -> Outcome:
    """Return the figures of the last run of `bench.peers` on the shape, if there was one."""
    path = peers_file(options.cache, options.shape)
    if not path.is_file():
        raise BenchError("make bench-peers")
    kept = json.loads(path.read_text())
    figures = [
        Figure(each["key"], Spread(**each["spread"]), f"{each['detail']} (run of {kept['started']})")
        for each in kept["figures"]
        if each["key"] in {target.key for target in TARGETS}
    ]
    return Outcome(figures, failures={"peers": f"not in the run of {kept['started']}: make bench-peers"})


def peers_file(cache: Path, shape: str) -> Path:
    return cache / f"peers-{shape}.json"


def run_sections(options: Namespace, model: Path) -> tuple[dict[str, Outcome], dict[str, str]]:
    """Run the sections, and return their results and the reasons for failures. A failed section does not
    affect the others."""
    outcomes, failures = dict[str, Outcome](), dict[str, str]()
    for name, measure in _plan(options, model).items():
        try:
            outcomes[name] = measure()
            failures |= outcomes[name].failures
        except BenchError as error:
            failures |= _fail(name, first_line(error))
        except Exception as error:  # an error in the benchmark itself must not lose the other results
            traceback.print_exc(file=sys.stderr)
            failures |= _fail(name, f"failed: {type(error).__name__}")
    return outcomes, failures


def _fail(name: str, text: str) -> dict[str, str]:
    return dict.fromkeys(rates.SECTIONS if name == "rates" else (name,), text)


def _plan(options: Namespace, model: Path) -> dict[str, Callable[[], Outcome]]:
    plan: dict[str, Callable[[], Outcome]] = {}
    if "memory" in options.only:
        plan["memory"] = partial(measure_memory, options, model)
    if set(rates.SECTIONS) & set(options.only):
        plan["rates"] = partial(_measure_rates, options, model)
    for section in MODULES:
        if section in options.only:
            plan[section] = partial(measure_module, section, options, model)
    if {"decode", "prefill"} & set(options.only):  # pairs that peers are compared in
        plan["peers"] = partial(recall_peers, options)
    return plan


def _measure_rates(options: Namespace, model: Path) -> Outcome:
    measured = rates.measure(options, model)
    return Outcome(measured.figures, measured.samples, measured.failures)
