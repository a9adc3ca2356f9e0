"""What a measurement sends."""

import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tgis.load.errors import LoadError
from tgis.load.workload.constraints import RULES, TextRule, follows, parse_shares
from tgis.load.workload.conversations import Conversation, ConversationSource, TokenScale, Workload
from tgis.load.workload.lengths import parse_lengths

SCALE = TokenScale(per_word=1.0)


def make(count: int = 400, first: int = 0, **fields: object) -> list[Conversation]:
    source = ConversationSource(Workload(**fields), SCALE)  # type: ignore[arg-type]
    return [source.make(first + index) for index in range(count)]


def words(conversation: Conversation) -> list[str]:
    return conversation.turns[0].text.split()


def test_conversations_follow_from_seed_and_number() -> None:
    assert make(20) == make(20)
    assert make(20)[7] == make(3, first=6)[1]
    assert make(20)[0].turns != make(20, seed=1)[0].turns
    assert len({one.turns[0].text for one in make()}) == 400


@pytest.mark.parametrize(
    ("text", "low", "high", "mean"),
    [
        ("12", 12, 12, 12.0),
        ("10-20", 10, 20, 15.0),
        ("normal:50:5", 25, 75, 50.0),
        ("lognormal:50:0.5", 1, 900, 50 * np.exp(0.125)),
        ("10:0.75,50:0.25", 10, 50, 20.0),
    ],
)
def test_lengths_follow_their_distribution(text: str, low: int, high: int, mean: float) -> None:
    lengths, source = parse_lengths(text), random.Random(4)
    drawn = [lengths.draw(source) for _ in range(4000)]
    assert min(drawn) >= low
    assert max(drawn) <= high
    assert np.mean(drawn) == pytest.approx(mean, rel=0.03)


@pytest.mark.parametrize(
    "text", ["", "0", "x", "5-3", "1-2-3", "normal:5", "lognormal:0:1", "3:0.5,4", "3:-1,4:2"]
)
def test_other_lengths_are_refused(text: str) -> None:
    with pytest.raises(LoadError, match="distribution of lengths"):
        parse_lengths(text)


def test_prompts_have_the_length_that_the_service_counts() -> None:
    scale = TokenScale(per_word=2.0, overhead=10.0)
    [turn] = ConversationSource(Workload(input_tokens="110", output_tokens="9"), scale).make(0).turns
    assert len(turn.text.split()) == 50
    assert turn.new_tokens == 9


def test_cut_prompts_have_a_word_for_each_token_of_the_drawn_length() -> None:
    made = make(50, cuts_prompts=True, input_tokens="10-20")
    lengths = {one.turns[0].max_input_tokens for one in made}
    assert lengths == set(range(10, 21))
    assert all(len(words(one)) == one.turns[0].max_input_tokens for one in made)


def test_given_texts_and_ids_take_turns() -> None:
    made = make(7, texts=("a", "b", "c"), adapter_ids=("x", "y"), soft_prompt_ids=("p",))
    assert [one.turns[0].text for one in made] == list("abcabca")
    assert [one.adapter_id for one in made] == list("xyxyxyx")
    assert {one.soft_prompt_id for one in made} == {"p"}


def test_prefixes_are_shared() -> None:
    made = [words(one) for one in make(prefix_tokens=30, num_prefixes=3, input_tokens="50")]
    assert {len(one) for one in made} == {50}
    assert len({tuple(one[:30]) for one in made}) == 3
    assert len({tuple(one[:31]) for one in made}) > 100


def test_shares_of_adapters_prompts_and_constraints() -> None:
    made = make(
        2000,
        adapter_ids=("a", "b"),
        adapter_share=0.5,
        soft_prompt_ids=("p",),
        soft_prompt_share=0.25,
        constraints=(("json", 0.2), ("choice", 0.1)),
        input_tokens="2",
    )
    adapters = Counter(one.adapter_id for one in made)
    rules = Counter(one.rule.kind if one.rule else None for one in made)
    assert adapters["a"] / 2000 == pytest.approx(0.25, abs=0.03)
    assert adapters["b"] / 2000 == pytest.approx(0.25, abs=0.03)
    assert sum(one.soft_prompt_id == "p" for one in made) / 2000 == pytest.approx(0.25, abs=0.03)
    assert rules["json"] / 2000 == pytest.approx(0.2, abs=0.03)
    assert rules["choice"] / 2000 == pytest.approx(0.1, abs=0.03)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_repeats_have_the_content_and_seed_of_the_one_before(share: float) -> None:
    made = make(200, repeat_share=share)
    repeats = [one for one in made if one.repeats is not None]
    assert len(repeats) == 200 * share
    for one in repeats:
        before = made[one.index - 1]
        assert (one.repeats, one.turns, one.seed) == (before.index, before.turns, before.seed)
        assert before.repeats is None


