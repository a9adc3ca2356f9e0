"""Texts that the grammar of a JSON schema accepts, according to the library's own matcher."""

import json
import random
from typing import Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from tgis.router.grammar.conversion import convert
from tgis.router.grammar.worker import ByteVocabulary

BYTES = LLTokenizer(TokenizerWrapper(ByteVocabulary()))


class SchemaGrammar:
    """Grammar of a JSON schema. Raises InvalidGrammarError if a schema is rejected before compilation."""

    def __init__(self, schema: Any) -> None:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        self._grammar = convert("json_schema", text)

    @property
    def problem(self) -> str:
        """Library's error text; empty if there is none."""
        return self._matcher().get_error()

    def takes(self, text: str) -> bool:
        """Return True if the grammar accepts the whole text, byte by byte."""
        matcher, data = self._matcher(), list(text.encode())
        assert not matcher.is_error(), matcher.get_error()
        return matcher.validate_tokens(data) == len(data) and self._accepts(matcher, data)

    def walk(self, r: random.Random, prefers: bytes, max_bytes: int = 200) -> str | None:
        """Return a random text, mostly of the preferred bytes, or None if it does not end. Raises
        AssertionError if the grammar leads to a dead end."""
        matcher, text = self._matcher(), b""
        while len(text) < max_bytes:
            is_accepting = matcher.is_accepting()
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            allowed = [byte for byte in range(256) if mask >> byte & 1]
            assert not matcher.is_error(), text
            assert allowed or is_accepting, text
            if is_accepting and (not allowed or r.random() < 0.5):
                return text.decode(errors="replace")
            byte = r.choice([each for each in allowed if each in prefers] or allowed)
            matcher.consume_token(byte)
            text += bytes([byte])
        return None

    def _matcher(self) -> LLMatcher:
        return LLMatcher(BYTES, self._grammar, log_level=0)

    def _accepts(self, matcher: LLMatcher, data: list[int]) -> bool:
        matcher.consume_tokens(data)
        return bool(matcher.is_accepting())
