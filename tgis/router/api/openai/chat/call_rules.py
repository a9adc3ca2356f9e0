"""Converts a model's format of calls and a request's functions to the rules that answers must follow."""

import json
from collections.abc import Callable, Iterator

from tgis.router.api.openai.chat.tools import Function, ToolUse
from tgis.router.chat.formats.harmony import FUNCTIONS, RECIPIENT
from tgis.router.chat.formats.types import (
    ChannelCall,
    JsonCall,
    LooseCall,
    NamedCall,
    PythonCall,
    TaggedCall,
    ToolFormat,
)
from tgis.router.grammar.answer_rules import CallRule, CallRules, Mark, Notation, Tags

FindMark = Callable[[str], Mark]
"""Returns the mark with this text. Its token is the one that spells the whole text."""


def make_call_rules(tool_format: ToolFormat, use: ToolUse, find_mark: FindMark) -> CallRules:
    before, after = tool_format.section
    before_call = tool_format.call[0]
    begins_each = not before and bool(before_call)
    parts = before_call if begins_each else before
    trigger, optional = tool_format.trigger, tool_format.optional_mark
    return CallRules(
        find_mark(trigger) if trigger else None,
        begins_each,
        begin=_after_trigger(parts) if trigger else "".join(parts),
        between=tool_format.between,
        end="".join(after),
        functions=tuple(
            _rule(tool_format, function, "" if begins_each else "".join(before_call))
            for function in use.functions
        ),
        is_required=use.is_required,
        allows_several=use.allows_several,
        marks=tuple(mark for mark in map(find_mark, _texts(tool_format)) if mark.token_id is not None),
        optional_mark=find_mark(optional) if optional else None,
    )


def _texts(tool_format: ToolFormat) -> Iterator[str]:
    """Yield the texts around calls, stripped of white space."""
    tags: tuple[str, ...] = ()
    separator = ""
    if isinstance(body := tool_format.body, NamedCall):
        separator = body.separator
    elif isinstance(body, LooseCall):
        tags = (body.quote,)
    elif isinstance(body, TaggedCall):
        tags = (body.key_begin, body.key_end, body.value_begin, body.value_end, body.text_key_end)
    for parts in (*tool_format.section, *tool_format.call, (separator, tool_format.optional_mark), tags):
        for part in parts:
            if text := part.strip():
                yield text


def _after_trigger(parts: tuple[str, ...]) -> str:
    """Return the texts after the first one, preceded by the trailing white space of the first one."""
    if not parts:
        return ""
    first = parts[0]
    return first[len(first.rstrip()) :] + "".join(parts[1:])


def _rule(tool_format: ToolFormat, function: Function, head: str) -> CallRule:
    tail = "".join(tool_format.call[1])
    name = function.name
    tags = notation = None
    match tool_format.body:
        case JsonCall(name_key, arguments_key):
            head += f"{{{json.dumps(name_key)}: {json.dumps(name)}, {json.dumps(arguments_key)}: "
            tail = "}" + tail
        case NamedCall(separator):
            head += name + separator
        case LooseCall(quote):
            head += name + "{"
            tail = "}" + tail
            notation = Notation(":", ",", ("true", "false", "null"), quote)
        case PythonCall():
            head += name + "("
            tail = ")" + tail
            notation = Notation("=", ", ", ("True", "False", "None"))
        case TaggedCall() as body:
            head += name + body.name_end
            ends = (body.key_end, body.value_begin, body.value_end, body.text_key_end or body.key_end)
            tags = Tags(body.key_begin, *ends)
        case ChannelCall():
            head = RECIPIENT + FUNCTIONS + name
    return CallRule(head, function.schema, tail, function.is_strict, function.field, tags, notation)
