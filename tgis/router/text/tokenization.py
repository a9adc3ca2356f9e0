"""Tokenization functions that both the router's threads and the tokenizer process use."""

import re
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from tgis.hub.gguf_files import wait_for_tokenizer
from tgis.pb import generation_pb2 as pb
from tgis.router.errors import RequestError, StartupError

NO_TOKEN_ID = 2**32 - 1
MAX_ID_DIGITS = 9


class TokenIds(NamedTuple):
    """Token ids of a text, including special tokens."""

    num_tokens: int
    last: list[int]
    """Last token ids, at most the requested number."""


class TokenizeOptions(NamedTuple):
    """Options of a Tokenize call that are not in its message."""

    inputs_are_ids: bool = False
    """True if each text consists of decimal token ids separated by single spaces."""
    tokens_are_ids: bool = False
    """True if tokens are returned as decimal ids instead of vocabulary pieces."""


class Tokenized(NamedTuple):
    response: bytes
    """The API's response, serialized here because serializing a large one takes long."""
    num_tokens: int


class TokenizeJob(NamedTuple):
    """Job that answers an API's tokenization call, in a thread or in the tokenizer process."""

    function: Callable[..., Tokenized]
    """Module-level function that is called with the tokenizer and `arguments`. Raises RequestError."""
    arguments: tuple[Any, ...]
    num_texts: int
    num_bytes: int
    """Size of the texts."""
    method: str = "Tokenize"
    """The API's name of the method."""


def load_tokenizer(directory: Path) -> tokenizers.Tokenizer:
    """Load the tokenizer in a directory. Raises StartupError if there is no readable one."""
    wait_for_tokenizer(directory)
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise StartupError("No existing fast tokenizer (tokenizer.json) found")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        raise StartupError(f"Problem loading tokenizer for model: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def ids_before_text(tokenizer: tokenizers.Tokenizer) -> list[int]:
    """Return the ids of the tokens that the tokenizer adds before every text."""
    # A padding id that no token has marks the position of the text, so the result depends on no text.
    encoding = tokenizer.encode("", add_special_tokens=False)
    encoding.pad(len(encoding) + 1, direction="left", pad_id=NO_TOKEN_ID)
    return list(takewhile(lambda token_id: token_id != NO_TOKEN_ID, tokenizer.post_process(encoding).ids))


def encode_ids(tokenizer: tokenizers.Tokenizer, texts: Sequence[str], max_ids: int) -> list[TokenIds]:
    """Encode each text and keep the last `max_ids` token ids. Raises RequestError."""
    return [
        TokenIds(len(encoding), encoding.ids[-max_ids:])
        for encoding in encode(tokenizer, texts, with_offsets=False)
    ]


def encode_plain(tokenizer: tokenizers.Tokenizer, texts: Sequence[str], max_ids: int) -> list[TokenIds]:
    """Encode each text like `encode_ids`, but without adding special tokens to those in the text."""
    return [
        TokenIds(len(encoding), encoding.ids[-max_ids:])
        for encoding in encode(tokenizer, texts, with_offsets=False, adds_special_tokens=False)
    ]


def read_ids(tokenizer: tokenizers.Tokenizer, texts: Sequence[str], max_ids: int) -> list[TokenIds]:
    """Parse texts of token ids separated by single spaces, and keep the last `max_ids` of each. No special
    tokens are added, and the tokenizer is not used. Raises RequestError."""
    return [_read_ids(text, max_ids, number) for number, text in enumerate(texts, 1)]


def _read_ids(text: str, max_ids: int, number: int) -> TokenIds:
    if not text:
        return TokenIds(0, [])
    last = text.rsplit(" ", max_ids)[-max_ids:]
    if not all(each.isascii() and each.isdecimal() and len(each) <= MAX_ID_DIGITS for each in last):
        raise RequestError(
            f"input {number}: token ids are decimal numbers of at most {MAX_ID_DIGITS} digits with one "
            "space between each two",
            "text",
        )
    return TokenIds(text.count(" ") + 1, list(map(int, last)))


def tokenize_job(request: pb.BatchedTokenizeRequest, options: TokenizeOptions) -> TokenizeJob:
    return TokenizeJob(tokenize, (request, options), len(request.requests), request.ByteSize())


def tokenize(
    tokenizer: tokenizers.Tokenizer, request: pb.BatchedTokenizeRequest, options: TokenizeOptions
) -> Tokenized:
    """Answer fmaas's Tokenize call with a serialized BatchedTokenizeResponse.

    Truncation keeps the last tokens and adds none. Raises RequestError."""
    answer = pb.BatchedTokenizeResponse()
    limit = request.truncate_input_tokens
    texts = [item.text for item in request.requests]
    in_full = request.return_tokens or request.return_offsets
    encodings: Sequence[_EncodedIds | tokenizers.Encoding] = (
        [_EncodedIds(tokenizer, text, number) for number, text in enumerate(texts, 1)]
        if options.inputs_are_ids
        else encode(tokenizer, texts, in_full)
    )
    for text, encoding in zip(texts, encodings, strict=True):
        num_tokens = len(encoding)
        start = max(num_tokens - limit, 0) if limit else 0
        response = answer.responses.add(token_count=num_tokens - start)
        if request.return_tokens:
            tokens = map(str, encoding.ids) if options.tokens_are_ids else encoding.tokens
            response.tokens.extend(list(tokens)[start:])
        if request.return_offsets:
            for begin, end in byte_offsets(text, encoding.offsets[start:]):
                response.offsets.add(start=begin, end=end)
    return Tokenized(answer.SerializeToString(), sum(each.token_count for each in answer.responses))


class _EncodedIds:
    """Text of token ids, with the interface of the library's encodings."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, text: str, number: int) -> None:
        """Parse the text of input `number`. Raises RequestError."""
        self._tokenizer = tokenizer
        self._text = text
        self.ids = _read_ids(text, len(text), number).last

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def tokens(self) -> list[str]:
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in self.ids]

    @property
    def offsets(self) -> list[tuple[int, int]]:
        return [place.span() for place in re.finditer("[0-9]+", self._text)]


def byte_offsets(text: str, offsets: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Convert character offsets into `text` to offsets into its UTF-8 bytes."""
    if text.isascii():
        return list(offsets)
    ends = [0]
    for character in text:
        ends.append(ends[-1] + len(character.encode()))
    return [(ends[start], ends[end]) for start, end in offsets]


def encode(
    tokenizer: tokenizers.Tokenizer,
    texts: Sequence[str],
    with_offsets: bool,
    adds_special_tokens: bool = True,
) -> list[tokenizers.Encoding]:
    """Encode all texts. Raises RequestError."""
    # Only the library's batch calls let other threads run, and the fast one does not compute offsets.
    encode_batch = tokenizer.encode_batch if with_offsets else tokenizer.encode_batch_fast
    try:
        return encode_batch(list(texts), add_special_tokens=adds_special_tokens)
    # The library raises plain Exceptions, and BaseExceptions after a panic. Their texts may quote the input.
    except BaseException as error:
        raise RequestError("tokenizer error the text could not be encoded", "text") from error
