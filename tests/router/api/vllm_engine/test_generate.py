"""Tests Generate with the stubs of smg-grpc-proto, against fmaas's answers to the same inputs."""

from collections.abc import Iterator

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from tests.support.router.engine_api import EngineApi, serve_engine_api
from tests.support.router.messages import PROMPT, batch, stopping
from tgis.pb import generation_pb2 as fmaas

INVALID = grpc.StatusCode.INVALID_ARGUMENT
IDS_OUT = ("tgis-tokens", "ids")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineApi]:
    with serve_engine_api(tmp_path_factory.mktemp("router")) as served:
        yield served


def request(served: EngineApi, *, stream: bool = False, **sampling: object) -> pb.GenerateRequest:
    params = {"temperature": 0.0, "max_tokens": 9, **sampling}
    return pb.GenerateRequest(
        request_id="r",
        tokenized=pb.TokenizedInput(original_text=PROMPT, input_ids=served.ids(PROMPT)),
        sampling_params=pb.SamplingParams(**params),
        stream=stream,
    )


def complete(served: EngineApi, message: pb.GenerateRequest) -> pb.GenerateComplete:
    [response] = served.stub.Generate(message)
    return response.complete


def expected(served: EngineApi, **response: object) -> fmaas.GenerationResponse:
    """Return fmaas's answer with its tokens' ids."""
    options = fmaas.ResponseOptions(generated_tokens=True, **response)
    answer = served.setup.stub.Generate(
        batch(PROMPT, stopping=stopping(9), response=options), metadata=[IDS_OUT]
    )
    return answer.responses[0]


def test_ids_are_those_of_fmaas(served: EngineApi) -> None:
    answer, wanted = complete(served, request(served)), expected(served)
    assert list(answer.output_ids) == [int(token.text) for token in wanted.tokens]
    counts = answer.prompt_tokens, answer.completion_tokens, answer.finish_reason, answer.index
    assert counts == (wanted.input_token_count, 9, "length", 0)
    assert not answer.HasField("output_logprobs")


def test_a_text_is_tokenized_here(served: EngineApi) -> None:
    by_text = request(served)
    by_text.text = PROMPT
    assert complete(served, by_text).output_ids == complete(served, request(served)).output_ids


def test_a_stream_has_the_tokens_of_the_whole_answer(served: EngineApi) -> None:
    whole = complete(served, request(served, logprobs=2, prompt_logprobs=1))
    *chunks, last = served.stub.Generate(request(served, stream=True, logprobs=2, prompt_logprobs=1))
    assert last.complete == whole
    ids = [token_id for each in chunks for token_id in each.chunk.token_ids]
    assert (ids, len(chunks) > 3) == (list(whole.output_ids), True)
    assert sum(each.chunk.completion_tokens for each in chunks) == whole.completion_tokens
    logprobs = [value for each in chunks for value in each.chunk.output_logprobs.token_logprobs]
    assert logprobs == list(whole.output_logprobs.token_logprobs)
    assert chunks[0].chunk.input_logprobs == whole.input_logprobs
    assert not any(each.chunk.HasField("input_logprobs") for each in chunks[1:])


def test_logprobs_are_those_of_fmaas(served: EngineApi) -> None:
    answer = complete(served, request(served, logprobs=2, prompt_logprobs=1))
    wanted = expected(served, input_tokens=True, token_logprobs=True, top_n_tokens=2)
    logprobs = answer.output_logprobs
    assert list(logprobs.token_ids) == list(answer.output_ids)
    assert logprobs.token_logprobs == pytest.approx([token.logprob for token in wanted.tokens], abs=1e-6)
    for top, token in zip(logprobs.top_logprobs, wanted.tokens, strict=True):
        assert list(top.token_ids) == [int(each.text) for each in token.top_tokens]
        assert top.values == pytest.approx([each.logprob for each in token.top_tokens], abs=1e-6)
    prompt = answer.input_logprobs
    assert list(prompt.token_ids) == served.ids(PROMPT)
    assert [each.HasField("value") for each in prompt.token_logprobs] == [False] + [True] * (
        len(prompt.token_ids) - 1
    )
    values = [each.value for each in prompt.token_logprobs[1:]]
    assert values == pytest.approx([token.logprob for token in wanted.input_tokens[1:]], abs=1e-6)
    assert len(prompt.top_logprobs) == len(prompt.token_ids)


