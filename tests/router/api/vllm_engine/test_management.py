"""Tests the methods beside Generate with the stubs of smg-grpc-proto."""

import hashlib
import io
import json
import threading
import time
import zipfile
from collections.abc import Iterator

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from tests.support.accounts import scrape
from tests.support.router.engine_api import EngineApi, serve_engine_api
from tests.support.router.messages import PROMPT
from tests.support.router.router_process import MAX_SEQUENCE_LENGTH


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineApi]:
    with serve_engine_api(tmp_path_factory.mktemp("router"), "--max-batch-size", "4") as served:
        yield served


def test_health_and_facts(served: EngineApi) -> None:
    assert served.stub.HealthCheck(pb.HealthCheckRequest()).healthy
    info = served.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.served_model_name, info.is_generation, info.supports_vision) == ("m", True, False)
    assert info.max_context_length == MAX_SEQUENCE_LENGTH
    assert info.vocab_size == served.setup.shards[0].info.vocab_size
    assert json.loads(info.default_sampling_params_json) == {"top_k": 7}
    server = served.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (server.server_type, server.data_parallel_size, server.uptime_seconds > 0) == (
        "vllm-grpc",
        1,
        True,
    )


def test_loads_count_requests_and_tokens(served: EngineApi) -> None:
    sampling = pb.SamplingParams(ignore_eos=True, n=6)
    stream = served.stub.Generate(pb.GenerateRequest(text=PROMPT, stream=True, sampling_params=sampling))
    next(stream)
    [load] = served.stub.GetLoads(pb.GetLoadsRequest()).loads
    while load.num_running_reqs < 4:  # a load that was read a moment ago may be returned again
        [load] = served.stub.GetLoads(pb.GetLoadsRequest()).loads
    stream.cancel()
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (4, 2, 6)
    assert 0 < load.token_usage < 1
    assert 0 < load.num_used_tokens < load.max_total_num_tokens
    assert load.gen_throughput >= 1
    hits, queries = (
        scrape(served.setup.http)[f"tgi_prefix_cache_{name}_total"] for name in ("hits", "queries")
    )
    assert load.cache_hit_rate == pytest.approx(hits / queries)
    num_waiting = 2 * len(served.ids(PROMPT))
    assert load.num_waiting_uncached_tokens == round(num_waiting * (1 - load.cache_hit_rate))


def test_the_tokenizer_is_that_of_the_service(served: EngineApi) -> None:
    chunks = list(served.stub.GetTokenizer(common_pb2.GetTokenizerRequest()))
    data = b"".join(chunk.data for chunk in chunks)
    assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + [hashlib.sha256(data).hexdigest()]
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        assert archive.read("tokenizer.json").decode() == served.setup.tokenizer.to_str(pretty=True)
    again = b"".join(chunk.data for chunk in served.stub.GetTokenizer(common_pb2.GetTokenizerRequest()))
    assert again == data


@pytest.mark.parametrize("stream", [False, True])
def test_an_aborted_request_ends(served: EngineApi, stream: bool) -> None:
    message = pb.GenerateRequest(
        request_id="mine",
        text=PROMPT,
        stream=stream,
        sampling_params=pb.SamplingParams(n=2, ignore_eos=True, max_tokens=150),
    )
    call, answers = served.stub.Generate(message), []
    reader = threading.Thread(target=lambda: answers.extend(call))
    reader.start()
    abort = pb.AbortRequest(request_ids=["mine", "other"])
    while not _aborts(served, abort):
        pass
    reader.join(20)
    ends = [each.complete for each in answers if each.HasField("complete")]
    assert [(end.index, end.finish_reason) for end in ends] == [(0, "abort"), (1, "abort")]
    assert all(end.completion_tokens < 150 for end in ends)