def test_distinct_conversations_repeat_in_turn() -> None:
    made = make(50, num_distinct=7, cancel_share=0.5)
    for one in made[7:]:
        before = made[one.index % 7]
        assert (one.repeats, one.turns, one.seed) == (before.index, before.turns, before.seed)
    assert [one.repeats for one in made[:7]] == [None] * 7
    assert len({one.turns for one in made}) == 7
    are_whole = {one.cancel_after is None for one in made[::7]}
    assert are_whole == {True, False}, "a cancellation belongs to a request, not to its content"


def test_calls_of_several_prompts_whole_answers_and_cancellations() -> None:
    shares: dict[str, Any] = {"unary_share": 0.5, "sampled_share": 0.25, "cancel_share": 0.5}
    made = make(2000, input_tokens="9", batch="1:0.5,3:0.5", **shares)
    sizes = Counter(1 + len(one.turns[0].more_texts) for one in made)
    assert sizes[1] / 2000 == pytest.approx(0.5, abs=0.04)
    assert set(sizes) == {1, 3}
    assert len({text for one in made for text in (one.turns[0].text, *one.turns[0].more_texts)}) > 3000
    assert sum(one.is_unary for one in made) / 2000 == pytest.approx(0.5, abs=0.04)
    assert sum(one.is_sampled for one in made) / 2000 == pytest.approx(0.25, abs=0.04)
    cancelled = [one for one in made if one.cancel_after is not None]
    assert len(cancelled) / 2000 == pytest.approx(0.5**3, abs=0.03)
    assert not any(one.is_unary or one.turns[0].more_texts for one in cancelled)
    assert {one.cancel_after for one in cancelled} < set(range(64))
    assert len({one.cancel_after for one in cancelled}) > 32


def test_further_prompts_of_a_call_are_made_like_the_first(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in "abc"))
    for fields in ({"texts": ("a", "b", "c")}, {"prompt_file": str(path)}):
        made = make(3, batch="2", **fields)
        texts = ["".join((one.turns[0].text, *one.turns[0].more_texts)) for one in made]
        assert texts == ["ab", "bc", "ca"]
    [one] = make(1, batch="3", cuts_prompts=True, input_tokens="10-20")
    assert {len(text.split()) for text in one.turns[0].more_texts} == {one.turns[0].max_input_tokens}


def test_files_of_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    entries = [
        {"prompt": "one", "max_new_tokens": 3},
        {"prompt": "two", "regex": "a+"},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "three"}]},
    ]
    path.write_text("\n".join(map(json.dumps, entries)))
    one, two, three, again = make(4, prompt_file=str(path), output_tokens="8")
    assert [(turn.text, turn.new_tokens) for turn in one.turns] == [("one", 3)]
    assert (two.turns[0].new_tokens, two.rule) == (8, TextRule("regex", "a+"))
    assert three.turns[0].text == "three"
    assert again.turns == one.turns


def test_files_of_sharegpt(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    turns = [("human", "hello"), ("gpt", "good day to you"), ("human", "bye"), ("gpt", "see you")]
    silent = {"conversations": [{"from": "gpt", "value": "nobody asked"}]}
    entry = {"id": "x", "conversations": [{"from": role, "value": text} for role, text in turns]}
    path.write_text(json.dumps([silent, entry]))
    [whole] = make(1, prompt_file=str(path), turns=0)
    assert [(turn.text, turn.new_tokens) for turn in whole.turns] == [("hello", 4), ("bye", 2)]
    [first] = make(1, prompt_file=str(path))
    assert [turn.text for turn in first.turns] == ["hello"]


@pytest.mark.parametrize(
    ("text", "why"), [("", "no prompts"), ("{", "neither"), ('{"text": "x"}', "entry 1"), ("[3]", "entry 1")]
)
def test_other_files_are_refused(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_text(text)
    with pytest.raises(LoadError, match=why):
        make(1, prompt_file=str(path))


@pytest.mark.parametrize("text", ["json", "json=x", "xml=0.1", "json=0.6,regex=0.6", "json=-1"])
def test_other_shares_are_refused(text: str) -> None:
    with pytest.raises(LoadError):
        parse_shares(text)


@pytest.mark.parametrize(
    ("kind", "text", "is_right"),
    [
        ("json", '{"name": "a", "count": 3, "known": true}', True),
        ("json", ' {"known": false, "count": 3, "name": ""}\n', True),
        ("json", '{"name": "a", "count": 3}', False),
        ("json", '{"name": "a", "count": true, "known": true}', False),
        ("json", '{"name": "a", "count": 3, "known": 1}', False),
        ("json", "[]", False),
        ("json", '{"name": "a"', False),
        ("regex", "abc-12", True),
        ("regex", "abc-12\n", False),
        ("choice", "yes", True),
        ("choice", "yes ", False),
    ],
)
def test_texts_are_checked_against_their_constraint(kind: str, text: str, is_right: bool) -> None:
    assert follows(RULES[kind], text) is is_right


def test_the_regex_is_one() -> None:
    assert re.compile(RULES["regex"].value)
