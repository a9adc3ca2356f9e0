"""Small tokenizers of kinds older than tokenizer.json."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tests.support.tokenizers.trained import ALPHABET, TEXT


def write_gpt2(directory: Path) -> None:
    """Write vocab.json and merges.txt."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    trained.train_from_iterator([*TEXT, ALPHABET], trainer)
    trained.model.save(str(directory))
    (directory / "config.json").write_text('{"model_type": "gpt2"}')


def write_bert(directory: Path) -> None:
    """Write vocab.txt."""
    words = sorted({word for text in TEXT for word in text.lower().split()} | {*"abcdefghij", "##x", "##s"})
    (directory / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    (directory / "config.json").write_text('{"model_type": "bert"}')


def write_llama(directory: Path) -> None:
    """Write tokenizer.model with byte pairs."""
    spaces = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    _train_pieces(directory / "tokenizer", "bpe", vocab_size=400, byte_fallback=True, **spaces)
    (directory / "config.json").write_text('{"model_type": "llama"}')
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, "add_bos_token": True}))


def write_t5(directory: Path) -> None:
    """Write spiece.model with a unigram model."""
    ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    _train_pieces(directory / "spiece", "unigram", vocab_size=100, **ids)
    (directory / "config.json").write_text('{"model_type": "t5"}')


def _train_pieces(prefix: Path, model_type: str, **more: object) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*TEXT, ALPHABET] * 3),
        model_prefix=str(prefix),
        model_type=model_type,
        minloglevel=2,
        hard_vocab_limit=False,
        **more,
    )
