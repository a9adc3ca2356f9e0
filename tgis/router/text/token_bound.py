"""Computes the maximum bytes of text that one token can represent, if the tokenizer's parts prove a bound.

The proof follows the text through the tokenizer. Added tokens that strip no spaces represent their own text.
Some known normalizers shrink text by at most a known factor. Some known pre-tokenizers neither drop nor
shrink text. A BPE model that has every byte drops nothing, and its tokens represent no more than their own
text. Post-processors only add tokens. If any part is not known to follow these rules, there is no bound."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers
from tokenizers import pre_tokenizers

from tgis.router.text.tokenizer_parts import read_parts

Part = Mapping[str, Any]

PARTS = frozenset(
    "version truncation padding added_tokens normalizer pre_tokenizer post_processor decoder model".split()
)
NFC_FACTOR = 3.5
"""Maximum bytes of text per byte of its NFC: U+1FBE U+0308 U+0301 (7 bytes) become U+0390 (2 bytes)."""
ADDED_TOKEN_FIELDS = frozenset("id content single_word lstrip rstrip normalized special".split())
SPLITTER_FIELDS = {
    "ByteLevel": {"add_prefix_space", "trim_offsets", "use_regex"},
    "Metaspace": {"replacement", "prepend_scheme", "split"},
    "Digits": {"individual_digits"},
    "Punctuation": {"behavior"},
    "Split": {"pattern", "invert", "behavior"},
}
"""Fields of the pre-tokenizers that neither drop nor shrink text."""
BPE_FIELDS = frozenset(
    "type dropout unk_token continuing_subword_prefix end_of_word_suffix fuse_unk byte_fallback "
    "ignore_merges vocab merges".split()
)
BEHAVIORS_THAT_KEEP_ALL = frozenset({"Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"})
BYTE_LEVEL_ALPHABET = frozenset(pre_tokenizers.ByteLevel.alphabet())
BYTE_FALLBACK_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))


def max_bytes_per_token(tokenizer: tokenizers.Tokenizer) -> int | None:
    """Return the maximum UTF-8 bytes of text per token, including special tokens; None without a proof."""
    parts = read_parts(tokenizer)
    if parts.keys() != PARTS:
        return None
    steps = list(_flatten(parts["pre_tokenizer"]))
    factor = math.prod(map(_shrink_factor, _flatten(parts["normalizer"])))
    is_known = (
        parts["truncation"] is None
        and all(map(_strips_nothing, parts["added_tokens"]))
        and factor > 0
        and all(map(_keeps_all, steps))
        and _only_adds(list(_flatten(parts["post_processor"])))
    )
    is_byte_level = any(step["type"] == "ByteLevel" for step in steps)
    if not is_known:
        return None
    vocab = tokenizer.get_vocab(with_added_tokens=False)
    longest_entry = _longest_entry(parts["model"], vocab, is_byte_level)
    if longest_entry is None:
        return None
    spellings = [_longest_spelling(tokenizer, token) for token in parts["added_tokens"]]
    return math.ceil(factor * max([longest_entry, *spellings]))


def _flatten(part: Part | None) -> Iterator[Part]:
    """Yield the steps of a part in order. Apart from its type, a Sequence has one field, a list of parts."""
    if part is None:
        return
    fields = [value for name, value in part.items() if name != "type"]
    if part["type"] != "Sequence" or len(fields) != 1:
        yield part
        return
    for step in fields[0]:
        yield from _flatten(step)


def _strips_nothing(token: Part) -> bool:
    return token.keys() == ADDED_TOKEN_FIELDS and not token["lstrip"] and not token["rstrip"]


def _shrink_factor(normalizer: Part) -> float:
    """Return the maximum bytes of text per byte of its normal form, or 0 if it is unknown."""
    match normalizer:
        case {"type": "NFC", **rest} if not rest:
            return NFC_FACTOR
        case {"type": "Prepend", "prepend": _, **rest} if not rest:
            return 1
        case {"type": "Replace", "pattern": {"String": pattern}, "content": content, **rest} if not rest:
            return float(0 < len(pattern.encode()) <= len(content.encode()))
    return 0


def _keeps_all(step: Part) -> bool:
    """Return whether a pre-tokenizer only splits or lengthens text."""
    fields = SPLITTER_FIELDS.get(step["type"])
    is_known = fields is not None and step.keys() == fields | {"type"}
    return is_known and step.get("behavior", "Isolated") in BEHAVIORS_THAT_KEEP_ALL


def _only_adds(processors: list[Part]) -> bool:
    """Return whether the processors keep all tokens of the text. A template may omit them, and a template
    after another processor gets them in pieces."""
    match [processor for processor in processors if processor["type"] != "ByteLevel"]:
        case [] | [{"type": "BertProcessing" | "RobertaProcessing"}]:
            return True
        case [{"type": "TemplateProcessing", "single": pieces}]:
            return any(piece.get("Sequence", {}).get("id") == "A" for piece in pieces)
    return False


def _longest_entry(model: Part, vocab: Mapping[str, int], is_byte_level: bool) -> int | None:
    """Return the maximum bytes of normalized text that a token of the model represents. Return None if the
    model is not BPE, lacks a byte, or has tokens that may represent more than their own text."""
    if model["type"] != "BPE" or model.keys() != BPE_FIELDS:
        return None
    if model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        return None
    if len({*vocab.values()}) != len(vocab):  # some entries share an id, and therefore their merges
        return None
    if is_byte_level and vocab.keys() >= BYTE_LEVEL_ALPHABET:
        return max(map(len, vocab))  # each character is a byte
    if model["byte_fallback"] and vocab.keys() >= BYTE_FALLBACK_TOKENS:
        return max(len(entry.encode()) for entry in vocab)
    return None


def _longest_spelling(tokenizer: tokenizers.Tokenizer, token: Part) -> int:
    """Return the maximum bytes that match an added token: its text, or the text that the library stores for
    its id, which may come from another token."""
    spellings = [token["content"], tokenizer.id_to_token(token["id"])]
    if tokenizer.normalizer is not None:
        spellings.append(tokenizer.normalizer.normalize_str(token["content"]))
    return max(len(spelling.encode()) for spelling in spellings)
