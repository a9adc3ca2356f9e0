"""Converts the texts of a choice to the parts of its message, or to the deltas of a stream."""

import secrets
import string
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from tgis.router.api.openai.answers.usage import finish_reason
from tgis.router.api.openai.chat.answer_form import AnswerForm
from tgis.router.api.openai.chat.types import (
    AnswerCall,
    AnswerFunction,
    AnswerMessage,
    CallDelta,
    Delta,
    FunctionDelta,
)
from tgis.router.api.service import Result
from tgis.router.chat.answers.pieces import (
    CallArguments,
    CallBegin,
    ContentText,
    Piece,
    ReasoningText,
    join_pieces,
)
from tgis.router.events import Output
from tgis.router.sequence import StopReason

TYPE = "function"
SHORT_ID_CHARACTERS = string.ascii_letters + string.digits
SHORT_ID_LENGTH = 9


class WholeAnswer(NamedTuple):
    message: AnswerMessage
    finish_reason: str | None
    num_reasoning: int


def read_answer(result: Result, form: AnswerForm | None) -> WholeAnswer:
    """Return the answer of a whole generation. Without a form, its whole text is content."""
    assert result.last is not None, "a generation ends with an output"
    if form is None:
        return WholeAnswer(AnswerMessage(result.text), finish_reason(result.last), 0)
    reader = AnswerReader(form)
    message = reader.message(result)
    return WholeAnswer(message, reader.finish_reason(result.last), reader.num_reasoning)


class AnswerReader:
    """Reader of one choice's text, which arrives with its tokens."""

    def __init__(self, form: AnswerForm) -> None:
        reasoning = form.reasoning
        self._form = form
        self._parser = form.parser()
        self._end_id = None if reasoning is None else reasoning.rule.end.token_id
        self._is_after_end = False
        self._counts = reasoning is not None
        self.num_reasoning = 0
        """Number of tokens up to the end of the reasoning."""
        self.num_calls = 0

    def read(self, output: Output) -> list[Piece]:
        """Return the pieces that are certain after this output, and after the final output the rest."""
        token_ids = [token.token_id for token in output.tokens]
        pieces = self._push(output.texts, token_ids, output.num_generated)
        if output.reason is not StopReason.NOT_FINISHED:
            pieces += self._parser.flush()
        return self._shown(pieces)

    def delta(self, piece: Piece) -> Delta:
        """Return the delta of the next piece."""
        match piece:
            case ContentText(text):
                return Delta(content=text)
            case ReasoningText(text):
                return Delta(reasoning_content=text)
            case CallBegin(name):
                self.num_calls += 1
                return self._call_delta(FunctionDelta("", name), id=self._new_id(), type=TYPE)
            case CallArguments(text):
                return self._call_delta(FunctionDelta(text))

    def message(self, result: Result) -> AnswerMessage:
        contents, reasonings = [], []
        calls: list[AnswerCall] = []
        for piece in self._read_all(result):
            match piece:
                case ContentText(text):
                    contents.append(text)
                case ReasoningText(text):
                    reasonings.append(text)
                case CallBegin(name):
                    calls.append(AnswerCall(self._new_id(), AnswerFunction(name, "")))
                case CallArguments(text):
                    calls[-1].function.arguments += text
        self.num_calls = len(calls)
        message = AnswerMessage("".join(contents) or (None if calls else ""))
        if self._form.has_reasoning and self._form.shows_reasoning:
            message.reasoning_content = "".join(reasonings) or None
        if calls:
            message.tool_calls = calls
        return message

    def finish_reason(self, output: Output) -> str | None:
        reason = finish_reason(output)
        has_chosen = reason == "stop" and self.num_calls > 0 and not self._form.is_named
        return "tool_calls" if has_chosen else reason

    def _read_all(self, result: Result) -> list[Piece]:
        pieces = self._push(result.texts, result.token_ids, len(result.token_ids))
        return self._shown(pieces + self._parser.flush())

    def _push(self, texts: Sequence[str], token_ids: Sequence[int], num_generated: int) -> list[Piece]:
        """Return the pieces that are certain after the texts of some tokens. `num_generated` is the number of
        the last token. There may be one text more than tokens."""
        parser = self._parser
        if not self._counts:
            return parser.push("".join(texts))
        pieces: list[Piece] = []
        number = num_generated - len(token_ids)
        for text, token_id in zip_longest(texts, token_ids):
            was_reasoning = parser.is_reasoning
            pieces += parser.push(text)
            number += token_id is not None
            if self._counts and (was_reasoning or parser.is_reasoning):
                # The text of the end mark may come with the next token.
                if not self._is_after_end:
                    self.num_reasoning = number
                self._is_after_end = token_id is not None and token_id == self._end_id
                # Reasoning may continue in another message.
                self._counts = not self._is_after_end or self._form.messages is not None
        return pieces

    def _shown(self, pieces: list[Piece]) -> list[Piece]:
        if not self._form.shows_reasoning:
            pieces = [piece for piece in pieces if not isinstance(piece, ReasoningText)]
        return join_pieces(pieces) if len(pieces) > 1 else pieces

    def _call_delta(self, function: FunctionDelta, **begin: str) -> Delta:
        return Delta(tool_calls=[CallDelta(self.num_calls - 1, function, **begin)])

    def _new_id(self) -> str:
        tools = self._form.tools
        if tools is not None and tools.has_short_ids:
            return "".join(secrets.choice(SHORT_ID_CHARACTERS) for _ in range(SHORT_ID_LENGTH))
        return f"chatcmpl-tool-{secrets.token_hex(16)}"
