"""Tests the forms of tokens and log-probabilities against the tokenizers' texts and an evaluation's sums."""

import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.tokenizers.trained import (
    write_byte_fallback,
    write_byte_level,
    write_metaspace,
    write_wordpiece,
)
from tgis.router.api.openai.answers.logprobs import (
    LEAST,
    CompletionLogprobsWriter,
    TokenNames,
    chat_logprobs,
    prompt_logprobs,
)
from tgis.router.sequence import TokenDetail
from tgis.router.text.detokenizer import Vocabulary
from tgis.router.text.tokenizer import Tokenizer

WRITERS = (write_byte_level, write_byte_fallback, write_metaspace, write_wordpiece)
TEXT = "The little girl, naïve café 東京 🙂 and no bread."


@pytest.fixture(params=WRITERS, ids=lambda write: write.__name__)
def tokenizer(request: Any, tmp_path: Path) -> Any:
    request.param(tmp_path)
    tokenizer = Tokenizer(tmp_path, 1)
    yield tokenizer
    tokenizer.close()


@pytest.fixture
def byte_level(tmp_path: Path) -> Any:
    write_byte_level(tmp_path)
    tokenizer = Tokenizer(tmp_path, 1)
    yield tokenizer
    tokenizer.close()


def details(token_ids: list[int], logprob: Callable[[int], float] = lambda _: -1.0) -> list[TokenDetail]:
    return [TokenDetail(token_id, logprob(at), 1 + at) for at, token_id in enumerate(token_ids)]


def test_bytes_are_the_text(tokenizer: Tokenizer) -> None:
    """The joined bytes of the tokens are the text that the library decodes."""
    fast, vocabulary, r = tokenizer.fast, Vocabulary(tokenizer), random.Random(0)
    # The library drops a whole run of byte tokens if one of its bytes is invalid.
    bytes_beyond_ascii = re.compile("<0x[89A-F].>")
    ids = [token_id for piece, token_id in fast.get_vocab().items() if not bytes_beyond_ascii.match(piece)]
    # Tokens that begin a text within a word decode differently in the middle of a text.
    some = [*fast.encode("A", add_special_tokens=False).ids, *r.choices(sorted(ids), k=200)]
    for ids in (fast.encode(TEXT).ids, fast.encode("A " + TEXT * 3).ids, some):
        chat = chat_logprobs(details(ids), TokenNames(vocabulary), 0)
        joined = b"".join(bytes(token.bytes or []) for token in chat.content)
        spoilt, text = fast.decode(ids), joined.decode(errors="replace")
        if "\N{REPLACEMENT CHARACTER}" in spoilt:  # libraries differ in the number of them for invalid bytes
            text, spoilt = (each.replace("\N{REPLACEMENT CHARACTER}", "") for each in (text, spoilt))
        assert text.lstrip() == spoilt.lstrip()


def test_special_tokens_have_no_bytes(tokenizer: Tokenizer) -> None:
    (token,) = chat_logprobs(details([1]), TokenNames(Vocabulary(tokenizer)), 0).content
    assert (token.token, token.bytes) == ("</s>", None)


def test_parts_of_characters(byte_level: Tokenizer) -> None:
    ids = byte_level.fast.encode("🌍", add_special_tokens=False).ids
    assert len(ids) > 1, "the vocabulary lacks it"
    names, spelled = TokenNames(Vocabulary(byte_level)), "🌍".encode()
    shown = CompletionLogprobsWriter(names, 0).write(details(ids))
    chat = chat_logprobs(details(ids), names, 0)
    assert bytes(byte for token in chat.content for byte in token.bytes or []) == spelled
    escaped = "".join(f"\\x{byte:02x}" for byte in spelled)
    assert "".join(token.removeprefix("bytes:") for token in shown.tokens) == escaped
    assert "".join(token.token for token in chat.content) == escaped
    assert all(token.startswith("bytes:") for token in shown.tokens)
    assert shown.text_offset == [0] * len(ids)


def test_offsets(byte_level: Tokenizer) -> None:
    encoding = byte_level.fast.encode(TEXT, add_special_tokens=False)
    writer = CompletionLogprobsWriter(TokenNames(Vocabulary(byte_level)), 0, 7)
    offsets = [offset for each in details(encoding.ids) for offset in writer.write([each]).text_offset]
    whole = byte_level.fast.decode
    for at, offset in enumerate(offsets):
        before = whole(encoding.ids[:at]).rstrip("\N{REPLACEMENT CHARACTER}")
        assert offset == 7 + len(before)


def test_top_logprobs(byte_level: Tokenizer) -> None:
    a, b, c = (byte_level.fast.token_to_id(letter) for letter in "abc")
    token = TokenDetail(c, -3.0, 3, ((a, -0.5), (b, -1.5)))
    names = TokenNames(Vocabulary(byte_level))
    logprobs = CompletionLogprobsWriter(names, 1).write([token])
    assert logprobs.top_logprobs == [{"a": -0.5, "c": -3.0}]
    assert logprobs.token_logprobs == [-3.0]
    (one,) = chat_logprobs([token], names, 2).content
    assert [(top.token, top.logprob, top.bytes) for top in one.top_logprobs] == [
        ("a", -0.5, [97]),
        ("b", -1.5, [98]),
    ]
    ranked = prompt_logprobs([token, token], names, 1)
    assert msgspec.to_builtins(ranked) == [
        None,
        {
            str(c): {"logprob": -3.0, "rank": 3, "decoded_token": "c"},
            str(a): {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
        },
    ]
    as_ids = CompletionLogprobsWriter(names._replace(are_ids=True), 0).write([token])
    assert as_ids.tokens == [f"token_id:{c}"]


def test_infinity(byte_level: Tokenizer) -> None:
    token = TokenDetail(5, -math.inf, 1, ((6, -math.inf), (7, math.nan)))
    names = TokenNames(Vocabulary(byte_level))
    logprobs = CompletionLogprobsWriter(names, 2).write([token])
    assert logprobs.token_logprobs == [LEAST]
    assert b"null" not in msgspec.json.encode([logprobs, chat_logprobs([token], names, 2).content])


@pytest.mark.parametrize("is_greedy", [False, True])
def test_log_likelihood(byte_level: Tokenizer, is_greedy: bool) -> None:
    """An evaluation echoes context and continuation with one more token, and sums the log-probabilities
    between the context and that token. The continuation is greedy if each of its tokens is the likeliest."""
    ids = byte_level.fast.encode("The quick brown fox").ids
    context, rest = ids[:2], ids[2:]
    logprob = [-0.25 * (1 + at) for at in range(len(ids) + 1)]
    likeliest = [((token_id, logprob[at]),) for at, token_id in enumerate([*ids, 1])]
    if not is_greedy:
        likeliest[3] = ((9, -0.125),)
    tokens = [TokenDetail(token_id, logprob[at], 1, likeliest[at]) for at, token_id in enumerate([*ids, 1])]
    writer = CompletionLogprobsWriter(TokenNames(Vocabulary(byte_level)), 1)
    first, last = writer.write(tokens[:-1], are_first=True), writer.write(tokens[-1:])
    token_logprobs = first.token_logprobs + last.token_logprobs
    top = (first.top_logprobs + last.top_logprobs)[len(context) : -1]
    continuation = token_logprobs[len(context) : -1]
    assert len(continuation) == len(rest)
    assert sum(each or 0.0 for each in continuation) == sum(logprob[len(context) : len(ids)])
    chosen = [one == max((likely or {}).values()) for one, likely in zip(continuation, top, strict=True)]
    assert all(chosen) == is_greedy
