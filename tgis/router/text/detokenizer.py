"""Decodes token ids to text as soon as the text is certain. Tokens are decoded in units. A unit ends with the
first token after which its text does not end in a replacement character, and is released as a whole.
Replacement characters at the end of a sequence are dropped."""

import codecs
import re
from collections.abc import Callable
from functools import cache
from typing import Protocol

from tgis.router.errors import StartupError
from tgis.router.text.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_UNIT = 256
"""Number of tokens after which a unit is released unfinished, if the library decodes it. Without this limit,
the cost per token would grow as long as a model generates no valid character."""

_BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")


class Detokenizer(Protocol):
    """Decoder of one sequence. Its text is the concatenation of all results of `push` and `flush`."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class Vocabulary:
    """Text of each token according to the tokenizer's decoder. All sequences share it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        output_special_tokens: bool = False,
        is_continuation: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """Choose the detokenizer. With `is_continuation`, the text continues the input, so its first token
        keeps its leading space. Texts include the special tokens in `shown`, or all of them with
        `output_special_tokens`. Raises StartupError if the decoder cannot decode token by token."""
        decoder = tokenizer.decoder
        self._tokenizer = tokenizer
        self._bytes_within: Callable[[int], bytes]
        self._skipped = frozenset() if output_special_tokens else tokenizer.special_ids - shown
        # The library can omit all special tokens or none, but not some of them.
        self._skips_special = not (output_special_tokens or shown)
        self._is_continuation = is_continuation
        self.streams_clusters = decoder is not None and decoder["type"] in ("ByteLevel", "Sequence")
        """True if streams are cut at grapheme clusters; otherwise they are cut at tokens."""
        kinds = _kinds(decoder)
        self.is_one_behind = "BPEDecoder" in kinds
        """True if a detokenizer returns a token's text only with the next token."""
        self.detokenizer = self._choose(kinds)
        self.spell = cache(self._spell)
        """Function that returns the bytes that a token adds in the middle of a text, or None for a special
        token that texts omit."""

    def piece(self, token_id: int) -> str:
        return self._tokenizer.piece(token_id)

    def _choose(self, kinds: list[str]) -> Callable[[], Detokenizer]:
        if kinds in (["ByteLevel"], ["ByteLevel", "Fuse"]):
            self._bytes_within = self._bytes_of
            text_or_bytes = cache(self._text_or_bytes)
            return lambda: ByteLevelDetokenizer(text_or_bytes)
        if self.is_one_behind:
            placeholder = self._find_placeholder()
            ending = self._decode([placeholder])
            inner = cache(lambda token_id: self._decode([token_id, placeholder]).removesuffix(ending))
            self._bytes_within = lambda token_id: inner(token_id).encode()
            return lambda: SuffixDetokenizer(inner, self._decode, self._skipped)
        decode = self._decode_after_placeholder() if kinds else self._decode_spaced
        first = decode if self._is_continuation else self._decode
        texts = cache(lambda token_id: decode([token_id]))
        falls_back = "ByteFallback" in kinds
        self._bytes_within = lambda token_id: (
            (self._fallback_byte(token_id) if falls_back else b"") or texts(token_id).encode()
        )
        return lambda: UnitDetokenizer(texts, decode, first, self._skipped)

    def _spell(self, token_id: int) -> bytes | None:
        return None if token_id in self._skipped else self._bytes_within(token_id)

    def _fallback_byte(self, token_id: int) -> bytes:
        """Return the byte of a byte token, or no byte for any other token."""
        match = _BYTE_PIECE.fullmatch(self._tokenizer.piece(token_id))
        return bytes.fromhex(match[1]) if match else b""

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.fast.decode(token_ids, skip_special_tokens=self._skips_special)
        return text

    def _decode_spaced(self, token_ids: list[int]) -> str:
        text = self._decode(token_ids)
        return " " + text if text else ""

    def _decode_after_placeholder(self) -> Callable[[list[int]], str]:
        """Return a decoder that decodes after a placeholder token, because the library strips the leading
        space of a text's first token."""
        placeholder = self._find_placeholder()
        beginning = self._decode([placeholder])
        return lambda token_ids: self._decode([placeholder, *token_ids]).removeprefix(beginning)

    def _find_placeholder(self) -> int:
        """Return a token whose text does not depend on its neighbours, as that of a byte token does."""
        fast = self._tokenizer.fast
        token_ids: list[int] = [
            *fast.encode("A", add_special_tokens=False).ids,
            *range(fast.get_vocab_size()),
        ]
        for token_id in token_ids:
            piece = self._tokenizer.piece(token_id)
            text = self._decode([token_id]).strip()
            if text.isascii() and text.isalnum() and not piece.startswith("<0x"):
                return token_id
        raise StartupError("Problem loading tokenizer for model: no token is plain text")

    def _text_or_bytes(self, token_id: int) -> str | bytes:
        """Return the token's text, or its bytes if its text depends on its neighbours."""
        if token_id in self._skipped:
            return ""
        spelled = self._bytes_of(token_id)
        try:
            text = spelled.decode()
        except UnicodeDecodeError:
            return spelled
        return spelled if text.endswith(REPLACEMENT) else text

    def _bytes_of(self, token_id: int) -> bytes:
        piece = self._tokenizer.piece(token_id)
        try:
            return bytes(_BYTE_OF_CHARACTER[character] for character in piece)
        except KeyError:  # the piece of an added token is its text
            return piece.encode()


