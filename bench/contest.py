"""Measures several contenders in turns on the same cases, with the machine's limits between measurements."""

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from bench.limits import Rates
from bench.probe import Probe, highest
from bench.service import BenchError
from bench.worker import Worker

Kind = Literal["decode", "prefill"]
MAX_TRIES = 3  # of a measurement on a machine that is disturbed meanwhile
TRY_SEEDS = 1_000_000  # distance of the seeds of two tries, so that no service has the prompts in its cache
Entry = TypeVar("Entry")


@dataclass(frozen=True)
class Case:
    """`decode`: sequences that start together; `prefill`: one sequence, until its first token."""

    kind: Kind
    batch: int
    input_tokens: int
    new_tokens: int
    is_cached: bool = False
    """True if the prompts are the same every time, so that a service has them in its cache."""

    @property
    def name(self) -> str:
        if self.kind == "prefill":
            return f"prefill {self.input_tokens}"
        return f"decode {self.batch}" + (f" at {self.input_tokens}" if self.is_cached else "")


class Contender(Protocol):
    @property
    def name(self) -> str: ...

    def generate(self, batch: int, input_tokens: int, new_tokens: int, seed: int) -> float:
        """Return the seconds from the prompts' arrival until all sequences have this many new tokens, sampled
        greedily. The seed determines the prompts."""


@dataclass(frozen=True)
class Asked:
    """Contender that runs in a separate process."""

    name: str
    worker: Worker
    time_limit: float = 300.0

    def generate(self, batch: int, input_tokens: int, new_tokens: int, seed: int) -> float:
        question = {"batch": batch, "input_tokens": input_tokens, "new_tokens": new_tokens, "seed": seed}
        seconds: float = self.worker.ask(question, self.time_limit)["seconds"]
        return seconds


@dataclass(frozen=True)
class Sample:
    """One measurement: `whole_s` is the time for all new tokens, `first_s` for the first one. Rates are
    tokens per second."""

    case: str
    contender: str
    round: int
    first_s: float
    whole_s: float
    rate: float
    looks: tuple[Rates, Rates]
    """The machine's limits measured right before and right after."""

    @property
    def rates(self) -> Rates:
        """Return the higher of the two limits: a disturbance of one of them is not the machine's limit."""
        return highest(*self.looks)


Match = tuple[Case, Sequence[Contender]]


def play(
    matches: Sequence[Match], probe: Probe, rounds: int, note: Callable[[Sample], None] | None = None
) -> list[Sample]:
    """Measure every match in each round, with the contenders in turns."""
    samples = []
    for case, contenders in matches:
        for contender in contenders:
            _warm(contender, case)
    before = probe()
    for number in range(rounds):
        for index, (case, contenders) in enumerate(matches):
            for contender in turns(contenders, number):
                first_s, whole_s = _measure(case, contender, seed=1 + number * len(matches) + index)
                after = probe()
                rate = _rate(case, first_s, whole_s)
                looks = (before, after)
                samples.append(Sample(case.name, contender.name, number, first_s, whole_s, rate, looks))
                before = after
                (note or _print)(samples[-1])
    return samples


def turns(contenders: Sequence[Entry], number: int) -> list[Entry]:
    """Return the contenders in the order of a round. The first of a round is the last of the next, so that no
    contender always follows the same other one."""
    turn = number % len(contenders)
    return [*contenders[turn:], *contenders[:turn]]


def _warm(contender: Contender, case: Case) -> None:
    """Run a warm-up, which also fills caches with the prompts that later measurements share."""
    is_whole = case.is_cached or case.kind == "prefill"
    contender.generate(case.batch, case.input_tokens if is_whole else 16, 2, seed=0)


def _measure(case: Case, contender: Contender, seed: int) -> tuple[float, float]:
    for number in range(MAX_TRIES):
        first_seed = 2 * (seed + number * TRY_SEEDS)
        seeds = (0, 0) if case.is_cached else (first_seed, first_seed + 1)
        first_s = contender.generate(case.batch, case.input_tokens, 1, seeds[0])
        if case.kind == "prefill":
            return first_s, first_s
        whole_s = contender.generate(case.batch, case.input_tokens, case.new_tokens, seeds[1])
        if whole_s > first_s:
            break
    return first_s, whole_s


def _rate(case: Case, first_s: float, whole_s: float) -> float:
    """Return the prompt tokens per second up to the first new token, or the rate of the tokens after it.

    Raises BenchError if the time is zero, as it can seem on a disturbed machine."""
    if case.kind == "prefill":
        return case.batch * case.input_tokens / first_s
    if whole_s <= first_s:
        raise BenchError(f"{case.name}: whole answers took {whole_s:.2f} s, first tokens {first_s:.2f} s")
    return case.batch * (case.new_tokens - 1) / (whole_s - first_s)


def _print(sample: Sample) -> None:
    text = f"{sample.contender}, {sample.case}: {sample.rate:.0f} tokens/s"
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Spread:
    """Median, minimum and maximum of several runs."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values), len(values))

    def __format__(self, form: str) -> str:
        return f"{self.median:{form}} ({self.low:{form}} to {self.high:{form}})"


def select(samples: Sequence[Sample], contender: str, case: str) -> list[Sample]:
    return [sample for sample in samples if (sample.contender, sample.case) == (contender, case)]


def rates_of(samples: Sequence[Sample], contender: str, case: str) -> Spread | None:
    """Return tokens per second, or None if they were not measured."""
    selected = select(samples, contender, case)
    return Spread.of([sample.rate for sample in selected]) if selected else None


def shares_of(
    samples: Sequence[Sample], contender: str, case: str, limit: Callable[[Rates], float]
) -> Spread | None:
    """Return the shares of what the machine allowed at the time of each run."""
    selected = select(samples, contender, case)
    return Spread.of([sample.rate / limit(sample.rates) for sample in selected]) if selected else None


def ratios_of(samples: Sequence[Sample], ours: tuple[str, str], theirs: tuple[str, str]) -> Spread | None:
    """Return the ratios of one (contender, case) to another, by round."""
    others = {sample.round: sample.rate for sample in select(samples, *theirs)}
    pairs = [(sample.rate, others.get(sample.round)) for sample in select(samples, *ours)]
    ratios = [rate / other for rate, other in pairs if other]
    return Spread.of(ratios) if ratios else None
