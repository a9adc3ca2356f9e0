"""Check soft prompts and adapters through the public API.

The tests cover the answers, what is shared between requests, and that a call releases its adapters however it
ends."""

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from tokenizers import Tokenizer

from tests.support.router.expected_answers import expected_text
from tests.support.router.fake_shard import BLOCK_SIZE, EOS, PAD, VOCAB_SIZE, FakeShard, ShardServer
from tests.support.router.http_port import metric
from tests.support.router.messages import batch, single, stopping
from tests.support.router.model_of_contents import PROMPT, Item, Library, adapter
from tests.support.router.model_of_shard import context, join_digests, next_token
from tests.support.router.router_process import MAX_SEQUENCE_LENGTH, Setup, start_router, stop_router
from tests.support.tokenizers.trained import write_byte_level
from tgis.pb import generation_pb2 as pb
from tgis.pb import shard_pb2

TEXT = "The quick brown fox"
KIB = 1024
ROOM = 4  # entries of one KiB, for each kind
INFO = shard_pb2.InfoResponse(prompt_cache_bytes=ROOM * KIB, adapter_cache_bytes=ROOM * KIB)
NUM_VIRTUAL = 11
Ids = tuple[str | None, str | None]
"""A prefix_id and an adapter_id."""


def library() -> Library:
    library = Library()
    for i in range(9):
        library.put(Item(f"p{i}", NUM_VIRTUAL), f"prompt/{i}.x")
        library.put(adapter(f"a{i}"), f"adapter-{i}")
    library.store[PROMPT, "lora"] = adapter("a1")
    return library


def write_no_bos(directory: Path) -> Tokenizer:
    """Write a tokenizer that adds no token to an empty text."""
    return write_byte_level(directory, VOCAB_SIZE, bos=False)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    """A router with blocks for one long sequence, so that others are preempted."""
    few = shard_pb2.InfoResponse(num_blocks=26)
    few.MergeFrom(INFO)
    directory = tmp_path_factory.mktemp("bare")
    setup = start_router(directory, 1, write_tokenizer=write_no_bos, info=few, library=library())
    yield setup
    assert stop_router(setup) == 0, setup.service.output
    assert setup.library.faults == []


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    setup = start_router(tmp_path_factory.mktemp("tuned"), 2, info=INFO, library=library())
    yield setup
    assert stop_router(setup) == 0, setup.service.output
    assert setup.library.faults == []


def request(text: str = TEXT, ids: Ids = (None, None), **params: object) -> pb.BatchedGenerationRequest:
    return batch(text, **params) if ids == (None, None) else named(batch(text, **params), ids)


def named(message: pb.BatchedGenerationRequest, ids: Ids) -> pb.BatchedGenerationRequest:
    for name, value in zip(("prefix_id", "adapter_id"), ids, strict=True):
        if value is not None:
            setattr(message, name, value)
    return message


def stream(text: str, ids: Ids, **params: object) -> pb.SingleGenerationRequest:
    message = single(text, **params)
    named(message, ids)  # type: ignore[arg-type]
    return message


def expected_tokens(setup: Setup, text: str, num_new: int, prompt: str = "", lora: str = "") -> list[int]:
    tokens = [PAD] * (NUM_VIRTUAL if prompt else 0) + setup.tokenizer.encode(text).ids
    prompt_len, seed = len(tokens), context([], False, join_digests(lora, prompt))
    while len(tokens) < prompt_len + num_new and (len(tokens) == prompt_len or tokens[-1] != EOS):
        tokens.append(next_token(tokens, VOCAB_SIZE, seed))
    return tokens[prompt_len:]


def refusal(setup: Setup, message: pb.BatchedGenerationRequest) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        setup.stub.Generate(message)
    return caught.value.code(), caught.value.details()


