"""Measures the time to the first token of a prompt whose first thousand tokens were computed for another
prompt, compared with a prompt that shares nothing."""

import random
import statistics
import sys
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bench.generator import Generator, closed_loop, load_processes
from bench.rates import service_flags
from bench.service import launch
from tgis.load.workload.conversations import Workload

LETTERS = "etaoinshrdlucmfw"
PREFIX_TOKENS = 1000
OWN_WORDS = 4  # tokens after the shared prefix
HITS = 3
TIMEOUT_S = 60.0


def run(options: Namespace, model: Path) -> dict[str, Any]:
    """Measure both. Raises BenchError."""
    log, flags = options.cache / "prefix.log", service_flags(options)
    source = Texts(model)
    with launch(model, log, flags) as (target, _), load_processes() as generator:
        pairs = [_measure_round(generator, target, source) for _ in range(options.rounds + 1)][1:]
    missed, hit = (1e3 * statistics.median(seconds) for seconds in zip(*pairs, strict=True))
    detail = f"{missed:.0f} to {hit:.0f} ms"
    return {"figures": {"prefix": {"values": [miss / hit for miss, hit in pairs], "detail": detail}}}


class Texts:
    """Return new random words."""

    def __init__(self, model: Path):
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._random = random.Random(time.time_ns())

    def make_words(self, count: int) -> str:
        choices, randint = self._random.choices, self._random.randint
        return "".join(f" {''.join(choices(LETTERS, k=randint(2, 7)))}" for _ in range(count))

    def make_prefix(self) -> str:
        """Return a text with exactly this many tokens, if it continues with a new word."""
        encoded = self._tokenizer.encode(self.make_words(PREFIX_TOKENS))
        text: str = self._tokenizer.decode(encoded.ids[:PREFIX_TOKENS])
        return text


def _measure_round(generator: Generator, target: str, texts: Texts) -> tuple[float, float]:
    """Return the seconds until the first token, of a prompt that shares nothing and of the prompts after
    it."""
    prefix = texts.make_prefix()
    prompts = tuple(prefix + texts.make_words(OWN_WORDS) for _ in range(1 + HITS))
    job = closed_loop(target, Workload(texts=prompts, output_tokens="1"), clients=1)
    answers = generator.answers(replace(job, num_conversations=len(prompts), timeout_s=TIMEOUT_S))
    missed, *hits = (answer.arrivals[0] - answer.sent for answer in answers)
    hit = statistics.median(hits)
    print(f"first token: {1e3 * missed:.0f} to {1e3 * hit:.0f} ms", file=sys.stderr, flush=True)
    return missed, hit
