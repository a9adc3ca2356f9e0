"""Every request gets a response within a deadline, according to the contract: a generation that satisfies its
parameters, or the first error, in the contract's words. Afterwards no resource is held."""

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations, cycle, product
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from integration_tests.support import any_message as messages
from integration_tests.support.case_files import as_single
from integration_tests.support.first_error import (
    GUIDED,
    OVERLOADED,
    UNREADABLE,
    Names,
    Server,
    first_error,
    is_documented,
    is_greedy,
    length_of,
)
from integration_tests.support.greedy_answers import MAX_SEQUENCE_LENGTH as MODEL_LENGTH
from integration_tests.support.greedy_answers import Model
from integration_tests.support.service import serve
from integration_tests.support.tuned_files import LINEAR, SoftPrompt, embeddings, write_adapter, write_prompt
from tests.support.accounts import assert_nothing_left
from tests.support.router.fake_shard import EOS, PAD, VOCAB_SIZE
from tests.support.router.model_of_contents import PROMPT, Item, Library, adapter
from tests.support.router.model_of_shard import context, join_digests, next_token
from tests.support.router.router_process import MAX_SEQUENCE_LENGTH, start_router, stop_router
from tgis.pb import generation_pb2 as pb

DEADLINE_S = 60
INVALID, EXHAUSTED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED
REASONS = {pb.MAX_TOKENS, pb.EOS_TOKEN, pb.TIME_LIMIT, pb.STOP_SEQUENCE, pb.TOKEN_LIMIT}
MEBIBYTE = 1 << 20
LENGTHS = {messages.PROMPT: messages.NUM_VIRTUAL}
Request = pb.BatchedGenerationRequest | pb.SingleGenerationRequest


