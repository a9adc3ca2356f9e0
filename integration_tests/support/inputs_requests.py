"""Sends one generation through TGI's and LMI's APIs, from the description that `api_requests` uses."""

import json
import urllib.request
from collections.abc import Callable, Mapping
from http.client import HTTPResponse
from typing import Any

from integration_tests.clients.expectations import Served
from integration_tests.support.api_requests import Answer, Fields

UNTOLD = -1
"""Number of input tokens if a response does not have it."""
REASONS = {"eos_token": "stop", "stop_sequence": "stop", "length": "length"}
"""OpenAI's finish reasons by TGI's."""
COMMON = {
    "max_tokens": "max_new_tokens",
    "temperature": "temperature",
    "seed": "seed",
    "top_k": "top_k",
    "top_p": "top_p",
    "repetition_penalty": "repetition_penalty",
    "frequency_penalty": "frequency_penalty",
    "truncate_prompt_tokens": "truncate",
}
TGI_NAMES = {**COMMON, "stop": "stop"}
LMI_NAMES = {
    **COMMON,
    "stop": "stop_sequences",
    "include_stop_str_in_output": "include_stop_str_in_output",
    "min_p": "min_p",
    "min_tokens": "min_tokens",
    "presence_penalty": "presence_penalty",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos_token",
}
Way = Callable[[str, Fields], Answer]


class InputsApis:
    """TGI's and LMI's APIs of a launched service, with the key that it requires."""

    def __init__(self, served: Served) -> None:
        self._served = served

    def ways(self, fields: Fields) -> dict[str, Way]:
        """Return the ways in which such a request can be sent."""
        by_name: dict[str, Way] = {}
        if _tgi_parameters(fields) is not None:
            by_name |= {"TGI": self.generate, "TGI, any": self.generate_any}
            by_name |= {"TGI, streamed": self.generate_stream}
        if fields.keys() <= LMI_NAMES.keys():
            by_name |= {"LMI": self.invoke, "LMI, streamed": self.invoke_stream}
        return by_name

    def generate(self, prompt: str, fields: Fields) -> Answer:
        with self.post("/generate", tgi_body(prompt, fields)) as response:
            num_input_tokens = int(response.headers["x-prompt-tokens"])
            return _whole(json.load(response), "logprob", num_input_tokens)

    def generate_any(self, prompt: str, fields: Fields) -> Answer:
        body = tgi_body(prompt, fields)
        body["parameters"]["return_full_text"] = False
        with self.post("/", body) as response:
            [answer] = json.load(response)
            return _whole(answer, "logprob", int(response.headers["x-prompt-tokens"]))

    def generate_stream(self, prompt: str, fields: Fields) -> Answer:
        with self.post("/generate_stream", tgi_body(prompt, fields)) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            *frames, rest = response.read().decode().split("\n\n")
        assert rest == ""
        events = [json.loads(frame.removeprefix("data: ")) for frame in frames]
        assert [event["index"] for event in events] == [*range(1, len(events) + 1)]
        return _streamed(events, "logprob", events[-1]["details"]["input_length"])

    def invoke(self, prompt: str, fields: Fields) -> Answer:
        with self.post("/invocations", lmi_body(prompt, fields)) as response:
            return _whole(json.load(response), "log_prob", UNTOLD)

    def invoke_stream(self, prompt: str, fields: Fields) -> Answer:
        with self.post("/invocations", {**lmi_body(prompt, fields), "stream": True}) as response:
            lines = [json.loads(line) for line in response.read().splitlines()]
        return _streamed(lines, "log_prob", UNTOLD)

    def post(self, path: str, body: Mapping[str, Any]) -> HTTPResponse:
        headers = {**self._served.headers, "content-type": "application/json"}
        request = urllib.request.Request(self._served.root + path, json.dumps(body).encode(), headers)
        response: HTTPResponse = urllib.request.urlopen(request, timeout=120)
        return response


def tgi_body(prompt: str, fields: Fields) -> dict[str, Any]:
    """Return the body of a request that TGI's API can express."""
    parameters = _tgi_parameters(fields)
    assert parameters is not None, fields
    return {"inputs": prompt, "parameters": {**parameters, "details": True}}


def _tgi_parameters(fields: Fields) -> dict[str, Any] | None:
    """Return None if TGI's API cannot express it. A stop text is always a part of its texts."""
    given = dict(fields)
    if given.pop("include_stop_str_in_output", False) != ("stop" in fields):
        return None
    guided = given.pop("structured_outputs", None)
    if not (given.keys() <= TGI_NAMES.keys() and (guided is None or guided.keys() <= {"regex", "json"})):
        return None
    parameters = _renamed(given, TGI_NAMES)
    if guided:
        [(kind, value)] = guided.items()
        parameters["grammar"] = {"type": kind, "value": value}
    return parameters


def lmi_body(prompt: str, fields: Fields) -> dict[str, Any]:
    return {"inputs": prompt, "parameters": {**_renamed(fields, LMI_NAMES), "details": True}}


def _renamed(fields: Fields, names: Mapping[str, str]) -> dict[str, Any]:
    renamed = {names[name]: value for name, value in fields.items()}
    if not renamed["temperature"]:
        del renamed["temperature"]
    return {**renamed, "do_sample": bool(fields["temperature"])}


def _whole(answer: Any, logprob: str, num_input_tokens: int) -> Answer:
    details = answer["details"]
    shown = "".join(token["text"] for token in details["tokens"] if not _is_special(token))
    assert answer["generated_text"] == shown
    return _answer(answer, details["tokens"], logprob, num_input_tokens)


def _streamed(events: list[Any], logprob: str, num_input_tokens: int) -> Answer:
    tokens = [event["token"] for event in events]
    shown = "".join(token["text"] for token in tokens if not _is_special(token))
    assert events[-1]["generated_text"] == shown
    assert all(event.get("details") is None for event in events[:-1])
    return _answer(events[-1], tokens, logprob, num_input_tokens)


def _is_special(token: Any) -> bool:
    return bool(token.get("special") or token.get("special_token"))


def _answer(last: Any, tokens: list[Any], logprob: str, num_input_tokens: int) -> Answer:
    details = last["details"]
    assert details["generated_tokens"] == len(tokens)
    return Answer(
        last["generated_text"],
        REASONS[details["finish_reason"]],
        num_input_tokens,
        len(tokens),
        tuple(token[logprob] for token in tokens),
    )
