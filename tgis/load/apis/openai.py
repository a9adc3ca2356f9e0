"""Sends requests over OpenAI's completions and chat completions."""

import json
from contextlib import aclosing
from typing import Any

from tgis.load.apis.http import HttpLinks, reading, sampling_fields, stream_error
from tgis.load.apis.interface import LoadTarget
from tgis.load.records import AnswerReceiver, Prompting
from tgis.load.workload.constraints import TextRule

DONE = b"[DONE]"


class OpenAiClient:
    """Client of both, which differ in the prompt and in where the text is."""

    def __init__(self, target: LoadTarget, is_chat: bool) -> None:
        self._links = HttpLinks(target)
        self._model = target.model
        self._is_chat = is_chat

    async def open(self) -> None:
        """Take the first model of the service if none is given."""
        models = await self._links.ask("GET", "/v1/models")
        if self._model is None:
            with reading():
                self._model = str(models["data"][0]["id"])

    async def send(self, prompting: Prompting, receiver: AnswerReceiver) -> None:
        path = "/v1/chat/completions" if self._is_chat else "/v1/completions"
        fields = self._fields(prompting)
        if not prompting.is_stream:
            with reading():
                _receive_whole(await self._links.ask("POST", path, fields), receiver)
            return
        async with aclosing(self._links.stream(path, fields)) as events:
            async for event in events:
                if event == DONE:
                    continue
                with reading():
                    _receive(json.loads(event), receiver)

    async def close(self) -> None:
        await self._links.close()

    def _fields(self, prompting: Prompting) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "model": prompting.adapter_id or self._model,
            "max_tokens": prompting.new_tokens,
            "temperature": 0.0,
            "stream": prompting.is_stream,
            **sampling_fields(prompting),
        }
        if prompting.is_stream:
            fields["stream_options"] = {"include_usage": True}
        if self._is_chat:
            fields["messages"] = [{"role": turn.role, "content": turn.text} for turn in prompting.turns]
        else:
            fields["prompt"] = list(prompting.texts) if prompting.more_texts else prompting.text
        if prompting.max_input_tokens is not None:
            fields["truncate_prompt_tokens"] = prompting.max_input_tokens
        if prompting.is_exact:
            fields |= {"ignore_eos": True, "min_tokens": prompting.new_tokens}
        return fields | _rule_fields(prompting.rule)


def _rule_fields(rule: TextRule | None) -> dict[str, Any]:
    """Return the fields of a constraint: OpenAI's for JSON, vLLM's for the others."""
    if rule is None:
        return {}
    if rule.kind == "json":
        schema = json.loads(rule.value) if isinstance(rule.value, str) else rule.value
        named = {"name": "answer", "schema": schema, "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": named}}
    return {"structured_outputs": {rule.kind: rule.value}}


def _receive(event: dict[str, Any], receiver: AnswerReceiver) -> None:
    if "error" in event:
        raise stream_error(event)
    num_texts = sum(_receive_choice(choice, receiver) for choice in event["choices"])
    usage = event.get("usage")
    if usage is None:
        # Each text is taken for a token, until the usage at the end corrects that.
        receiver.add_tokens(num_texts)
        return
    receiver.correct_tokens(usage["completion_tokens"])
    _report_usage(usage, receiver)


def _receive_whole(answer: dict[str, Any], receiver: AnswerReceiver) -> None:
    for choice in answer["choices"]:
        _receive_choice(choice, receiver)
    receiver.count_tokens(answer["usage"]["completion_tokens"])
    _report_usage(answer["usage"], receiver)


def _receive_choice(choice: dict[str, Any], receiver: AnswerReceiver) -> bool:
    """Return True if the choice has text."""
    text = _text(choice)
    number = choice.get("index", 0)
    receiver.add_text(text, number)
    receiver.end(choice.get("finish_reason"), number)
    return bool(text)


def _report_usage(usage: dict[str, Any], receiver: AnswerReceiver) -> None:
    details = usage.get("prompt_tokens_details") or {}
    receiver.report(usage["prompt_tokens"], details.get("cached_tokens"))


def _text(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return str(choice["text"])
    delta = choice["message"] if "message" in choice else choice["delta"]
    return "".join(delta.get(name) or "" for name in ("reasoning_content", "content"))