def _aborts(served: EngineApi, message: pb.AbortRequest) -> bool:
    """Send an abort over a new connection, which another router worker may accept."""
    target = f"127.0.0.1:{served.setup.service.grpc_port}"
    with grpc.insecure_channel(target, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        try:
            VllmEngineStub(channel).Abort(message)  # type: ignore[no-untyped-call]
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise
            return False
    return True


def test_an_aborted_answer_has_one_end_for_each_text(served: EngineApi) -> None:
    """The client reads nothing until the abort, so that the service still sends the texts. Its connection
    takes two or three texts at once."""
    sampling = pb.SamplingParams(n=16, ignore_eos=True, max_tokens=150, logprobs=20)
    message = pb.GenerateRequest(request_id="slow", text=PROMPT, sampling_params=sampling)
    target = f"127.0.0.1:{served.setup.service.grpc_port}"
    small = [("grpc.http2.lookahead_bytes", 4096), ("grpc.http2.bdp_probe", 0)]
    with grpc.insecure_channel(target, small) as channel:
        call = VllmEngineStub(channel).Generate(message)  # type: ignore[no-untyped-call]
        call.initial_metadata()  # it comes with the first text
        assert _aborts(served, pb.AbortRequest(request_ids=["slow"]))
        ends = [(answer.complete.index, answer.complete.finish_reason) for answer in call]
    num_sent = sum(reason == "length" for _, reason in ends)
    assert 0 < num_sent < 16
    assert ends == [(index, "length" if index < num_sent else "abort") for index in range(16)]


def test_calls_without_an_id_are_not_aborted(served: EngineApi) -> None:
    sampling = pb.SamplingParams(ignore_eos=True, max_tokens=150)
    stream = served.stub.Generate(pb.GenerateRequest(text=PROMPT, stream=True, sampling_params=sampling))
    next(stream)
    assert not _aborts(served, pb.AbortRequest(request_ids=["", ""]))
    assert list(stream)[-1].complete.finish_reason == "length"


def test_an_abort_of_too_many_requests_is_refused(served: EngineApi) -> None:
    with pytest.raises(grpc.RpcError, match="request_ids must have at most 1024 ids") as refused:
        served.stub.Abort(pb.AbortRequest(request_ids=["a"] * 1025))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_what_is_missing_is_unimplemented(served: EngineApi) -> None:
    for call, message in (
        (served.stub.Embed, pb.EmbedRequest()),
        (served.stub.StartProfile, common_pb2.StartProfileRequest()),
    ):
        with pytest.raises(grpc.RpcError) as refusal:
            call(message)
        assert refusal.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_each_refusal_is_in_the_log_with_its_reason(served: EngineApi) -> None:
    stub = served.stub
    far = common_pb2.SubscribeKvEventsRequest(start_sequence_number=1 << 62)
    refused = [
        lambda: stub.Abort(pb.AbortRequest(request_ids=["a"] * 1025)),
        lambda: stub.Abort(pb.AbortRequest(request_ids=["secret"])),
        lambda: stub.StopProfile(common_pb2.StopProfileRequest()),
        lambda: next(stub.SubscribeKvEvents(far)),
        lambda: next(stub.Generate(pb.GenerateRequest())),
    ]
    for call in refused:
        with pytest.raises(grpc.RpcError):
            call()
    expected = [
        "Abort failed with INVALID_ARGUMENT: request_ids must have at most 1024 ids",
        "Abort failed with NOT_FOUND: request_ids: no such request is generating",
        "StopProfile failed with UNIMPLEMENTED: there is no profiler",
        "SubscribeKvEvents failed with INVALID_ARGUMENT: start_sequence_number must be <= ",
        "Request failed with INVALID_ARGUMENT: input: a request needs token ids or a text",
    ]
    lines, deadline = served.setup.service.lines, time.monotonic() + 10
    while not all(any(text in line for line in lines) for text in expected):
        assert time.monotonic() < deadline, lines
        time.sleep(0.02)
    assert all(" WARNING " in line for line in lines if " failed with " in line)
    assert not any("secret" in line for line in lines)


def test_cache_events_are_the_blocks_of_the_prompts(served: EngineApi) -> None:
    served.stub.FlushCache(common_pb2.FlushCacheRequest())
    stream = served.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
    first = next(stream)
    kinds = [event.WhichOneof("data") for event in first.events]
    assert (kinds, first.snapshot.count, first.snapshot.blocks) == (["cleared"], 1, 0)
    ids = served.ids("every word of a long prompt is in the cache " * 5)
    size = served.setup.shards[0].info.block_size
    message = pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=ids), sampling_params=pb.SamplingParams(max_tokens=1)
    )
    list(served.stub.Generate(message))
    stored = [event.stored for event in _next_events(stream, "stored")]
    blocks = [block for each in stored for block in each.blocks]
    wanted = [ids[start : start + size] for start in range(0, len(ids) - size + 1, size)]
    assert [list(block.token_ids) for block in blocks] == wanted
    assert not stored[0].HasField("parent_block_hash")
    assert len({block.block_hash for block in blocks}) == len(blocks)
    again = served.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
    copies = [block for event in _next_events(again, "stored")[1:] for block in event.stored.blocks]
    assert copies == blocks
    served.stub.FlushCache(common_pb2.FlushCacheRequest())
    assert len(_next_events(stream, "cleared")) == 1
    stream.cancel()
    again.cancel()


def _next_events(stream: Iterator[common_pb2.KvEventBatch], kind: str) -> list[common_pb2.KvCacheEvent]:
    """Return the events of the next batch with events of a kind."""
    batches = (batch for batch in stream if any(event.HasField(kind) for event in batch.events))
    return list(next(batches).events)


def test_a_stream_of_events_repeats_the_load_under_its_number(served: EngineApi) -> None:
    stream = served.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
    sequence_number, records = 0, []
    while len(records) < 2:
        batch = next(stream)
        if batch.load.load_only:
            assert (batch.sequence_number, len(batch.events)) == (sequence_number, 0)
            records.append(batch)
        sequence_number = batch.sequence_number
    stream.cancel()
    record, later = records
    assert (later.load.sample, later.load.running_requests) == (record.load.sample + 1, 0)
    [load] = served.stub.GetLoads(pb.GetLoadsRequest()).loads
    assert later.load.cache_hit_rate == load.cache_hit_rate
    assert later.load.HasField("waiting_uncached_tokens")


def test_a_subscriber_from_the_future_is_refused(served: EngineApi) -> None:
    stream = served.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(start_sequence_number=2**63))
    with pytest.raises(grpc.RpcError) as refusal:
        next(stream)
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refusal.value.details().startswith("start_sequence_number must be <= ")