def check_nothing_is_held(setup: Setup) -> None:
    """Check that no entry is referenced, by loading entries that need the whole cache."""
    for item in (Item("all", num_bytes=ROOM * KIB), adapter("all too", ROOM * KIB)):
        setup.library.put(item, "all")
    assert setup.stub.Generate(request("a", ("all", "all"), stopping=stopping(1))).responses
    assert [set(shard.shelf.loaded) for shard in setup.shards] == [{"all", "all too"}] * len(setup.shards)
    assert setup.library.faults == []


@pytest.mark.parametrize(
    ("ids", "prompt", "lora"),
    [
        (("prompt/1.x", None), "p1", ""),
        ((None, "adapter-2"), "", "a2"),
        (("prompt/1.x", "adapter-2"), "p1", "a2"),
        (("lora", None), "", "a1"),
        (("prompt/1.x", ""), "p1", ""),
        (("lora", ""), "", "a1"),
        ((None, ""), "", ""),
    ],
)
def test_ids_change_the_answer_and_nothing_else(tuned: Setup, ids: Ids, prompt: str, lora: str) -> None:
    tokens = expected_tokens(tuned, TEXT, 20, prompt, lora)
    [answer] = tuned.stub.Generate(request(ids=ids)).responses
    assert answer.text == expected_text(tuned, tokens)
    assert answer.generated_token_count == len(tokens)
    assert answer.input_token_count == len(tuned.tokenizer.encode(TEXT).ids)
    header, *rest = tuned.stub.GenerateStream(stream(TEXT, ids))
    assert header.input_token_count == answer.input_token_count
    assert "".join(part.text for part in rest) == answer.text


def test_all_of_a_batch_have_the_same(tuned: Setup) -> None:
    texts = [f"{i} little girls" for i in range(20)]
    message = named(batch(*texts, stopping=stopping(9)), ("prompt/3.x", "adapter-3"))
    answers = tuned.stub.Generate(message).responses
    tokens = [expected_tokens(tuned, text, 9, "p3", "a3") for text in texts]
    assert [answer.text for answer in answers] == [expected_text(tuned, some) for some in tokens]


ALONE: Ids = ("prompt/1.x", None)


@pytest.mark.parametrize("limit", [0, 1])
def test_an_empty_text_is_an_input_behind_a_prompt(bare: Setup, limit: int) -> None:
    """Check that a client sees no input token, and that details report the virtual tokens."""
    options = pb.ResponseOptions(
        input_tokens=True, generated_tokens=True, token_ranks=True, token_logprobs=True, input_text=True
    )
    params = {"response": options, "truncate_input_tokens": limit}
    tokens = expected_tokens(bare, "", 20, "p1")
    before = metric(bare, "tgi_request_input_length_count")
    [answer] = bare.stub.Generate(request("", ALONE, **params)).responses
    assert (answer.text, answer.input_token_count) == (expected_text(bare, tokens), 0)
    assert [token.text for token in answer.input_tokens] == [bare.tokenizer.id_to_token(PAD)] * NUM_VIRTUAL
    assert [token.rank for token in answer.input_tokens] == list(range(NUM_VIRTUAL))
    header, inputs, *rest = bare.stub.GenerateStream(stream("", ALONE, **params))
    assert header == pb.GenerationResponse()
    assert inputs.input_tokens == answer.input_tokens
    assert inputs.input_token_count == NUM_VIRTUAL
    assert "".join(part.text for part in rest) == answer.text
    assert metric(bare, "tgi_request_input_length_count") == before + 2
    bare.service.wait_for_line("input_tokens=0 ", 5)


def test_limits_of_a_prompt_alone(bare: Setup) -> None:
    room = MAX_SEQUENCE_LENGTH - NUM_VIRTUAL
    sums = f"input tokens (0) plus prefix length ({NUM_VIRTUAL})"
    long = request("", ALONE, stopping=stopping(199, min_new_tokens=room + 1))
    text = f"{sums} plus min_new_tokens ({room + 1}) must be <= {MAX_SEQUENCE_LENGTH}"
    assert refusal(bare, long) == (grpc.StatusCode.INVALID_ARGUMENT, text)
    long.params.stopping.min_new_tokens = room
    [answer] = bare.stub.Generate(long).responses
    assert (answer.generated_token_count, answer.stop_reason) == (room, pb.TOKEN_LIMIT)


