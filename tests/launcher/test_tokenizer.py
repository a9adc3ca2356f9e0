"""A model without tokenizer.json is converted at start-up, without contact to a hub."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hub_server import Hub
from tests.support.processes import Service
from tests.support.shard.checkpoints import write_llama
from tests.support.tokenizers.older_kinds import write_gpt2
from tgis.pb import generation_pb2 as pb
from tgis.pb import generation_pb2_grpc


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_gpt2(directory)
    write_llama(directory, vocab_size=400, eos_token_id=0)
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    return directory


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        yield hub


def launch(model: Path, hub: Hub) -> Service:
    ports = ["--bind", "127.0.0.1", "--port", "0", "--grpc-port", "0"]
    log = ["--termination-log", str(model / "termination-log")]
    env = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "TOKENIZER_PATH": "/nowhere"}
    return Service(["launcher", "--model-name", str(model), *ports, *log], env)


@pytest.mark.slow
def test_it_is_converted_for_the_router_and_the_shard(model: Path, hub: Hub) -> None:
    before = sorted(model.iterdir())
    service = launch(model, hub).wait_until_serving()
    try:
        with service.channel() as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            tokens = stub.Tokenize(
                pb.BatchedTokenizeRequest(requests=[pb.TokenizeRequest(text="the quick fox")])
            )
            decoding = pb.DecodingParameters(regex="fo[x]{2,4}")
            asked = pb.BatchedGenerationRequest(
                requests=[pb.GenerationRequest(text="the")], params=pb.Parameters(decoding=decoding)
            )
            answer = stub.Generate(asked)
    finally:
        code = service.end()
    assert code == 0, service.output
    assert tokens.responses[0].token_count > 2
    assert answer.responses[0].text.startswith("foxx")
    assert sorted(model.iterdir()) == before
    assert not hub.requests
    assert any("Tokenizer: Saved tokenizer to" in line for line in service.lines)


@pytest.mark.slow
def test_one_that_cannot_be_converted_ends_the_start(model: Path, hub: Hub) -> None:
    (model / "tokenizer.model").write_bytes(b"no tokenizer")
    service = launch(model, hub)
    assert service.process.wait(60) == 1
    assert service.end() == 1
    assert service.lines[-1].startswith(f"error: tokenizer: the tokenizer of {model} ")
    assert not hub.requests
