"""Decode and prefill through the service, in turns with int8 weights, with bfloat16 arithmetic and with
transformers; what of the machine's limits they reach."""

import contextlib
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench import burst, limits, worker
from bench.contest import Asked, Case, Match, Sample, Spread, play, rates_of, ratios_of, select, shares_of
from bench.limits import Rates
from bench.probe import probing
from bench.service import BenchError, first_line, launch
from bench.shapes import SHAPES, Shape
from bench.targets import PREFILLS, Figure

SECTIONS = ("decode", "prefill", "int8", "bfloat16", "context", "engine", "transformers")
OURS, INT8, BFLOAT16 = "ours", "ours int8", "ours bfloat16"
ENGINE, TRANSFORMERS = "the engine alone", "transformers"
# The service's other ways to compute: their sections, and their options.
VARIANTS = {
    INT8: ("int8", ("--quantize", "int8")),
    BFLOAT16: ("bfloat16", ("--cpu-arithmetic", "bfloat16")),
}
LONG_CONTEXT, CONTEXT_CLIENTS = 1024, 32
ENGINE_CLIENTS = (1, 32)  # there is no target between them, and a run takes long enough
COMPARED_PREFILL = 512
# So that all prompts of a round, and those that are to be found again, have room in the cache.
CACHE_TOKENS, MAX_LENGTH = 81920, 2304


Start = Callable[[], AbstractContextManager[Asked]]


@dataclass(frozen=True)
class Found:
    figures: list[Figure]
    samples: list[Sample]
    failures: dict[str, str]
    """By section, why it was not measured."""


def measure(options: Namespace, model: Path) -> Found:
    """Raises BenchError where our own service fails; without a rival its section is left out."""
    failures: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        probe = stack.enter_context(probing())
        ours = stack.enter_context(serving(options, model, OURS, []))
        rivals: dict[str, Asked] = {}
        starts: dict[str, tuple[str, Start]] = {
            name: (section, partial(serving, options, model, name, flags))
            for name, (section, flags) in VARIANTS.items()
        }
        starts |= {
            ENGINE: ("engine", lambda: _engine(options, model)),
            TRANSFORMERS: ("transformers", lambda: _transformers(model)),
        }
        for name, (section, start) in starts.items():
            if section in options.only:
                try:
                    rivals[name] = stack.enter_context(start())
                    rivals[name].generate(1, 16, 2, seed=0)
                except BenchError as error:
                    rivals.pop(name, None)
                    failures[section] = first_line(error)
        samples = play(make_matches(options, ours, rivals), probe, options.rounds)
    figures = find_figures(samples, SHAPES[options.shape], options)
    return Found(figures, samples, failures)


@contextlib.contextmanager
def _engine(options: Namespace, model: Path) -> Iterator[Asked]:
    arguments = (str(model), options.dtype, str(CACHE_TOKENS))
    with worker.start("bench.engine_worker", *arguments, log=options.cache / "engine.log") as child:
        yield Asked(ENGINE, child)


@contextlib.contextmanager
def _transformers(model: Path) -> Iterator[Asked]:
    with worker.start("bench.peers.transformers", str(model), "float32") as child:
        yield Asked(TRANSFORMERS, child)


def service_flags(options: Namespace) -> list[str]:
    """Of the launcher, for every service that is measured."""
    sizes = ["--kv-cache-tokens", str(CACHE_TOKENS), "--max-sequence-length", str(MAX_LENGTH)]
    return ["--dtype", options.dtype, *sizes, *options.launcher]


@contextlib.contextmanager
def serving(options: Namespace, model: Path, name: str, more: Sequence[str]) -> Iterator[Asked]:
    """A launched service and its clients."""
    log = options.cache / f"{name.replace(' ', '-')}.log"
    flags = [*service_flags(options), *more]
    with launch(model, log, flags) as (target, _), worker.start(burst.MODULE, target) as clients:
        yield Asked(name, clients)


