"""Tests the methods beside Generate with the stubs of smg-grpc-proto."""

import hashlib
import io
import threading
import zipfile

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from tests.router.api.vllm_engine.conftest import ServedEngine
from tests.support.router.messages import PROMPT
from tests.support.router.router_process import MAX_SEQUENCE_LENGTH


def test_health_and_facts(served: ServedEngine) -> None:
    assert served.stub.HealthCheck(pb.HealthCheckRequest()).healthy
    info = served.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.served_model_name, info.is_generation, info.supports_vision) == ("m", True, False)
    assert info.max_context_length == MAX_SEQUENCE_LENGTH
    assert info.vocab_size == served.setup.shards[0].info.vocab_size
    server = served.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (server.server_type, server.data_parallel_size, server.uptime_seconds > 0) == (
        "vllm-grpc",
        1,
        True,
    )


def test_loads_count_running_requests(served: ServedEngine) -> None:
    message = pb.GenerateRequest(
        request_id="long", text=PROMPT, stream=True, sampling_params=pb.SamplingParams(ignore_eos=True)
    )
    stream = served.stub.Generate(message)
    next(stream)
    loads = served.stub.GetLoads(pb.GetLoadsRequest())
    stream.cancel()
    [load] = loads.loads
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (1, 0, 1)
    assert 0 < load.token_usage < 1
    assert 0 < load.num_used_tokens < load.max_total_num_tokens


def test_the_tokenizer_is_that_of_the_service(served: ServedEngine) -> None:
    chunks = list(served.stub.GetTokenizer(common_pb2.GetTokenizerRequest()))
    data = b"".join(chunk.data for chunk in chunks)
    assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + [hashlib.sha256(data).hexdigest()]
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        assert archive.read("tokenizer.json").decode() == served.setup.tokenizer.to_str(pretty=True)
    again = b"".join(chunk.data for chunk in served.stub.GetTokenizer(common_pb2.GetTokenizerRequest()))
    assert again == data


@pytest.mark.parametrize("stream", [False, True])
def test_an_aborted_request_ends(served: ServedEngine, stream: bool) -> None:
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


def _aborts(served: ServedEngine, message: pb.AbortRequest) -> bool:
    try:
        served.stub.Abort(message)
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.NOT_FOUND:
            raise
        return False
    return True


def test_what_is_missing_is_unimplemented(served: ServedEngine) -> None:
    for call, message in (
        (served.stub.Embed, pb.EmbedRequest()),
        (served.stub.StartProfile, common_pb2.StartProfileRequest()),
    ):
        with pytest.raises(grpc.RpcError) as refusal:
            call(message)
        assert refusal.value.code() is grpc.StatusCode.UNIMPLEMENTED
