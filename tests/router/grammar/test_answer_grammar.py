"""Check whole answers under their rules, token by token, against a plain reader of the finished text."""

import itertools
import json
import random
import re
from dataclasses import replace

import pytest
from llguidance import LLMatcher

from tests.support.answer_cases import (
    ARGUMENTS,
    FORMATS,
    MARKS,
    NAMES,
    SCHEMA,
    fits,
    random_answer,
    reasoning,
    split_reasoning,
)
from tests.support.answer_walks import FIRST, KINDS, Walk, takes, token_ids, token_of, wander
from tests.support.random_schemas import random_object
from tgis.router.grammar.answer_rules import AnswerRules
from tgis.router.grammar.worker import FREE, Compiler

COMPILER = Compiler()
# One format of each kind of markers; `make test-all` tries all pairs.
FAST = {("tags", "added"), ("array", "special"), ("section", "special"), ("names", "text"), ("bare", "added")}
kinds = pytest.mark.parametrize("kind", KINDS)
forms = pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(*pair, marks=() if pair in FAST else pytest.mark.slow)
        for pair in itertools.product(FORMATS, KINDS)
    ],
)


@forms
@pytest.mark.parametrize("is_required", [True, False])
def test_every_answer_follows_its_rules(name: str, kind: str, is_required: bool) -> None:
    """Check that calls are JSON that matches its schema, whatever tokens the model prefers."""
    (_, token_id), form = KINDS[kind], FORMATS[name]
    num_calls = num_texts = num_thoughts = 0
    for seed in range(2):
        r = random.Random(seed)
        has_begun, allows_several = r.random() < 0.5, r.random() < 0.7
        rules = AnswerRules(
            reasoning(token_id, has_begun) if r.random() < 0.8 else None,
            form.rules(is_required, token_id, allows_several),
        )
        grammar = COMPILER.compile(FREE, "", rules)
        for _ in range(30):
            answer = random_answer(r, form, has_begun and rules.reasoning is not None)
            # Markers may be spelled out, although the model has tokens for them.
            text = wander(grammar, kind, [*token_ids(answer, kind if r.random() < 0.7 else "text")], r)
            if text is None:
                continue
            thoughts, rest = split_reasoning(text, has_begun) if rules.reasoning else (None, text)
            content, calls = form.read(rest)
            assert all(name in NAMES and fits(name, arguments) for name, arguments in calls), text
            assert len(calls) <= 1 or allows_several
            assert not is_required or (calls and not content.strip()), text
            num_calls += len(calls)
            num_texts += not calls
            num_thoughts += bool(thoughts)
    assert num_calls > 5
    assert num_texts > 5 or is_required
    assert num_thoughts > 5


@forms
def test_grammars_allow_the_output_of_models(name: str, kind: str) -> None:
    (_, token_id), form = KINDS[kind], FORMATS[name]
    grammars = {
        (is_required, several, thinks): COMPILER.compile(
            FREE,
            "",
            AnswerRules(
                reasoning(token_id, has_begun=False) if thinks else None,
                form.rules(is_required, token_id, several),
            ),
        )
        for is_required in (True, False)
        for several in (True, False)
        for thinks in (True, False)
    }
    for (is_required, several, thinks), grammar in grammars.items():
        for num_calls in range(4):
            calls = [(NAMES[i], json.dumps(ARGUMENTS[i], ensure_ascii=False)) for i in range(num_calls)]
            text = form.write(calls) if calls else "A text. {}<>é"
            fits_rules = num_calls == 1 or (several if calls else not is_required)
            assert takes(grammar, text, kind) == fits_rules, text
            for before in ("<think>hm</think>\n\n", "\n<think>\n</think>", "<think></think> "):
                assert takes(grammar, before + text, kind) == fits_rules or not thinks
            if form.trigger and calls:
                assert takes(grammar, "I see. " + text, kind) == (fits_rules and not is_required)
        assert not takes(grammar, form.write([(NAMES[0], '{"n": 13}')]), kind)
        assert not takes(grammar, form.write([("found", "{}")]), kind) or not form.trigger
        assert not takes(grammar, '{"parameters": {"n": 13}, "name": "find"}', kind) or form.trigger


TEXTS = [
    ("json_schema", json.dumps(SCHEMA), '{"n": 3}', '{"n": 13}'),
    ("regex", "[a-c]{2,4}", "abc", "abd"),
    ("choice", '["one", "two"]', "two", "three"),
    ("grammar", 'start: "a" more\nmore: "b"+\n%ignore / /', "a b b", "a c"),
    ("grammar", 'root ::= "a" more\nmore ::= "b"+', "abb", "ac"),
]


