"""Sends one generation through gRPC and through OpenAI's API over HTTP, from one description in plain
values."""

import json
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from integration_tests.clients.expectations import Served
from integration_tests.support.service import Client
from tests.support.streams import join_stream
from tgis.pb import generation_pb2 as pb

Fields = Mapping[str, Any]
"""Request's fields under OpenAI's and vLLM's names, without its prompt. All are set in both APIs."""
LENGTHS = {pb.MAX_TOKENS, pb.TOKEN_LIMIT, pb.TIME_LIMIT}


class Answer(NamedTuple):
    text: str
    finish_reason: str
    num_input_tokens: int
    num_tokens: int
    logprobs: tuple[float, ...] = ()
    """Log-probabilities of the generated tokens, if requested."""
    prompt_logprobs: tuple[float, ...] = ()


class Apis:
    """gRPC and OpenAI's API of a launched service, with the key that it requires."""

    def __init__(self, served: Served, client: Client) -> None:
        self._served, self._client = served, client

    @property
    def ways(self) -> dict[str, Callable[[str | list[int], Fields], Answer]]:
        return {
            "gRPC": self.generate,
            "gRPC, streamed": self.generate_stream,
            "HTTP": self.complete,
            "HTTP, streamed": self.complete_stream,
        }

    def generate(self, prompt: str | list[int], fields: Fields) -> Answer:
        text, params, metadata = self._for_grpc(prompt, fields)
        message = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text=text)], params=params)
        [response] = self._client.stub.Generate(message, metadata=metadata).responses
        return _answer(response)

    def generate_stream(self, prompt: str | list[int], fields: Fields) -> Answer:
        text, params, metadata = self._for_grpc(prompt, fields)
        message = pb.SingleGenerationRequest(request=pb.GenerationRequest(text=text), params=params)
        return _answer(join_stream(self._client.stub.GenerateStream(message, metadata=metadata)))

    def _for_grpc(
        self, prompt: str | list[int], fields: Fields
    ) -> tuple[str, pb.Parameters, list[tuple[str, str]]]:
        metadata = [("authorization", f"Bearer {self._served.api_key}"), *_metadata(fields)]
        if isinstance(prompt, str):
            return prompt, _parameters(fields), metadata
        return " ".join(map(str, prompt)), _parameters(fields), [*metadata, ("tgis-input", "ids")]

    def complete(self, prompt: str | list[int], fields: Fields) -> Answer:
        answer = self.post("completions", {"prompt": prompt, **fields})
        [choice] = answer["choices"]
        assert choice["index"] == 0
        usage, numbers = answer["usage"], _logprobs(choice)
        num_echoed = usage["prompt_tokens"] if fields.get("echo") else 0
        return Answer(
            choice["text"].removeprefix(str(prompt) if num_echoed else ""),
            choice["finish_reason"],
            usage["prompt_tokens"],
            usage["completion_tokens"],
            numbers[num_echoed:],
            numbers[1:num_echoed],
        )

    def complete_stream(self, prompt: str | list[int], fields: Fields) -> Answer:
        chunks = self.events("completions", {"prompt": prompt, **fields})
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        return Answer(
            "".join(choice["text"] for choice in choices),
            _reason(choices),
            chunks[-1]["usage"]["prompt_tokens"],
            chunks[-1]["usage"]["completion_tokens"],
            tuple(number for choice in choices for number in _logprobs(choice)),
        )

    def chat(self, messages: list[dict[str, Any]], fields: Fields) -> Answer:
        answer = self.post("chat/completions", {"messages": messages, **fields})
        [choice] = answer["choices"]
        usage, reason = answer["usage"], choice["finish_reason"]
        return Answer(
            choice["message"]["content"], reason, usage["prompt_tokens"], usage["completion_tokens"]
        )

    def chat_stream(self, messages: list[dict[str, Any]], fields: Fields) -> Answer:
        chunks = self.events("chat/completions", {"messages": messages, **fields})
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        return Answer(
            "".join(choice["delta"].get("content") or "" for choice in choices),
            _reason(choices),
            chunks[-1]["usage"]["prompt_tokens"],
            chunks[-1]["usage"]["completion_tokens"],
        )

    def post(self, path: str, fields: Fields) -> Any:
        """Return the body of the response to a POST to `path`, parsed as JSON."""
        with urllib.request.urlopen(self._request(path, fields), timeout=120) as response:
            return json.load(response)

    def events(self, path: str, fields: Fields) -> list[Any]:
        """Return the events of a stream, except for its end mark."""
        fields = {**fields, "stream": True, "stream_options": {"include_usage": True}}
        with urllib.request.urlopen(self._request(path, fields), timeout=120) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            *events, end, rest = response.read().decode().split("\n\n")
        assert (end, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def _request(self, path: str, fields: Fields) -> urllib.request.Request:
        body = json.dumps({"model": self._served.model, **fields}).encode()
        headers = {"authorization": f"Bearer {self._served.api_key}", "content-type": "application/json"}
        return urllib.request.Request(f"{self._served.base_url}/{path}", body, headers)


def _parameters(fields: Fields) -> pb.Parameters:
    temperature = fields.get("temperature", 1.0)
    params = pb.Parameters(method=pb.SAMPLE if temperature else pb.GREEDY)
    if temperature:
        params.sampling.temperature = temperature
        params.sampling.top_k, params.sampling.top_p = fields.get("top_k", 0), fields.get("top_p", 1.0)
        params.sampling.seed = fields["seed"]
    params.stopping.max_new_tokens = fields["max_tokens"]
    params.stopping.min_new_tokens = fields.get("min_tokens", 0)
    params.stopping.stop_sequences.extend(fields.get("stop", []))
    params.stopping.include_stop_sequence = fields.get("include_stop_str_in_output", False)
    params.decoding.repetition_penalty = fields.get("repetition_penalty", 0.0)
    params.truncate_input_tokens = fields.get("truncate_prompt_tokens", 0)
    guided = fields.get("structured_outputs", {})
    if "regex" in guided:
        params.decoding.regex = guided["regex"]
    if "json" in guided:
        params.decoding.json_schema = json.dumps(guided["json"])
    if "choice" in guided:
        params.decoding.choice.choices.extend(guided["choice"])
    if "logprobs" in fields:
        params.response.generated_tokens = params.response.token_logprobs = True
        params.response.input_tokens = fields.get("echo", False)
    return params


def _metadata(fields: Fields) -> list[tuple[str, str]]:
    keys = ("presence_penalty", "frequency_penalty", "min_p", "cache_salt")
    metadata = [(f"tgis-{key.replace('_', '-')}", str(fields[key])) for key in keys if key in fields]
    if "logit_bias" in fields:
        biases = ",".join(f"{token}:{bias}" for token, bias in fields["logit_bias"].items())
        metadata.append(("tgis-logit-bias", biases))
    if "stop_token_ids" in fields:
        metadata.append(("tgis-stop-token-ids", ",".join(map(str, fields["stop_token_ids"]))))
    if fields.get("ignore_eos"):
        metadata.append(("tgis-ignore-eos", "true"))
    return metadata


def _answer(response: pb.GenerationResponse) -> Answer:
    return Answer(
        response.text,
        "length" if response.stop_reason in LENGTHS else "stop",
        response.input_token_count,
        response.generated_token_count,
        tuple(token.logprob for token in response.tokens),
        tuple(token.logprob for token in response.input_tokens[1:]),
    )


def _logprobs(choice: Any) -> tuple[float, ...]:
    logprobs = choice.get("logprobs")
    return tuple(logprobs["token_logprobs"]) if logprobs else ()


def _reason(choices: list[Any]) -> str:
    """Return the finish reason, which exactly one chunk of a stream has."""
    [reason] = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    assert isinstance(reason, str)
    return reason
