"""Tests the texts of tokens for tokenizers of every kind: joined, they are the generated text."""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.tokenizers.trained import (
    write_byte_fallback,
    write_byte_level,
    write_metaspace,
    write_plain,
    write_suffix_bpe,
    write_wordpiece,
)
from tgis.router.api.http.answers.token_texts import ShownToken, TokenForms, TokenTexts
from tgis.router.sequence import StopReason, TokenDetail
from tgis.router.text.detokenizer import Vocabulary
from tgis.router.text.stop_sequences import StopSequences, TextStream
from tgis.router.text.tokenizer import Tokenizer

WRITERS = (
    write_byte_level,
    write_byte_fallback,
    write_metaspace,
    write_wordpiece,
    write_suffix_bpe,
    write_plain,
)
EOS, NUM_CASES = 1, 60
TEXT = "The little girl had naïve café bread 🙂 and no fox."


@pytest.fixture(params=WRITERS, ids=lambda write: write.__name__)
def tokenizer(request: Any, tmp_path: Path) -> Any:
    request.param(tmp_path)
    tokenizer = Tokenizer(tmp_path, 1)
    yield tokenizer
    tokenizer.close()


def generate(
    vocabulary: Vocabulary, ids: list[int], stops: tuple[str, ...]
) -> tuple[list[list[ShownToken]], str, list[int]]:
    """Return the tokens shown with each token, the whole text, and the token ids up to the end."""
    stream, texts = TextStream(vocabulary, StopSequences(stops)), TokenTexts(TokenForms(vocabulary))
    brought: list[list[ShownToken]] = []
    text = ""
    for number, token_id in enumerate(ids, 1):
        reason = StopReason.EOS_TOKEN if token_id == EOS else StopReason.NOT_FINISHED
        if reason is StopReason.NOT_FINISHED and number == len(ids):
            reason = StopReason.MAX_TOKENS
        is_stopped = stream.push(token_id, reason)
        text += "".join(stream.take(1))
        detail = TokenDetail(token_id, -float(number))
        if is_stopped or reason is not StopReason.NOT_FINISHED:
            brought.append(texts.finish(detail, text, reason is StopReason.EOS_TOKEN))
            return brought, text, ids[:number]
        brought.append(texts.push(detail))
    raise AssertionError("a text ends")


@pytest.mark.parametrize("shows_special", [False, True])
def test_texts_join(tokenizer: Tokenizer, shows_special: bool) -> None:
    vocabulary = Vocabulary(tokenizer, shows_special)
    r = random.Random(5)
    plain = [token_id for token_id in range(2, tokenizer.vocab_size) if token_id not in tokenizer.special_ids]
    usual = tokenizer.fast.encode(TEXT, add_special_tokens=False).ids
    num_stopped = 0
    for case in range(NUM_CASES):
        ids = r.choices(plain if case % 2 else usual, k=r.randrange(1, 24))
        for _ in range(r.choice((0, 0, 2))):
            ids.insert(r.randrange(len(ids) + 1), 0)
        if case % 3 == 0:
            ids.append(EOS)
        _, whole, _ = generate(vocabulary, ids, ())
        at = r.randrange(len(whole) + 1)
        stops = (whole[at : at + 2],) if case % 4 == 0 and whole[at : at + 2] else ()
        brought, text, used = generate(vocabulary, ids, stops)
        shown = [each.token for some in brought for each in some]
        assert [(token.id, token.logprob) for token in shown] == [
            (token_id, -float(number)) for number, token_id in enumerate(used, 1)
        ]
        assert "".join(token.text for token in shown if not token.special) == text
        hidden = {EOS} if shows_special else tokenizer.special_ids
        assert [token.special for token in shown] == [token_id in hidden for token_id in used]
        assert all(token.text.strip() == tokenizer.piece(token.id) for token in shown if token.special)
        num_stopped += len(used) < len(ids)
    assert num_stopped > 5


def test_tokens_come_at_once(tokenizer: Tokenizer) -> None:
    """A token waits only for its text: for the next token if that matters, and for the rest of a
    character."""
    vocabulary = Vocabulary(tokenizer)
    ids = tokenizer.fast.encode("The quick brown fox jumps", add_special_tokens=False).ids
    brought, _, _ = generate(vocabulary, ids, ())
    counts = [len(some) for some in brought]
    if vocabulary.is_one_behind:
        assert counts == [0, *[1] * (len(ids) - 2), 2]
    else:
        assert counts == [1] * len(ids)


def test_parts_of_a_character(tmp_path: Path) -> None:
    write_byte_level(tmp_path)
    tokenizer = Tokenizer(tmp_path, 1)
    ids = tokenizer.fast.encode("🌍 a", add_special_tokens=False).ids
    assert len(ids) == 4, "three tokens spell one character"
    brought, text, _ = generate(Vocabulary(tokenizer), ids, ())
    tokenizer.close()
    assert [len(some) for some in brought] == [0, 0, 3, 1]
    assert [each.token.text for some in brought for each in some] == ["", "", "🌍", " a"]
    assert text == "🌍 a"