@dataclass(frozen=True)
class Served:
    """Running service, with expectations from other sources."""

    channel: grpc.Channel
    http: str
    tokenizer: Tokenizer
    server: Server
    knows_tokens: bool
    """True if `next_token` determines the generated text."""

    def call(self, method: str, request: bytes) -> bytes:
        answer: bytes = self.channel.unary_unary(f"/fmaas.GenerationService/{method}")(
            request, timeout=DEADLINE_S
        )
        return answer

    def stream(self, request: bytes, timeout: float = DEADLINE_S) -> list[pb.GenerationResponse]:
        method = "/fmaas.GenerationService/GenerateStream"
        parts = self.channel.unary_stream(method)(request, timeout=timeout)
        return [pb.GenerationResponse.FromString(part) for part in parts]

    def generate(self, request: pb.BatchedGenerationRequest) -> list[pb.GenerationResponse]:
        answer = self.call("Generate", request.SerializeToString())
        return list(pb.BatchedGenerationResponse.FromString(answer).responses)

    def num_tokens(self, text: str, truncate: int) -> int:
        """Return the number of tokens of an input."""
        whole = len(self.tokenizer.encode(text).ids)
        return min(whole, truncate) if truncate else whole

    def check_that_it_is_idle_and_serves(self) -> None:
        assert_nothing_left(self.http, {})
        texts = ["a girl"] * self.server.max_concurrent_requests  # all permits were returned
        answers = self.generate(batch(*texts, stopping={"max_new_tokens": 1, "min_new_tokens": 1}))
        assert [answer.generated_token_count for answer in answers] == [1] * len(texts)


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Router in front of a plain model of a shard."""
    library = Library()
    library.put(Item("p" * 64, messages.NUM_VIRTUAL), messages.PROMPT)
    library.put(adapter("a" * 64), messages.ADAPTER)
    library.store[PROMPT, messages.ADAPTER] = adapter("a" * 64)
    setup = start_router(tmp_path_factory.mktemp("router"), 1, "--max-batch-size", "64", library=library)
    setup.shards[0].step_s = 0
    names = Names(LENGTHS, [messages.ADAPTER], [messages.ADAPTER], is_real=False)
    server = Server(MAX_SEQUENCE_LENGTH, MAX_SEQUENCE_LENGTH - 1, names=names)
    channel = grpc.insecure_channel(
        f"127.0.0.1:{setup.service.grpc_port}", [("grpc.max_receive_message_length", -1)]
    )
    yield Served(channel, setup.http, setup.tokenizer, server, knows_tokens=True)
    channel.close()
    assert stop_router(setup) == 0, setup.service.output
    assert "Traceback" not in setup.service.output
    assert not library.faults


@pytest.fixture(scope="module")
def real(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Whole service, with a checkpoint."""
    store = tmp_path_factory.mktemp("store")
    write_prompt(store / messages.PROMPT, SoftPrompt(embeddings(messages.NUM_VIRTUAL, 0)))
    write_adapter(store / messages.ADAPTER, model.directory, 0, LINEAR)
    bare = (
        f"can't retrieve adapter with id '{messages.PROMPT}': invalid adapter: no adapter_config.json found"
    )
    names = Names(LENGTHS, [messages.ADAPTER], [messages.ADAPTER], adapter_errors={messages.PROMPT: bare})
    for client in serve(model.directory, "--dtype", "float32", "--prefix-store-path", str(store)):
        tokenizer = Tokenizer.from_file(str(model.directory / "tokenizer.json"))
        server = Server(MODEL_LENGTH, MODEL_LENGTH - 1, names=names)
        yield Served(client.channel, client.service.http, tokenizer, server, knows_tokens=False)
        assert "Traceback" not in client.service.output


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Property tests use the fake shards; as slow tests, they run longer, and also with the whole service."""
    if "num_examples" in metafunc.fixturenames:
        slow = [
            pytest.param(name, 600, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])
            for name in ("fake", "real")
        ]
        metafunc.parametrize(("served", "num_examples"), [("fake", 12), *slow], indirect=["served"])


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Served:
    service: Served = request.getfixturevalue(getattr(request, "param", "fake"))
    return service


def for_any(strategy: st.SearchStrategy[Any], num_examples: int, check: Callable[[Any], None]) -> None:
    """Use the same examples every time."""

    @settings(
        max_examples=num_examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def run(example: Any) -> None:
        check(example)

    run()


def batch(*texts: str, **params: Any) -> pb.BatchedGenerationRequest:
    requests = [pb.GenerationRequest(text=text) for text in texts]
    return pb.BatchedGenerationRequest(requests=requests, params=pb.Parameters(**params))


def check_values(served: Served, request: pb.BatchedGenerationRequest) -> bool:
    """Return whether the response was a generation."""
    text = request.requests[0].text
    answer = attempt(lambda: served.generate(request))
    is_generation = expect_first_error(served, request, [text], answer)
    if is_generation:
        [response] = answer
        check_response(served, request, text, response)
    return is_generation


@pytest.mark.parametrize("with_both", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_value_alone(fake: Served, with_both: bool) -> None:
    """Greedy and sampled; `make test` tries each value with one of the two."""
    methods = (pb.SAMPLE, pb.GREEDY)
    for path, values in messages.VALUES.items():
        for value, method in product(values, methods) if with_both else zip(values, cycle(methods)):
            check_values(fake, messages.with_values(method, (path, value)))
    fake.check_that_it_is_idle_and_serves()


def test_the_first_of_two_errors_is_returned(fake: Served) -> None:
    for first, second in combinations(messages.VIOLATIONS, 2):
        for method in (pb.GREEDY, pb.SAMPLE):
            is_generation = check_values(fake, messages.with_values(method, first, second))
            assert not is_generation or method == pb.GREEDY
    fake.check_that_it_is_idle_and_serves()


def test_any_batch(served: Served, num_examples: int) -> None:
    def check(example: tuple[pb.BatchedGenerationRequest, bytes]) -> None:
        request, more = example
        answer = attempt(lambda: served.call("Generate", request.SerializeToString() + more))
        if not request.requests:
            assert answer == b""
        elif len(request.requests) > served.server.max_concurrent_requests:
            assert answer == (EXHAUSTED, OVERLOADED)
        elif expect_first_error(served, request, [item.text for item in request.requests], answer):
            responses = pb.BatchedGenerationResponse.FromString(answer).responses
            assert len(responses) == len(request.requests)
            for item, response in zip(request.requests, responses, strict=True):
                check_response(served, request, item.text, response)
            check_stream_is_unary(served, request, responses[0])

    for_any(st.tuples(messages.batches, messages.unknown_fields), num_examples, check)
    served.check_that_it_is_idle_and_serves()


def test_any_stream(served: Served, num_examples: int) -> None:
    def check(example: tuple[pb.SingleGenerationRequest, bytes]) -> None:
        request, more = example
        check_stream(served, request, attempt(lambda: served.stream(request.SerializeToString() + more)))

    for_any(st.tuples(messages.singles, messages.unknown_fields), num_examples, check)
    served.check_that_it_is_idle_and_serves()


def test_any_tokenization(served: Served, num_examples: int) -> None:
    def check(example: tuple[pb.BatchedTokenizeRequest, bytes]) -> None:
        request, more = example
        answer = served.call("Tokenize", request.SerializeToString() + more)
        responses = pb.BatchedTokenizeResponse.FromString(answer).responses
        assert len(responses) == len(request.requests)
        for item, response in zip(request.requests, responses, strict=True):
            check_tokens(served, request, item.text, response)

    for_any(st.tuples(messages.tokenizations, messages.unknown_fields), num_examples, check)
    served.check_that_it_is_idle_and_serves()


def test_any_crowd(served: Served, num_examples: int) -> None:
    """Send all simultaneously, and cancel some early; each response equals the one without other requests."""

    def check_one(example: tuple[pb.SingleGenerationRequest, bool]) -> None:
        request, is_impatient = example
        timeout = 0.02 if is_impatient else DEADLINE_S
        answer = attempt(lambda: served.stream(request.SerializeToString(), timeout))
        if is_impatient and isinstance(answer, tuple) and answer[0] is grpc.StatusCode.DEADLINE_EXCEEDED:
            return
        check_stream(served, request, answer)

    def check(examples: list[tuple[pb.SingleGenerationRequest, bool]]) -> None:
        with ThreadPoolExecutor(16) as threads:
            list(threads.map(check_one, examples))

    crowd = st.lists(
        st.tuples(messages.singles, messages.rarely(st.just(True), st.just(False))), min_size=12, max_size=40
    )
    for_any(crowd, num_examples // 10, check)
    served.check_that_it_is_idle_and_serves()


def attempt(call: Callable[[], Any]) -> Any:
    """Return the response, or the status and its text."""
    try:
        return call()
    except grpc.RpcError as error:
        return error.code(), error.details()


def expect_first_error(
    served: Served,
    request: pb.BatchedGenerationRequest | pb.SingleGenerationRequest,
    texts: list[str],
    answer: Any,
) -> bool:
    """Return True for a correct generation where one is expected; assert that an error is the correct one."""
    params = request.params
    lengths = [length_of(served.tokenizer, text, params.truncate_input_tokens) for text in texts]
    prefix_id = request.prefix_id if request.HasField("prefix_id") else None
    adapter_id = request.adapter_id if request.HasField("adapter_id") else None
    expected = first_error(params, served.server, lengths, prefix_id, adapter_id)
    guided = params.decoding.WhichOneof("guided") is not None
    was_refused = isinstance(answer, tuple)
    if was_refused:
        code, text = answer
        assert code == INVALID
        assert text == expected or (guided and GUIDED.fullmatch(text))
    else:
        assert expected is None
    return not was_refused


def check_stream(served: Served, request: pb.SingleGenerationRequest, answer: Any) -> None:
    """Return the messages of a stream, or its error."""
    if not request.HasField("request"):
        assert answer == (INVALID, "missing request")
    elif expect_first_error(served, request, [request.request.text], answer):
        whole = check_shape(request.params, answer)
        check_response(served, request, request.request.text, whole)


def check_response(served: Served, request: Request, text: str, answer: pb.GenerationResponse) -> None:
    """Check a unary response, or a joined stream: every property that does not depend on the model."""
    params, num_virtual = request.params, served.server.names.prefix_length(request.prefix_id)
    stopping, response = params.stopping, params.response
    is_guided = params.decoding.WhichOneof("guided") is not None
    num_inputs = served.num_tokens(text, params.truncate_input_tokens)
    room, num = served.server.max_sequence_length - num_inputs - num_virtual, answer.generated_token_count
    limit = stopping.max_new_tokens or 20
    assert answer.input_token_count == num_inputs
    assert answer.stop_reason in REASONS
    assert num <= min(limit, room)
    if answer.stop_reason == pb.TIME_LIMIT:
        assert stopping.time_limit_millis
    else:  # a complete grammar ends the text, whatever the minimum
        is_complete = is_guided and answer.stop_reason == pb.EOS_TOKEN
        assert num >= (1 if is_complete else max(stopping.min_new_tokens, 1))
    if answer.stop_reason == pb.MAX_TOKENS:
        assert num == limit <= room
    if answer.stop_reason == pb.TOKEN_LIMIT:
        assert num == room < limit
    check_stop_sequence(params, answer)
    assert len(answer.tokens) == (num if response.generated_tokens else 0)
    assert len(answer.input_tokens) == (num_virtual + num_inputs if response.input_tokens and num else 0)
    for token in [*answer.tokens, *answer.input_tokens]:
        assert len(token.top_tokens) <= 4 * response.top_n_tokens
        assert token.rank == 0 or response.token_ranks
        assert token.logprob == 0 or response.token_logprobs
    assert answer.text.startswith(text) or not (response.input_text and num)
    assert answer.text == "" or num
    check_seed(params, answer)
    if served.knows_tokens and not stopping.stop_sequences and not is_guided:
        check_tokens_known_in_advance(served, request, text, answer)


def check_stop_sequence(params: pb.Parameters, answer: pb.GenerationResponse) -> None:
    if answer.stop_reason != pb.STOP_SEQUENCE:
        assert answer.stop_sequence == ""
        return
    assert answer.stop_sequence in params.stopping.stop_sequences
    if params.stopping.include_stop_sequence or not params.stopping.HasField("include_stop_sequence"):
        assert answer.text.endswith(answer.stop_sequence)


def check_seed(params: pb.Parameters, answer: pb.GenerationResponse) -> None:
    if is_greedy(params) or not answer.generated_token_count:
        assert answer.seed == 0
    elif params.sampling.HasField("seed"):
        assert answer.seed == params.sampling.seed
    else:
        assert answer.seed < 2**32


def check_tokens_known_in_advance(
    served: Served, request: Request, text: str, answer: pb.GenerationResponse
) -> None:
    """The fake shards' tokens depend only on the input, not on the sampling parameters."""
    params, prompt = request.params, served.tokenizer.encode(text).ids
    truncate = params.truncate_input_tokens
    if 0 < truncate < len(prompt):
        prompt = [0, *prompt[len(prompt) - truncate + 1 :]]
    virtual = [PAD] * served.server.names.prefix_length(request.prefix_id)
    seed = context([], False, digests_of(request))
    tokens: list[int] = []
    while len(tokens) < answer.generated_token_count:
        assert EOS not in tokens
        token = next_token([*virtual, *prompt, *tokens], VOCAB_SIZE, seed)
        is_masked = token == EOS and len(tokens) < params.stopping.min_new_tokens
        tokens.append(token + 1 if is_masked else token)
    if params.response.generated_tokens:
        assert [token.text for token in answer.tokens] == [
            served.tokenizer.id_to_token(i) or "" for i in tokens
        ]
    decoded = served.tokenizer.decode(tokens, skip_special_tokens=True).rstrip("\ufffd")
    echoed = text if params.response.input_text and tokens else ""
    assert answer.text == echoed + decoded
    if answer.stop_reason != pb.TIME_LIMIT:
        assert (EOS in tokens) == (answer.stop_reason == pb.EOS_TOKEN)