@kinds
@pytest.mark.parametrize(("field", "text", "right", "wrong"), TEXTS)
def test_a_constraint_begins_after_the_reasoning(
    kind: str, field: str, text: str, right: str, wrong: str
) -> None:
    _, token_id = KINDS[kind]
    for has_begun, before in ((True, "hm</think>"), (False, "<think>hm</think>"), (False, "")):
        grammar = COMPILER.compile(field, text, AnswerRules(reasoning(token_id, has_begun)))
        assert takes(grammar, before + right, kind)
        assert takes(grammar, f"{before}\n\n{right}", kind)
        assert not takes(grammar, before + wrong, kind)
        assert not takes(grammar, before, kind)
        assert not takes(grammar, "hm", kind)


@forms
@pytest.mark.parametrize(
    ("field", "text", "right", "wrong"),
    [TEXTS[0], *(pytest.param(*text, marks=pytest.mark.slow) for text in TEXTS[1:])],
)
def test_the_answer_is_a_constrained_text_or_calls(
    name: str, kind: str, field: str, text: str, right: str, wrong: str
) -> None:
    form = FORMATS[name]
    grammar = COMPILER.compile(field, text, AnswerRules(calls=form.rules(False, KINDS[kind][1])))
    assert takes(grammar, right, kind)
    assert not takes(grammar, wrong, kind)
    calls = [(each, json.dumps(ARGUMENTS[0])) for each in NAMES]
    assert takes(grammar, form.write(calls), kind)
    assert not takes(grammar, right + form.write(calls), kind)


@pytest.mark.parametrize("kind", ["special", "added"])
@pytest.mark.parametrize("has_begun", [True, False])
@pytest.mark.parametrize("budget", [0, 1, 2, 5])
def test_a_budget_ends_the_reasoning(kind: str, has_begun: bool, budget: int) -> None:
    """Check that every reasoning token counts, also those that are replayed after a lost shard."""
    rule = reasoning(token_of, has_begun, budget, kind == "special")
    grammar = COMPILER.compile(FREE, "", AnswerRules(rule, FORMATS["tags"].rules(False, token_of)))
    end, r = token_of("</think>"), random.Random(budget)
    lengths = set()
    for _ in range(20):
        walk = Walk(grammar, kind)
        if not has_begun:
            assert len(walk.allowed()) > 100, "the answer may begin with a text"
            walk.push(token_of("<think>"))
        while (allowed := walk.allowed()) != {end}:
            assert len(allowed) > 10
            assert not walk.may_end
            walk.push(r.choice([i for i in allowed if i < 128 or (i >= FIRST and i != end)]))
        lengths.add(len(walk.ids) - (not has_begun))
        again = LLMatcher(KINDS[kind][0], grammar, log_level=0)
        assert again.consume_tokens(walk.ids)
        assert int.from_bytes(again.compute_bitmask(), "little") == 1 << end
        walk.push(end)
        assert walk.may_end
        assert len(walk.allowed()) > 100
    is_exact = has_begun or kind == "special" or budget < 2
    assert lengths <= ({budget} if is_exact else {budget - 1, budget})


def test_arguments_fit_random_schemas() -> None:
    """Check several functions with separate schemas; answers are written with random tokens."""
    num_calls = 0
    form, token_id = FORMATS["tags"], KINDS["added"][1]
    for seed in range(40):
        r = random.Random(seed)
        schemas = {name: random_object(r) for name in NAMES}
        rules = form.rules(True, token_id)
        functions = tuple(
            function._replace(schema=json.dumps(schemas[name].schema), is_strict=r.random() < 0.5)
            for name, function in zip(NAMES, rules.functions, strict=True)
        )
        grammar = COMPILER.compile(FREE, "", AnswerRules(calls=replace(rules, functions=functions)))
        for _ in range(5):
            text = wander(grammar, "added", [], r)
            _, calls = form.read(text) if text else ("", [])
            assert all(schemas[name].fits(arguments) for name, arguments in calls), text
            num_calls += len(calls)
    assert num_calls > 150


def test_tokens_are_those_of_the_rules() -> None:
    form = FORMATS["section"]
    rules = AnswerRules(reasoning(lambda mark: 151_600 + MARKS.index(mark), True, 9))
    rules = replace(rules, calls=form.rules(False, lambda mark: 151_600 + MARKS.index(mark)))
    grammar = COMPILER.compile(FREE, "", rules)
    ids = {int(result) for result in re.findall(r"<\[(\d+)\]>", grammar)}
    used = ["</think>", form.trigger, *form.marks]
    assert ids == {151_600 + MARKS.index(mark) for mark in used}
