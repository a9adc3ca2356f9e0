"""Reads the settings of a tokenizer's parts, without the vocabulary and merges of a BPE model, whose text
takes seconds for a vocabulary of 262,000 tokens."""

import json
from typing import Any

import tokenizers
from tokenizers import models

BPE_OPTIONS = (
    *("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk"),
    *("byte_fallback", "ignore_merges"),
)


def read_parts(tokenizer: tokenizers.Tokenizer) -> dict[str, Any]:
    """Return the parts as in `tokenizer.json`. The vocabulary and the merges of a BPE model are empty."""
    model = tokenizer.model
    if not isinstance(model, models.BPE):
        whole: dict[str, Any] = json.loads(tokenizer.to_str())
        return whole
    options = {name: value for name in BPE_OPTIONS if (value := getattr(model, name)) is not None}
    empty = tokenizers.Tokenizer(models.BPE(**options))
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (part := getattr(tokenizer, name)) is not None:
            setattr(empty, name, part)
    parts: dict[str, Any] = json.loads(empty.to_str())
    return parts | {
        "truncation": tokenizer.truncation,
        "padding": tokenizer.padding,
        "added_tokens": list_added_tokens(tokenizer),
    }


def list_added_tokens(tokenizer: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """Return the added tokens as in `tokenizer.json`."""
    names = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    added = sorted(tokenizer.get_added_tokens_decoder().items())
    return [{"id": id, **{name: getattr(token, name) for name in names}} for id, token in added]
