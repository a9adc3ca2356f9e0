"""Sends requests over the API of Hugging Face's Text Generation Inference."""

import json
from contextlib import aclosing
from typing import Any

from tgis.load.apis.http import HttpLinks, inputs_parameters, reading, stream_error
from tgis.load.apis.interface import LoadTarget
from tgis.load.records import AnswerReceiver, Prompting
from tgis.load.workload.constraints import TextRule


class TgiClient:
    """Client of TGI's API, which has no minimum length: texts may be shorter than wanted."""

    def __init__(self, target: LoadTarget) -> None:
        self._links = HttpLinks(target)

    async def open(self) -> None:
        await self._links.ask("GET", "/info")

    async def send(self, prompting: Prompting, receiver: AnswerReceiver) -> None:
        fields = _fields(prompting)
        if not prompting.is_stream:
            with reading():
                _receive_whole(await self._links.ask("POST", "/generate", fields), receiver)
            return
        async with aclosing(self._links.stream("/generate_stream", fields)) as events:
            async for event in events:
                with reading():
                    _receive(json.loads(event), receiver)

    async def close(self) -> None:
        await self._links.close()


def _fields(prompting: Prompting) -> dict[str, Any]:
    parameters = {**inputs_parameters(prompting), "decoder_input_details": False}
    if prompting.adapter_id is not None:
        parameters["adapter_id"] = prompting.adapter_id
    if prompting.rule is not None:
        parameters["grammar"] = _grammar(prompting.rule)
    return {"inputs": prompting.text, "parameters": parameters}


def _grammar(rule: TextRule) -> dict[str, Any]:
    if rule.kind == "json":
        return {"type": "json", "value": rule.value}
    if rule.kind == "regex":
        return {"type": "regex", "value": rule.value}
    return {"type": "regex", "value": "|".join(f"({text})" for text in rule.value)}


def _receive_whole(answer: dict[str, Any], receiver: AnswerReceiver) -> None:
    receiver.add_text(answer["generated_text"])
    receiver.count_tokens(answer["details"]["generated_tokens"])
    receiver.end(answer["details"]["finish_reason"])


def _receive(event: dict[str, Any], receiver: AnswerReceiver) -> None:
    if "error" in event:
        raise stream_error(event)
    if not event["token"].get("special"):
        receiver.add_text(event["token"]["text"])
    receiver.add_tokens(1)
    if details := event.get("details"):
        receiver.end(details.get("finish_reason"))
        receiver.report(details.get("input_length"), None)
