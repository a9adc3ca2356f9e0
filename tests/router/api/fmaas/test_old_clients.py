"""Tests clients generated from the contract and its older versions: every method answers all of them
alike."""

from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.json_format import ParseDict
from google.protobuf.message_factory import GetMessageClass

from tests.support.router.router_process import Setup
from tests.support.streams import join_stream
from tgis.pb import generation_pb2 as pb

PARAMS = {
    "method": "GREEDY",
    "stopping": {"maxNewTokens": 12, "stopSequences": ["zz"]},
    "response": {"generatedTokens": True, "inputTokens": True, "tokenLogprobs": True, "topNTokens": 2},
    "truncateInputTokens": 9,
}
REQUESTS: dict[str, Any] = {
    "Generate": {"requests": [{"text": "a girl"}, {"text": "naïve café"}], "params": PARAMS},
    "GenerateStream": {"request": {"text": "a girl"}, "params": PARAMS},
    "Tokenize": {"requests": [{"text": "a girl"}], "returnTokens": True, "returnOffsets": True},
    "ModelInfo": {"modelId": "any"},
}


def answer(channel: grpc.Channel, file: FileDescriptor, name: str) -> bytes:
    """Return a client's answer, serialized again. The client uses the messages of `file`."""
    method = file.services_by_name["GenerationService"].methods_by_name[name]
    asked, answered = (GetMessageClass(each) for each in (method.input_type, method.output_type))
    path = f"/{method.containing_service.full_name}/{name}"
    make = channel.unary_stream if method.server_streaming else channel.unary_unary
    call = make(path, request_serializer=asked.SerializeToString, response_deserializer=answered.FromString)
    response = call(ParseDict(REQUESTS[name], asked()), timeout=20)
    whole = join_stream(response) if method.server_streaming else response
    data: bytes = whole.SerializeToString(deterministic=True)
    return data


@pytest.mark.parametrize("name", REQUESTS)
def test_every_shape_is_answered_alike(router: Setup, frozen: FileDescriptor, name: str) -> None:
    expected = answer(router.channel, pb.DESCRIPTOR, name)
    assert answer(router.channel, frozen, name) == expected
    assert len(expected) > 5
