"""Responses of LMI's API of a launched service on a tiny model: texts, tokens and log-probabilities, of text
and input, equal transformers', whole and streamed; sampled texts equal gRPC's."""

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from integration_tests.clients.expectations import Completion, Served, is_close
from integration_tests.clients.served import launch_served
from integration_tests.support.service import Client
from tests.support.http_exchange import exchange
from tgis.pb import generation_pb2 as pb

pytestmark = pytest.mark.slow

REASONS = {"stop": "eos_token", "length": "length"}
NUM_TOP = 3


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Client]]:
    with launch_served(tmp_path_factory.mktemp("served"), "--http-api", "lmi") as launched:
        yield launched


def invoke(served: Served, body: dict[str, Any]) -> bytes:
    answer = exchange(f"{served.root}/invocations", body, served.headers)
    assert answer.status == 200, answer.text
    return answer.body


def test_details_equal_those_of_transformers(launched: tuple[Served, Client]) -> None:
    served = launched[0]
    for asked in served.completions:
        parameters = {"max_new_tokens": asked.max_tokens, "details": True}
        more = {"decoder_input_details": True, "top_n_tokens": NUM_TOP}
        answer = json.loads(invoke(served, {"inputs": asked.prompt, "parameters": parameters | more}))
        assert answer["generated_text"] == asked.text
        details = answer["details"]
        check_tokens(details["tokens"], asked)
        assert details["finish_reason"] == REASONS[asked.finish_reason]
        assert details["generated_tokens"] == len(asked.output_ids)
        assert [token["id"] for token in details["prefill"]] == asked.ids
        assert is_close([token["log_prob"] for token in details["prefill"][1:]], asked.prompt_logprobs)
        for token, top in zip(details["tokens"], details["top_tokens"], strict=True):
            assert len(top) == NUM_TOP
            assert top[0]["id"] == token["id"], "greedy"
            assert sum(math.exp(each["log_prob"]) for each in top) <= 1.001
            assert [each["log_prob"] for each in top] == sorted(
                (each["log_prob"] for each in top), reverse=True
            )
        streamed = invoke(served, {"inputs": asked.prompt, "parameters": parameters, "stream": True})
        lines = [json.loads(line) for line in streamed.splitlines()]
        check_tokens([line["token"] for line in lines], asked)
        assert lines[-1]["generated_text"] == asked.text


def check_tokens(tokens: list[dict[str, Any]], asked: Completion) -> None:
    assert [token["id"] for token in tokens] == asked.output_ids
    assert is_close([token["log_prob"] for token in tokens], asked.logprobs)
    assert "".join(token["text"] for token in tokens) == asked.text


def test_sampled_texts_are_those_of_grpc(launched: tuple[Served, Client]) -> None:
    served, client = launched
    for seed, asked in enumerate(served.completions):
        params = pb.Parameters(method=pb.SAMPLE)
        params.sampling.seed, params.sampling.temperature, params.sampling.top_p = seed, 0.8, 0.9
        params.stopping.max_new_tokens = 12
        message = pb.BatchedGenerationRequest(
            requests=[pb.GenerationRequest(text=asked.prompt)], params=params
        )
        metadata = [("authorization", f"Bearer {served.api_key}")]
        wanted = client.stub.Generate(message, metadata=metadata).responses[0].text
        fields = {"max_new_tokens": 12, "seed": seed, "temperature": 0.8, "top_p": 0.9}
        body = {"inputs": [asked.prompt, asked.prompt], "parameters": fields}
        assert [each["generated_text"] for each in json.loads(invoke(served, body))] == [wanted, wanted]