def digests_of(request: Request) -> str:
    """Check the parameters of a served request."""
    has_adapter = messages.ADAPTER in (request.adapter_id, request.prefix_id)
    has_prompt = request.prefix_id == messages.PROMPT
    return join_digests("a" * 64 * has_adapter, "p" * 64 * has_prompt)


def check_shape(params: pb.Parameters, parts: list[pb.GenerationResponse]) -> pb.GenerationResponse:
    """Check the order and content of a stream's messages, and return them joined."""
    header, *rest = parts
    greedy = is_greedy(params)
    assert header == pb.GenerationResponse(
        input_token_count=header.input_token_count, seed=0 if greedy else header.seed, text=header.text
    )
    assert params.response.input_text or not header.text
    whole = pb.GenerationResponse(input_token_count=header.input_token_count)
    if rest[0].input_tokens:
        inputs = rest.pop(0)
        count = len(inputs.input_tokens)
        assert inputs == pb.GenerationResponse(input_tokens=inputs.input_tokens, input_token_count=count)
        whole.input_tokens.extend(inputs.input_tokens)
    *middle, last = rest
    numbers = [part.generated_token_count for part in rest if part.generated_token_count]
    assert numbers == sorted(set(numbers))
    for part in middle:
        assert (part.stop_reason, part.stop_sequence, part.seed) == (pb.NOT_FINISHED, "", 0)
        assert part.text or part.tokens
    for part in rest:
        assert part.input_token_count == 0
        whole.tokens.extend(part.tokens)
        assert part.generated_token_count == len(whole.tokens) or not params.response.generated_tokens
    assert last.seed == (header.seed if last.generated_token_count else 0)
    whole.text = "".join(part.text for part in rest)
    if last.generated_token_count:
        whole.text = header.text + whole.text  # a unary response without tokens has no text at all
    whole.generated_token_count, whole.seed = last.generated_token_count, last.seed
    whole.stop_reason, whole.stop_sequence = last.stop_reason, last.stop_sequence
    return whole


