"""Check the text that a stream shows and when it ends, against a plain model and TGIS's own examples."""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import tokenizers
from tokenizers import decoders, models

from tests.support import plain_text
from tests.support.seeds import seed_ranges
from tests.support.tokenizers.decoder_kinds import KINDS, random_ids
from tgis.router.sequence import Stopping, StopReason
from tgis.router.text.detokenizer import Vocabulary
from tgis.router.text.stop_sequences import MAX_CLUSTER, StopSequences, TextStream
from tgis.router.text.tokenizer import Tokenizer

EOS = 1


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    KINDS["byte_level"](directory)
    return Tokenizer(directory, 1)


class Piece(NamedTuple):
    text: str
    reason: StopReason
    stop_sequence: str


class Generation:
    """A text stream driven as by the engine, which checks its own stop reasons first."""

    def __init__(self, vocabulary: Vocabulary, stopping: Stopping, stops: StopSequences) -> None:
        self._text, self._stopping, self._num_tokens = TextStream(vocabulary, stops), stopping, 0
        self.flush = self._text.flush

    def push(self, token_id: int) -> Piece:
        self._num_tokens += 1
        reason = self._stopping.reason_at(self._num_tokens, token_id, time.monotonic())
        if self._text.push(token_id, reason):
            reason = StopReason.STOP_SEQUENCE
        (text,) = self._text.take(1)
        return Piece(text, reason, self._text.stop_sequence)


def stream(
    vocabulary: Vocabulary,
    stop_sequences: tuple[str, ...] = (),
    include_stop_sequence: bool = True,
    **stopping: object,
) -> Generation:
    defaults = {"max_new_tokens": 5, "eos_token_ids": frozenset({EOS})}
    limits = Stopping(**(defaults | stopping))  # type: ignore[arg-type]
    return Generation(
        vocabulary, limits, StopSequences(stop_sequences, include_stop_sequence, limits.min_new_tokens)
    )


def entries(text_stream: Generation, token_ids: list[int]) -> list[plain_text.Entry]:
    shown = []
    for token_id in token_ids:
        piece = text_stream.push(token_id)
        shown.append((piece.text, piece.reason.name, piece.stop_sequence))
        if piece.reason is not StopReason.NOT_FINISHED:
            break
    return shown


def random_stops(r: random.Random, text: str) -> tuple[str, ...]:
    """Return stop sequences, mostly parts of the text, some with one character changed."""
    stops = []
    for _ in range(r.choice([0, 1, 1, 2, 3, 6])):
        start = r.randrange(len(text) + 1)
        stop = text[start : start + r.randint(1, 6)] or "zz"
        stops.append(stop[:-1] + "q" if r.random() < 0.2 else stop)
    return tuple(stops)


@pytest.mark.parametrize("kind", KINDS)
@seed_ranges(400, 1500)
def test_streams_against_the_plain_model(tmp_path: Path, kind: str, seeds: range) -> None:
    fast = KINDS[kind](tmp_path)
    tokenizer = Tokenizer(tmp_path, 1)
    vocabularies = [Vocabulary(tokenizer), Vocabulary(tokenizer, output_special_tokens=True)]
    reasons = set()
    for seed in seeds:
        r = random.Random(seed)
        token_ids = random_ids(fast, r)
        output_special, stops = r.random() < 0.2, random_stops(r, fast.decode(token_ids))
        limit = r.choice([len(token_ids), r.randint(1, 12), 99])
        stopping = {
            "stop_sequences": stops,
            "min_new_tokens": r.choice([0, 0, r.randint(0, limit)]),
            "max_new_tokens": limit,
            "reduced": r.random() < 0.5,
        }
        include, eos_ids = r.random() < 0.4, frozenset({EOS})
        expected = plain_text.stream(
            fast,
            token_ids,
            include=include,
            eos_ids=eos_ids,
            output_special_tokens=output_special,
            **stopping,
        )
        text_stream = stream(vocabularies[output_special], include_stop_sequence=include, **stopping)
        assert entries(text_stream, token_ids) == expected, seed
        reasons.add(expected[-1][1])
    names = {"EOS_TOKEN", "MAX_TOKENS", "TOKEN_LIMIT", "STOP_SEQUENCE", "NOT_FINISHED"}
    assert reasons == names, "the cases above must reach every end"


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_joined_is_the_text(tmp_path: Path, kind: str) -> None:
    """Check that the shown text does not depend on how it is held back, and that `flush` shows the rest."""
    fast = KINDS[kind](tmp_path)
    vocabulary = Vocabulary(Tokenizer(tmp_path, 1))
    for seed in range(300):
        r = random.Random(seed)
        token_ids = [token for token in random_ids(fast, r) if token != EOS]
        stops = r.choice([(), ("\N{SNOWMAN}" * r.randint(1, 80),)])
        include = r.random() < 0.5
        text_stream = stream(
            vocabulary, max_new_tokens=99, stop_sequences=stops, include_stop_sequence=include
        )
        shown = "".join(text_stream.push(token).text for token in token_ids)
        assert shown + text_stream.flush() == plain_text.text(fast, token_ids)
        assert text_stream.flush() == ""


