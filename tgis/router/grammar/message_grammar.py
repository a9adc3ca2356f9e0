"""Writes the grammar of an answer that consists of messages in channels (`MessageRules`). Reasoning and
comments come first; then the content or one call ends the answer."""

import json
from collections.abc import Callable, Iterator

from tgis.router.grammar.answer_rules import AnswerRules, Mark, MessageRules
from tgis.router.grammar.conversion import HEADER
from tgis.router.grammar.json_schema.reading import read_schema


def write_message_grammar(
    rules: AnswerRules, messages: MessageRules, has_text_grammar: bool, number: Callable[[int], int]
) -> str:
    """Return the grammar of an answer. Its content is the rule `@text` if `has_text_grammar`, otherwise any
    text. `number` maps the token ids of marks to ids in the grammar. Raises InvalidGrammarError if a schema
    cannot be parsed."""
    return _MessageGrammar(rules, messages, has_text_grammar, number).write()


class _MessageGrammar:
    """Writer of the grammar's lines."""

    def __init__(
        self, rules: AnswerRules, messages: MessageRules, has_text_grammar: bool, number: Callable[[int], int]
    ) -> None:
        self._limit = None if rules.reasoning is None else rules.reasoning.max_tokens
        self._calls = rules.calls
        self._is_required = rules.calls is not None and rules.calls.is_required
        self._is_free = not has_text_grammar
        self._messages = messages
        self._number = number

    def write(self) -> str:
        lines = (f"{HEADER}start: {self._begin()}", *self._message_rules(), *self._text_rules())
        return "\n".join(lines)

    def _begin(self) -> str:
        match self._messages.opened:
            case "content":
                return "content"
            case "reasoning":
                return f"limited {self._next()} last"
            case "header":
                many = "*" if self._limit is None else "?"
                return "last" if self._limit == 0 else f"reasoning{many} last"

    def _message_rules(self) -> Iterator[str]:
        """Yield the rules of messages, and of those that may follow reasoning."""
        messages = self._messages
        last = [] if self._is_required else [self._body(messages.content_channel, "content")]
        if self._calls is not None:
            last += [f"call_{i}" for i in range(len(self._calls.functions))]
            yield from self._call_rules()
        if self._is_free and not self._is_required:
            last.append(f"{self._body(messages.calls_channel, 'thoughts')} {self._next()} last")
        yield f"reasoning: {self._body(messages.reasoning_channel, 'limited')} {self._next()}"
        yield f"last: {' | '.join(last)}"

    def _call_rules(self) -> Iterator[str]:
        """Yield the rules of calls, whose function may be named after or before the channel."""
        assert self._calls is not None
        channel = self._mark(self._messages.channel)
        name = self._messages.calls_channel
        rest = f'{self._mark(self._messages.constrain)}? "json" {self._mark(self._messages.message)}'
        for i, function in enumerate(self._calls.functions):
            after = f"{channel} {json.dumps(f'{name} {function.head} ')}"
            before = f"{json.dumps(f' {function.head}')} {channel} {json.dumps(f'{name} ')}"
            schema = read_schema(function.schema, function.is_strict)
            yield f"call_{i}: ({after} | {before}) {rest} %json {schema}"

    def _text_rules(self) -> Iterator[str]:
        yield "thoughts: ANYTHING"
        yield f"limited{'' if self._limit is None else f'[max_tokens={max(self._limit, 1)}]'}: ANYTHING"
        yield f"content: {'ANYTHING' if self._is_free else '@text'}"
        yield "ANYTHING: /(?s:.*)/"

    def _body(self, channel: str, text: str) -> str:
        messages = self._messages
        return f'{self._mark(messages.channel)} "{channel}" {self._mark(messages.message)} {text}'

    def _next(self) -> str:
        """Return the end of a message and the beginning of the next one."""
        messages = self._messages
        return f'{self._mark(messages.end)} {self._mark(messages.start)} "{messages.role}"'

    def _mark(self, mark: Mark) -> str:
        assert mark.token_id is not None, "marks of messages are tokens"
        return f"<[{self._number(mark.token_id)}]>"
