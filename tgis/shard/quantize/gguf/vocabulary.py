"""Metadata of a GGUF file that describe a tokenizer. A tokenizer that they cannot represent is refused: the
one read back must split a set of texts in the same way."""

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tgis.convert.gguf.metadata import Metadata
from tgis.convert.gguf.model_directory import END_KEYS, TEMPLATE, TEMPLATES
from tgis.convert.gguf.pre_tokenizers import SPLITTINGS, split_patterns
from tgis.convert.gguf.tokenizer import (
    BYTE,
    CONTROL,
    KEY,
    MERGED,
    NORMAL,
    SPECIAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    GgufVocabulary,
    list_merges,
    make_tokenizer,
)
from tgis.errors import first_line
from tgis.hub import model_files
from tgis.shard.quantize.gguf.metadata import Value
from tgis.shard.quantize.settings import QuantizeError

logger = logging.getLogger(__name__)

FILE, SETTINGS = "tokenizer.json", "tokenizer_config.json"
NUM_BYTES = 256
PROBES = (
    *("Hello world", " two  spaces   and a tab\t.", "line\nline\n\n\nline\r\n ", "don't I'LL we've o'clock"),
    *(
        "1234567890 12 3.14 x1y22",
        "CamelCase snake_case ALLCAPS",
        "naïve Ünïcödé e\u0301 ﬁ ½ ①",
        "東京は日本語 한국어",
    ),
    *("العربية हिन्दी ไทย", "🙂👩‍👩‍👧 ❤️", "def f(x):\n\treturn {x: [1, 2]}  # a\n", "https://a.b/c?d=e&f=g#h"),
    *("'s 's\u00a0\u3000 x ", "...!?;:--", "▁ literal", "   ", "\n", "x"),
)


def describe_tokenizer(directory: Path, vocab_size: int) -> dict[str, Value]:
    """Return the metadata of the tokenizer in a directory. Raises QuantizeError and ModelNotFoundError."""
    tokenizer = _load(directory / FILE)
    content = json.loads(tokenizer.to_str())
    kind, further = _describe_kind(directory, content)
    tokens, types = _list_tokens(tokenizer, content["model"], vocab_size)
    if kind == "llama":
        further["scores"] = _make_scores(tokens, content["model"]["merges"])
    ends = _describe_ends(directory, tokenizer)
    metadata: dict[str, Value] = {
        "model": kind,
        "tokens": tokens,
        "token_type": types,
        **further,
        **ends,
    }
    return {KEY + key: value for key, value in metadata.items()}


def check_tokenizer(directory: Path, metadata: Metadata) -> None:
    """Check that metadata represent the tokenizer in a directory. Raises QuantizeError and
    ConversionError."""
    tokenizer = _load(directory / FILE)
    vocabulary = GgufVocabulary(metadata)
    read_back = make_tokenizer(vocabulary)
    for text in _list_probes(tokenizer):
        if read_back.encode(text).ids != tokenizer.encode(text).ids:
            raise QuantizeError(
                f"{directory / FILE}: a GGUF file cannot represent how this tokenizer splits {text[:40]!r}"
            )
    if metadata.text(KEY + "model") == "llama" and not _has_merges(vocabulary, tokenizer):
        raise QuantizeError(f"{directory / FILE}: the merges are not in the order of a SentencePiece model")


def _has_merges(vocabulary: GgufVocabulary, tokenizer: Tokenizer) -> bool:
    """Return True if the scores of a vocabulary imply the tokenizer's merges. Ignores merges of control
    tokens, which SentencePiece never applies, and the order of pairs that form the same token."""
    implied = list_merges(vocabulary)
    merges = [(first, second) for first, second in json.loads(tokenizer.to_str())["model"]["merges"]]
    merged = {vocabulary.tokens[id] for id, kind in enumerate(vocabulary.types) if kind in MERGED}
    usable = [pair for pair in merges if merged.issuperset((*pair, "".join(pair)))]
    in_order = (list(dict.fromkeys(map("".join, pairs))) for pairs in (implied, usable))
    return {*implied} == {*usable} and len({*map(tuple, in_order)}) == 1


def _load(path: Path) -> Tokenizer:
    if not path.is_file():
        raise QuantizeError(f"{path} is missing: run text-generation-server convert-to-fast-tokenizer")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain exceptions
        raise QuantizeError(f"{path} cannot be read: {first_line(error)}") from error


def _describe_kind(directory: Path, content: Mapping[str, Any]) -> tuple[str, dict[str, Value]]:
    model = content["model"]
    if model["type"] != "BPE":
        raise QuantizeError(
            f"{directory / FILE}: tokenizers of type {model['type']} cannot be written as GGUF; only BPE can"
        )
    if model.get("byte_fallback"):
        return "llama", {"add_space_prefix": _has_space_prefix(content)}
    patterns, is_composed = split_patterns(content["pre_tokenizer"]), _is_composed(content["normalizer"])
    for name, splitting in SPLITTINGS.items():
        is_same = splitting.merges_last == bool(model.get("ignore_merges"))
        if is_same and (splitting.patterns, splitting.is_composed) == (patterns, is_composed):
            return "gpt2", {"pre": name, "merges": [" ".join(merge) for merge in model["merges"]]}
    raise QuantizeError(
        f"{directory / FILE}: llama.cpp has no name for this tokenizer's way of splitting texts"
    )


