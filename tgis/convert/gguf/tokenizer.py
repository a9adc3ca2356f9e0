"""Builds a tokenizer from the vocabulary in a GGUF file."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tgis.convert.atomic_write import ConversionError
from tgis.convert.gguf.metadata import Metadata, cut, show
from tgis.convert.gguf.pre_tokenizers import SPLITTINGS
from tgis.errors import first_line

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of tokens
MERGED = (NORMAL, USER_DEFINED, UNUSED)  # types of the operands and results of SentencePiece's merges
KEY = "tokenizer.ggml."
SPACE = "▁"
SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


class GgufVocabulary:
    """Tokens of a file with their types. Raises ConversionError for inconsistent metadata."""

    def __init__(self, metadata: Metadata) -> None:
        self.metadata = metadata
        self.tokens = metadata.texts(KEY + "tokens")
        has_types = KEY + "token_type" in metadata
        self.types = metadata.integers(KEY + "token_type") if has_types else [NORMAL] * len(self.tokens)
        self._check_length("token_type", self.types)
        self.ids: dict[str, int] = {}
        for id, token in enumerate(self.tokens):
            self.ids.setdefault(token, id)

    def scores(self) -> list[float]:
        scores = self.metadata.numbers(KEY + "scores")
        self._check_length("scores", scores)
        return scores

    def find(self, key: str) -> str | None:
        """Return the token whose id is the value of a key, or None without the key. Raises
        ConversionError."""
        id = self.metadata.token_id(KEY + key)
        if id is None or id in (0xFFFFFFFF, -1):  # these values mean none
            return None
        if id >= len(self.tokens):
            raise self.metadata.refuse(KEY + key, f"is {id}, but there are {len(self.tokens)} tokens")
        return self.tokens[id]

    def added(self) -> list[AddedToken]:
        """Return the tokens that are matched in texts before all others."""
        kinds = zip(self.tokens, self.types, strict=True)
        return [
            AddedToken(token, special=kind != USER_DEFINED, normalized=False)
            for token, kind in kinds
            if kind in (CONTROL, USER_DEFINED, UNKNOWN) and token
        ]

    def _check_length(self, key: str, values: Sequence[object]) -> None:
        if len(values) != len(self.tokens):
            raise self.metadata.refuse(KEY + key, f"has {len(values)} entries for {len(self.tokens)} tokens")


def make_tokenizer(vocabulary: GgufVocabulary) -> Tokenizer:
    """Return the tokenizer. Raises ConversionError."""
    metadata = vocabulary.metadata
    kind = metadata.text(KEY + "model")
    if kind not in _KINDS:
        known = ", ".join(_KINDS)
        raise metadata.refuse(KEY + "model", f"{show(kind)} is not supported; use one of: {known}")
    try:
        tokenizer, adds_bos, adds_eos = _KINDS[kind](vocabulary)
        tokenizer.add_tokens(vocabulary.added())
    except ConversionError:
        raise
    except Exception as error:  # the library raises plain exceptions
        raise metadata.refuse(KEY + "tokens", f"cannot be used: {cut(first_line(error))}") from error
    _add_ends(
        tokenizer,
        vocabulary.find("bos_token_id") if metadata.flag(KEY + "add_bos_token", adds_bos) else None,
        vocabulary.find("eos_token_id") if metadata.flag(KEY + "add_eos_token", adds_eos) else None,
    )
    return tokenizer


def make_settings(vocabulary: GgufVocabulary) -> dict[str, Any]:
    """Return the content of tokenizer_config.json without templates. Raises ConversionError."""
    tokens = {name: vocabulary.find(key) for name, key in SPECIAL.items()}
    settings = {name: token for name, token in tokens.items() if token is not None}
    return {"tokenizer_class": "PreTrainedTokenizerFast", **settings}


def _make_byte_level(vocabulary: GgufVocabulary) -> tuple[Tokenizer, bool, bool]:
    metadata = vocabulary.metadata
    name = metadata.text(KEY + "pre", "default")
    if name not in SPLITTINGS:
        known = ", ".join(sorted(SPLITTINGS))
        raise metadata.refuse(KEY + "pre", f"{show(name)} is not supported; use one of: {known}")
    splitting = SPLITTINGS[name]
    merges = [_split_merge(metadata, merge) for merge in metadata.texts(KEY + "merges")]
    tokenizer = Tokenizer(models.BPE(vocabulary.ids, merges, ignore_merges=splitting.merges_last))
    if splitting.is_composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = splitting.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, splitting.adds_bos, False


def _split_merge(metadata: Metadata, merge: str) -> tuple[str, str]:
    index = merge.find(" ", 1)
    if index < 0:
        raise metadata.refuse(KEY + "merges", f"contains {merge[:20]!r}, which is not a pair of tokens")
    return merge[:index], merge[index + 1 :]


def _make_sentencepiece_bpe(vocabulary: GgufVocabulary) -> tuple[Tokenizer, bool, bool]:
    return _merge_pieces(vocabulary, list_merges(vocabulary), has_prefix=True)


def _make_gemma4(vocabulary: GgufVocabulary) -> tuple[Tokenizer, bool, bool]:
    metadata = vocabulary.metadata
    merges = [_split_merge(metadata, merge) for merge in metadata.texts(KEY + "merges")]
    return _merge_pieces(vocabulary, merges, has_prefix=False)


def _merge_pieces(
    vocabulary: GgufVocabulary, merges: list[tuple[str, str]], has_prefix: bool
) -> tuple[Tokenizer, bool, bool]:
    """Return a tokenizer of pieces with spaces, and of bytes. `has_prefix` is True if texts begin with a
    space unless the file sets this."""
    has_prefix = vocabulary.metadata.flag(KEY + "add_space_prefix", has_prefix)
    model = models.BPE(
        vocabulary.ids,
        merges,
        unk_token=vocabulary.find("unknown_token_id"),
        byte_fallback=BYTE in vocabulary.types,
        fuse_unk=True,
    )
    tokenizer = Tokenizer(model)
    prefix = [normalizers.Prepend(SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer, True, False


def list_merges(vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    """Return all pairs of tokens that concatenate to a token, in the order in which SentencePiece merges
    them.

    The order is by the score of the result, then by the ids of the pair. Large vocabularies have half a
    million pairs, so only pairs with equal scores are sorted."""
    scores = vocabulary.scores()
    types = vocabulary.types
    ids = {token: id for token, id in vocabulary.ids.items() if types[id] in MERGED}
    by_score: dict[float, list[str]] = {}
    for token, id in ids.items():
        by_score.setdefault(scores[id], []).append(token)
    merges: list[tuple[str, str]] = []
    for score in sorted(by_score, reverse=True):
        pairs = [
            (first, second)
            for token in by_score[score]
            for i in range(1, len(token))
            if (first := token[:i]) in ids and (second := token[i:]) in ids
        ]
        if len(pairs) > 1:
            pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        merges += pairs
    return merges


def _make_unigram(vocabulary: GgufVocabulary) -> tuple[Tokenizer, bool, bool]:
    metadata = vocabulary.metadata
    pieces = list(zip(vocabulary.tokens, vocabulary.scores(), strict=True))
    unknown = metadata.token_id(KEY + "unknown_token_id")
    tokenizer = Tokenizer(models.Unigram(pieces, unknown, byte_fallback=BYTE in vocabulary.types))
    steps: list[normalizers.Normalizer] = []
    if KEY + "precompiled_charsmap" in metadata:
        steps.append(
            normalizers.Precompiled(bytes(x & 255 for x in metadata.integers(KEY + "precompiled_charsmap")))
        )
    if metadata.flag(KEY + "remove_extra_whitespaces", True):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    scheme = "always" if metadata.flag(KEY + "add_space_prefix", True) else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, scheme)
    tokenizer.decoder = decoders.Metaspace(SPACE, scheme)
    return tokenizer, False, True


def _add_ends(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Let the tokenizer add these tokens to the begin and the end of texts."""
    if bos is None and eos is None:
        return
    single = " ".join(["[BOS]"] * bool(bos) + ["$A"] + ["[EOS]"] * bool(eos))
    specials = [
        {"id": name, "ids": [tokenizer.token_to_id(token)], "tokens": [token]}
        for name, token in (("[BOS]", bos), ("[EOS]", eos))
        if token is not None
    ]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=specials)


_KINDS: Mapping[str, Callable[[GgufVocabulary], tuple[Tokenizer, bool, bool]]] = {
    "gpt2": _make_byte_level,
    "llama": _make_sentencepiece_bpe,
    "gemma4": _make_gemma4,
    "t5": _make_unigram,
}
