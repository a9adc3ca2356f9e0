"""Detokenizing and stopping, piece by piece, against whole-text models of the rules."""

import random
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models

from tests.tokenizers_for_tests import write_byte_level
from tgis.router.detokenizer import Detokenizer, Vocabulary
from tgis.router.errors import RequestError, StartupError
from tgis.router.sequence import Stopping, StopReason
from tgis.router.stopping import StopMatcher, TextStream
from tgis.router.tokenizer import Tokenizer, byte_offsets

ALPHABET = "ab é東🙂\u200d👩\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_byte_level(directory)
    return Tokenizer(directory, 1)


def whole_text(tokenizer: Tokenizer, token_ids: list[int], skip_special_tokens: bool = True) -> str:
    """The library's own decoding, less what an unfinished character leaves at the end."""
    text: str = tokenizer.fast.decode(token_ids, skip_special_tokens=skip_special_tokens)
    return text.rstrip("\N{REPLACEMENT CHARACTER}")


def search(pieces: list[str], stops: tuple[str, ...], include: bool) -> tuple[str, str]:
    """(text, stop sequence), looked for in the whole text after each piece."""
    text = ""
    for piece in pieces:
        old, text = len(text), text + piece
        for stop in stops:
            start = text.rfind(stop)
            if start >= 0 and start + len(stop) > old:
                return text[: start + len(stop) if include else start], stop
    return text, ""


@pytest.mark.parametrize("batch", range(5))
def test_pieces_are_the_whole_text(tokenizer: Tokenizer, batch: int) -> None:
    vocabulary = Vocabulary(tokenizer)
    for seed in range(batch * 300, (batch + 1) * 300):
        r = random.Random(seed)
        token_ids = tokenizer.fast.encode("".join(r.choices(ALPHABET, k=r.randint(0, 12)))).ids
        if r.random() < 0.5:  # as a model that knows nothing of characters
            token_ids = [r.randrange(tokenizer.vocab_size) for _ in range(r.randint(0, 12))]
        detokenizer = Detokenizer(vocabulary)
        text = "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()
        assert text == whole_text(tokenizer, token_ids)


def test_characters_appear_with_their_last_byte(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.fast.encode("🙂", add_special_tokens=False).ids
    assert len(token_ids) > 1
    detokenizer = Detokenizer(Vocabulary(tokenizer))
    assert [detokenizer.push(token) for token in token_ids] == [""] * (len(token_ids) - 1) + ["🙂"]


def test_special_tokens_are_shown_on_request(tokenizer: Tokenizer) -> None:
    token_ids = [*tokenizer.fast.encode("fox").ids, 1]
    for output_special_tokens, text in ((False, "fox"), (True, "<s>fox</s>")):
        detokenizer = Detokenizer(Vocabulary(tokenizer, output_special_tokens))
        assert "".join(map(detokenizer.push, token_ids)) == text


def test_other_kinds_of_tokenizer_are_refused(tmp_path: Path) -> None:
    fast = Fast(models.BPE())
    fast.decoder = decoders.Metaspace()
    fast.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(StartupError, match="Unsupported tokenizer type: Metaspace"):
        Vocabulary(Tokenizer(tmp_path, 1))


@pytest.mark.parametrize("batch", range(5))
def test_stop_sequences_against_a_search_of_the_whole_text(batch: int) -> None:
    for seed in range(batch * 2000, (batch + 1) * 2000):
        r = random.Random(seed)
        stops = tuple("".join(r.choices("ab", k=r.randint(1, 4))) for _ in range(r.randint(0, 3)))
        pieces = ["".join(r.choices("abc", k=r.randint(0, 3))) for _ in range(r.randint(1, 8))]
        matcher, text, stop = StopMatcher(stops, include=seed % 2 == 0), "", ""
        for piece in pieces:
            released, stop = matcher.push(piece)
            text += released
            if stop:
                break
        else:
            text += matcher.flush()
        assert (text, stop) == search(pieces, stops, include=seed % 2 == 0)


def test_only_a_possible_beginning_is_held_back() -> None:
    matcher = StopMatcher(("stop", "op!"), include=False)
    assert [matcher.push(piece)[0] for piece in ("no s", "to", "ne", " sto")] == ["no ", "", "stone", " "]
    assert matcher.flush() == "sto"


def stream(tokenizer: Tokenizer, **stopping: object) -> TextStream:
    defaults = {"max_new_tokens": 5, "eos_token_ids": frozenset({1})}
    return TextStream(Vocabulary(tokenizer), Stopping(**(defaults | stopping)))  # type: ignore[arg-type]


def test_order_of_reasons(tokenizer: Tokenizer) -> None:
    fox = tokenizer.fast.encode("fox", add_special_tokens=False).ids
    assert len(fox) > 1
    *before, last = fox

    def reason_of_last(token: int, **stopping: object) -> StopReason:
        text = stream(tokenizer, **stopping)
        for earlier in before:
            assert text.push(earlier).reason is StopReason.NOT_FINISHED
        return text.push(token).reason

    num = len(fox)
    past = time.monotonic() - 1
    assert reason_of_last(last) is StopReason.NOT_FINISHED
    assert reason_of_last(1) is StopReason.EOS_TOKEN
    assert reason_of_last(1, max_new_tokens=num) is StopReason.EOS_TOKEN
    assert reason_of_last(last, max_new_tokens=num) is StopReason.MAX_TOKENS
    assert reason_of_last(last, max_new_tokens=num, reduced=True) is StopReason.TOKEN_LIMIT
    assert reason_of_last(last, stop_sequences=("ox",)) is StopReason.STOP_SEQUENCE
    assert reason_of_last(last, stop_sequences=("ox",), max_new_tokens=num) is StopReason.MAX_TOKENS
    assert reason_of_last(last, stop_sequences=("ox",), min_new_tokens=num) is StopReason.STOP_SEQUENCE
    assert reason_of_last(last, stop_sequences=("ox",), min_new_tokens=num + 1) is StopReason.NOT_FINISHED
    assert stream(tokenizer, deadline=past, min_new_tokens=3).push(1).reason is StopReason.TIME_LIMIT


def test_the_limit_leaves_a_stop_sequence_in_the_text(tokenizer: Tokenizer) -> None:
    fox = tokenizer.fast.encode("fox", add_special_tokens=False).ids
    text = stream(tokenizer, stop_sequences=("ox",), include_stop_sequence=False, max_new_tokens=len(fox))
    pieces = [text.push(token) for token in fox]
    assert "".join(piece.text for piece in pieces) == "fox"
    assert pieces[-1].stop_sequence == ""


def test_byte_offsets() -> None:
    text = "aé東🙂b"
    offsets = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (0, 0)]
    assert byte_offsets(text, offsets) == [(0, 1), (1, 3), (3, 6), (6, 10), (10, 11), (0, 0)]
    assert byte_offsets("abc", [(0, 2)]) == [(0, 2)]


async def test_a_text_that_is_no_unicode_is_a_request_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="tokenizer error"):
        await tokenizer.encode(["\ud800"])