def _has_space_prefix(content: Mapping[str, Any]) -> bool:
    """Return True if the normalizer or the pre-tokenizer prepends a space to texts."""
    normalizer = json.dumps(content["normalizer"])
    pre_tokenizer = content["pre_tokenizer"] or {}
    return "Prepend" in normalizer or pre_tokenizer.get("prepend_scheme", "never") != "never"


def _is_composed(normalizer: Mapping[str, Any] | None) -> bool:
    return normalizer is not None and normalizer["type"] == "NFC"


def _list_tokens(
    tokenizer: Tokenizer, model: Mapping[str, Any], vocab_size: int
) -> tuple[list[str], list[int]]:
    """Return the tokens and their types. Rows of the embedding without a token get an unused one."""
    added = tokenizer.get_added_tokens_decoder()
    bytes_of = {f"<0x{value:02X}>" for value in range(NUM_BYTES)} if model.get("byte_fallback") else set()
    texts = {id: token for token, id in tokenizer.get_vocab(with_added_tokens=True).items()}
    tokens, types = [], []
    for id in range(max(vocab_size, len(texts))):
        token = texts.get(id)
        kind = NORMAL
        if token is None:
            token = f"[PAD{id}]"
            kind = UNUSED
        elif id in added:
            kind = CONTROL if added[id].special else USER_DEFINED
        elif token in bytes_of:
            kind = BYTE
        if token == model.get("unk_token") and bytes_of:
            kind = UNKNOWN
        tokens.append(token)
        types.append(kind)
    return tokens, types


def _make_scores(tokens: list[str], merges: list[list[str]]) -> list[float]:
    """Return scores with which SentencePiece applies the merges in their order: lower scores come later."""
    first: dict[str, int] = {}
    for number, merge in enumerate(merges):
        first.setdefault("".join(merge), number)
    return [-float(first.get(token, len(merges))) for token in tokens]


def _describe_ends(directory: Path, tokenizer: Tokenizer) -> dict[str, Value]:
    """Return the ids of special tokens, and whether texts get them."""
    settings = model_files.read_json(directory, SETTINGS)
    texts = {name: _text_of(settings.get(name)) for name in SPECIAL}
    ids_by_key: dict[str, int] = {
        SPECIAL[name]: id
        for name, text in texts.items()
        if text is not None and (id := tokenizer.token_to_id(text)) is not None
    }
    ends = [id for id in model_files.eos_token_ids(directory) if id != ids_by_key.get("eos_token_id")]
    keys = [key for key in END_KEYS if key not in ids_by_key]
    ids_by_key |= dict(zip(keys, ends, strict=False))
    if left := ends[len(keys) :]:
        logger.warning(
            "a GGUF file has keys for only some of the end-of-sequence ids: %s are left out, and texts end "
            "with them only where the reader knows the tokens by their text",
            left,
        )
    before, after = _list_around(tokenizer)
    for name, ids in (("bos", before), ("eos", after)):
        if ids not in ([], [ids_by_key.get(f"{name}_token_id")]):
            raise QuantizeError(f"{directory / FILE}: the tokenizer adds {ids}, which are not {name}_token")
    return {**ids_by_key, "add_bos_token": bool(before), "add_eos_token": bool(after)}


def _text_of(token: object) -> str | None:
    """Return the text of a special token, which settings hold as a string or an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _list_around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids that the tokenizer adds before and after a text."""
    whole = tokenizer.encode("x")
    plain = tokenizer.encode("x", add_special_tokens=False)
    flags = whole.special_tokens_mask
    num_before = flags.index(0) if 0 in flags else len(flags)
    return whole.ids[:num_before], whole.ids[num_before + len(plain.ids) :]


def _list_probes(tokenizer: Tokenizer) -> Iterator[str]:
    yield from PROBES
    for token in tokenizer.get_added_tokens_decoder().values():
        yield f"a {token.content} b{token.content}c"


def describe_templates(directory: Path) -> dict[str, Value]:
    """Return the metadata of the chat templates, if any. Raises ModelNotFoundError."""
    templates = _read_templates(directory)
    default = templates.pop("default", None)
    if default is None:
        return {}
    others: dict[str, Value] = {f"{TEMPLATE}.{name}": text for name, text in templates.items()}
    return {TEMPLATE: default, **others, **({TEMPLATES: [*templates]} if others else {})}


def _read_templates(directory: Path) -> dict[str, str]:
    """Return the templates by name. A template file takes precedence over the settings."""
    file, folder = directory / "chat_template.jinja", directory / "additional_chat_templates"
    templates = model_files.read_json(directory, SETTINGS).get("chat_template")
    if file.is_file():
        templates = file.read_text(encoding="utf-8")
    if isinstance(templates, str):
        templates = [{"name": "default", "template": templates}]
    named = {each["name"]: each["template"] for each in templates or ()}
    return named | {each.stem: each.read_text(encoding="utf-8") for each in sorted(folder.glob("*.jinja"))}
