"""Computes scores of next tokens with transformers, and with PEFT if there is an adapter: one sequence at a
time, always from its beginning."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from integration_tests.support.served_models import Served
from integration_tests.support.tuned_files import SoftPrompt, read_model

Ids = tuple[int, ...]
NO_PROMPT = SoftPrompt()


@dataclass(frozen=True)
class Tuned:
    """Ids of a response's soft prompt and adapter."""

    prompt: str = ""
    adapter: str = ""


PLAIN = Tuned()


class Scorer:
    def __init__(self, served: Served) -> None:
        self._served = served
        self._models: dict[str, PreTrainedModel] = {}
        self._rows: dict[tuple[Tuned, Ids, Ids], list[float]] = {}
        self._encoded: dict[tuple[Tuned, Ids], BaseModelOutput] = {}

    @torch.inference_mode()
    def logits(self, ids: Ids, encoder_ids: Ids = (), tuned: Tuned = PLAIN) -> list[float]:
        """Return the scores of the token after these, the first of which are virtual. One pass over all of
        them also returns the scores before."""
        if (tuned, encoder_ids, ids) not in self._rows:
            model, inputs = self.model(tuned), self._embed(ids, tuned, self._prompt(tuned).decoder)
            if encoder_ids:
                encoded = self._encode(encoder_ids, tuned)
                logits = model(encoder_outputs=encoded, decoder_inputs_embeds=inputs).logits
            else:
                logits = model(inputs_embeds=inputs).logits
            for end in range(len(ids), 0, -1):
                key = tuned, encoder_ids, ids[:end]
                if key in self._rows:
                    break
                self._rows[key] = logits[0, end - 1].tolist()
        return self._rows[tuned, encoder_ids, ids]

    def virtual_ids(self, tuned: Tuned) -> Ids:
        """Name of the decoder's virtual tokens."""
        return (self._served.pad_id,) * len(self._prompt(tuned).decoder)

    def encoder_ids(self, ids: Ids, tuned: Tuned) -> Ids:
        """Return the encoder's output for an input with its virtual tokens, or None without an encoder."""
        if self._served.decoder_start_id is None:
            return ()
        return ((self._served.pad_id,) * len(self._prompt(tuned).encoder)) + ids

    def _prompt(self, tuned: Tuned) -> SoftPrompt:
        return self._served.store.prompts.get(tuned.prompt, NO_PROMPT)

    def model(self, tuned: Tuned) -> PreTrainedModel:
        """Return the model, with its adapter if it has one."""
        if tuned.adapter not in self._models:
            adapter = self._served.store.adapters.get(tuned.adapter)
            self._models[tuned.adapter] = read_model(self._served.directory, adapter)
        return self._models[tuned.adapter]

    def _encode(self, ids: Ids, tuned: Tuned) -> BaseModelOutput:
        if (tuned, ids) not in self._encoded:
            inputs = self._embed(ids, tuned, self._prompt(tuned).encoder)
            self._encoded[tuned, ids] = self.model(tuned).get_encoder()(inputs_embeds=inputs)
        return self._encoded[tuned, ids]

    def _embed(self, ids: Ids, tuned: Tuned, prompt: Tensor) -> Tensor:
        """Return [1, num_tokens, width]."""
        embedded: Tensor = self.model(tuned).get_input_embeddings()(torch.tensor([ids]))
        embedded[0, : len(prompt)] = prompt[: len(ids)]
        return embedded