def test_prompts_alone_are_preempted_and_resumed(bare: Setup) -> None:
    """Check empty texts in a batch with others; all of them are preempted and computed again."""
    before, texts = metric(bare, "tgi_preemptions"), ["", "girl", "", "a little girl"] * 4
    ids = [("prompt/1.x", None), ("prompt/2.x", "adapter-2")]
    asked = [(text, ids[i % 5 == 0]) for i, text in enumerate(texts)]
    with ThreadPoolExecutor(len(asked)) as threads:
        answers = threads.map(
            lambda one: bare.stub.Generate(request(*one, stopping=stopping(60))).responses[0], asked
        )
        for (text, (prompt, lora)), answer in zip(asked, answers, strict=True):
            names = f"p{prompt[7]}", f"a{lora[8]}" if lora else ""
            assert answer.text == expected_text(bare, expected_tokens(bare, text, 60, *names))
    assert metric(bare, "tgi_preemptions") > before


def test_an_empty_text_without_virtual_tokens_is_refused(bare: Setup) -> None:
    """Check that an adapter adds no tokens, whichever ID names it."""
    text = "tokenizer error the input has no tokens"
    for ids in ((None, None), (None, "adapter-1"), ("lora", None)):
        assert refusal(bare, request("", ids)) == (grpc.StatusCode.INVALID_ARGUMENT, text)


def test_refusals(tuned: Setup) -> None:
    prompt, lora = "can't retrieve prompt prefix with id '{}': {}", "can't retrieve adapter with id '{}': {}"
    cut = "é" * 128
    tuned.library.errors[1, "p8"] = (grpc.StatusCode.INVALID_ARGUMENT, "the cause")
    tuned.library.errors[0, "a8"] = (grpc.StatusCode.INVALID_ARGUMENT, "the cause")
    conflict = "it is an adapter, but adapter_id names one too"
    cases: list[tuple[Ids, str]] = [
        (("nobody", None), prompt.format("nobody", 'prefix id "nobody" not found')),
        (("", None), prompt.format("", 'prefix id "" not found')),
        ((None, "nobody"), lora.format("nobody", "directory does not exist")),
        (("nobody", "nobody"), lora.format("nobody", "directory does not exist")),
        (("lora", "adapter-2"), prompt.format("lora", conflict)),
        (("é" * 2048, None), prompt.format(cut, f'prefix id "{cut}" not found')),
        ((None, "é" * 2048), lora.format(cut, "directory does not exist")),
        (("prompt/8.x", None), prompt.format("prompt/8.x", "the cause")),
        (("prompt/1.x", "adapter-8"), lora.format("adapter-8", "the cause")),
    ]
    for ids, text in cases:
        assert refusal(tuned, request(ids=ids)) == (grpc.StatusCode.INVALID_ARGUMENT, text)
        with pytest.raises(grpc.RpcError) as caught:
            list(tuned.stub.GenerateStream(stream(TEXT, ids)))
        assert caught.value.details() == text
    bad = request("", ("nobody", "nobody"), stopping=stopping(5000))
    assert refusal(tuned, bad)[1].startswith("max_new_tokens must be <=")  # parameters are checked first
    check_nothing_is_held(tuned)


