"""Determines how a request's answers are parsed, and which rules they follow."""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from tgis.router.api.openai.chat.call_rules import FindMark, make_call_rules
from tgis.router.api.openai.chat.tools import ToolUse
from tgis.router.api.openai.chat.types import ChatRequest
from tgis.router.api.openai.errors import ApiError
from tgis.router.chat.answers.content_scope import ContentScope
from tgis.router.chat.answers.messages import MessageParser, MessagePart, MessageReader, MessageScope
from tgis.router.chat.answers.parser import AnswerParser
from tgis.router.chat.formats import harmony
from tgis.router.chat.formats.json_list import JSON_LIST
from tgis.router.chat.formats.registry import ChatFormats
from tgis.router.chat.formats.types import ReasoningFormat, ToolFormat
from tgis.router.grammar.answer_rules import AnswerRules, CallRules, Mark, MessageRules, ReasoningRule
from tgis.router.grammar.compiler import Guided
from tgis.router.grammar.parameters import read_parameters

NO_AUTO_TOOLS = (
    'tools: tool_choice "auto", the default, does not work with this model: its chat template does not show '
    'tools, or the format of its calls is unknown; use tool_choice "required" or a function\'s name, or '
    "serve a model that calls tools, or set --chat-template and --tool-call-parser"
)
UNKNOWN_REASONING = (
    "max_reasoning_tokens: the service does not know how the model reasons; its --reasoning-parser can say it"
)
NO_MESSAGE_MARKS = "tools: the tokenizer has no tokens for the marks of the model's messages"
NO_MARKS = "max_reasoning_tokens: the model has no tokens that begin and end its reasoning"


class ReasoningForm(NamedTuple):
    """Reasoning at the beginning of an answer."""

    format: ReasoningFormat
    has_begun: bool
    """True if the reasoning begins in the prompt."""
    rule: ReasoningRule


class MessageForm(NamedTuple):
    """Messages in channels, of which an answer consists."""

    opened: str
    """Text of the message that the prompt has begun."""
    marks: tuple[Mark, ...]
    rules: MessageRules | None
    """None if the tokenizer has no tokens for the marks."""


@dataclass(frozen=True)
class AnswerForm:
    """Parts of the answers to a request."""

    has_reasoning: bool
    """True if the format of the model's reasoning is known, even if the prompt ends the reasoning."""
    shows_reasoning: bool
    reasoning: ReasoningForm | None
    tools: ToolFormat | None
    names: frozenset[str]
    """Names of the functions that the answer may call."""
    is_named: bool
    """True if the client has chosen the function."""
    calls: CallRules | None
    messages: MessageForm | None = None
    texts: frozenset[tuple[str, str]] = frozenset()
    """Functions and parameters whose values are texts."""

    @property
    def mark_ids(self) -> frozenset[int]:
        """Tokens that mark the parts."""
        marks = [*self.calls.marks] if self.calls is not None else []
        if self.reasoning is not None:
            marks += [mark for mark in (self.reasoning.rule.begin, self.reasoning.rule.end) if mark]
        if self.messages is not None:
            marks += self.messages.marks
        return frozenset(mark.token_id for mark in marks if mark.token_id is not None)

    @property
    def has_begun_reasoning(self) -> bool:
        return self.reasoning is not None and self.reasoning.has_begun

    @property
    def reasoning_format(self) -> ReasoningFormat | None:
        """Format of the reasoning that an answer may have, or None."""
        return None if self.reasoning is None else self.reasoning.format

    def parser(self) -> AnswerParser | MessageParser:
        """Return the parser of one answer."""
        if self.messages is not None:
            return MessageParser(self.messages.opened, self.has_reasoning, self.names)
        return AnswerParser(
            self.reasoning_format, self.has_begun_reasoning, self.tools, self.names, self.texts
        )

    def stop_scope(self) -> ContentScope | MessageScope:
        """Return the scope of the stop sequences of one answer."""
        if self.messages is not None:
            return MessageScope(self.messages.opened, self.has_reasoning, self.names)
        return ContentScope(self.reasoning_format, self.has_begun_reasoning, self.tools, self.names)

    def rules(self, is_constrained: bool) -> AnswerRules | None:
        """Return the rules of a grammar, or None if answers are free. `is_constrained` is True if the request
        constrains the text outside of reasoning and calls."""
        rule = None if self.reasoning is None else self.reasoning.rule
        is_limited = rule is not None and rule.max_tokens is not None
        if self.calls is None and not is_limited and not (is_constrained and rule is not None):
            return None
        return AnswerRules(rule, self.calls, None if self.messages is None else self.messages.rules)


