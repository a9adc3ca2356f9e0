"""Check which tokens grammars allow, against languages listed in full and against other libraries.

A guided engine is compared with a plain loop over the logits of transformers."""

import json
import random
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLParserLimits
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.support.shard.checkpoints import write_llama
from tests.support.shard.driver import Request, Router, configure, opening
from tests.support.shard.messages import GREEDY, SAMPLE, Steps, integers, open_row
from tests.support.tokenizers.decoder_kinds import KINDS
from tests.support.tokenizers.trained import write_byte_level
from tgis.pb import shard_pb2 as pb
from tgis.shard.runner.interface import ModelRunner
from tgis.shard.sampling.grammar import Guides, read_tokenizer
from tgis.shard.startup.load import load

VOCAB_SIZE = 403  # more than the tokenizer's tokens
EOS, OTHER_EOS = 1, 7
# Tokenizers whose tokens have no fixed text: it depends on the next token, or a decoder rewrites it.
WITHOUT_SPELLING = {"byte_level_and_more", "plain", "suffix", "suffix_in_sequence"}
HEADER = '%llguidance {"no_forcing": true}\n'


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("guided")
    write_llama(directory, vocab_size=VOCAB_SIZE, eos_token_id=EOS)
    write_byte_level(directory, 400)
    return directory


@pytest.fixture(scope="module")
def pieces(directory: Path) -> list[bytes]:
    """Return the bytes of every token; special tokens are empty."""
    tokenizer, byte_of = Tokenizer.from_file(str(directory / "tokenizer.json")), bytes_to_unicode()
    byte_of = {character: byte for byte, character in byte_of.items()}
    texts = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    return [b"" if i < 2 else bytes(byte_of[c] for c in text) for i, text in enumerate(texts)]


@pytest.fixture(scope="module")
def guides(directory: Path) -> Guides:
    return Guides(partial(read_tokenizer, directory, VOCAB_SIZE, [EOS]), VOCAB_SIZE)


@pytest.fixture(scope="module")
def runner(directory: Path) -> ModelRunner:
    return load(configure(directory))


def opened(
    grammar: str | None, generated: tuple[int, ...] = (), row: int = 0, eos: tuple[int, ...] = (EOS,)
) -> Any:
    message = open_row(row, [5, 6, *generated], prompt_len=2, eos=eos)
    if grammar is not None:
        message.grammar.text = message.grammar.digest = grammar
    return message