def test_limits_count_virtual_tokens(tuned: Setup) -> None:
    num_left = MAX_SEQUENCE_LENGTH - NUM_VIRTUAL
    sums = f"plus prefix length ({NUM_VIRTUAL})"
    long, ids = "fox " * 300, ("prompt/1.x", None)
    whole = request(long, ids, truncate_input_tokens=num_left)
    text = f"input tokens ({num_left}) {sums} must be < {MAX_SEQUENCE_LENGTH}"
    assert refusal(tuned, whole) == (grpc.StatusCode.INVALID_ARGUMENT, text)
    num_least = -(-len(long * 20) // 19)  # the tokenizer's longest entry has 19 bytes
    text = f"input tokens (at least {num_least}) {sums} must be < {MAX_SEQUENCE_LENGTH}"
    assert refusal(tuned, request(long * 20, ids)) == (grpc.StatusCode.INVALID_ARGUMENT, text)
    minimum = request(long, ids, truncate_input_tokens=150, stopping=stopping(100, min_new_tokens=40))
    text = f"input tokens (150) {sums} plus min_new_tokens (40) must be <= {MAX_SEQUENCE_LENGTH}"
    assert refusal(tuned, minimum) == (grpc.StatusCode.INVALID_ARGUMENT, text)
    criteria = stopping(100, min_new_tokens=39)
    [answer] = tuned.stub.Generate(request(long, ids, truncate_input_tokens=150, stopping=criteria)).responses
    assert (answer.generated_token_count, answer.stop_reason) == (39, pb.TOKEN_LIMIT)
    assert answer.input_token_count == 150


def test_virtual_tokens_are_listed_as_padding(tuned: Setup) -> None:
    options = pb.ResponseOptions(input_tokens=True, token_ranks=True)
    pad = tuned.tokenizer.id_to_token(PAD)
    pieces = [pad] * NUM_VIRTUAL + tuned.tokenizer.encode(TEXT).tokens
    ids = ("prompt/2.x", None)
    [answer] = tuned.stub.Generate(request(ids=ids, response=options)).responses
    assert [token.text for token in answer.input_tokens] == pieces
    assert [token.rank for token in answer.input_tokens] == list(range(len(pieces)))
    header, inputs, *_ = tuned.stub.GenerateStream(stream(TEXT, ids, response=options))
    assert inputs.input_tokens == answer.input_tokens
    assert inputs.input_token_count == len(pieces)
    assert header.input_token_count == answer.input_token_count == len(pieces) - NUM_VIRTUAL


def num_computed(setup: Setup, text: str, ids: Ids) -> int:
    before = setup.shards[0].model.num_computed
    setup.stub.Generate(request(text, ids, stopping=stopping(1)))
    return setup.shards[0].model.num_computed - before


def test_one_prompt_is_computed_once_and_nothing_is_shared_across(tuned: Setup) -> None:
    num_inputs = len(tuned.tokenizer.encode(TEXT * 5).ids)
    seen: set[Ids] = set()
    for ids in [(p, a) for p in (None, "prompt/4.x", "prompt/5.x") for a in (None, "adapter-4", "adapter-5")]:
        num_tokens = num_inputs + NUM_VIRTUAL * (ids[0] is not None)
        tuned.library.put(Item("p4", NUM_VIRTUAL), "same")
        assert num_computed(tuned, TEXT * 5, ids) == num_tokens, ids
        again = ("same" if ids[0] == "prompt/4.x" else ids[0], ids[1])  # another ID of the same content
        assert num_computed(tuned, TEXT * 5, again) == (num_tokens - 1) % BLOCK_SIZE + 1, ids
        seen.add(ids)
    assert len(seen) == 9
    # For another text under a known prompt, the full blocks of the virtual tokens are cached.
    assert num_computed(tuned, "0 else", ("prompt/4.x", None)) == (
        len(tuned.tokenizer.encode("0 else").ids) + NUM_VIRTUAL % BLOCK_SIZE
    )


def test_a_replaced_or_removed_prompt_stays_with_its_requests(tuned: Setup) -> None:
    tuned.library.put(Item("old", NUM_VIRTUAL), "changing")
    for shard in tuned.shards:
        shard.step_s = 0.05
    try:
        ids = ("changing", None)
        running = tuned.stub.GenerateStream(stream("old", ids, stopping=stopping(150, min_new_tokens=150)))
        next(running)
        tuned.library.put(Item("new", NUM_VIRTUAL), "changing")
        [answer] = tuned.stub.Generate(request("new", ids, stopping=stopping(5))).responses
        assert answer.text == expected_text(tuned, expected_tokens(tuned, "new", 5, "new"))
        del tuned.library.store[PROMPT, "changing"]
        assert refusal(tuned, request(ids=ids))[1].endswith('prefix id "changing" not found')
        for i in range(ROOM):
            tuned.stub.Generate(request("a", (f"prompt/{i}.x", None), stopping=stopping(1)))
        assert tuned.shards[1].shelf.loaded.keys() >= {"old"}
    finally:
        for shard in tuned.shards:
            shard.step_s = 0.001
    assert list(running)[-1].generated_token_count == 150
    check_nothing_is_held(tuned)


def test_metrics_and_log(tuned: Setup) -> None:
    check_nothing_is_held(tuned)
    names = ["load_duration_count", "load_failure", "cache_hits", "cache_misses", "cache_evictions"]
    lengths = ["tgi_request_input_length_sum", "tgi_request_total_tokens_sum", "tgi_batch_next_tokens_sum"]
    series = [f"tgi_{kind}_{name}" for kind in ("prompt", "adapter") for name in names]
    tuned.library.put(Item("m1", NUM_VIRTUAL), "metrics")
    tuned.library.put(adapter("m2", 100), "metrics")
    before = [metric(tuned, name) for name in series + lengths]
    [answer, _, _] = [
        tuned.stub.Generate(request("for metrics", ("metrics", "metrics"))).responses[0] for _ in range(3)
    ]
    refusal(tuned, request(ids=("nobody", None)))
    refusal(tuned, request(ids=(None, "nobody")))
    refusal(tuned, request(ids=("metrics", "nobody")))
    after = [metric(tuned, name) for name in series + lengths]
    changed = [int(b - a) for a, b in zip(before, after, strict=True)]
    assert changed[:10] == [1, 1, 2, 1, 1, 1, 2, 2, 1, 1]
    num_inputs = len(tuned.tokenizer.encode("for metrics").ids)
    assert changed[10:12] == [3 * num_inputs, 3 * (num_inputs + answer.generated_token_count)]
    assert changed[12] >= num_inputs + NUM_VIRTUAL
    gauges = [
        metric(tuned, f"tgi_{kind}_cache_{name}")
        for kind in ("prompt", "adapter")
        for name in ("entries", "bytes")
    ]
    assert gauges == [1, KIB, 1, 100]
    tuned.service.wait_for_line(f"virtual_tokens={NUM_VIRTUAL}", 5)


def test_storms_of_calls_that_end_in_every_way_hold_nothing(tuned: Setup) -> None:
    """Check more entries than fit into the cache; every answer must be of the right entry."""
    wrong, served = [], []

    def client(seed: int) -> None:
        r = random.Random(seed)
        for _ in range(12):
            i, j = r.randrange(1, 6), r.randrange(1, 6)
            ids = r.choice(
                [(f"prompt/{i}.x", None), (None, f"adapter-{j}"), (f"prompt/{i}.x", f"adapter-{j}")]
            )
            text, num_new = f"{r.randrange(9)} storm", r.randint(1, 12)
            way = r.randrange(5)
            with suppress(grpc.RpcError):
                if way == 0:
                    call = tuned.stub.GenerateStream(stream(text, ids, stopping=stopping(60)))
                    for _ in range(r.randrange(3)):
                        next(call, None)
                    call.cancel()
                elif way == 1:
                    tuned.stub.Generate(request(text, ids, stopping=stopping(100)), timeout=r.random() / 30)
                elif way == 2:
                    tuned.stub.Generate(request("long " * 300, ids))
                else:
                    [answer] = tuned.stub.Generate(request(text, ids, stopping=stopping(num_new))).responses
                    digests = f"p{i}" if ids[0] else "", f"a{j}" if ids[1] else ""
                    tokens = expected_tokens(tuned, text, num_new, *digests)
                    served.append(answer.text)
                    if answer.text != expected_text(tuned, tokens):
                        wrong.append((text, ids))

    with ThreadPoolExecutor(12) as threads:
        list(threads.map(client, range(12)))
    assert not wrong
    assert len(served) > 30
    check_nothing_is_held(tuned)


@pytest.fixture
def lost(tmp_path: Path) -> Iterator[Setup]:
    """A separate router whose shards the test may stop; two adapters are preloaded."""
    info = shard_pb2.InfoResponse(preloaded_adapter_ids=["adapter-1", "adapter-2"])
    info.MergeFrom(INFO)
    setup = start_router(tmp_path, 2, info=info, library=library())
    yield setup
    assert stop_router(setup) == 0, setup.service.output
    assert setup.library.faults == []


def test_streams_go_on_with_their_prompts_when_the_shards_come_back(lost: Setup) -> None:
    """Check that only requests whose copy is also lost fail, and that unused entries are not reloaded."""
    setup = lost
    assert [set(shard.shelf.loaded) for shard in setup.shards] == [{"a1", "a2"}] * 2  # before any request
    for shard in setup.shards:
        shard.step_s = 0.01
    all_ids: list[Ids] = [(f"prompt/{i % 4}.x", f"adapter-{i % 3 + 1}") for i in range(8)]
    setup.stub.Generate(request("a", (None, "adapter-7"), stopping=stopping(1)))
    started = threading.Barrier(len(all_ids) + 1)

    def read(i: int) -> str:
        parts, has_begun = [], False
        try:
            call = setup.stub.GenerateStream(stream(f"{i}", all_ids[i], stopping=stopping(60)))
            for response in call:
                parts.append(response.text)
                if response.generated_token_count and not has_begun:
                    has_begun = True
                    started.wait(10)
        except grpc.RpcError as error:
            return f"{error.code().name} {error.details()}"
        return "".join(parts)

    with ThreadPoolExecutor(len(all_ids)) as threads:
        results = [threads.submit(read, i) for i in range(len(all_ids))]
        started.wait(10)
        for server in setup.servers:
            server.stop()
        setup.library.store.clear()
        del setup.library.copies["p2"]
        serve_again(setup)
        texts = [result.result(30) for result in results]
    for i, text in enumerate(texts):
        if i % 4 == 2:
            assert text.startswith("INTERNAL Request failed during generation: internal error, request ")
        else:
            tokens = expected_tokens(setup, f"{i}", 60, f"p{i % 4}", f"a{i % 3 + 1}")
            assert text == expected_text(setup, tokens)
    loaded = [set(shard.shelf.loaded) for shard in setup.shards]
    assert loaded == [{"p0", "p1", "p3", "a1", "a2", "a3"}] * 2


def serve_again(setup: Setup) -> None:
    setup.shards[:] = [FakeShard(rank, 2, INFO, setup.library, 2) for rank in range(2)]
    setup.shards[0].shelf.loaded["left over"] = Item("left over")
    setup.servers[:] = [ShardServer(shard, setup.uds_path) for shard in setup.shards]


def test_a_call_waits_for_room(tuned: Setup) -> None:
    """Check that a call waits for space up to the lookup's time limit."""
    check_nothing_is_held(tuned)
    for shard in tuned.shards:
        shard.step_s = 0.02
    try:
        criteria = stopping(20, min_new_tokens=20)
        running = tuned.stub.GenerateStream(stream("a", ("all", None), stopping=criteria))
        next(running)
        began = time.monotonic()
        assert tuned.stub.Generate(request("b", ("prompt/1.x", None), stopping=stopping(1))).responses
        assert time.monotonic() - began > 0.15
        assert "all" not in tuned.shards[0].shelf.loaded
        assert list(running)[-1].generated_token_count == 20
    finally:
        for shard in tuned.shards:
            shard.step_s = 0.001
