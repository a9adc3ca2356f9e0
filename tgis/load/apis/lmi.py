"""Sends requests over the API of DJL Serving's LMI containers."""

import json
from contextlib import aclosing
from typing import Any

from tgis.load.apis.http import HttpLinks, inputs_parameters, reading, stream_error
from tgis.load.apis.interface import LoadTarget
from tgis.load.errors import AnswerError
from tgis.load.records import AnswerReceiver, Prompting

PATH = "/invocations"
LINE = b""
"""Mark of every line of a stream of JSON lines."""


class LmiClient:
    """Client of LMI's API. Only its whole answers can count the prompt's tokens."""

    def __init__(self, target: LoadTarget) -> None:
        self._links = HttpLinks(target)

    async def open(self) -> None:
        await self._links.ask("GET", "/ping")

    async def send(self, prompting: Prompting, receiver: AnswerReceiver) -> None:
        if prompting.rule is not None:
            raise AnswerError("LMI's API has no constraints")
        fields = _fields(prompting)
        if not fields["stream"]:
            with reading():
                _receive_whole(await self._links.ask("POST", PATH, fields), receiver)
            return
        async with aclosing(self._links.stream(PATH, fields, LINE)) as lines:
            async for line in lines:
                with reading():
                    _receive(json.loads(line), receiver)

    async def close(self) -> None:
        await self._links.close()


def _fields(prompting: Prompting) -> dict[str, Any]:
    parameters = inputs_parameters(prompting)
    if prompting.is_exact:
        parameters |= {"min_tokens": prompting.new_tokens, "ignore_eos_token": True}
    if prompting.counts_input:
        parameters["decoder_input_details"] = True
    fields = {"inputs": prompting.text, "parameters": parameters}
    if prompting.adapter_id is not None:
        fields["adapters"] = prompting.adapter_id
    return {**fields, "stream": prompting.is_stream and not prompting.counts_input}


def _receive_whole(answer: dict[str, Any], receiver: AnswerReceiver) -> None:
    details = answer["details"]
    receiver.add_text(answer["generated_text"])
    receiver.count_tokens(details["generated_tokens"])
    receiver.end(details["finish_reason"])
    receiver.report(len(details.get("prefill") or ()), None)


def _receive(line: dict[str, Any], receiver: AnswerReceiver) -> None:
    details = line.get("details") or {}
    if "error" in line or details.get("finish_reason") == "error":
        raise stream_error(line)
    receiver.add_text(line["token"]["text"])
    receiver.add_tokens(1)
    receiver.end(details.get("finish_reason"))
