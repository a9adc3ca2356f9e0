"""Checks the inputs, outputs and limits of an encoder-decoder model through the public service."""

import json
import math
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import grpc
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from tests.support.router.fake_shard import BLOCK_SIZE, EOS, PAD
from tests.support.router.http_port import get, metric
from tests.support.router.messages import batch, single, stopping
from tests.support.router.model_of_contents import Item, Library
from tests.support.router.model_of_shard import context, join_digests, next_token
from tests.support.router.router_process import MAX_SEQUENCE_LENGTH, Setup, start_router, stop_router
from tgis.pb import generation_pb2 as pb
from tgis.pb import shard_pb2

WORDS = "the quick brown fox jumps over a lazy dog once upon time there was little girl who had no bread"
SPECIAL = ["<s>", "</s>", "<unk>"]
PIECES = [*SPECIAL, *(f"▁{word}" for word in WORDS.split()), "▁", *"abcdefghijklmnopqrstuvwxyzTQ0123456789"]
VOCAB_SIZE = len(PIECES)
DECODER_START = 0
SWITCH_LEN = 40
PROMPT = "The quick brown fox"
PROMPTS = {"none": (0, 0), "decoder": (9, 0), "encoder": (0, 5), "both": (3, 4)}
"""Numbers of virtual tokens of the decoder and of the encoder, by soft prompt."""
ALL_DETAILS = {
    "input_tokens": True,
    "generated_tokens": True,
    "token_logprobs": True,
    "token_ranks": True,
    "top_n_tokens": 2,
}


def write_tokenizer(directory: Path) -> Tokenizer:
    """Write a tokenizer like T5's: inputs end with </s>, and pieces contain their leading space."""
    tokenizer = Tokenizer(models.Unigram([(piece, -len(PIECES) / len(piece)) for piece in PIECES], unk_id=2))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", EOS)])
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "T5Tokenizer", "eos_token": "</s>"})
    )
    return tokenizer


def write_bare_tokenizer(directory: Path) -> Tokenizer:
    """Write a tokenizer that adds no </s> to its inputs."""
    tokenizer = write_tokenizer(directory)
    tokenizer.post_processor = processors.Sequence([])
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer


def model(num_blocks: int = 0) -> shard_pb2.InfoResponse:
    """Return the info of the model. With `num_blocks` 0, its cache has the default size."""
    return shard_pb2.InfoResponse(
        model_kind=shard_pb2.InfoResponse.MODEL_KIND_ENCODER_DECODER,
        vocab_size=VOCAB_SIZE,
        decoder_start_token_id=DECODER_START,
        rope_switch_len=SWITCH_LEN,
        num_blocks=num_blocks,
    )


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    directory, library = tmp_path_factory.mktemp("t5"), Library()
    for name, (num_decoder, num_encoder) in PROMPTS.items():
        library.put(Item(name, num_decoder, num_encoder), name)
    setup = start_router(directory, 1, write_tokenizer=write_tokenizer, info=model(), library=library)
    yield setup
    assert stop_router(setup) == 0, setup.service.output
    assert library.faults == []


def expected_tokens(
    encoder_ids: list[int], max_new_tokens: int, min_new_tokens: int = 0, prompt: str = "none"
) -> list[int]:
    num_decoder, num_encoder = PROMPTS[prompt]
    encoder_ids, tokens = [PAD] * num_encoder + encoder_ids, [PAD] * num_decoder + [DECODER_START]
    prompt_len, digests = len(tokens), "" if prompt == "none" else join_digests("", prompt)
    while len(tokens) < prompt_len + max_new_tokens and tokens[-1] != EOS:
        seed = context(encoder_ids, len(tokens) > SWITCH_LEN, digests)
        token = next_token(tokens, VOCAB_SIZE, seed)
        is_masked = token == EOS and len(tokens) - prompt_len < min_new_tokens
        tokens.append(token + is_masked)
    return tokens[prompt_len:]


def input_ids(setup: Setup, text: str) -> list[int]:
    ids: list[int] = setup.tokenizer.encode(text).ids
    return ids


def text_of(setup: Setup, tokens: list[int]) -> str:
    """Return the text that the tokenizers library decodes from all tokens at once."""
    text: str = setup.tokenizer.decode(tokens, skip_special_tokens=True)
    return text


