"""Measures the time between tokens of 16 short streams while a prompt of 2,048 tokens is computed beside
them, compared with the same streams alone; in turns, with one service."""

import statistics
import sys
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.generator import (
    Generator,
    check_answers,
    closed_loop,
    load_processes,
    new_prompts,
    open_loop,
    time_of_token,
)
from bench.rates import service_flags
from bench.service import launch
from tgis.load.job import LoadJob
from tgis.load.records import AnswerRecord
from tgis.load.statistics import quantile

STREAMS, SHORT_TOKENS, NEW_TOKENS = 16, 32, 96
PROMPT_TOKENS = 2048
COMES_AFTER = 20  # tokens of the streams
TIMEOUT_S = 120.0


def run(options: Namespace, model: Path) -> dict[str, Any]:
    """Measure both. Raises BenchError."""
    log = options.cache / "interruption.log"
    with launch(model, log, service_flags(options)) as (target, _), load_processes(2) as generator:
        generator.answers(_streams(target))
        rounds = [_measure_round(generator, target) for _ in range(options.rounds)]
    alone, beside, first_s = (
        statistics.median(getattr(each, name) for each in rounds)
        for name in ("alone_s", "beside_s", "first_s")
    )
    detail = f"{1e3 * beside:.0f} to {1e3 * alone:.0f} ms; the prompt's first token after {first_s:.1f} s"
    values = [each.beside_s / each.alone_s for each in rounds]
    return {"figures": {"interruption": {"values": values, "detail": detail}}, "rounds": rounds}


@dataclass(frozen=True)
class Round:
    """p99 between tokens, without and with the prompt, and the prompt's own waiting time, in seconds."""

    alone_s: float
    beside_s: float
    first_s: float


def _streams(target: str) -> LoadJob:
    workload = new_prompts(SHORT_TOKENS, NEW_TOKENS, has_token_details=True)
    return closed_loop(target, workload, STREAMS, timeout_s=TIMEOUT_S)


def _measure_round(generator: Generator, target: str) -> Round:
    alone = generator.answers(_streams(target))
    comes = statistics.median(time_of_token(answer, COMES_AFTER) for answer in alone)
    long = open_loop(target, new_prompts(PROMPT_TOKENS, 1), [comes])
    records = generator.run(_streams(target), long).records
    check_answers(records)
    [prompt] = [record for record in records if record.input_tokens == PROMPT_TOKENS]
    beside = [record for record in records if record is not prompt]
    first_s = prompt.arrivals[0] - prompt.sent
    result = Round(
        alone_s=quantile(sorted(find_gaps(alone, comes, TIMEOUT_S)), 0.99),
        beside_s=quantile(sorted(find_gaps(beside, prompt.sent, prompt.arrivals[0])), 0.99),
        first_s=first_s,
    )
    beside_ms, alone_ms = 1e3 * result.beside_s, 1e3 * result.alone_s
    print(f"between tokens, p99: {beside_ms:.0f} to {alone_ms:.0f} ms", file=sys.stderr)
    return result


def find_gaps(answers: Iterable[AnswerRecord], begin: float, end: float) -> list[float]:
    """Return the seconds between tokens of a stream whose waiting time overlaps the interval."""
    return [
        after - before
        for answer in answers
        for before, after in pairwise(answer.arrivals)
        if after > begin and before < end
    ]
