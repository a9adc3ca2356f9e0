"""Measures the time to the first token of a prompt whose first thousand tokens were computed for another
prompt, compared with a prompt that shares nothing."""

import random
import statistics
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import grpc
from tokenizers import Tokenizer

from bench.load import LETTERS
from bench.rates import service_flags
from bench.service import launch
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

PREFIX_TOKENS = 1000
OWN_WORDS = 4  # tokens after the shared prefix
HITS = 3
TIMEOUT_S = 60.0


def run(options: Namespace, model: Path) -> dict[str, Any]:
    """Measure both. Raises BenchError."""
    log, flags = options.cache / "prefix.log", service_flags(options)
    source = Texts(model)
    with launch(model, log, flags) as (target, _), grpc.insecure_channel(target) as channel:
        stub = GenerationServiceStub(channel)
        pairs = [_measure_round(stub, source) for _ in range(options.rounds + 1)][1:]
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


def _measure_round(stub: GenerationServiceStub, texts: Texts) -> tuple[float, float]:
    """Return the seconds until the first token, of a prompt that shares nothing and of the prompts after
    it."""
    prefix = texts.make_prefix()
    missed, *hits = (_time_first_token(stub, prefix + texts.make_words(OWN_WORDS)) for _ in range(1 + HITS))
    hit = statistics.median(hits)
    print(f"first token: {1e3 * missed:.0f} to {1e3 * hit:.0f} ms", file=sys.stderr, flush=True)
    return missed, hit


def _time_first_token(stub: GenerationServiceStub, text: str) -> float:
    """Return the seconds until the first token."""
    params = pb.Parameters(stopping=pb.StoppingCriteria(max_new_tokens=1, min_new_tokens=1))
    request = pb.SingleGenerationRequest(request=pb.GenerationRequest(text=text), params=params)
    start = time.perf_counter()
    for message in stub.GenerateStream(request, timeout=TIMEOUT_S):
        if message.generated_token_count:
            break
    return time.perf_counter() - start
