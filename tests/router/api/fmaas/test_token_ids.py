"""Tests token ids as inputs and in answers, over a real socket."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from tests.support.router.messages import PROMPT, batch, single, stopping
from tests.support.router.served_grpc import LIMITS, ServedGrpc, open_grpc, status_of
from tgis.pb import generation_pb2 as pb
from tgis.router.text.tokenizer import LONG_TEXT_BYTES

pytestmark = pytest.mark.asyncio(loop_scope="module")

INVALID = grpc.StatusCode.INVALID_ARGUMENT
IDS_IN, IDS_OUT = ("tgis-input", "ids"), ("tgis-tokens", "ids")
DETAILS = pb.ResponseOptions(
    generated_tokens=True, input_tokens=True, token_logprobs=True, top_n_tokens=2, input_text=True
)
FORM = "token ids are decimal numbers of at most 9 digits with one space between each two"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServedGrpc]:
    async with open_grpc(tmp_path_factory.mktemp("served")) as served:
        yield served


def ids_of(served: ServedGrpc, text: str) -> list[int]:
    ids: list[int] = served.tokenizer.fast.encode(text).ids
    return ids


def written(ids: list[int]) -> str:
    return " ".join(map(str, ids))


@pytest.mark.parametrize("texts", [[PROMPT], [PROMPT, "a", "naïve 東京 🙂"]])
async def test_ids_get_the_answer_of_their_text(served: ServedGrpc, texts: list[str]) -> None:
    inputs = [written(ids_of(served, text)) for text in texts]
    params = {"stopping": stopping(9), "response": DETAILS}
    of_texts = (await served.stub.Generate(batch(*texts, **params))).responses
    of_ids = (await served.stub.Generate(batch(*inputs, **params), metadata=[IDS_IN])).responses
    for text, ids, expected, actual in zip(texts, inputs, of_texts, of_ids, strict=True):
        assert (expected.text.startswith(text), actual.text.startswith(ids)) == (True, True)
        actual.text = text + actual.text.removeprefix(ids)
        assert actual == expected
    parts = [
        part async for part in served.stub.GenerateStream(single(inputs[0], **params), metadata=[IDS_IN])
    ]
    assert parts[0].text == inputs[0]
    assert "".join(part.text for part in parts).removeprefix(inputs[0]) == of_texts[0].text.removeprefix(
        texts[0]
    )


async def test_ids_out_are_those_of_the_pieces(served: ServedGrpc) -> None:
    params = {"stopping": stopping(9), "response": DETAILS}
    [pieces] = (await served.stub.Generate(batch(PROMPT, **params))).responses
    [ids] = (await served.stub.Generate(batch(PROMPT, **params), metadata=[IDS_OUT])).responses
    parts = [part async for part in served.stub.GenerateStream(single(PROMPT, **params), metadata=[IDS_OUT])]
    assert [token for part in parts for token in part.tokens] == list(ids.tokens)
    assert [token for part in parts for token in part.input_tokens] == list(ids.input_tokens)
    assert [int(token.text) for token in ids.input_tokens] == ids_of(served, PROMPT)
    for tokens in (ids.tokens, ids.input_tokens, *(token.top_tokens for token in ids.tokens)):
        for token in tokens:
            token.text = served.tokenizer.piece(int(token.text))
    assert ids == pieces
    assert len(ids.tokens) == 9


async def test_truncation_keeps_the_last_ids_and_puts_none_in_front(served: ServedGrpc) -> None:
    ids = ids_of(served, PROMPT)
    request = batch(written(ids), truncate_input_tokens=3, stopping=stopping(1))
    await served.stub.Generate(request, metadata=[IDS_IN])
    assert served.take_specs()[-1].input_ids == tuple(ids[-3:])
    many = [7] * 5000 + ids  # the first ids are not read
    for text in (written(many), f"x  {written(many)}"):
        request = batch(text, truncate_input_tokens=3, stopping=stopping(1))
        await served.stub.Generate(request, metadata=[IDS_IN])
        assert served.take_specs()[-1].input_ids == tuple(ids[-3:])


@pytest.mark.parametrize(
    "text",
    [
        *[" ", "1 ", " 1", "1  2", "1\t2", "1\n2", "1,2", "-1", "+1", "1.0", "0x1", "1_0", "٣", "²", "x"],
        *["1" * 10, "9" * 4000, "1 " * 4000, "nan", "<s>", "\0"],
    ],
)
async def test_invalid_ids_are_refused_with_the_number_of_the_input(served: ServedGrpc, text: str) -> None:
    ask = pb.BatchedTokenizeRequest(requests=[pb.TokenizeRequest(text=each) for each in ("1", "2 3", text)])
    for number, call in (
        (2, served.stub.Generate(batch("1 2", text, "3"), metadata=[IDS_IN])),
        (1, served.stub.GenerateStream(single(text), metadata=[IDS_IN])),
        (3, served.stub.Tokenize(ask, metadata=[IDS_IN])),
    ):
        assert await status_of(call) == (INVALID, f"input {number}: {FORM}")


async def test_ids_that_cannot_be_served_are_refused_as_texts_are(served: ServedGrpc) -> None:
    limit = LIMITS.max_sequence_length
    long = f"input tokens ({{}}) plus prefix length (0) must be < {limit}"
    cases = {
        "": "tokenizer error the input has no tokens",
        "1 400": "input token id 400 is beyond the model's vocabulary of 400 tokens",
        "999999999": "input token id 999999999 is beyond the model's vocabulary of 400 tokens",
        written([5] * limit): long.format(limit),
        written([5] * 500_000): long.format(500_000),
    }
    for text, error in cases.items():
        assert await status_of(served.stub.Generate(batch("1", text), metadata=[IDS_IN])) == (INVALID, error)
    fits = batch(written([5] * (limit - 1)), stopping=stopping(5))
    [response] = (await served.stub.Generate(fits, metadata=[IDS_IN])).responses
    assert (response.input_token_count, response.generated_token_count) == (limit - 1, 1)


@pytest.mark.parametrize("copies", [1, LONG_TEXT_BYTES // 10])
async def test_tokenize_accepts_and_returns_ids(served: ServedGrpc, copies: int) -> None:
    text = "naïve 東京 fox " * copies
    encoding = served.tokenizer.fast.encode(text)
    written_ids = written(encoding.ids)
    for truncated in (0, 3):
        kept = slice(-truncated if truncated else None, None)

        async def ask(text: str, truncated: int = truncated, *headers: Any) -> pb.TokenizeResponse:
            request = pb.BatchedTokenizeRequest(
                requests=[pb.TokenizeRequest(text=text)],
                return_tokens=True,
                return_offsets=True,
                truncate_input_tokens=truncated,
            )
            return (await served.stub.Tokenize(request, metadata=headers)).responses[0]

        pieces = await ask(text, truncated)
        ids = await ask(text, truncated, IDS_OUT)
        assert list(map(int, ids.tokens)) == encoding.ids[kept]
        assert (ids.token_count, ids.offsets) == (pieces.token_count, pieces.offsets)
        of_ids = await ask(written_ids, truncated, IDS_IN)
        assert (of_ids.token_count, of_ids.tokens) == (pieces.token_count, pieces.tokens)
        places = [written_ids[each.start : each.end] for each in of_ids.offsets]
        assert list(map(int, places)) == encoding.ids[kept]
        both = await ask(written_ids, truncated, IDS_IN, IDS_OUT)
        assert (both.tokens, both.offsets) == (ids.tokens, of_ids.offsets)
    empty = await ask("", 0, IDS_IN)
    assert empty == pb.TokenizeResponse()
    beyond = await ask("399 999999999", 0, IDS_IN)
    assert list(beyond.tokens) == [served.tokenizer.piece(399), ""]
