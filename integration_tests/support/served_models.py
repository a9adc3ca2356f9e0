"""Creates the checkpoints of the cases, with the flags of their services; random, but such that generations
end, vary, and have equal scores where the cases need them."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import T5Config

from integration_tests.support.served_stores import Store, write_decoder_store, write_encoder_decoder_store
from tests.support.shard.checkpoints import write_llama, write_model
from tests.support.tokenizers.trained import TEXT, write_byte_fallback, write_byte_level

VOCAB_SIZE = 403  # more than the tokenizers have
MAX_SEQUENCE_LENGTH, MAX_NEW_TOKENS = 200, 169
FLAGS = ["--max-sequence-length", "200", "--max-new-tokens", "169", "--dtype", "float32"]


@dataclass(frozen=True)
class Served:
    """Checkpoint on disk, and properties of its service."""

    directory: Path
    tokenizer: Tokenizer
    eos_ids: tuple[int, ...]
    flags: Sequence[str] = ()
    include_stop_sequence: bool = True
    output_special_tokens: bool = False
    decoder_start_id: int | None = None
    """Tokens of encoder-decoder models."""
    pad_id: int = 1
    """Name of virtual tokens."""
    store: Store = field(default_factory=Store)


def write_bytes(directory: Path) -> Served:
    """Return weights in which incomplete bytes are rarer than other tokens."""
    tokenizer = write_byte_level(directory)
    parts = {i: 0.6 for piece, i in tokenizer.get_vocab().items() if len(piece) == 1 and not piece.isascii()}
    _write(directory, eos_token_id=1, louder={**parts, 1: 2.0})
    return Served(directory, tokenizer, (1,))


def write_fallback(directory: Path) -> Served:
    """Return the vocabulary: pieces, then the bytes of multi-byte characters, then those of single-byte
    ones."""
    tokenizer = write_byte_fallback(directory)
    ascii_bytes = {2 + byte: 0.5 for byte in range(0x80)}
    pieces = dict.fromkeys(range(258, VOCAB_SIZE), 1.2)
    _write(directory, eos_token_id=1, louder={**ascii_bytes, **pieces, 1: 2.0})
    store = write_decoder_store(directory)
    return Served(directory, tokenizer, (1,), store.flags, store=store)


def write_special(directory: Path) -> Served:
    """Create a Llama with three end-of-sequence tokens, one beyond the vocabulary, each from another file; a
    special token that ends nothing; and most tokens with a score of 0. As in Llama 3, only the tokenizer's
    settings define that texts begin with <s>."""
    tokenizer = write_byte_level(directory, vocab_size=390)
    tokenizer.add_special_tokens(["<|end|>", "<|user|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    end, user = tokenizer.token_to_id("<|end|>"), tokenizer.token_to_id("<|user|>")
    eos_ids = (end, 1, 4000)
    silent = [i for i in range(VOCAB_SIZE) if i % 24 and i not in (1, end, user)]
    louder = {end: 1.2, 1: 1.6, user: 1.8}
    _write(directory, eos_token_id=4000, louder=louder, silent=silent)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [4000, end]}))
    flags = ["--output-special-tokens", "--default-include-stop-seqs", "false"]
    return Served(directory, tokenizer, eos_ids, flags, False, True)


def write_encoder_decoder(directory: Path) -> Served:
    """Create a T5 like Flan. Ids without a piece are rarer, and the start token can be generated."""
    tokenizer = write_t5_tokenizer(directory)
    nameless = dict.fromkeys(range(tokenizer.get_vocab_size(), VOCAB_SIZE), 0.7)
    write_t5(directory, {**nameless, 0: 1.5})
    store = write_encoder_decoder_store(directory)
    return Served(directory, tokenizer, (1,), store.flags, decoder_start_id=0, pad_id=0, store=store)


def write_t5_tokenizer(directory: Path) -> Tokenizer:
    """Return Unigram pieces with their spaces; <pad> is 0, </s>, which ends texts, is 1, <unk> is 2."""
    special = ["<pad>", "</s>", "<unk>"]
    words = sorted({"▁" + word for text in TEXT for word in text.split() if word.isascii()})
    syllables = [a + b for a in "bdfghklmnprst" for b in ("a", "e", "in", "or", "us", "ly", "ing")]
    single = sorted({*map(chr, range(0x21, 0x7F)), *"".join(TEXT)} - {" "})
    pieces = [*special, *words, *syllables, *(f"▁{syllable}" for syllable in syllables), "▁", *single]
    assert 250 < len(pieces) < VOCAB_SIZE
    # A few long pieces are likelier than many short ones.
    model = models.Unigram([(piece, -10 - i / 1000) for i, piece in enumerate(pieces)], unk_id=2)
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(special)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "T5TokenizerFast", "eos_token": "</s>", "pad_token": "<pad>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer


def write_t5(directory: Path, louder: Mapping[int, float]) -> None:
    config = T5Config(
        vocab_size=VOCAB_SIZE,
        d_model=32,
        d_kv=12,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        decoder_start_token_id=0,
    )
    write_model(directory, config)
    _let_inputs_matter(directory)
    _change_head(directory, louder)


def _let_inputs_matter(directory: Path) -> None:
    """Increase the weights of cross-attention, which a random decoder hardly uses, and add a separate head,
    which transformers reads but does not write."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith("EncDecAttention.o.weight"):
            tensor *= 3
    tensors["lm_head.weight"] = tensors["shared.weight"].flip(0).contiguous()  # [vocab_size, d_model]
    save_file(tensors, path, {"format": "pt"})


WRITERS: dict[str, Callable[[Path], Served]] = {
    "bytes": write_bytes,
    "fallback": write_fallback,
    "special": write_special,
    "encoder_decoder": write_encoder_decoder,
}


def _write(
    directory: Path, eos_token_id: int | list[int], louder: Mapping[int, float], silent: Sequence[int] = ()
) -> None:
    """Create a Llama in which the scores of some tokens vary more than others', and some are zero."""
    write_llama(directory, vocab_size=VOCAB_SIZE, max_position_embeddings=256, eos_token_id=eos_token_id)
    _change_head(directory, louder, silent)


def _change_head(directory: Path, louder: Mapping[int, float], silent: Sequence[int] = ()) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    head = tensors["lm_head.weight"]  # [vocab_size, hidden_size]
    for token_id, factor in louder.items():
        head[token_id] *= factor
    head[torch.tensor(list(silent), dtype=torch.int64)] = 0
    save_file(tensors, path, {"format": "pt"})