def read_answer_form(
    formats: ChatFormats,
    use: ToolUse | None,
    prompt: str,
    body: ChatRequest,
    find_mark: FindMark,
    shows_tools: bool = True,
) -> AnswerForm | None:
    """Return the form of the answers to a prompt, or None if the answers are plain texts. `shows_tools` is
    True if the template shows tools to the model. Raises ApiError."""
    max_reasoning_tokens = body.max_reasoning_tokens
    is_channel = any(each is not None and each.is_channel for each in formats)
    tools = None if use is None else _choose_tools(formats.tools, use, shows_tools, is_channel)
    if formats.reasoning is None and max_reasoning_tokens is not None:
        raise ApiError(400, UNKNOWN_REASONING, "max_reasoning_tokens")
    if formats.reasoning is None and use is None and not is_channel:
        return None
    messages = _read_messages(prompt, formats.reasoning is not None, find_mark) if is_channel else None
    if messages is not None and messages.rules is None and use is not None:
        raise ApiError(400, NO_MESSAGE_MARKS, "tools")
    return AnswerForm(
        formats.reasoning is not None,
        body.include_reasoning is not False,
        _read_reasoning(formats.reasoning, prompt, max_reasoning_tokens, find_mark, messages),
        tools,
        frozenset(function.name for function in use.functions) if use is not None else frozenset(),
        use is not None and use.is_named,
        None if tools is None or use is None else make_call_rules(tools, use, find_mark),
        messages,
        frozenset() if use is None else _list_texts(use),
    )


def _list_texts(use: ToolUse) -> frozenset[tuple[str, str]]:
    return frozenset(
        (function.name, parameter.name)
        for function in use.functions
        for parameter in read_parameters(function.schema)
        if parameter.is_text
    )


def _choose_tools(known: ToolFormat | None, use: ToolUse, shows_tools: bool, is_channel: bool) -> ToolFormat:
    """Return the format of calls. Raises ApiError if the model does not learn of its tools."""
    if not use.is_required and (known is None or not shows_tools):
        raise ApiError(400, NO_AUTO_TOOLS, "tools")
    return harmony.HARMONY if is_channel else known or JSON_LIST


def constrain(guided: Guided | None, form: AnswerForm | None) -> Guided | None:
    """Return a request's constraint. It applies to the text outside of reasoning and calls."""
    rules = None if form is None else form.rules(is_constrained=guided is not None)
    return guided if rules is None else replace(guided or Guided(""), answer=rules)


def _read_messages(prompt: str, has_reasoning: bool, find_mark: FindMark) -> MessageForm:
    opened = harmony.find_open_message(prompt)
    marks = tuple(map(find_mark, harmony.MARKS))
    if any(mark.token_id is None for mark in marks):
        return MessageForm(opened, marks, None)
    part = MessageReader(opened, has_reasoning, frozenset()).part
    begun: dict[MessagePart, Literal["reasoning", "content"]] = {
        MessagePart.REASONING: "reasoning",
        MessagePart.CONTENT: "content",
    }
    start, channel, constrain, message, end, *_ = marks
    rules = MessageRules(
        start,
        channel,
        constrain,
        message,
        end,
        harmony.ROLE,
        harmony.REASONING,
        harmony.CALLS,
        harmony.CONTENT,
        begun.get(part, "header"),
    )
    return MessageForm(opened, marks, rules)


def _read_reasoning(
    reasoning: ReasoningFormat | None,
    prompt: str,
    max_tokens: int | None,
    find_mark: FindMark,
    messages: MessageForm | None,
) -> ReasoningForm | None:
    """Return the reasoning that an answer to the prompt may have, or None if it has none. Raises ApiError."""
    if reasoning is None:
        return None
    begin, end = find_mark(reasoning.begin), find_mark(reasoning.end)
    has_marks = begin.token_id is not None and end.token_id is not None
    if messages is not None:
        has_marks = messages.rules is not None
    if max_tokens is not None and not has_marks:
        raise ApiError(400, NO_MARKS, "max_reasoning_tokens")
    text = prompt.rstrip()
    if text.endswith(reasoning.end) and messages is None:
        return None
    has_begun = text.endswith(reasoning.begin)
    return ReasoningForm(reasoning, has_begun, ReasoningRule(None if has_begun else begin, end, max_tokens))
