"""Token details of TGI's API of a launched service equal those of the same gRPC call and, for the input,
transformers'; the best of several texts, each of which gRPC generates from its seed."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from integration_tests.clients.expectations import Served
from integration_tests.clients.served import launch_served
from integration_tests.support.service import Client
from tests.support.http_exchange import exchange
from tgis.pb import generation_pb2 as pb

pytestmark = pytest.mark.slow

NUM_NEW, NUM_TOP = 16, 3
CASES: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.4},
    {"do_sample": True, "seed": 7},
    {"temperature": 0.7, "top_k": 9, "seed": 2**40},
    {"top_p": 0.8, "seed": 3},
    {"typical_p": 0.6, "seed": 4},
    {"temperature": 1.5, "seed": 5, "truncate": 3},
    {"grammar": {"type": "regex", "value": "[a-z]{4,9}( [a-z]{2,5}){2}"}},
    {"watermark": True, "do_sample": True, "seed": 6},
    {"stop": ["e"]},
]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Client]]:
    with launch_served(tmp_path_factory.mktemp("served"), "--http-api", "tgi") as launched:
        yield launched


class Ways:
    """TGI's API and gRPC of one service, for equal requests."""

    def __init__(self, launched: tuple[Served, Client]) -> None:
        self._served, self._client = launched

    def http(self, path: str, prompt: str, parameters: dict[str, Any]) -> bytes:
        body = {"inputs": prompt, "parameters": parameters | {"max_new_tokens": NUM_NEW}}
        answer = exchange(self._served.root + path, body, self._served.headers)
        assert answer.status == 200, answer.text
        return answer.body

    def grpc(self, prompt: str, parameters: dict[str, Any]) -> pb.GenerationResponse:
        """Return the response with token ids."""
        sampled = any(name in parameters for name in ("do_sample", "temperature", "top_p", "typical_p"))
        params = pb.Parameters(method=pb.SAMPLE if sampled else pb.GREEDY)
        params.truncate_input_tokens = parameters.get("truncate", 0)
        for name in ("temperature", "top_k", "top_p", "typical_p", "seed"):
            if name in parameters:
                setattr(params.sampling, name, parameters[name])
        params.decoding.repetition_penalty = parameters.get("repetition_penalty", 0)
        if "grammar" in parameters:
            params.decoding.regex = parameters["grammar"]["value"]
        params.stopping.max_new_tokens = NUM_NEW
        params.stopping.stop_sequences.extend(parameters.get("stop", ()))
        params.stopping.include_stop_sequence = True
        response = params.response
        response.generated_tokens = response.input_tokens = response.token_logprobs = True
        response.top_n_tokens = NUM_TOP
        metadata = [("authorization", f"Bearer {self._served.api_key}"), ("tgis-tokens", "ids")]
        if parameters.get("watermark"):
            metadata.append(("tgis-watermark", "true"))
        message = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text=prompt)], params=params)
        answer: pb.GenerationResponse = self._client.stub.Generate(message, metadata=metadata).responses[0]
        return answer


@pytest.fixture(scope="module")
def ways(launched: tuple[Served, Client]) -> Ways:
    return Ways(launched)


def pairs(tokens: Any) -> list[tuple[int, float]]:
    return [(int(token.text), pytest.approx(token.logprob, abs=1e-6)) for token in tokens]


def shown(tokens: Any) -> list[tuple[int, float]]:
    return [(token["id"], token["logprob"]) for token in tokens]


def test_details_are_those_of_grpc(launched: tuple[Served, Client], ways: Ways) -> None:
    for number, case in enumerate(CASES):
        asked = launched[0].completions[number % len(launched[0].completions)]
        wanted = ways.grpc(asked.prompt, case)
        more = {"details": True, "decoder_input_details": True, "top_n_tokens": NUM_TOP}
        answer = json.loads(ways.http("/generate", asked.prompt, case | more))
        details = answer["details"]
        assert answer["generated_text"] == wanted.text, case
        assert shown(details["tokens"]) == pairs(wanted.tokens), case
        for tokens, token in zip(details["top_tokens"], wanted.tokens, strict=True):
            expected = [top for top in pairs(token.top_tokens) if top[1] != float("-inf")]
            assert shown(tokens)[: len(expected)] == expected
            assert all(top["logprob"] is None for top in tokens[len(expected) :])
        assert shown(details["prefill"])[1:] == pairs(wanted.input_tokens)[1:]
        assert details["prefill"][0]["logprob"] is None
        if "truncate" not in case:
            numbers = [token["logprob"] for token in details["prefill"][1:]]
            assert numbers == pytest.approx(asked.prompt_logprobs, abs=1e-3)
        streamed = ways.http("/generate_stream", asked.prompt, case | {"details": True})
        events = [json.loads(frame.removeprefix(b"data: ")) for frame in streamed.split(b"\n\n")[:-1]]
        assert [event["token"] for event in events] == details["tokens"]
        assert events[-1]["details"]["finish_reason"] == details["finish_reason"]


def test_the_best_of_two(launched: tuple[Served, Client], ways: Ways) -> None:
    for asked in launched[0].completions:
        more = {"best_of": 2, "details": True, "temperature": 1.3}
        answer = json.loads(ways.http("/generate", asked.prompt, more))
        best, (other,) = answer["details"], answer["details"]["best_of_sequences"]
        means = []
        for details in (best, other):
            wanted = ways.grpc(asked.prompt, {"temperature": 1.3, "seed": details["seed"]})
            assert shown(details["tokens"]) == pairs(wanted.tokens)
            means.append(sum(token.logprob for token in wanted.tokens) / len(wanted.tokens))
        assert means[0] > means[1]
