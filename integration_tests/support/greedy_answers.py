"""Computes greedy responses with transformers for the prompts of a tiny random checkpoint."""

import math
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from tests.support.greedy import count_certain, generate
from tgis.pb import generation_pb2 as pb

VOCAB_SIZE = 403  # cannot be split evenly between two ranks
MAX_SEQUENCE_LENGTH = 256
WORDS = (
    "girl bread fox dog time once upon little quick brown lazy café 東京 🙂 def return naïve argument"
).split(" ")


@dataclass(frozen=True)
class Expected:
    """transformers' greedy response to one prompt."""

    prompt: str
    max_new_tokens: int
    input_pieces: list[str]
    input_logprobs: list[float]
    """Log-probabilities of the tokens after the first; NaN for an encoder's."""
    pieces: list[str]
    logprobs: list[float]
    certain: int
    """Number of tokens before the first whose two best scores are too close to decide."""


class Oracle:
    """transformers, in float32, one prompt at a time."""

    def __init__(self, model: PreTrainedModel, tokenizer: Tokenizer) -> None:
        self.model, self.tokenizer = model.eval(), tokenizer

    @torch.inference_mode()
    def answer(self, prompt: str, max_new_tokens: int) -> Expected:
        ids = self.tokenizer.encode(prompt).ids
        tokens, steps = generate(self.model, ids, max_new_tokens=max_new_tokens)
        return Expected(
            prompt,
            max_new_tokens,
            [self.tokenizer.id_to_token(token) for token in ids],
            self._input_logprobs(ids),
            [self.tokenizer.id_to_token(token) or "" for token in tokens],
            [float(steps[i, token]) for i, token in enumerate(tokens)],
            count_certain(steps),
        )

    def _input_logprobs(self, ids: list[int]) -> list[float]:
        if self.model.config.is_encoder_decoder:
            return [math.nan] * (len(ids) - 1)
        inputs = self.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        return [float(inputs[i, token]) for i, token in enumerate(ids[1:])]


@dataclass(frozen=True)
class Model:
    directory: Path
    expected: list[Expected]


def answer_prompts(oracle: Oracle) -> list[Expected]:
    """Return prompts; the last seven share their beginning."""
    r = random.Random(0)
    shared = " ".join(r.choices(WORDS, k=12))
    prompts = [" ".join(r.choices(WORDS, k=r.randint(1, 30))) for _ in range(14)]
    prompts += [f"{shared} {' '.join(r.choices(WORDS, k=r.randint(1, 8)))}" for _ in range(7)]
    return [oracle.answer(prompt, r.randint(10, 60)) for prompt in prompts]


def request(expected: Expected, **more: object) -> dict[str, object]:
    """Parameters that request everything that can be compared."""
    return {
        "stopping": pb.StoppingCriteria(max_new_tokens=expected.max_new_tokens),
        "response": pb.ResponseOptions(
            generated_tokens=True, input_tokens=True, token_logprobs=True, token_ranks=True, top_n_tokens=2
        ),
        **more,
    }


def check(expected: Expected, response: pb.GenerationResponse) -> None:
    """Compare: tokens equal, log-probabilities within 1e-4, absolute or relative."""
    pieces = [token.text for token in response.tokens]
    num = expected.certain
    assert pieces[:num] == expected.pieces[:num]
    if num == len(expected.pieces):
        assert len(pieces) == num
    logprobs = [token.logprob for token in response.tokens]
    assert logprobs[:num] == pytest.approx(expected.logprobs[:num], rel=1e-4, abs=1e-4)
    assert all(token.rank == 1 for token in response.tokens)
    assert [token.text for token in response.input_tokens] == expected.input_pieces
    given = [token.logprob for token in response.input_tokens]
    wanted = [math.nan, *expected.input_logprobs]
    assert given == pytest.approx(wanted, rel=1e-4, abs=1e-4, nan_ok=True)
