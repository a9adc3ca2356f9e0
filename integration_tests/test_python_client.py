"""The Python client with a launched service on a tiny checkpoint, compared with transformers."""

from collections.abc import Iterator

import pytest

from integration_tests.support.greedy_answers import Model, check
from integration_tests.support.served_models import FLAGS
from integration_tests.support.service import Client as Stubs
from integration_tests.support.service import serve
from integration_tests.support.tuned_files import LINEAR, SoftPrompt, embeddings, write_adapter, write_prompt
from tests.support.blocking_clients import CLIENTS, OpenClient
from tgis.pb import generation_pb2 as pb
from tgis_client import InvalidRequestError, Parameters

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def service(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stubs]:
    store = tmp_path_factory.mktemp("store")
    write_prompt(store / "eight", SoftPrompt(embeddings(8, 1)))
    write_adapter(store / "sql", model.directory, 3, LINEAR)
    yield from serve(
        model.directory, *FLAGS, "--prefix-store-path", str(store), "--adapter-cache", str(store)
    )


@pytest.fixture(params=CLIENTS)
def open_client(request: pytest.FixtureRequest) -> OpenClient:
    return CLIENTS[request.param]


def target_of(service: Stubs) -> str:
    return f"127.0.0.1:{service.service.grpc_port}"


def test_answers_are_transformers(open_client: OpenClient, service: Stubs, model: Model) -> None:
    with open_client(target_of(service)) as client:
        for expected in model.expected[:8]:
            parameters = Parameters(
                max_new_tokens=expected.max_new_tokens,
                tokens=True,
                input_tokens=True,
                logprobs=True,
                ranks=True,
                top_n_tokens=2,
            )
            check(expected, client.generate(expected.prompt, parameters))
            stream = client.stream(expected.prompt, parameters)
            assert len(list(stream)) > 2
            check(expected, stream.result)
            [tokens] = client.tokenize([expected.prompt])
            assert list(tokens.tokens) == expected.input_pieces


def test_constrained_answers(open_client: OpenClient, service: Stubs) -> None:
    with open_client(target_of(service)) as client:
        assert client.generate("girl", Parameters(choices=["fox", "dog"])).text in ("fox", "dog")
        assert client.generate("girl", Parameters(regex="a{3}b")).text == "aaab"
        schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
        text = client.generate("girl", Parameters(json_schema=schema, max_new_tokens=60)).text
        assert "".join(text.split()).startswith('{"a":1')


def test_prompts_and_adapters(open_client: OpenClient, service: Stubs) -> None:
    texts = []
    with open_client(target_of(service)) as client:
        for ids in ({}, {"prefix_id": "eight"}, {"adapter_id": "sql"}, {"prefix_id": "sql"}):
            request = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text="girl")], **ids)
            texts.append(client.generate("girl", **ids).text)
            assert texts[-1] == service.stub.Generate(request).responses[0].text
        with pytest.raises(InvalidRequestError):
            client.generate("girl", adapter_id="missing")
    assert len(set(texts)) == 3
    assert texts[2] == texts[3]
