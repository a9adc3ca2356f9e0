"""Writes LoRA adapters with peft for any family's checkpoint, and returns peft's greedy answers with them."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from tests.support.greedy import generate
from tests.support.shard.family_oracle import NEW_TOKENS, Answer, describe, load_model


class Tuned:
    """Checkpoint in transformers, with the adapter that `options` of peft.LoraConfig describe, or without
    one. Its weights are random and are saved in `directory`."""

    def __init__(self, checkpoint: Path, directory: Path, seed: int = 0, **options: Any) -> None:
        config = transformers.AutoConfig.from_pretrained(checkpoint)
        self.is_encoder_decoder = bool(config.is_encoder_decoder)
        self.model: Any = load_model(checkpoint, config)
        self.start_token_id = self.model.generation_config.decoder_start_token_id
        if options:
            with quiet():
                self.model = write_adapter(self.model, directory, seed, **options)
        if self.is_encoder_decoder:  # T5's own answers in float32 differ by 3e-4 between processors
            self.model = self.model.double()

    def answer(self, input_ids: list[int]) -> Answer:
        with quiet():
            result = generate(self.model, input_ids, max_new_tokens=NEW_TOKENS)
        return describe(input_ids, *result)


def write_adapter(model: Any, directory: Path, seed: int = 0, **options: Any) -> peft.PeftModel:
    """Return `model` with an adapter of random weights, which peft also saves."""
    tuned = peft.get_peft_model(model, peft.LoraConfig(**options)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    tuned.save_pretrained(directory)
    return tuned


def list_targets(model: Any) -> list[str]:
    """Return peft's "all-linear" modules and the two ends of the model, by the last parts of their names."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    kinds = (torch.nn.Linear, transformers.pytorch_utils.Conv1D)
    result = (name for name, module in model.named_modules() if isinstance(module, kinds) or module in ends)
    return sorted({name.rpartition(".")[2] for name in result})


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress peft's warnings about states that are intended here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
