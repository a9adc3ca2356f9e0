"""Text whose words are single tokens, and its tokenizer."""

import random
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, processors

VOCAB_SIZE = 99
BOS = 1


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer for which word wN is token N, and which adds token 1 before every text."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"w{BOS} $A", special_tokens=[(f"w{BOS}", BOS)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))


def draw_ids(count: int, first: int = 3, last: int = VOCAB_SIZE - 1, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(first, last) for _ in range(count)]


def write_text(file: Path, ids: Sequence[int]) -> Path:
    file.write_text(" ".join(f"w{i}" for i in ids))
    return file
