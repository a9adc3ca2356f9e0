"""The client with services of older versions of the contract, whose messages lack fields."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message_factory import GetMessageClass

from tests.support.blocking_clients import OpenClient
from tgis_client import CallReport, ModelInfo, ModelKind, Parameters, StopReason

TOKEN = {"text": "x", "logprob": -1.5, "rank": 2, "topTokens": [{"text": "y", "logprob": -0.5}]}
END: dict[str, Any] = {
    "generatedTokenCount": 2,
    "stopReason": "STOP_SEQUENCE",
    "stopSequence": "z",
    "seed": "7",
}
ANSWERS: dict[str, Any] = {
    "Generate": [{"responses": [{"text": "one two", "inputTokenCount": 3, "tokens": [TOKEN], **END}]}],
    "GenerateStream": [
        {"inputTokenCount": 3, "seed": "7"},
        {"text": "one", "generatedTokenCount": 1, "tokens": [TOKEN]},
        {"text": " two", **END},
    ],
    "Tokenize": [{"responses": [{"tokenCount": 2, "tokens": ["a", "b"]}]}],
    "ModelInfo": [{"modelKind": "ENCODER_DECODER", "maxSequenceLength": 5, "maxNewTokens": 4}],
}


@contextmanager
def serve_frozen(file: FileDescriptor, received: dict[str, Any]) -> Iterator[str]:
    """Serve with the messages of `file`."""

    def handler(method: Any) -> grpc.RpcMethodHandler:
        asked, answered = (GetMessageClass(each) for each in (method.input_type, method.output_type))
        answers = [ParseDict(each, answered()) for each in ANSWERS[method.name]]

        def answer(request: Any, _: grpc.ServicerContext) -> Any:
            received[method.name] = MessageToDict(request)
            return iter(answers) if method.server_streaming else answers[0]

        make = (
            grpc.unary_stream_rpc_method_handler
            if method.server_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        return make(answer, asked.FromString, answered.SerializeToString)

    service = file.services_by_name["GenerationService"]
    handlers = {method.name: handler(method) for method in service.methods}
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service.full_name, handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def test_every_method(open_client: OpenClient, frozen: FileDescriptor) -> None:
    received: dict[str, Any] = {}
    parameters = Parameters(temperature=0.5, max_new_tokens=4, stop_sequences=["z"], tokens=True)
    with serve_frozen(frozen, received) as target, open_client(target) as client:
        generation = client.generate("a", parameters)
        stream = client.stream("a", parameters)
        texts = [part.text for part in stream]
        [tokens] = client.tokenize(["a"])
        info = client.model_info()
    assert texts == ["", "one", " two"]
    assert stream.result == generation
    assert (generation.text, generation.seed, generation.stop_sequence) == ("one two", 7, "z")
    assert generation.stop_reason is StopReason.STOP_SEQUENCE
    assert generation.tokens[0].top_tokens[0].text == "y"
    assert generation.report == CallReport()
    assert (tokens.token_count, tokens.tokens) == (2, ("a", "b"))
    assert info == ModelInfo(ModelKind.ENCODER_DECODER, 5, 4)
    sent = {"maxNewTokens": 4, "stopSequences": ["z"]}
    for name in ("Generate", "GenerateStream"):
        params = received[name]["params"]
        assert (params["method"], params["sampling"], params["stopping"]) == (
            "SAMPLE",
            {"temperature": pytest.approx(0.5)},
            sent,
        )