def check_stream_is_unary(
    served: Served, batch: pb.BatchedGenerationRequest, unary: pb.GenerationResponse
) -> None:
    """Send the first input again as a stream; random values and times may differ."""
    params = batch.params
    request = as_single(batch)
    whole = check_shape(params, served.stream(request.SerializeToString()))
    is_certain = is_greedy(params) or params.sampling.HasField("seed")
    if is_certain and not params.stopping.time_limit_millis:
        assert without_nan(whole) == without_nan(unary)


def without_nan(answer: pb.GenerationResponse) -> pb.GenerationResponse:
    """Remove NaN, the first input token's logprob, because it equals nothing."""
    for token in answer.input_tokens:
        if math.isnan(token.logprob):
            token.logprob = 1
    return answer


def check_tokens(
    served: Served, request: pb.BatchedTokenizeRequest, text: str, answer: pb.TokenizeResponse
) -> None:
    encoding, limit = served.tokenizer.encode(text), request.truncate_input_tokens
    start = max(len(encoding.ids) - limit, 0) if limit else 0
    assert answer.token_count == len(encoding.ids) - start
    assert list(answer.tokens) == (encoding.tokens[start:] if request.return_tokens else [])
    assert len(answer.offsets) == (answer.token_count if request.return_offsets else 0)
    size = len(text.encode())
    assert all(offset.start <= offset.end <= size for offset in answer.offsets)