def test_unary_answer(t5: Setup) -> None:
    ids = input_ids(t5, PROMPT)
    tokens = expected_tokens(ids, 20)
    [response] = t5.stub.Generate(batch(PROMPT)).responses
    assert response.text == text_of(t5, tokens)
    assert response.input_token_count == len(ids)
    assert response.generated_token_count == len(tokens)
    assert response.stop_reason == (pb.EOS_TOKEN if tokens[-1] == EOS else pb.MAX_TOKENS)


def test_answers_begin_without_the_space_of_their_first_piece(t5: Setup) -> None:
    texts = [f"{i} little girls had no bread" for i in range(60)]
    answers = t5.stub.Generate(batch(*texts, stopping=stopping(9))).responses
    tokens = [expected_tokens(input_ids(t5, text), 9) for text in texts]
    assert [answer.text for answer in answers] == [text_of(t5, some) for some in tokens]
    firsts = [t5.tokenizer.id_to_token(some[0]) for some in tokens]
    assert any(piece.startswith("▁") for piece in firsts)


@pytest.mark.parametrize("text", [PROMPT, ""])
def test_an_echoed_input_is_set_apart_in_an_answer_but_not_in_a_stream(t5: Setup, text: str) -> None:
    params = {"response": pb.ResponseOptions(input_text=True)}
    [unary] = t5.stub.Generate(batch(text, **params)).responses
    generated = text_of(t5, expected_tokens(input_ids(t5, text), 20))
    assert unary.text == f"{text}\n\n{generated}"
    header, *rest = t5.stub.GenerateStream(single(text, **params))
    assert header == pb.GenerationResponse(input_token_count=len(input_ids(t5, text)), text=text)
    assert "".join(part.text for part in rest) == generated


def test_stream_is_the_unary_answer_in_pieces(t5: Setup) -> None:
    params = {"response": pb.ResponseOptions(generated_tokens=True, input_tokens=True)}
    [unary] = t5.stub.Generate(batch(PROMPT, **params)).responses
    header, inputs, *rest = t5.stub.GenerateStream(single(PROMPT, **params))
    assert header == pb.GenerationResponse(input_token_count=unary.input_token_count)
    assert inputs == pb.GenerationResponse(
        input_tokens=unary.input_tokens, input_token_count=unary.input_token_count
    )
    assert "".join(part.text for part in rest) == unary.text
    assert [token for part in rest for token in part.tokens] == list(unary.tokens)
    counts = [part.generated_token_count for part in rest]
    assert counts == list(accumulate(len(part.tokens) for part in rest))
    assert counts[-1] == unary.generated_token_count
    assert (rest[-1].stop_reason, rest[-1].stop_sequence) == (unary.stop_reason, unary.stop_sequence)


@pytest.mark.parametrize("with_logprobs", [True, False])
def test_input_tokens_are_the_encoders_and_nothing_is_known_of_them(t5: Setup, with_logprobs: bool) -> None:
    options = pb.ResponseOptions(**ALL_DETAILS | {"token_logprobs": with_logprobs})
    [response] = t5.stub.Generate(batch(PROMPT, response=options)).responses
    assert [token.text for token in response.input_tokens] == t5.tokenizer.encode(PROMPT).tokens
    assert response.input_tokens[-1].text == "</s>"
    for token in response.input_tokens:
        assert math.isnan(token.logprob) if with_logprobs else token.logprob == 0
        assert token.rank == 0
        assert not token.top_tokens
    tokens = expected_tokens(input_ids(t5, PROMPT), 20)
    assert [token.text for token in response.tokens] == [t5.tokenizer.id_to_token(i) for i in tokens]


