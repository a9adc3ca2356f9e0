"""Check token IDs that the tokenizer has and the model lacks."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from tokenizers import Tokenizer

from tests.support.router.fake_shard import VOCAB_SIZE
from tests.support.router.messages import batch, single
from tests.support.router.router_process import NUM_WORKERS, Setup, start_router, stop_router
from tests.support.tokenizers.trained import write_byte_level
from tgis.pb import generation_pb2 as pb
from tgis.pb import shard_pb2

WARNING = "beyond the model's vocabulary"
KINDS = shard_pb2.InfoResponse.ModelKind


def write_with_more_tokens(directory: Path) -> Tokenizer:
    """Build a tokenizer where `<i>` is token i, with three tokens that the model lacks."""
    tokenizer = write_byte_level(directory, VOCAB_SIZE)
    tokenizer.add_tokens([f"<{i}>" for i in range(tokenizer.get_vocab_size(), VOCAB_SIZE + 3)])
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer


@pytest.fixture(scope="module", params=[KINDS.MODEL_KIND_DECODER_ONLY, KINDS.MODEL_KIND_ENCODER_DECODER])
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    info, home = shard_pb2.InfoResponse(model_kind=request.param), tmp_path_factory.mktemp("router")
    setup = start_router(home, 1, write_tokenizer=write_with_more_tokens, info=info)
    yield setup
    assert stop_router(setup) == 0


def test_the_start_logs_their_number(setup: Setup) -> None:
    lines = [line for line in setup.service.lines if WARNING in line]
    assert len(lines) == NUM_WORKERS
    text = f"has 3 token ids {WARNING} of {VOCAB_SIZE} tokens, up to {VOCAB_SIZE + 2}: "
    assert all(text in line for line in lines)


def test_a_request_that_has_one_is_refused(setup: Setup) -> None:
    text = f"secret <{VOCAB_SIZE - 1}> <{VOCAB_SIZE + 1}> <{VOCAB_SIZE}>"
    for ask in (
        lambda: setup.stub.Generate(batch("fine", text)),
        lambda: list(setup.stub.GenerateStream(single(text))),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            ask()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        message = f"input token id {VOCAB_SIZE + 1} is beyond the model's vocabulary of {VOCAB_SIZE} tokens"
        assert caught.value.details() == message


def test_all_others_are_served(setup: Setup) -> None:
    """Check calls whose unknown token is cut off, and calls that only count tokens."""
    last = f"<{VOCAB_SIZE - 1}>"
    assert setup.stub.Generate(batch(last)).responses
    assert setup.stub.Generate(batch(f"<{VOCAB_SIZE}> {last}", truncate_input_tokens=2)).responses
    [answer] = setup.stub.Tokenize(
        pb.BatchedTokenizeRequest(requests=[pb.TokenizeRequest(text=f"<{VOCAB_SIZE}>")])
    ).responses
    assert answer.token_count == 2


def test_a_tokenizer_that_fits_is_not_mentioned(router: Setup) -> None:
    assert WARNING not in router.service.output
