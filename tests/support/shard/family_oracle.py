"""transformers' greedy answers to a few inputs, one at a time and unpadded, for any family's checkpoint."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.support.greedy import count_certain, generate
from tests.support.shard.checkpoints import find_auto_class
from tests.support.shard.driver import Request

NEW_TOKENS = 8
LENGTHS = (1, 9, 30)


@dataclass(frozen=True)
class Answer:
    """Answer with `certain` tokens before the first one whose two best scores are too close to decide between
    them."""

    input_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    certain: int


class Oracle:
    def __init__(self, directory: Path, config: transformers.PretrainedConfig) -> None:
        self.is_encoder_decoder = bool(config.is_encoder_decoder)
        self._model = load_model(directory, config)
        self.start_token_id = self._model.generation_config.decoder_start_token_id

    def answer(self, input_ids: list[int]) -> Answer:
        return describe(input_ids, *generate(self._model, input_ids, max_new_tokens=NEW_TOKENS))


def load_model(directory: Path, config: transformers.PretrainedConfig) -> Any:
    """Load a model in transformers, to be run step by step."""
    # When run step by step, Falcon would add ALiBi twice.
    implementation = "sdpa" if config.model_type == "falcon" else "eager"
    options = {"dtype": torch.float32, "attn_implementation": implementation}
    model = find_auto_class(config).from_pretrained(directory, **options).eval()
    settings = model.generation_config
    # Some models force tokens, which a server must not do.
    settings.eos_token_id = settings.forced_bos_token_id = settings.forced_eos_token_id = None
    if set(getattr(config, "layer_types", None) or ()) == {"linear_attention"}:
        # transformers asks an attention layer for the length of its cache, and peft expects one.
        settings.use_cache = model.config.use_cache = False
    return model


def describe(input_ids: list[int], tokens: list[int], steps: Tensor) -> Answer:
    """Return an answer. `steps` [num_tokens, vocab_size] has the log-probabilities of the tokens."""
    logprobs = [float(steps[i, token]) for i, token in enumerate(tokens)]
    return Answer(input_ids, tokens, logprobs, count_certain(steps))


def check(request: Request, answer: Answer, tolerance: float = 1e-4) -> None:
    """Assert that the request got the expected answer."""
    certain = answer.certain
    assert request.generated[:certain] == answer.token_ids[:certain]
    assert request.logprobs[:certain] == pytest.approx(
        answer.logprobs[:certain], rel=tolerance, abs=tolerance
    )
    assert certain, "nothing was compared"


def draw_inputs(seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 99) for _ in range(length)] for length in LENGTHS]
