"""One tokenizer for each kind of decoder, and token ids to test it with."""

import json
import random
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from tests.support.tokenizers import trained

ALPHABET = [
    "a",
    "b",
    "The",
    " ",
    " fox",
    " the",
    "é",
    "東",
    "🙂",
    "👩\u200d👩\u200d👧",
    "e\u0301",
    "\r\n",
    "\n",
    "A",
]


def _with_decoder(
    write: Callable[[Path], Tokenizer], decoder: dict[str, object]
) -> Callable[[Path], Tokenizer]:
    def write_changed(directory: Path) -> Tokenizer:
        write(directory)
        path = directory / "tokenizer.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"decoder": decoder}))
        return Tokenizer.from_file(str(path))

    return write_changed


def _sequence(*parts: dict[str, object]) -> dict[str, object]:
    return {"type": "Sequence", "decoders": list(parts)}


_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_REPLACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
_METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
_SUFFIX = {"type": "BPEDecoder", "suffix": "</w>"}
_WORDPIECE = {"type": "WordPiece", "prefix": "##", "cleanup": False}
_FALLBACK = {"type": "ByteFallback"}
_FUSE = {"type": "Fuse"}

KINDS: dict[str, Callable[[Path], Tokenizer]] = {
    "byte_level": trained.write_byte_level,
    "byte_level_in_sequence": _with_decoder(trained.write_byte_level, _sequence(_BYTE_LEVEL)),
    "byte_level_and_more": _with_decoder(
        trained.write_byte_level,
        _sequence(_BYTE_LEVEL, {"type": "Replace", "pattern": {"Regex": "o"}, "content": "oo"}),
    ),
    "byte_fallback": trained.write_byte_fallback,
    "byte_fallback_without_strip": _with_decoder(
        trained.write_byte_fallback, _sequence(_REPLACE, _FALLBACK, _FUSE)
    ),
    "byte_fallback_before_metaspace": _with_decoder(
        trained.write_byte_fallback, _sequence(_FALLBACK, _METASPACE)
    ),
    "metaspace": trained.write_metaspace,
    "wordpiece": trained.write_wordpiece,
    "wordpiece_in_sequence": _with_decoder(trained.write_wordpiece, _sequence(_WORDPIECE)),
    "suffix": trained.write_suffix_bpe,
    "suffix_in_sequence": _with_decoder(trained.write_suffix_bpe, _sequence(_SUFFIX)),
    "plain": trained.write_plain,
}


def random_ids(fast: Tokenizer, r: random.Random) -> list[int]:
    """Return 1 to 16 token ids: half of the time from a text, otherwise random. Some end with the end
    token."""
    ids: list[int] = fast.encode(
        "".join(r.choices(ALPHABET, k=r.randint(1, 8))), add_special_tokens=False
    ).ids
    if r.random() < 0.5:
        size = r.choice([fast.get_vocab_size(), 260])
        ids = [r.randrange(min(size, fast.get_vocab_size())) for _ in range(r.randint(1, 12))]
    return [*ids[:15], 1] if r.random() < 0.3 else ids[:16] or [2]
