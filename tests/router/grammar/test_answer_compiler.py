"""Check which answer rules are refused, with which errors, and which compiled rules are cached."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from tests.support.answer_cases import FORMATS, SCHEMA, reasoning
from tests.support.answer_walks import takes, token_of
from tgis.router.errors import RequestError
from tgis.router.grammar.answer_rules import AnswerRules, CallRule, Notation
from tgis.router.grammar.compiler import GrammarCompiler, Guided, read_constraint

MAX_BYTES = 1 << 16


@pytest_asyncio.fixture
async def grammars() -> AsyncIterator[GrammarCompiler]:
    grammars = GrammarCompiler()
    yield grammars
    grammars.close()


def functions(*schemas: object, is_strict: bool = True) -> tuple[CallRule, ...]:
    rules = FORMATS["tags"].rules(False, token_of)
    return tuple(
        rules.functions[0]._replace(
            head=f'{{"name": "f{i}", "arguments": ',
            schema=json.dumps(schema),
            is_strict=is_strict,
            field=f"tools[{i}].function.parameters",
        )
        for i, schema in enumerate(schemas)
    )


def guided(
    *schemas: object, is_strict: bool = True, field: str = "", text: str = "", budget: int | None = None
) -> Guided:
    calls = replace(
        FORMATS["tags"].rules(False, token_of), functions=functions(*schemas, is_strict=is_strict)
    )
    rules = AnswerRules(reasoning(token_of, True, budget), calls if schemas else None)
    return Guided(field, text, answer=rules)


OBJECT = {"type": "object"}
UNSUPPORTED = {"type": "object", "properties": {"a": {"type": "string", "contentEncoding": "base64"}}}
UNSUPPORTED["minProperties"] = UNSUPPORTED["patternProperties"] = UNSUPPORTED["propertyNames"] = {}
IMPOSSIBLE = {"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}}
REFUSED = [
    (guided(OBJECT, IMPOSSIBLE), "tools[1].function.parameters is not valid: "),
    (guided(OBJECT, OBJECT, {"type": "strange"}), "tools[2].function.parameters is not valid: Invalid type"),
    (guided(OBJECT, {"not": {"type": "string"}}), "tools[1].function.parameters is not valid: "),
    (guided(OBJECT, {"$ref": "http://127.0.0.1:9/x"}), "tools[1].function.parameters is not valid: "),
    (guided(OBJECT, {"enum": ["x" * MAX_BYTES]}), f"tools must have at most {MAX_BYTES} UTF8 bytes"),
    (guided(OBJECT, field="regex", text="(a"), "regex is not valid: unclosed group"),
    (guided(OBJECT, field="regex", text="a" * MAX_BYTES), "tools must have at most"),
    (guided(field="json_schema", text="{"), "json_schema is not valid: "),
    (guided(*[{"type": "integer", "multipleOf": 999_983 + i} for i in range(9)]), "tools"),
]


async def test_refusals_name_the_field_that_is_wrong(grammars: GrammarCompiler) -> None:
    for asked, expected in REFUSED:
        with pytest.raises(RequestError) as error:
            await text_of(grammars, asked)
        assert str(error.value).startswith(expected)
        assert str(error.value).isprintable()
        assert len(str(error.value)) < 260


async def text_of(grammars: GrammarCompiler, asked: Guided) -> str:
    constraint = read_constraint(asked, MAX_BYTES)
    assert constraint is not None
    grammar = await grammars.compile(constraint)
    has_calls = asked.answer is not None and asked.answer.calls is not None
    assert grammar.field == (asked.field or ("tools" if has_calls else "max_reasoning_tokens"))
    return grammar.text


async def test_schemas_without_strict_may_use_unsupported_keywords(grammars: GrammarCompiler) -> None:
    schema = {**OBJECT, "properties": {"a": {"type": "string"}}, "not": {"required": ["b"]}}
    grammar = await text_of(grammars, guided(schema, is_strict=False))
    call = '<call>\n{"name": "f0", "arguments": {"a": %s}}\n</call>'
    assert takes(grammar, "hm</think>" + call % '"x"', "added")
    assert not takes(grammar, "hm</think>" + call % "1", "added")
    with pytest.raises(RequestError):
        await text_of(grammars, guided(schema))


HOPELESS = {**OBJECT, "patternProperties": {"^a": {"type": "string"}, "b$": {"type": "integer"}}}


async def test_a_schema_that_no_grammar_keeps_does_not_disable_other_tools(grammars: GrammarCompiler) -> None:
    """Check a function that is not strict; its own arguments may then be any object."""
    other = {**OBJECT, "properties": {"n": {"type": "integer"}}, "additionalProperties": False}
    grammar = await text_of(grammars, guided(HOPELESS, other, is_strict=False))
    call = '</think><call>\n{"name": "f%d", "arguments": %s}\n</call>'
    assert takes(grammar, call % (0, '{"ab": [1]}'), "added")
    assert not takes(grammar, call % (0, "[1]"), "added")
    assert takes(grammar, call % (1, '{"n": 1}'), "added")
    assert not takes(grammar, call % (1, '{"n": "x"}'), "added")
    with pytest.raises(RequestError, match=r"tools\[0\]\.function\.parameters is not valid: .* not disjoint"):
        await text_of(grammars, guided(HOPELESS, other))


async def test_names_that_a_notation_cannot_write(grammars: GrammarCompiler) -> None:
    """The arguments of a function that is not strict may then be any."""
    notation = Notation("=", ", ", ("True", "False", "None"))
    schema = {**OBJECT, "properties": {'a"b': {"type": "integer"}}, "required": ['a"b']}

    def ask(is_strict: bool) -> Guided:
        asked = guided(schema, is_strict=is_strict)
        assert asked.answer is not None
        assert asked.answer.calls is not None
        [function] = asked.answer.calls.functions
        function = function._replace(head="f(", tail=")", notation=notation)
        calls = replace(asked.answer.calls, functions=(function,))
        return Guided("", "", answer=replace(asked.answer, calls=calls))

    grammar = await text_of(grammars, ask(False))
    assert takes(grammar, '</think><call>\nf(a="x")', "added")
    with pytest.raises(RequestError, match=r"tools\[0\]\.function\.parameters is not valid: the model's"):
        await text_of(grammars, ask(True))


async def test_formats_that_are_not_enforced_are_logged_once(
    grammars: GrammarCompiler, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    schema = {**OBJECT, "properties": {"secret word": {"type": "string", "format": "secret format"}}}
    for _ in range(2):
        await text_of(grammars, guided(schema))
        await text_of(grammars, guided(OBJECT))
    assert [record.getMessage() for record in caplog.records] == [
        "a JSON schema has unsupported formats, which allow any string"
    ]


async def test_rules_are_part_of_the_cache_key(grammars: GrammarCompiler) -> None:
    texts = [
        await text_of(grammars, asked)
        for asked in (
            guided(OBJECT),
            guided(OBJECT, budget=7),
            guided(OBJECT, budget=8),
            guided(SCHEMA),
            guided(OBJECT, field="regex", text="a"),
            Guided("regex", "a"),
            guided(budget=8),
        )
    ]
    assert len(set(texts)) == len(texts)
    assert await text_of(grammars, guided(OBJECT, budget=8)) == texts[2]


async def test_as_many_functions_as_a_request_may_have(grammars: GrammarCompiler) -> None:
    schemas = [
        {
            "type": "object",
            "description": f"function {i}",
            "properties": {f"p{i}": {"type": "string"}, "n": {"type": "integer"}, "a": {"type": "array"}},
            "required": [f"p{i}"],
        }
        for i in range(128)
    ]
    grammar = await text_of(grammars, guided(*schemas, is_strict=False))
    call = '</think><call>\n{"name": "f%d", "arguments": {"p%d": "x"}}\n</call>'
    assert takes(grammar, call % (127, 127), "special")
    assert not takes(grammar, call % (12, 13), "special")