@pytest.mark.parametrize("prompt", ["decoder", "encoder", "both"])
def test_soft_prompts_of_either_side(t5: Setup, prompt: str) -> None:
    num_encoder, ids = PROMPTS[prompt][1], input_ids(t5, PROMPT)
    request = batch(PROMPT, stopping=stopping(50), response=pb.ResponseOptions(**ALL_DETAILS))
    request.prefix_id = prompt
    [response] = t5.stub.Generate(request).responses
    tokens = expected_tokens(ids, 50, prompt=prompt)
    assert [token.text for token in response.tokens] == [t5.tokenizer.id_to_token(i) for i in tokens]
    pieces = [t5.tokenizer.id_to_token(PAD)] * num_encoder + t5.tokenizer.encode(PROMPT).tokens
    assert [token.text for token in response.input_tokens] == pieces
    assert all(math.isnan(token.logprob) for token in response.input_tokens)
    assert response.input_token_count == len(ids)
    before = t5.shards[0].model.num_encoded
    assert t5.stub.Generate(request).responses[0].text == response.text
    assert t5.shards[0].model.num_encoded == before


def test_an_empty_text_is_an_input_where_the_encoder_has_virtual_tokens(tmp_path: Path) -> None:
    """Use a tokenizer that adds no tokens to the text."""
    library = Library()
    for name, (num_decoder, num_encoder) in PROMPTS.items():
        library.put(Item(name, num_decoder, num_encoder), name)
    setup = start_router(tmp_path, 1, write_tokenizer=write_bare_tokenizer, info=model(), library=library)
    try:
        for prompt, (_, num_encoder) in PROMPTS.items():
            request = batch("", stopping=stopping(30), response=pb.ResponseOptions(**ALL_DETAILS))
            request.prefix_id = prompt
            if not num_encoder:
                with pytest.raises(grpc.RpcError) as caught:
                    setup.stub.Generate(request)
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert caught.value.details() == "tokenizer error the input has no tokens"
                continue
            [response] = setup.stub.Generate(request).responses
            tokens = expected_tokens([], 30, prompt=prompt)
            assert [token.text for token in response.tokens] == [PIECES[i] for i in tokens]
            assert [token.text for token in response.input_tokens] == [PIECES[PAD]] * num_encoder
            assert response.input_token_count == 0
    finally:
        assert stop_router(setup) == 0, setup.service.output
    assert library.faults == []


@pytest.mark.parametrize(("prompt", "length"), [("decoder", 10), ("encoder", 5), ("both", 8)])
def test_limits_count_the_prompt_and_its_place_before_the_start(t5: Setup, prompt: str, length: int) -> None:
    words, room = "fox " * MAX_SEQUENCE_LENGTH, MAX_SEQUENCE_LENGTH - length - 150
    criteria = stopping(150, min_new_tokens=room + 1)
    request = batch(words, truncate_input_tokens=150, stopping=criteria)
    request.prefix_id = prompt
    with pytest.raises(grpc.RpcError) as caught:
        t5.stub.Generate(request)
    sums = f"input tokens (150) plus prefix length ({length}) plus min_new_tokens ({room + 1})"
    assert caught.value.details() == f"{sums} must be <= {MAX_SEQUENCE_LENGTH}"
    request.params.stopping.min_new_tokens = room
    [response] = t5.stub.Generate(request).responses
    assert (response.generated_token_count, response.stop_reason) == (room, pb.TOKEN_LIMIT)
    tokens = expected_tokens(input_ids(t5, words)[-150:], room, room, prompt)
    assert response.text == text_of(t5, tokens)


def test_stop_sequences(t5: Setup) -> None:
    whole = text_of(t5, expected_tokens(input_ids(t5, PROMPT), 20))
    stop = whole[4:6]
    criteria = stopping(20, stop_sequences=[stop], include_stop_sequence=False)
    [response] = t5.stub.Generate(batch(PROMPT, stopping=criteria)).responses
    assert response.text == whole[: whole.index(stop)]
    assert (response.stop_reason, response.stop_sequence) == (pb.STOP_SEQUENCE, stop)


def test_truncation_keeps_the_end_and_its_special_token(t5: Setup) -> None:
    ids = input_ids(t5, PROMPT)
    for limit in (1, 3):
        options = pb.ResponseOptions(input_tokens=True, input_text=True)
        request = batch(PROMPT, truncate_input_tokens=limit, response=options)
        [response] = t5.stub.Generate(request).responses
        kept = ids[-limit:]
        assert [token.text for token in response.input_tokens] == [t5.tokenizer.id_to_token(i) for i in kept]
        assert response.input_token_count == limit
        assert response.text == f"{PROMPT}\n\n{text_of(t5, expected_tokens(kept, 20))}"