def test_any_bytes(served: Served, num_examples: int) -> None:
    """Use protobuf's own parser to decide whether bytes are a message."""
    whole = (messages.batches | messages.singles | messages.tokenizations).map(
        lambda m: m.SerializeToString()
    )
    chopped = st.tuples(whole, st.integers(0, 200)).map(lambda pair: pair[0][: pair[1]])
    flipped = st.tuples(whole, st.integers(0, 10**6), st.integers(0, 255)).map(
        lambda triple: with_byte(*triple)
    )
    kinds = {
        "Generate": pb.BatchedGenerationRequest,
        "GenerateStream": pb.SingleGenerationRequest,
        "Tokenize": pb.BatchedTokenizeRequest,
        "ModelInfo": pb.ModelInfoRequest,
    }

    def check(example: tuple[str, bytes]) -> None:
        method, data = example
        call = served.stream if method == "GenerateStream" else lambda data: served.call(method, data)
        answer = attempt(lambda: call(data))
        try:
            message = kinds[method].FromString(data)
        except Exception:
            assert answer == (INVALID, UNREADABLE)
            return
        if isinstance(answer, tuple):
            code, text = answer
            params = getattr(message, "params", pb.Parameters())
            assert (code, text) == (EXHAUSTED, OVERLOADED) or code == INVALID
            guided = params.decoding.WhichOneof("guided") is not None
            assert code == EXHAUSTED or is_documented(text, guided), text

    data = st.binary(max_size=60) | whole | chopped | flipped
    for_any(st.tuples(st.sampled_from(list(kinds)), data), num_examples, check)
    served.check_that_it_is_idle_and_serves()