def word_level(directory: Path, words: list[str], decoder: decoders.Decoder | None) -> Vocabulary:
    """Return a vocabulary in which token i + 2 is word i; tokens 0 and 1 are unused."""
    vocab = {word: i for i, word in enumerate(["<s>", "</s>", *words])}
    fast = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<s>"))
    if decoder is not None:
        fast.decoder = decoder
    fast.save(str(directory / "tokenizer.json"))
    return Vocabulary(Tokenizer(directory, 1))


EXAMPLE = ["The", "Ġfirst", "Ġtime", "ĠI"]


@pytest.mark.parametrize(
    ("stops", "include", "shown"),
    [
        ((), True, ["Th", "e firs", "t tim", "e ", "I"]),
        (("absent",), False, ["", "", "The", " firs", "t time I"]),
        (("absent",), True, ["", "Th", "e firs", "t tim", "e I"]),
        (("é", "absent"), False, ["", "", "The", " firs", "t time I"]),
    ],
)
def test_examples_of_the_hold_back(
    tmp_path: Path, stops: tuple[str, ...], include: bool, shown: list[str]
) -> None:
    vocabulary = word_level(tmp_path, EXAMPLE, decoders.ByteLevel())
    text_stream = stream(vocabulary, stop_sequences=stops, include_stop_sequence=include)
    assert [*(text_stream.push(i).text for i in range(2, 6)), text_stream.flush()] == shown


@pytest.mark.parametrize(
    ("stops", "include", "shown"),
    [
        ((), True, [" The", " first", " time", " I", ""]),
        (("absent",), False, ["", " The", "", " first", " time I"]),
        (("absent",), True, ["", " The", " first", " time", " I"]),
    ],
)
def test_other_kinds_hold_whole_tokens(
    tmp_path: Path, stops: tuple[str, ...], include: bool, shown: list[str]
) -> None:
    vocabulary = word_level(tmp_path, ["The", "first", "time", "I"], None)
    text_stream = stream(vocabulary, stop_sequences=stops, include_stop_sequence=include)
    assert [*(text_stream.push(i).text for i in range(2, 6)), text_stream.flush()] == shown


@pytest.mark.parametrize(
    "clusters",
    [
        ["e\u0301", "x"],
        ["\r\n", "\n", "\r", "\r\n"],
        ["👩\u200d👩\u200d👧", "👩🏽", "🙂"],
        ["🇩🇪", "🇫🇷", "a"],
        ["각", "ᄀ\u1161\u11a8", "가"],
    ],
)
def test_clusters_are_shown_whole(tokenizer: Tokenizer, clusters: list[str]) -> None:
    vocabulary = Vocabulary(tokenizer)
    token_ids = tokenizer.fast.encode("".join(clusters), add_special_tokens=False).ids
    text_stream = stream(vocabulary, max_new_tokens=99)
    starts = {"".join(clusters[:i]) for i in range(len(clusters) + 1)}
    shown = ""
    for token_id in token_ids:
        shown += text_stream.push(token_id).text
        assert shown in starts
    assert shown == "".join(clusters[:-1])


