"""Measures decode and prefill through the service, in turns with its other precisions and with transformers,
and the shares of the machine's limits."""

import contextlib
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench import limits, variants, worker
from bench.contest import (
    Asked,
    Case,
    Contender,
    Match,
    Sample,
    Spread,
    play,
    rates_of,
    ratios_of,
    select,
    shares_of,
)
from bench.generator import Loaded, load_processes
from bench.limits import Rates
from bench.probe import probing
from bench.service import BenchError, first_line, launch
from bench.shapes import SHAPES, Shape
from bench.targets import PREFILLS, Figure
from bench.variants import BFLOAT16, INT8, OURS, OURS_FLAGS, VARIANTS, Variant

SECTIONS = ("decode", "prefill", *variants.SECTIONS, "context", "engine", "transformers")
ENGINE, TRANSFORMERS = "the engine alone", "transformers"
LONG_CONTEXT, CONTEXT_CLIENTS = 1024, 32
ENGINE_CLIENTS = (1, 32)  # there is no target for batch sizes in between, and a run takes long enough
COMPARED_PREFILL = 512
# Large enough for all prompts of a round, and for those that later measurements share.
CACHE_TOKENS, MAX_LENGTH = 81920, 2304
UNMEASURED = "unmeasured: the processor has no {}"

Start = Callable[[], AbstractContextManager[Contender]]


@dataclass(frozen=True)
class Found:
    figures: list[Figure]
    samples: list[Sample]
    failures: dict[str, str]
    """Reasons why sections were not measured, by section."""


def measure(options: Namespace, model: Path) -> Found:
    """Measure all sections. Raises BenchError if the service fails; if a rival fails, its section is left
    out."""
    failures: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        probe = stack.enter_context(probing())
        ours = stack.enter_context(serving(options, model, OURS, OURS_FLAGS))
        machine = probe()
        unmeasured = find_unmeasured(machine)
        rivals: dict[str, Contender] = {}
        for name, sections, start in _list_starts(options, model):
            if is_emulated(name, machine):
                continue
            try:
                rivals[name] = stack.enter_context(start())
                rivals[name].generate(1, 16, 2, seed=0)
            except BenchError as error:
                rivals.pop(name, None)
                failures |= dict.fromkeys(sections, first_line(error))
        samples = play(make_matches(options, ours, rivals), probe, options.rounds)
    figures = find_figures(samples, SHAPES[options.shape], options)
    return Found(figures, samples, unmeasured | failures)


def is_emulated(contender: str, machine: Rates) -> bool:
    """Return True if the contender's figures on this machine do not represent other processors."""
    return contender == BFLOAT16 and machine.bfloat16 is None


def find_unmeasured(rates: Rates) -> dict[str, str]:
    """Return the reasons why some or all figures of sections cannot be measured on this machine, by
    section."""
    names = {"bfloat16": (rates.bfloat16, "AVX512_BF16"), "int8": (rates.int8, "AVX512_VNNI")}
    return {section: UNMEASURED.format(name) for section, (rate, name) in names.items() if rate is None}


def _list_starts(options: Namespace, model: Path) -> Iterator[tuple[str, list[str], Start]]:
    """Yield the other contenders: name, the sections that need it, and a function that starts it."""
    for variant, sections in variants.find_wanted(options.only).items():
        flags = (*OURS_FLAGS, *variant.flags)
        yield variant.name, sections, partial(serving, options, model, variant.name, flags)
    if "engine" in options.only:
        yield ENGINE, ["engine"], partial(_engine, options, model)
    if "transformers" in options.only:
        yield TRANSFORMERS, ["transformers"], partial(_transformers, model)


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
    """Return the launcher's options for every measured service."""
    return ["--dtype", options.dtype, *list_sizes(), *options.launcher]


def list_sizes() -> list[str]:
    """Return the launcher's options for the cache's size."""
    return ["--kv-cache-tokens", str(CACHE_TOKENS), "--max-sequence-length", str(MAX_LENGTH)]


@contextlib.contextmanager
def serving(options: Namespace, model: Path, name: str, more: Sequence[str]) -> Iterator[Loaded]:
    """Launched service and its clients."""
    log = options.cache / f"{name.replace(' ', '-')}.log"
    flags = [*service_flags(options), *more]
    with launch(model, log, flags) as (target, _), load_processes() as generator:
        yield Loaded(name, generator, target)


def make_matches(options: Namespace, ours: Contender, others: Mapping[str, Contender]) -> list[Match]:
    """Return the matches that the chosen sections need."""
    chosen, matches = set(options.only), list[Match]()
    everywhere = [others[each.name] for each in VARIANTS if each.name in others and not each.is_for_context]
    at_context = [others[each.name] for each in VARIANTS if each.name in others and each.is_for_context]
    rivals = everywhere + [others[name] for name in (ENGINE, TRANSFORMERS) if name in others]
    if "decode" in chosen or rivals:
        for count in options.clients:
            case = Case("decode", count, options.input_tokens, options.new_tokens)
            beside = [rival for rival in rivals if rival.name != ENGINE or count in ENGINE_CLIENTS]
            matches.append((case, [ours, *beside]))
    if "prefill" in chosen:
        matches += [(Case("prefill", 1, length, 1), [ours]) for length in PREFILLS]
    if everywhere:
        case = Case("prefill", 1, COMPARED_PREFILL, 1)
        matches = [match for match in matches if match[0] != case] + [(case, [ours, *everywhere])]
    near, far = _context_cases(options)
    if "context" in chosen:
        matches.append((near, [ours]))
    if "context" in chosen or at_context:
        matches.append((far, [ours, *at_context]))
    return matches


