"""Token ids to text as soon as it is certain: `push(token_id)` releases text, `flush()` the rest."""

import codecs
import json
from functools import lru_cache

from tgis.router.errors import StartupError
from tgis.router.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Vocabulary:
    """What every token of a byte-level vocabulary contributes to the text; shared by all detokenizers."""

    def __init__(self, tokenizer: Tokenizer, output_special_tokens: bool = False) -> None:
        """Raises StartupError for a tokenizer that is not byte-level."""
        decoder = json.loads(tokenizer.fast.to_str())["decoder"]
        kinds = [decoder, *decoder.get("decoders", [])] if decoder else []
        if not any(part["type"] == "ByteLevel" for part in kinds):
            kind = decoder["type"] if decoder else "none"
            raise StartupError(f"Unsupported tokenizer type: {kind}; byte-level tokenizers are supported")
        self._tokenizer = tokenizer
        self._skipped = frozenset() if output_special_tokens else tokenizer.special_ids
        self.bytes_of = lru_cache(maxsize=None)(self._bytes_of)

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._skipped:
            return b""
        piece = self._tokenizer.piece(token_id)
        try:
            return bytes(_BYTE_OF_CHARACTER[character] for character in piece)
        except KeyError:  # an added token is its own text
            return piece.encode()


class Detokenizer:
    """Decodes one generation. Bytes of an unfinished character stay back; so do replacement characters at the
    end of the text so far, which are dropped when the text ends with them."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_held = 0  # replacement characters that more text would confirm

    def push(self, token_id: int) -> str:
        text = self._decoder.decode(self._vocabulary.bytes_of(token_id))
        if not text:
            return ""
        certain = text.rstrip(REPLACEMENT)
        if not certain:
            self._num_held += len(text)
            return ""
        released = REPLACEMENT * self._num_held + certain
        self._num_held = len(text) - len(certain)
        return released

    def flush(self) -> str:
        """Nothing: what is held back is an unfinished character or replacement characters."""
        self._decoder.reset()
        self._num_held = 0
        return ""


def _characters_of_bytes() -> dict[str, int]:
    """The published alphabet of byte-level vocabularies: printable bytes stand for themselves, the others
    follow from U+0100 on (GPT-2, Radford et al. 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _characters_of_bytes()
