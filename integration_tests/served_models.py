"""The checkpoints that the cases are asked of, each with the flags its service is launched with; random, but
such that generations end, are varied, and hold equal scores where equals matter."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tests.shard.checkpoints import write_llama
from tests.tokenizers_for_tests import write_byte_fallback, write_byte_level

VOCAB_SIZE = 403  # more than the tokenizers have
MAX_SEQUENCE_LENGTH, MAX_NEW_TOKENS = 200, 169
FLAGS = ["--max-sequence-length", "200", "--max-new-tokens", "169", "--dtype", "float32"]


@dataclass(frozen=True)
class Served:
    """A checkpoint on disk and what is known of the service that serves it."""

    directory: Path
    tokenizer: Tokenizer
    eos_ids: tuple[int, ...]
    flags: Sequence[str] = ()
    include_stop_sequence: bool = True
    output_special_tokens: bool = False


def write_bytes(directory: Path) -> Served:
    """Bytes that are no text by themselves are rarer than the rest."""
    tokenizer = write_byte_level(directory)
    parts = {i: 0.6 for piece, i in tokenizer.get_vocab().items() if len(piece) == 1 and not piece.isascii()}
    _write(directory, eos_token_id=1, louder={**parts, 1: 2.0})
    return Served(directory, tokenizer, (1,))


def write_fallback(directory: Path) -> Served:
    """Pieces first, then the bytes that spell characters, then those that are text by themselves."""
    tokenizer = write_byte_fallback(directory)
    ascii_bytes = {2 + byte: 0.5 for byte in range(0x80)}
    pieces = dict.fromkeys(range(258, VOCAB_SIZE), 1.2)
    _write(directory, eos_token_id=1, louder={**ascii_bytes, **pieces, 1: 2.0})
    return Served(directory, tokenizer, (1,))


def write_special(directory: Path) -> Served:
    """Three ends of sequence, one of them beyond the vocabulary; a special token that ends nothing; and most
    tokens have the score 0, always."""
    tokenizer = write_byte_level(directory, vocab_size=390)
    tokenizer.add_special_tokens(["<|end|>", "<|user|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    end, user = tokenizer.token_to_id("<|end|>"), tokenizer.token_to_id("<|user|>")
    eos_ids = (end, 1, 4000)
    silent = [i for i in range(VOCAB_SIZE) if i % 24 and i not in (1, end, user)]
    louder = {end: 1.2, 1: 1.6, user: 1.8}
    _write(directory, eos_token_id=list(eos_ids), louder=louder, silent=silent)
    flags = ["--output-special-tokens", "--default-include-stop-seqs", "false"]
    return Served(directory, tokenizer, eos_ids, flags, False, True)


WRITERS: dict[str, Callable[[Path], Served]] = {
    "bytes": write_bytes,
    "fallback": write_fallback,
    "special": write_special,
}


def _write(
    directory: Path, eos_token_id: int | list[int], louder: dict[int, float], silent: Sequence[int] = ()
) -> None:
    """A Llama whose scores of some tokens are more spread than the others', and of some zero."""
    write_llama(directory, vocab_size=VOCAB_SIZE, max_position_embeddings=256, eos_token_id=eos_token_id)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    head = tensors["lm_head.weight"]  # [vocab_size, hidden_size]
    for token_id, factor in louder.items():
        head[token_id] *= factor
    head[torch.tensor(list(silent), dtype=torch.int64)] = 0
    save_file(tensors, path, {"format": "pt"})