def make_matches(options: Namespace, ours: Asked, others: dict[str, Asked]) -> list[Match]:
    """What the chosen sections need, and of whom."""
    chosen, matches = set(options.only), list[Match]()
    variants = [others[name] for name in VARIANTS if name in others]
    rivals = variants + [others[name] for name in (ENGINE, TRANSFORMERS) if name in others]
    if chosen & {"decode", "int8", "bfloat16", "engine", "transformers"}:
        for count in options.clients:
            case = Case("decode", count, options.input_tokens, options.new_tokens)
            beside = [rival for rival in rivals if rival.name != ENGINE or count in ENGINE_CLIENTS]
            matches.append((case, [ours, *beside]))
    if "prefill" in chosen:
        matches += [(Case("prefill", 1, length, 1), [ours]) for length in PREFILLS]
    if variants:
        case = Case("prefill", 1, COMPARED_PREFILL, 1)
        matches = [match for match in matches if match[0] != case] + [(case, [ours, *variants])]
    if "context" in chosen:
        matches += [(case, [ours]) for case in _context_cases(options)]
    return matches


def find_figures(samples: Sequence[Sample], shape: Shape, options: Namespace) -> list[Figure]:
    found = [_decode_share(samples, shape, options, count) for count in options.clients]
    found += [_prefill_share(samples, shape, length) for length in PREFILLS]
    variants = [(name, section) for name, (section, _) in VARIANTS.items()]
    for name, key in (*variants, (ENGINE, "engine"), (TRANSFORMERS, "transformers")):
        found += [_compare(samples, name, f"decode {count}", f"{key} {count}") for count in options.clients]
    for name, key in variants:
        found.append(_compare(samples, name, f"prefill {COMPARED_PREFILL}", f"{key} prefill"))
    near, far = _context_cases(options)
    found.append(_ratio(samples, "context", (OURS, far.name), (OURS, near.name)))
    return [figure for figure in found if figure is not None]


def _context_cases(options: Namespace) -> tuple[Case, Case]:
    near, far = (
        Case("decode", CONTEXT_CLIENTS, length, options.new_tokens, is_cached=True)
        for length in (options.input_tokens, LONG_CONTEXT)
    )
    return near, far


def _decode_share(samples: Sequence[Sample], shape: Shape, options: Namespace, count: int) -> Figure | None:
    def limit(rates: Rates) -> float:
        sizes = (count, options.input_tokens, options.new_tokens)
        return limits.decode_limit(shape, options.dtype, *sizes, rates)

    return _share(samples, f"decode {count}", limit)


def _prefill_share(samples: Sequence[Sample], shape: Shape, length: int) -> Figure | None:
    return _share(samples, f"prefill {length}", lambda rates: limits.prefill_limit(shape, length, rates))


def _share(samples: Sequence[Sample], case: str, limit: Any) -> Figure | None:
    share, rate = shares_of(samples, OURS, case, limit), rates_of(samples, OURS, case)
    if share is None or rate is None:
        return None
    most = Spread.of([limit(sample.rates) for sample in select(samples, OURS, case)])
    return Figure(case, share, f"{rate.median:.0f} of {most.median:.0f} tokens/s")


def _compare(samples: Sequence[Sample], other: str, case: str, key: str) -> Figure | None:
    """Of our variants to ours; of ours to anything else."""
    pair = ((other, case), (OURS, case)) if other in VARIANTS else ((OURS, case), (other, case))
    return _ratio(samples, key, *pair)


def _ratio(
    samples: Sequence[Sample], key: str, first: tuple[str, str], second: tuple[str, str]
) -> Figure | None:
    ratio = ratios_of(samples, first, second)
    one, other = rates_of(samples, *first), rates_of(samples, *second)
    if ratio is None or one is None or other is None:
        return None
    return Figure(key, ratio, f"{one.median:.0f} to {other.median:.0f} tokens/s")