def with_byte(data: bytes, position: int, value: int) -> bytes:
    """Replace one byte."""
    if not data:
        return data
    position %= len(data)
    return data[:position] + bytes([value]) + data[position + 1 :]


REQUEST = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text="a girl")]).SerializeToString()
NO_MESSAGES = {
    "half a tag": b"\xff",
    "a length beyond the end": b"\x1a\x7f\x12\x01a",
    "a varint of eleven bytes": b"\x18" + b"\xff" * 10 + b"\x01",
    "a length of 2^64-1": b"\x1a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
    "field number zero": REQUEST + b"\x02\x01a",
    "wire type six": REQUEST + b"\x1e",
    "a group that does not end": REQUEST + b"\xa3\x06",
    "the end of no group": REQUEST + b"\xa4\x06",
    "half a character": b"\x1a\x03\x12\x01\xc3",
    "a lone surrogate": b"\x1a\x05\x12\x03\xed\xa0\x80",
    "an overlong slash": b"\x1a\x04\x12\x02\xc0\xaf",
    "ten thousand nested groups": b"\xa3\x06" * 10_000 + b"\xa4\x06" * 10_000,
    "gzip": b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03",
}
ODD_MESSAGES = {
    "a wrong wire type is an unknown field": REQUEST + b"\x50\x01",
    "a message in two halves": REQUEST
    + pb.BatchedGenerationRequest(params={"method": 1}).SerializeToString(),
    "a varint longer than it must be": b"\x9a\x80\x00" + REQUEST[1:],
    "a megabyte of unknown field": REQUEST + b"\xba\x3e\x80\x80\x40" + b"x" * MEBIBYTE,
}


@pytest.mark.parametrize("name", NO_MESSAGES)
@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
def test_bytes_that_are_no_message(fake: Served, name: str, method: str) -> None:
    data = NO_MESSAGES[name]
    answer = attempt(lambda: fake.call("Generate", data) if method == "Generate" else fake.stream(data))
    assert answer == (INVALID, UNREADABLE)


@pytest.mark.parametrize("name", ODD_MESSAGES)
def test_odd_bytes_that_are_a_message(fake: Served, name: str) -> None:
    answer = pb.BatchedGenerationResponse.FromString(fake.call("Generate", ODD_MESSAGES[name]))
    assert [response.generated_token_count for response in answer.responses] == [20]


def test_ten_thousand_inputs(fake: Served) -> None:
    texts = [f"fox {i}" for i in range(10_000)]
    assert attempt(lambda: fake.generate(batch(*texts))) == (EXHAUSTED, OVERLOADED)
    request = pb.BatchedTokenizeRequest(requests=[pb.TokenizeRequest(text=text) for text in texts])
    responses = pb.BatchedTokenizeResponse.FromString(
        fake.call("Tokenize", request.SerializeToString())
    ).responses
    assert [r.token_count for r in responses] == [len(fake.tokenizer.encode(text).ids) for text in texts]
    fake.check_that_it_is_idle_and_serves()


