"""Check the parameters that are read from schemas, and calls whose parameters' schemas are unsupported."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tgis.router.grammar.answer_rules import AnswerRules, CallRule, CallRules, Mark, Tags
from tgis.router.grammar.errors import InvalidGrammarError
from tgis.router.grammar.parameters import allows_any, read_parameters
from tgis.router.grammar.worker import Compiler

TAGS = Tags("<parameter=", ">\n", "", "\n</parameter>\n", ">\n")


def test_texts_and_choices() -> None:
    properties: dict[str, Any] = {
        "text": {"type": "string"},
        "choice": {"enum": ["a", "b"]},
        "one": {"const": "c"},
        "mixed": {"enum": ["a", 1]},
        "either": {"type": ["string", "null"]},
        "any": True,
    }
    read = read_parameters(json.dumps({"properties": properties, "required": ["one"]}))
    assert [each.name for each in read if each.is_text] == ["text", "choice", "one"]
    assert {each.name: each.choices for each in read if each.choices} == {"choice": ("a", "b"), "one": ("c",)}
    assert [each.name for each in read if each.is_required] == ["one"]
    assert [allows_any(text) for text in ("{}", '{"additionalProperties": false}')] == [True, False]


def test_a_reference_to_the_whole_schema_is_loosened_unless_it_is_strict() -> None:
    schema = json.dumps({"type": "object", "properties": {"child": {"$ref": "#"}}})
    call = CallRule("<function=f>\n", schema, "</function>", False, "tools[0]", TAGS)
    rules = CallRules(Mark("<tool_call>"), False, "\n", "\n", "", (call,), True, False)
    compiler = Compiler()
    assert "KEY" in compiler.compile("free", "", AnswerRules(None, rules))
    strict = replace(rules, functions=(call._replace(is_strict=True),))
    with pytest.raises(InvalidGrammarError):
        compiler.compile("free", "", AnswerRules(None, strict))