def allowed(guides: Guides, row: int = 0) -> set[int]:
    logits = torch.zeros(1, VOCAB_SIZE)
    _, problems = guides.mask(logits, np.array([row]))
    assert not problems
    result = set(logits[0].isfinite().nonzero().flatten().tolist())
    masks, problems = guides.pack_masks(np.array([row]))
    assert not problems
    words = masks.words[0].tolist() if len(masks.at) else [-1] * VOCAB_SIZE  # without a grammar
    assert {i for i in range(VOCAB_SIZE) if words[i // 32] >> (i % 32) & 1} == result
    return result


def advance(guides: Guides, token_id: int, row: int = 0) -> None:
    guides.advance(np.array([row]), np.array([token_id], np.int32), np.array([False]))


def fitting(
    language: set[bytes], text: bytes, pieces: list[bytes], eos: tuple[int, ...] = (EOS,)
) -> set[int]:
    """Return the tokens after which `text` is still a prefix of the language, and the end token once it is
    complete."""
    starts = {word[:length] for word in language for length in range(len(word) + 1)}
    tokens = {i for i, piece in enumerate(pieces) if piece and text + piece in starts and i not in eos}
    return tokens | (set(eos) if text in language else set())


def literal(text: str) -> str:
    return json.dumps(text)


def choices(words: list[str]) -> str:
    return f"{HEADER}start: CHOICE\nCHOICE: {' | '.join(map(literal, words))}"


class Pattern:
    """A random regular expression and all strings that match it."""

    def __init__(self, r: random.Random, depth: int = 3) -> None:
        kind = r.choice(["text", "text", "either", "both", "optional", "count", "class"]) if depth else "text"
        if kind == "text":
            text = "".join(r.choices("abé🙂 the.", k=r.randint(1, 3)))
            self.text, self.language = re.escape(text).replace("\\ ", " "), {text}
        elif kind == "class":
            members = r.sample("abcxyzé", 3)
            self.text, self.language = f"[{''.join(members)}]", set(members)
        else:
            one, two = Pattern(r, depth - 1), Pattern(r, depth - 1)
            self.text, self.language = _combine(kind, one, two)


def _combine(kind: str, one: Pattern, two: Pattern) -> tuple[str, set[str]]:
    pairs = {a + b for a in one.language for b in two.language}
    if kind == "either":
        return f"(?:{one.text}|{two.text})", one.language | two.language
    if kind == "both":
        return one.text + two.text, pairs
    if kind == "optional":
        return f"(?:{one.text})?{two.text}", pairs | two.language
    twice = {a + b for a in one.language for b in one.language}
    return f"(?:{one.text}){{1,2}}", one.language | twice


def walk(guides: Guides, language: set[str], grammar: str, pieces: list[bytes], r: random.Random) -> str:
    """Walk a random path through the grammar and check every state against the language listed in full."""
    words = {word.encode() for word in language}
    text = b""
    guides.open(opened(grammar))
    while True:
        expected = fitting(words, text, pieces)
        assert allowed(guides) == expected, (grammar, text)
        token = r.choice(sorted(expected))
        if token == EOS:
            return text.decode()
        text += pieces[token]
        advance(guides, token)


def test_choices_allow_their_prefixes(guides: Guides, pieces: list[bytes]) -> None:
    r = random.Random(1)
    alphabet = ["the", "there was", "a", " ", "bread", "東京", "🙂", '"', "\\", "\n", "\0", "/", "é"]
    for _ in range(40):
        words = ["".join(r.choices(alphabet, k=r.randint(0, 4))) for _ in range(r.randint(2, 6))]
        assert walk(guides, set(words), choices(words), pieces, r) in words


def test_patterns_allow_prefixes_of_matches(guides: Guides, pieces: list[bytes]) -> None:
    r = random.Random(2)
    num_checked = 0
    while num_checked < 40:
        pattern = Pattern(r)
        if len(pattern.language) > 400:
            continue
        assert all(re.fullmatch(pattern.text, word) for word in pattern.language)
        text = walk(guides, pattern.language, f"{HEADER}start: /{pattern.text}/", pieces, r)
        assert re.fullmatch(pattern.text, text)
        num_checked += 1


def test_a_schema_allows_valid_prefixes(guides: Guides, pieces: list[bytes]) -> None:
    r = random.Random(3)
    schema = {
        "type": "object",
        "properties": {"the": {"type": "boolean"}, "n": {"enum": [1, "one", None]}},
        "required": ["the"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
    language = {
        json.dumps({"the": the, **n}, separators=(",", ":"))
        for the in (True, False)
        for n in ({}, {"n": 1}, {"n": "one"}, {"n": None})
    }
    for _ in range(8):
        walk(guides, language, f"{HEADER}start: %json {json.dumps(schema)}", pieces, r)


@pytest.mark.parametrize(
    "pattern", [r"(the|girl)+[0-9]*", r"[^a]*b", r".{3,}\.", r"(?i)girl( girl)*", r"a*|b+c?"]
)
def test_patterns_without_an_end_match(guides: Guides, pieces: list[bytes], pattern: str) -> None:
    r = random.Random(4)
    for _ in range(6):
        guides.open(opened(f"{HEADER}start: /{pattern}/"))
        text = b""
        while True:
            tokens = sorted(allowed(guides))
            token = EOS if EOS in tokens and len(text) > 12 else r.choice(tokens)
            if token == EOS:
                break
            text += pieces[token]
            advance(guides, token)
        assert re.fullmatch(pattern, text.decode()), text


def test_json_is_json(guides: Guides, pieces: list[bytes]) -> None:
    r = random.Random(5)
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 5},
            "age": {"type": "integer", "minimum": -3, "maximum": 120},
            "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
    for _ in range(20):
        guides.open(opened(f"{HEADER}start: %json {json.dumps(schema)}"))
        text = b""
        while (token := r.choice(sorted(allowed(guides)))) != EOS:
            text += pieces[token]
            advance(guides, token)
        value = json.loads(text)
        assert list(value) == ["name", "age", "tags"]
        assert len(value["name"]) <= 5
        assert -3 <= value["age"] <= 120
        assert 1 <= len(value["tags"]) <= 3
        assert all(isinstance(tag, bool) for tag in value["tags"])


def test_a_resumed_row_goes_on_where_it_was(guides: Guides, pieces: list[bytes]) -> None:
    words = ["there was a girl", "there was no bread", "the end"]
    r, generated = random.Random(6), ()
    guides.open(opened(choices(words)))
    while (expected := allowed(guides)) != {EOS}:
        guides.open(opened(choices(words), generated, row=3))
        assert allowed(guides, 3) == expected
        token = r.choice(sorted(expected - {EOS}))
        generated += (token,)
        advance(guides, token)


def test_every_end_of_the_row_ends_the_grammar_and_nothing_else_does(
    guides: Guides, pieces: list[bytes]
) -> None:
    """Check every end token: one may have text, and one may be unknown to the model."""
    text = pieces[OTHER_EOS].decode()
    eos = (EOS, OTHER_EOS, VOCAB_SIZE + 5)
    guides.open(opened(choices([f"a{text}", f"a{text}b", "a"]), eos=eos))
    assert allowed(guides) == {pieces.index(b"a")}
    advance(guides, pieces.index(b"a"))
    assert allowed(guides) == {EOS, OTHER_EOS}
    guides.open(opened(choices([f"a{text}b", "ab"]), (pieces.index(b"a"),), eos=eos))
    assert allowed(guides) == {pieces.index(b"b")}, "though it would be the right text"
    guides.open(opened(choices(["b", "bb"]), eos=(OTHER_EOS,)))
    advance(guides, pieces.index(b"b"))
    assert allowed(guides) == {OTHER_EOS, pieces.index(b"b")}, "the tokenizer's own is not one of the row's"


def test_a_used_up_grammar_cache_fails_no_row(
    directory: Path, pieces: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check rows that share one grammar's limited cache."""
    limits = LLParserLimits(max_lexer_states=1000, verbose_errors=False)
    monkeypatch.setattr("tgis.shard.sampling.grammar.LIMITS", limits)
    guides = Guides(partial(read_tokenizer, directory, VOCAB_SIZE, [EOS]), VOCAB_SIZE)
    grammar = f"{HEADER}start: /x((.*[a-f].{{30}})|(.*x.{{20}}))/"
    for seed in range(30):
        r, generated = random.Random(seed), ()
        guides.open(opened(grammar))
        for _ in range(18):
            token = r.choice(sorted(allowed(guides) - {EOS}))
            generated += (token,)
            advance(guides, token)
        expected = allowed(guides)
        guides.open(opened(grammar + f" // {seed}", generated, row=1))
        assert expected == allowed(guides, 1), "as if there had been no other"


def test_rows_are_masked_in_their_places(guides: Guides, pieces: list[bytes]) -> None:
    guides.reset()
    guides.open(opened(choices(["a", "b"]), row=4))
    guides.open(opened(choices([""]), row=2))
    guides.open(opened(f"{HEADER}start: /(/", row=6))
    guides.open(opened(None, row=5))
    before = torch.randn(5, VOCAB_SIZE)
    logits = before.clone()
    complete, problems = guides.mask(logits, np.array([2, 5, 4, 6, 1]))
    assert complete.tolist() == [True, False, False, False, False]
    assert list(problems) == [3]
    assert torch.equal(logits[[1, 3, 4]], before[[1, 3, 4]])
    assert logits[0].isfinite().nonzero().flatten().tolist() == [EOS]
    kept = sorted({pieces.index(b"a"), pieces.index(b"b")})
    assert logits[2].isfinite().nonzero().flatten().tolist() == kept
    assert torch.equal(logits[2, kept], before[2, kept])


def read_words(words: np.ndarray[Any, Any]) -> set[int]:
    return {i for i in range(VOCAB_SIZE) if words[i // 32] >> (i % 32) & 1}


def test_masks_after_drafts_are_those_of_sampled_tokens(guides: Guides, pieces: list[bytes]) -> None:
    """Check rows with right drafts, with one that the grammar disallows, with an end, and without a grammar.
    The drafts do not advance the grammars."""
    words = ["abab", "abba", "abacus"]
    token = {piece: i for i, piece in enumerate(pieces)}
    a, b, c = token[b"a"], token[b"b"], token[b"c"]
    drafts = {0: [a, b, a, b], 1: [a, c, a], 2: [a, b, a, b, EOS, a], 3: [a, a], 4: []}
    guides.reset()
    for row in drafts:
        guides.open(opened(None if row == 3 else choices(words), row=row))
    rounds = guides.start_masking(drafts)()
    assert [rows.tolist() for rows, _ in rounds] == [[0, 1, 2], [0, 2], [0, 2], [0, 2]]
    foreseen = [
        {row: read_words(masks.words[i]) for i, row in enumerate(rows.tolist())} for rows, masks in rounds
    ]
    assert [list(masks.are_complete) for _, masks in rounds][3] == [True, True]
    for number, token_id in enumerate([a, b, a, b]):
        advance(guides, token_id, row=0)
        assert foreseen[number][0] == foreseen[number][2] == allowed(guides, row=0)
    start = fitting({word.encode() for word in words}, b"", pieces)
    assert allowed(guides, row=1) == allowed(guides, row=4) == start
    assert guides.start_masking({3: [a]})() == []


def test_no_token_is_allowed_after_a_draft_that_the_library_cannot_follow(
    guides: Guides, pieces: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    guides.reset()
    guides.open(opened(choices(["abab"])))
    allowed(guides)
    compute, a = guides._compute_mask, next(i for i, piece in enumerate(pieces) if piece == b"a")

    def fail(guide: Any, matcher: Any, token_ids: list[int]) -> Any:
        if matcher is not guide.matcher:
            raise RuntimeError("too many states")
        return compute(guide, matcher, token_ids)

    monkeypatch.setattr(guides, "_compute_mask", fail)
    [(rows, masks)] = guides.start_masking({0: [a, a]})()
    assert rows.tolist() == [0]
    assert not masks.words.any()
    assert not masks.are_complete.any()
    advance(guides, a)
    assert allowed(guides), "the row goes on"


def test_a_library_error_ends_only_its_row(guides: Guides) -> None:
    guides.reset()
    for row in (0, 1):
        guides.open(opened(choices(["a", "b"]), row=row))
    advance(guides, -1)  # not a valid token: the library refuses it
    _, problems = guides.mask(torch.zeros(2, VOCAB_SIZE), np.array([0, 1]))
    assert problems == {0: "its grammar cannot be followed: OverflowError"}


def test_a_row_that_is_closed_or_opened_anew_is_free(guides: Guides) -> None:
    everything = set(range(VOCAB_SIZE))
    for forget in (
        lambda: guides.close(np.array([0])),
        lambda: guides.open(opened(None)),
        guides.reset,
    ):
        guides.open(opened(choices(["a", "b"])))
        assert allowed(guides) != everything
        forget()
        assert allowed(guides) == everything


def test_a_tokenizer_that_cannot_be_read_concerns_guided_rows_only(tmp_path: Path) -> None:
    guides = Guides(partial(read_tokenizer, tmp_path, VOCAB_SIZE, [EOS]), VOCAB_SIZE)
    guides.wait_until_ready()
    guides.open(opened(choices(["a", "b"])))
    logits = torch.zeros(2, VOCAB_SIZE)
    _, problems = guides.mask(logits, np.array([0, 1]))
    assert list(problems) == [0]
    assert "tokenizer" in problems[0]
    assert (logits == 0).all()


@pytest.mark.parametrize("num_more", [5, -3])
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - WITHOUT_SPELLING))
def test_every_kind_of_tokenizer_spells_matching_texts(tmp_path: Path, kind: str, num_more: int) -> None:
    """Check every kind of tokenizer with the tokenizers library's decoder.

    The models have more or fewer IDs than the tokenizer. WordPiece shows its prefix only at the start of a
    text, so the texts begin with one."""
    tokenizer = KINDS[kind](tmp_path)
    vocab_size = tokenizer.get_vocab_size() + num_more
    guides = Guides(partial(read_tokenizer, tmp_path, vocab_size, [EOS]), vocab_size)
    first = tokenizer.encode("the", add_special_tokens=False).ids
    r = random.Random(9)
    for pattern in (r"[a-z]{1,5}( [a-z]{1,4})?", r" ?the( fox)?"):
        guides.open(opened(f"{HEADER}start: /{pattern}/"))
        generated = []
        while True:
            logits = torch.zeros(1, vocab_size)
            assert guides.mask(logits, np.array([0]))[1] == {}
            token = r.choice(logits[0].isfinite().nonzero().flatten().tolist())
            if token == EOS:
                break
            generated.append(token)
            advance(guides, token)
        text = tokenizer.decode([*first, *generated]).removeprefix(tokenizer.decode(first))
        assert re.fullmatch(pattern, text), text


class Oracle:
    """Compute the logits with transformers, one token at a time, and mask them by the listed language."""

    def __init__(self, directory: Path, pieces: list[bytes]) -> None:
        self.model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.pieces = pieces

    @torch.inference_mode()
    def generate(
        self, prompt: list[int], language: set[bytes], min_new_tokens: int = 0
    ) -> tuple[list[int], list[float]]:
        """Return the greedy tokens up to the end, and their log-probabilities among the allowed tokens."""
        ids, logprobs, text = list(prompt), [], b""
        while True:
            logits = self.model(torch.tensor([ids])).logits[0, -1]
            tokens = fitting(language, text, self.pieces)
            if len(ids) - len(prompt) < min_new_tokens and tokens != {EOS}:
                tokens.discard(EOS)
            kept = torch.full_like(logits, -torch.inf)
            index = sorted(tokens)
            kept[index] = logits[index]
            ids.append(int(kept.argmax()))
            logprobs.append(float(kept.log_softmax(-1)[ids[-1]]))
            if ids[-1] == EOS:
                return ids[len(prompt) :], logprobs
            text += self.pieces[ids[-1]]


@pytest.fixture(scope="module")
def oracle(directory: Path, pieces: list[bytes]) -> Oracle:
    return Oracle(directory, pieces)


WORDS = [
    "there was a little girl",
    "there was no bread",
    "the fox",
    "quick quick quick",
    "brown dog 🙂",
    "naïve",
]
PATTERN, LANGUAGE = (
    r"(the |a )?(girl|dog|fox){1,2}",
    {
        article + one + two
        for article in ("", "the ", "a ")
        for one in ("girl", "dog", "fox")
        for two in ("", "girl", "dog", "fox")
    },
)


def guided_requests(seed: int) -> Iterator[tuple[Request, set[bytes]]]:
    r = random.Random(seed)
    for i in range(6):
        prompt = [r.randrange(2, 380) for _ in range(r.randint(1, 40))]
        words = r.sample(WORDS, 4) if i % 2 else sorted(LANGUAGE)
        grammar = choices(words) if i % 2 else f"{HEADER}start: /{PATTERN}/"
        sampling = {**GREEDY, "min_new_tokens": r.choice([0, 0, 30])}
        request = Request(prompt, 40, [EOS], sampling, {"logprobs": True}, grammar)
        yield request, {word.encode() for word in words}


@pytest.mark.parametrize("depth", [1, 2])
def test_the_engine_follows_grammars_as_a_plain_loop_does(
    runner: ModelRunner, oracle: Oracle, depth: int
) -> None:
    requests = list(guided_requests(depth))
    runner.reset()
    Router(runner, seed=depth, depth=depth).run([request for request, _ in requests])
    for request, language in requests:
        minimum = request.sampling["min_new_tokens"]
        expected, logprobs = oracle.generate(request.prompt, language, minimum)
        assert request.generated == expected
        assert request.logprobs == pytest.approx(logprobs, abs=1e-4)


def free_requests() -> list[Request]:
    r = random.Random(8)
    sampled = {**SAMPLE, "seed": 5, "top_k": 20, "repetition_penalty": 1.3}
    return [
        Request([r.randrange(2, 380) for _ in range(20)], 12, [EOS], sampling, {"logprobs": True, "top_n": 3})
        for sampling in (GREEDY, sampled, GREEDY)
    ]


def test_free_rows_are_the_same_to_the_last_bit(runner: ModelRunner) -> None:
    alone, beside = free_requests(), free_requests()
    runner.reset()
    Router(runner, seed=1, whole=True).run(list(alone))
    runner.reset()
    guided = [request for request, _ in guided_requests(3)][:3]
    mixed = [request for pair in zip(guided, beside, strict=True) for request in pair]
    Router(runner, seed=2, whole=True).run(mixed)
    for one, other in zip(alone, beside, strict=True):
        assert one.generated == other.generated
        assert one.logprobs == other.logprobs
        assert one.tops == other.tops
    assert all(request.generated[-1] == EOS for request in guided)


def test_a_sampled_row_resumes_with_the_same_tokens(runner: ModelRunner) -> None:
    sampling = {**SAMPLE, "seed": 99, "temperature": 1.5}
    grammar = f"{HEADER}start: /[a-z ]{{20,30}}/"
    whole = Request([9, 10, 11], 40, [EOS], sampling, {}, grammar)
    runner.reset()
    Router(runner).run([whole])
    assert len(whole.generated) > 8
    cut = Request([9, 10, 11], 40, [EOS], sampling, {}, grammar, generated=whole.generated[:5])
    runner.reset()
    Router(runner, seed=3).run([cut])
    assert cut.generated == whole.generated


@pytest.mark.parametrize(
    ("pattern", "num_tokens"), [("(", range(1)), ("((a{1,1000}){1,1000}){1,1000}", range(3, 100))]
)
def test_a_row_whose_grammar_fails_fails_alone(runner: ModelRunner, pattern: str, num_tokens: range) -> None:
    """Check grammars that fail at once, and grammars that grow too large during generation."""
    runner.reset()
    steps = Steps(runner.info.block_size, runner.info.num_blocks)
    good = Request([5, 6, 7], 120, grammar=f"{HEADER}start: /[a-z]*/", row=1)
    bad = Request([5, 6], 120, grammar=f"{HEADER}start: /{pattern}/", row=0)
    response = runner.launch(steps.step([(1, 0, 3), (0, 0, 2)], [opening(good), opening(bad)])).answer()
    step = 0
    while not response.errors:
        assert set(integers(response.rows)) == {0, 1}
        response = runner.launch(steps.step([(1, 3 + step, 4 + step), (0, 2 + step, 3 + step)])).answer()
        step += 1
    assert step in num_tokens
    [error] = response.errors
    assert (error.row, error.cause) == (0, pb.RowError.CAUSE_GRAMMAR)
    assert integers(response.rows) == [1]
    response = runner.launch(steps.step([(1, 3 + step, 4 + step), (0, 2 + step, 3 + step)])).answer()
    assert integers(response.rows) == [1]
    assert not response.errors