@pytest.mark.parametrize("stream", [False, True])
def test_several_texts_have_their_indexes(served: EngineApi, stream: bool) -> None:
    answers = served.stub.Generate(request(served, stream=stream, n=3, temperature=1.0, seed=-7))
    completes = [each.complete for each in answers if each.HasField("complete")]
    assert sorted(each.index for each in completes) == [0, 1, 2]
    assert {each.completion_tokens for each in completes} == {9}


def test_stop_token_ids_and_stop_strings_are_reported(served: EngineApi) -> None:
    ids = list(complete(served, request(served)).output_ids)
    first = ids.index(ids[3])
    answer = complete(served, request(served, stop_token_ids=[ids[3]]))
    assert (answer.finish_reason, answer.matched_token_id) == ("stop", ids[3])
    assert list(answer.output_ids) == ids[: first + 1]
    stop = served.setup.tokenizer.decode(ids).strip()[2:4]
    answer = complete(served, request(served, stop=[stop]))
    assert (answer.finish_reason, answer.matched_stop_str) == ("stop", stop)


def test_texts_are_built_for_stop_strings_only(served: EngineApi) -> None:
    for stop, shown in (((), "output 0 bytes"), (["never"], "output ")):
        num_lines = len(served.setup.service.lines)
        complete(served, request(served, stop=stop))
        text = f"generated 9 tokens before MAX_TOKENS, {shown}"
        served.setup.service.wait_for_line(text, begin=num_lines)
        [line] = [line for line in served.setup.service.lines[num_lines:] if "generated 9 tokens" in line]
        assert ("output 0 bytes" in line) == (not stop)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"temperature": -1.0}, "temperature must be >= 0.0"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p must be > 0.0 and <= 1.0"),
        ({"n": 10**6}, "n must be >= 1 and <= 128"),
        ({"logprobs": -1}, "logprobs must be >= 0"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens must be >= -1"),
        ({"logprobs": 21}, "logprobs (21) must be <= 20"),
        ({"min_tokens": 10}, "min_tokens must be <= max_tokens"),
        ({"structural_tag": "{}"}, "structural_tag: structural tags are not supported"),
        ({"json_schema": "{"}, "json_schema is not valid: "),
        ({"logit_bias": {10**8: 1.0}}, "logit_bias"),
    ],
)
def test_wrong_fields_are_refused_by_their_names(
    served: EngineApi, fields: dict[str, object], text: str
) -> None:
    with pytest.raises(grpc.RpcError) as refusal:
        list(served.stub.Generate(request(served, **fields)))
    assert (refusal.value.code(), refusal.value.details().startswith(text)) == (INVALID, True), refusal.value


def test_priorities_are_metadata(served: EngineApi) -> None:
    message = pb.GenerateRequest(text="a", sampling_params=pb.SamplingParams(max_tokens=1))
    for value in ("5", "-5"):
        list(served.stub.Generate(message, metadata=[("tgis-priority", value)]))
    for pairs in ([("tgis-priority", "high")], [("tgis-priority", "1")] * 2):
        with pytest.raises(grpc.RpcError) as refusal:
            list(served.stub.Generate(message, metadata=pairs))
        text = "tgis-priority must be a whole number, such as 10"
        assert (refusal.value.code(), refusal.value.details()) == (INVALID, text)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (pb.GenerateRequest(), "input: a request needs token ids or a text"),
        (pb.GenerateRequest(tokenized=pb.TokenizedInput()), "the input has no tokens"),
        (
            pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[999_999_999])),
            "input token id 999999999 is beyond the model's vocabulary of",
        ),
        (pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[2**32 - 1])), "input 1: token ids are"),
        (
            pb.GenerateRequest(text="a", mm_inputs=pb.MultimodalInputs()),
            "mm_inputs: only text is served",
        ),
        (pb.GenerateRequest(text="a", kv_transfer_params_json="{}"), "kv_transfer_params: caches are not"),
        (pb.GenerateRequest(text="a", data_parallel_rank=1), "data_parallel_rank must be 0"),
    ],
)
def test_wrong_requests_are_refused_in_one_line(
    served: EngineApi, message: pb.GenerateRequest, text: str
) -> None:
    with pytest.raises(grpc.RpcError) as refusal:
        list(served.stub.Generate(message))
    assert (refusal.value.code(), refusal.value.details().startswith(text)) == (INVALID, True), refusal.value
    assert "\n" not in refusal.value.details()