class ByteLevelDetokenizer:
    """Detokenizer for vocabularies whose pieces encode bytes."""

    def __init__(self, text_or_bytes: Callable[[int], str | bytes]) -> None:
        """`text_or_bytes` returns a token's text, or its bytes if its text depends on its neighbours."""
        self._text_or_bytes = text_or_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._unit: list[str] = []
        self._is_uncertain = False  # whether the unit's last character is a replacement

    def push(self, token_id: int) -> str:
        spelled = self._text_or_bytes(token_id)
        if not self._unit and isinstance(spelled, str):
            return spelled
        text = self._decoder.decode(spelled.encode() if isinstance(spelled, str) else spelled)
        self._unit.append(text)
        if text:
            self._is_uncertain = text.endswith(REPLACEMENT)
        if self._is_uncertain or self._decoder.getstate()[0]:
            return ""
        return self._take_unit()

    def flush(self) -> str:
        self._decoder.reset()
        return self._take_unit().rstrip(REPLACEMENT)

    def _take_unit(self) -> str:
        text = "".join(self._unit)
        self._unit.clear()
        self._is_uncertain = False
        return text


class UnitDetokenizer:
    """Detokenizer for vocabularies whose tokens have the same text everywhere, except at the beginning of a
    text and within a character that consists of byte tokens."""

    def __init__(
        self,
        texts: Callable[[int], str],
        decode: Callable[[list[int]], str],
        decode_first: Callable[[list[int]], str],
        skipped: frozenset[int],
    ) -> None:
        """Create a detokenizer. `decode` returns the text of a unit, `decode_first` the text of a unit at the
        beginning, and `texts` the text of a single token."""
        self._texts = texts
        self._decode_later = decode
        self._skipped = skipped
        self._decode = decode_first
        self._unit: list[int] = []

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        is_alone = not self._unit and self._decode is self._decode_later
        text = self._texts(token_id) if is_alone else self._decode([*self._unit, token_id])
        if text.endswith(REPLACEMENT) and len(self._unit) + 1 < MAX_UNIT:
            self._unit.append(token_id)
            return ""
        self._unit.clear()
        if text or self._texts(token_id):  # an id without a piece does not count as the first token
            self._decode = self._decode_later
        return text

    def flush(self) -> str:
        text = self._decode(self._unit).rstrip(REPLACEMENT) if self._unit else ""
        self._unit.clear()
        return text


class SuffixDetokenizer:
    """Detokenizer for vocabularies with end-of-word markers. It is one token behind, because the marker is a
    space unless the text ends there."""

    def __init__(
        self, inner: Callable[[int], str], decode: Callable[[list[int]], str], skipped: frozenset[int]
    ) -> None:
        """Create a detokenizer. `inner` returns the text of a token before another one, `decode` the text of
        the last token."""
        self._inner = inner
        self._decode = decode
        self._skipped = skipped
        self._last: int | None = None

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        previous = self._last
        self._last = token_id
        return "" if previous is None else self._inner(previous)

    def flush(self) -> str:
        last = self._last
        self._last = None
        return "" if last is None else self._decode([last])


def _kinds(decoder: dict[str, object] | None) -> list[str]:
    """Return the decoder's steps. Raises StartupError for an unsupported step."""
    if decoder is None:
        return []
    steps = _steps(decoder)
    supported = _WHOLE | _STEPS if decoder["type"] == "Sequence" else _WHOLE
    for step in steps:
        if step not in supported:
            raise StartupError(f"Unsupported tokenizer type: {step}")
    return steps


def _steps(decoder: dict[str, object]) -> list[str]:
    if decoder["type"] != "Sequence":
        return [str(decoder["type"])]
    decoders = decoder["decoders"]
    assert isinstance(decoders, list)
    return [step for inner in decoders for step in _steps(inner)]


_WHOLE = {"ByteLevel", "Metaspace", "WordPiece", "BPEDecoder"}
_STEPS = {"Replace", "ByteFallback", "Fuse", "Strip"}  # only useful in a sequence


def _characters_of_bytes() -> dict[str, int]:
    """Return the published alphabet of byte-level vocabularies: printable bytes map to themselves, and the
    others to characters from U+0100 on (GPT-2, Radford et al. 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _characters_of_bytes()