def test_a_cluster_without_end_costs_no_more_per_token(tmp_path: Path) -> None:
    vocabulary = word_level(tmp_path, ["a", "Ìģ"], decoders.ByteLevel())  # U+0301 in the byte alphabet
    num = 20_000
    text_stream = stream(vocabulary, max_new_tokens=2 * num)
    started = time.thread_time()
    shown = [text_stream.push(token_id).text for token_id in [2, *[3] * num]]
    assert time.thread_time() - started < 5
    assert max(map(len, shown)) <= MAX_CLUSTER
    assert len("".join(shown)) > num - MAX_CLUSTER
    assert "".join(shown) + text_stream.flush() == "a" + "\u0301" * num


@pytest.fixture(scope="module")
def reason_of_last(tokenizer: Tokenizer) -> Callable[..., StopReason]:
    before = tokenizer.fast.encode("fox", add_special_tokens=False).ids[:-1]
    assert before

    def push(token: int, **stopping: object) -> StopReason:
        text_stream = stream(Vocabulary(tokenizer), **stopping)
        for earlier in before:
            assert text_stream.push(earlier).reason is StopReason.NOT_FINISHED
        return text_stream.push(token).reason

    return push


def test_order_of_reasons(tokenizer: Tokenizer, reason_of_last: Callable[..., StopReason]) -> None:
    fox = tokenizer.fast.encode("fox", add_special_tokens=False).ids
    num, last = len(fox), fox[-1]
    assert reason_of_last(last) is StopReason.NOT_FINISHED
    assert reason_of_last(EOS) is StopReason.EOS_TOKEN
    assert reason_of_last(EOS, max_new_tokens=num) is StopReason.EOS_TOKEN
    assert reason_of_last(last, max_new_tokens=num) is StopReason.MAX_TOKENS
    assert reason_of_last(last, max_new_tokens=num, reduced=True) is StopReason.TOKEN_LIMIT
    assert reason_of_last(last, stop_sequences=("ox",)) is StopReason.STOP_SEQUENCE
    assert reason_of_last(last, stop_sequences=("ox",), max_new_tokens=num) is StopReason.MAX_TOKENS
    assert reason_of_last(last, stop_sequences=("ox",), min_new_tokens=num) is StopReason.STOP_SEQUENCE
    assert reason_of_last(last, stop_sequences=("ox",), min_new_tokens=num + 1) is StopReason.NOT_FINISHED


def test_a_passed_deadline_comes_before_all(tokenizer: Tokenizer) -> None:
    vocabulary, past = Vocabulary(tokenizer), time.monotonic() - 1
    assert stream(vocabulary, deadline=past, min_new_tokens=3).push(EOS).reason is StopReason.TIME_LIMIT
    assert stream(vocabulary, deadline=past + 99).push(2).reason is StopReason.NOT_FINISHED


def test_the_end_of_sequence_ends_before_min_new_tokens(tokenizer: Tokenizer) -> None:
    """Check that a grammar with only the end token left ends a generation before its minimum."""
    piece = stream(Vocabulary(tokenizer), min_new_tokens=4).push(EOS)
    assert (piece.text, piece.reason) == ("", StopReason.EOS_TOKEN)


def test_the_limit_leaves_a_stop_sequence_in_the_text(tokenizer: Tokenizer) -> None:
    fox = tokenizer.fast.encode("fox", add_special_tokens=False).ids
    text_stream = stream(
        Vocabulary(tokenizer), stop_sequences=("ox",), include_stop_sequence=False, max_new_tokens=len(fox)
    )
    assert "".join(text for text, _, _ in entries(text_stream, fox)) == "fox"


def test_only_the_end_of_sequence_token_that_ended_it_is_not_text(tokenizer: Tokenizer) -> None:
    fox = tokenizer.fast.encode("fox", add_special_tokens=False).ids
    vocabulary = Vocabulary(tokenizer, output_special_tokens=True)
    for eos_token_ids, text in ((frozenset({EOS}), "<s>fox"), (frozenset({99}), "<s>fox</s>")):
        text_stream = stream(vocabulary, eos_token_ids=eos_token_ids, max_new_tokens=len(fox) + 2)
        assert "".join(shown for shown, _, _ in entries(text_stream, [0, *fox, EOS])) == text
