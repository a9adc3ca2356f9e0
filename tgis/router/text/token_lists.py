"""Answers, as JSON, calls that list the tokens of a text or join tokens to a text."""

from collections.abc import Sequence

import msgspec
import tokenizers

from tgis.router.errors import RequestError
from tgis.router.text.tokenization import Tokenized, encode

MAX_PLACES = 1 << 18  # each takes about 50 bytes


class TokenList(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class TokenText(msgspec.Struct):
    prompt: str


class TokenPlace(msgspec.Struct):
    """Token and its span in the text, in characters. A token that the tokenizer adds has the span 0 to 0."""

    id: int
    text: str
    start: int
    stop: int


class ChatPlaces(msgspec.Struct):
    tokenize_response: list[TokenPlace]
    templated_text: str


def list_tokens(
    tokenizer: tokenizers.Tokenizer,
    text: str,
    adds_special_tokens: bool,
    has_pieces: bool,
    max_model_len: int,
) -> Tokenized:
    """Return a serialized TokenList. Raises RequestError."""
    [encoding] = encode(tokenizer, [text], with_offsets=False, adds_special_tokens=adds_special_tokens)
    ids = encoding.ids
    pieces = [tokenizer.id_to_token(token_id) or "" for token_id in ids] if has_pieces else None
    answer = TokenList(len(ids), max_model_len, ids, pieces)
    return Tokenized(msgspec.json.encode(answer), len(ids))


def join_tokens(tokenizer: tokenizers.Tokenizer, token_ids: Sequence[int]) -> Tokenized:
    """Return a serialized TokenText that includes special tokens. Raises RequestError."""
    for token_id in token_ids:
        if tokenizer.id_to_token(token_id) is None:
            raise RequestError(f"tokens: {token_id} is not in the vocabulary", "tokens")
    try:
        text = tokenizer.decode(list(token_ids), skip_special_tokens=False)
    except BaseException as error:
        raise RequestError("tokenizer error the tokens could not be decoded", "tokens") from error
    return Tokenized(msgspec.json.encode(TokenText(text)), len(token_ids))


def list_places(tokenizer: tokenizers.Tokenizer, text: str, max_tokens: int) -> Tokenized:
    """Return a serialized list of TokenPlace for the last `max_tokens` tokens. Raises RequestError."""
    places = _places(tokenizer, text, adds_special_tokens=True)
    return Tokenized(msgspec.json.encode(places[-max_tokens:]), len(places))


def list_chat_places(tokenizer: tokenizers.Tokenizer, text: str) -> Tokenized:
    """Return the serialized ChatPlaces of a chat prompt, which already has its special tokens. Raises
    RequestError."""
    places = _places(tokenizer, text, adds_special_tokens=False)
    return Tokenized(msgspec.json.encode(ChatPlaces(places, text)), len(places))


def _places(tokenizer: tokenizers.Tokenizer, text: str, adds_special_tokens: bool) -> list[TokenPlace]:
    [encoding] = encode(tokenizer, [text], with_offsets=True, adds_special_tokens=adds_special_tokens)
    if len(encoding) > MAX_PLACES:
        raise RequestError(f"the text has more than {MAX_PLACES} tokens", "text")
    return [
        TokenPlace(token_id, text[start:stop], start, stop)
        for token_id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True)
    ]