def test_largest_counts(fake: Served) -> None:
    largest = 2**32 - 1
    stopping = {"max_new_tokens": largest, "min_new_tokens": largest, "time_limit_millis": largest}
    everything = {"stopping": stopping, "sampling": {"top_k": largest}, "truncate_input_tokens": largest}
    limit = fake.server.max_new_tokens
    assert attempt(lambda: fake.generate(batch("a", **everything))) == (
        INVALID,
        f"max_new_tokens must be <= {limit}",
    )
    stopping |= {"max_new_tokens": limit, "min_new_tokens": 0}
    [answer] = fake.generate(batch("a", **everything))
    assert answer.stop_reason in (pb.EOS_TOKEN, pb.TOKEN_LIMIT)


@pytest.mark.parametrize("size", [MEBIBYTE, 3 * MEBIBYTE])
def test_a_huge_stop_sequence(fake: Served, size: int) -> None:
    request = batch("a", stopping={"stop_sequences": ["x" * size]})
    code, text = attempt(lambda: fake.generate(request))
    assert (code, is_documented(text, guided=False)) == (INVALID, True)


def slowest_meanwhile(served: Served, *calls: Callable[[], Any]) -> tuple[list[Any], float, float]:
    """Return the calls' responses, the maximum latency of a small call meanwhile, and the total time."""
    with ThreadPoolExecutor(len(calls)) as threads:
        futures = [threads.submit(attempt, call) for call in calls]
        began, slowest = time.monotonic(), 0.0
        while not all(future.done() for future in futures):
            started = time.monotonic()
            served.call("ModelInfo", b"")
            slowest = max(slowest, time.monotonic() - started)
        return [future.result() for future in futures], slowest, time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize(("character", "size"), [("a", 3 * MEBIBYTE), ("🙂", MEBIBYTE)])
def test_mebibytes_of_one_character_delay_no_other_call(fake: Served, character: str, size: int) -> None:
    """Both methods that read text; small calls get responses meanwhile."""
    text = character * (size // len(character.encode()))
    tokens = pb.BatchedTokenizeRequest(
        requests=[pb.TokenizeRequest(text=text)], return_offsets=True, truncate_input_tokens=3
    ).SerializeToString()
    [generated, tokenized], slowest, together = slowest_meanwhile(
        fake, lambda: fake.generate(batch(text)), lambda: fake.call("Tokenize", tokens)
    )
    code, message = generated
    assert (code, is_documented(message, guided=False)) == (INVALID, True)
    [answer] = pb.BatchedTokenizeResponse.FromString(tokenized).responses
    assert answer.token_count == 3
    assert answer.offsets[-1].end == len(text.encode())
    assert slowest < max(together / 3, 0.3)
    fake.check_that_it_is_idle_and_serves()


def test_a_message_of_many_small_texts_delays_no_other_call(fake: Served) -> None:
    num_texts = 50_000
    request = pb.BatchedTokenizeRequest(requests=[pb.TokenizeRequest(text="a")] * num_texts)
    data = request.SerializeToString()
    [tokenized], slowest, together = slowest_meanwhile(fake, lambda: fake.call("Tokenize", data))
    assert len(pb.BatchedTokenizeResponse.FromString(tokenized).responses) == num_texts
    assert slowest < max(together / 3, 0.3)


@pytest.mark.parametrize("field", ["prefix_id", "adapter_id"])
@pytest.mark.parametrize("size", [3_000, 9_000, MEBIBYTE])
def test_a_huge_id_is_refused(fake: Served, field: str, size: int) -> None:
    """The text must not exceed the size of a status."""
    request = batch("a")
    setattr(request, field, "é" * (size // 2))
    code, text = attempt(lambda: fake.generate(request))
    assert (code, is_documented(text, guided=False)) == (INVALID, True)


def test_a_soft_prompt_while_shards_are_lost(tmp_path: Path) -> None:
    """Lost shards are not the client's fault, and the text does not reveal their address."""
    setup = start_router(tmp_path, 1, "--recovery-timeout", "1")
    try:
        setup.servers.pop().stop()
        request = batch("a")
        request.prefix_id = "nobody"
        code, text = attempt(lambda: setup.stub.Generate(request, timeout=5))
    finally:
        stop_router(setup)
    assert (code, str(tmp_path) in text, "unix:" in text) == (grpc.StatusCode.UNAVAILABLE, False, False)