def find_figures(samples: Sequence[Sample], shape: Shape, options: Namespace) -> list[Figure]:
    figures = [_decode_share(samples, shape, options, count) for count in options.clients]
    figures += [_prefill_share(samples, shape, length) for length in PREFILLS]
    figures += _instruction_shares(samples, shape)
    for variant in VARIANTS:
        figures += _compare_variant(samples, variant, options)
    for name, key in ((ENGINE, "engine"), (TRANSFORMERS, "transformers")):
        for case, label in _list_cases(options):
            figures.append(find_ratio(samples, f"{key} {label}", (OURS, case), (name, case)))
    near, far = _context_cases(options)
    figures.append(find_ratio(samples, "context", (OURS, far.name), (OURS, near.name)))
    return [figure for figure in figures if figure is not None]


def _context_cases(options: Namespace) -> tuple[Case, Case]:
    near, far = (
        Case("decode", CONTEXT_CLIENTS, length, options.new_tokens, is_cached=True)
        for length in (options.input_tokens, LONG_CONTEXT)
    )
    return near, far


def _list_cases(options: Namespace) -> list[tuple[str, str]]:
    """Return the cases in which contenders are compared, with their names in figures' keys."""
    decoding = [(f"decode {count}", str(count)) for count in options.clients]
    far = _context_cases(options)[1].name
    return [*decoding, (f"prefill {COMPARED_PREFILL}", "prefill"), (far, f"at {LONG_CONTEXT}")]


def _compare_variant(
    samples: Sequence[Sample], variant: Variant, options: Namespace
) -> Iterator[Figure | None]:
    """Yield a variant's speed as a multiple of float16's and of the variants of sections in the keys."""
    sections = {each.name: each.section for each in VARIANTS}
    for case, label in _list_cases(options):
        pair = (variant.name, case)
        yield find_ratio(samples, f"{variant.section} {label}", pair, (OURS, case))
        for other in variant.beside:
            yield find_ratio(samples, f"{variant.section} to {sections[other]} {label}", pair, (other, case))


def _instruction_shares(samples: Sequence[Sample], shape: Shape) -> Iterator[Figure | None]:
    """Yield the share of the instructions' rates that prompts reach, if these were measured.

    Attention is not computed in 8 bits, so the share of int8 weights is also given with attention at
    float32's rate."""
    length, case = COMPARED_PREFILL, f"prefill {COMPARED_PREFILL}"
    limit = partial(limits.prefill_limit, shape, length)
    paired = [sample for sample in samples if sample.rates.bfloat16]
    in_eight = [sample for sample in samples if sample.rates.int8]
    yield _share(paired, BFLOAT16, case, "bfloat16 prefill limit", lambda rates: limit(rates.bfloat16))
    yield _share(in_eight, INT8, case, "int8 prefill limit", lambda rates: limit(rates.int8))
    key = "int8 prefill limit, attention in float32"
    yield _share(in_eight, INT8, case, key, lambda rates: limit(rates.int8, rates.gemm))


def _decode_share(samples: Sequence[Sample], shape: Shape, options: Namespace, count: int) -> Figure | None:
    def limit(rates: Rates) -> float:
        sizes = (count, options.input_tokens, options.new_tokens)
        return limits.decode_limit(shape, options.dtype, *sizes, rates)

    return _share(samples, OURS, f"decode {count}", f"decode {count}", limit)


def _prefill_share(samples: Sequence[Sample], shape: Shape, length: int) -> Figure | None:
    def limit(rates: Rates) -> float:
        return limits.prefill_limit(shape, length, rates.gemm)

    return _share(samples, OURS, f"prefill {length}", f"prefill {length}", limit)


def _share(
    samples: Sequence[Sample], name: str, case: str, key: str, limit: Callable[[Rates], float]
) -> Figure | None:
    share, rate = shares_of(samples, name, case, limit), rates_of(samples, name, case)
    if share is None or rate is None:
        return None
    maximum = Spread.of([limit(sample.rates) for sample in select(samples, name, case)])
    return Figure(key, share, f"{rate.median:.0f} of {maximum.median:.0f} tokens/s")


def find_ratio(
    samples: Sequence[Sample], key: str, first: tuple[str, str], second: tuple[str, str]
) -> Figure | None:
    """Return the first contender's speed as a multiple of the second's, if both were measured."""
    ratio = ratios_of(samples, first, second)
    one, other = rates_of(samples, *first), rates_of(samples, *second)
    if ratio is None or one is None or other is None:
        return None
    return Figure(key, ratio, f"{one.median:.0f} to {other.median:.0f} tokens/s")