def test_limits_count_the_encoders_tokens(t5: Setup) -> None:
    words = "fox " * MAX_SEQUENCE_LENGTH
    num_inputs = len(input_ids(t5, words))
    sums = "input tokens (199) plus prefix length (0)"
    cases = [
        (batch(words), f"input tokens ({num_inputs}) plus prefix length (0) must be < {MAX_SEQUENCE_LENGTH}"),
        (
            batch(words, truncate_input_tokens=199, stopping=stopping(2, min_new_tokens=2)),
            f"{sums} plus min_new_tokens (2) must be <= {MAX_SEQUENCE_LENGTH}",
        ),
    ]
    for request, text in cases:
        with pytest.raises(grpc.RpcError) as caught:
            t5.stub.Generate(request)
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, text)
    [response] = t5.stub.Generate(batch(words, truncate_input_tokens=199)).responses
    assert (response.generated_token_count, response.stop_reason) == (1, pb.TOKEN_LIMIT)


@pytest.mark.parametrize("num_inputs", [2, 100, 180])
def test_an_output_of_all_that_the_limit_leaves(t5: Setup, num_inputs: int) -> None:
    """Fill the maximum length, without the decoder's start token. Long outputs switch their frequencies."""
    words, room = "fox girl bread " * MAX_SEQUENCE_LENGTH, MAX_SEQUENCE_LENGTH - num_inputs
    criteria = stopping(199, min_new_tokens=room)
    request = batch(words, truncate_input_tokens=num_inputs, stopping=criteria)
    before, num_long = metric(t5, "tgi_preemptions"), t5.shards[0].model.num_long
    [response] = t5.stub.Generate(request).responses
    tokens = expected_tokens(input_ids(t5, words)[-num_inputs:], room, room)
    assert response.text == text_of(t5, tokens)
    assert (response.generated_token_count, response.stop_reason) == (room, pb.TOKEN_LIMIT)
    assert t5.shards[0].model.num_long == num_long + (room > SWITCH_LEN)
    assert metric(t5, "tgi_preemptions") == before


def test_equal_inputs_are_encoded_once(t5: Setup) -> None:
    text = "a text that no other test has"
    before = t5.shards[0].model.num_encoded
    answers = [t5.stub.Generate(batch(text)).responses[0] for _ in range(3)]
    assert answers[0] == answers[1] == answers[2]
    assert t5.shards[0].model.num_encoded == before + len(input_ids(t5, text))


def test_metrics_and_log_count_the_encoders_tokens(t5: Setup) -> None:
    text = "1 2 a b another text that is new"
    lengths = ("tgi_request_input_length_sum", "tgi_request_total_tokens_sum", "tgi_batch_next_tokens_sum")
    before = [metric(t5, name) for name in lengths]
    [response] = t5.stub.Generate(batch(text)).responses
    num_inputs, num_outputs = len(input_ids(t5, text)), response.generated_token_count
    counted = [metric(t5, name) - value for name, value in zip(lengths, before, strict=True)]
    assert counted == [num_inputs, num_inputs + num_outputs, num_inputs + 1]
    t5.service.wait_for_line(f"input_tokens={num_inputs} ", 5)


def test_model_info(t5: Setup) -> None:
    info = t5.stub.ModelInfo(pb.ModelInfoRequest())
    assert info.model_kind == pb.ModelInfoResponse.ENCODER_DECODER
    assert (info.max_sequence_length, info.max_new_tokens) == (MAX_SEQUENCE_LENGTH, MAX_SEQUENCE_LENGTH - 1)
    assert get(t5.http + "/health") == (200, "")


def test_a_cache_that_cannot_hold_one_request_is_refused(tmp_path: Path) -> None:
    """Require one more block than the tokens fill, because input and output use separate blocks."""
    needed = 1 + -(-(MAX_SEQUENCE_LENGTH - 1) // BLOCK_SIZE)
    text = f"max_sequence_length {MAX_SEQUENCE_LENGTH} takes {needed} cache blocks of {BLOCK_SIZE} tokens"
    with pytest.raises(AssertionError) as caught:
        stop_router(start_router(tmp_path, 1, write_tokenizer=write_tokenizer, info=model(needed - 1)))
    assert f"error: {text}, but the shards have only {needed - 1}" in str(caught.value)
