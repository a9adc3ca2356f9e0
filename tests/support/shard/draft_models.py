"""Draft models, and transformers as the oracle of their proposals."""

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from tgis.router.scheduling.prefix_cache import stop_following
from tgis.router.scheduling.step import NO_DRAFTS, DraftResult, Drafts, Step
from tgis.router.sequence import Sequence as Row

MAX_DRAFTS = 4


def write_neox(directory: Path, vocab_size: int) -> Path:
    """Write a model of another family than Llama, with other widths."""
    torch.manual_seed(4)
    config = transformers.GPTNeoXConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=512,
        initializer_range=0.5,
    )
    transformers.GPTNeoXForCausalLM(config).save_pretrained(directory)
    return directory


def change_config(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


class Oracle:
    """Transformers' model in a directory. `num_token_ids` limits its tokens."""

    def __init__(self, directory: Path, num_token_ids: int) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.vocab_size: int = self._model.config.vocab_size
        self._num_token_ids = num_token_ids

    @torch.inference_mode()
    def check(self, known: Sequence[int], proposed: Sequence[int]) -> None:
        """Check that each proposed token is the most likely one after those before it."""
        ids = [*known, *proposed]
        logits = self._model(torch.tensor([ids[:-1]])).logits[0, len(known) - 1 :, : self._num_token_ids]
        assert logits.argmax(-1).tolist() == list(proposed)


@dataclass
class AlwaysDrafts:
    """`Proposer` of the router that requests drafts of every sequence."""

    is_following: bool = True

    def begin(self, num_sequences: int, max_drafts: int) -> bool:
        return max_drafts > 0

    def propose(self, sequence: Row, max_drafts: int) -> Drafts:
        return Drafts(max_proposed=max(0, min(max_drafts, MAX_DRAFTS)), waits=True)

    def follows(self, sequence: Row, num_sequences: int) -> bool:
        return self.is_following

    def observe(self, step: Step, results: Iterable[DraftResult], seconds: float, follow_s: float) -> None:
        pass


class SwitchedDrafts(AlwaysDrafts):
    """`Proposer` of the router that follows only some sequences, and stops to follow them at times."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._followed: list[Row] = []
        self.num_stopped = self.num_unfollowed = 0

    def begin(self, num_sequences: int, max_drafts: int) -> bool:
        if self._random.random() < 0.1:
            self.num_stopped += any(sequence.row is not None for sequence in self._followed)
            for sequence in self._followed:
                stop_following(sequence)
            self._followed.clear()
        return super().begin(num_sequences, max_drafts)

    def propose(self, sequence: Row, max_drafts: int) -> Drafts:
        return super().propose(sequence, max_drafts) if sequence.is_followed else NO_DRAFTS

    def follows(self, sequence: Row, num_sequences: int) -> bool:
        if self._random.random() < 0.3:
            self.num_unfollowed += 1
            return False
        self._followed.append(sequence)
        return True
