"""`botocore`'s client of SageMaker's runtime, with a stand-in for SageMaker's front end: other paths and
keys, responses as an event stream, errors as ModelError."""

import binascii
import io
import json
import struct
from collections.abc import Iterator, Mapping
from functools import wraps
from typing import Any

import botocore.session
import urllib3
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.exceptions import ClientError

from integration_tests.clients.expectations import Check, Served, run
from integration_tests.clients.lmi_examples import EXAMPLES, Example, Reply, greedy

STREAMED = "invocations-response-stream"


class Front:
    """Front end that forwards to the service what the client sends to SageMaker."""

    def __init__(self, served: Served) -> None:
        self._url, self._headers = f"{served.root}/invocations", served.headers
        self._pool = urllib3.PoolManager(retries=False, timeout=60)

    def __call__(self, request: AWSPreparedRequest, **_: Any) -> AWSResponse:
        given = {name.lower(): _text(value) for name, value in request.headers.items()}
        assert given["authorization"].startswith("AWS4-HMAC-SHA256 ")
        passed = {name: value for name, value in given.items() if name.startswith("x-amzn-sagemaker-")}
        accept = given.get("accept") or given.get("x-amzn-sagemaker-accept") or "*/*"
        passed |= {"content-type": given["content-type"], "accept": accept, **self._headers}
        response = self._pool.request(
            "POST", self._url, body=request.body, headers=passed, preload_content=False
        )
        if response.status != 200:
            return self._fail(request.url, response)
        content_type = response.headers["content-type"]
        if request.url.endswith(STREAMED):
            headers = {"content-type": "application/vnd.amazon.eventstream"}
            headers["x-amzn-sagemaker-content-type"] = content_type
            return AWSResponse(request.url, 200, headers, Events(response))
        return AWSResponse(request.url, 200, {"content-type": content_type}, response)

    def _fail(self, url: str, response: urllib3.BaseHTTPResponse) -> AWSResponse:
        text = response.data.decode()
        fields: dict[str, str | int] = {"ErrorCode": "CLIENT_ERROR_FROM_MODEL"}
        fields |= {"Message": "the model refused"}
        fields |= {"OriginalStatusCode": response.status, "OriginalMessage": text}
        body = urllib3.HTTPResponse(io.BytesIO(json.dumps(fields).encode()), preload_content=False)
        headers = {"content-type": "application/json", "x-amzn-errortype": "ModelError"}
        return AWSResponse(url, 424, headers, body)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


class Events:
    """Convert a body to events of the AWS event stream as its pieces arrive."""

    def __init__(self, response: urllib3.BaseHTTPResponse) -> None:
        self._response = response

    def stream(self) -> Iterator[bytes]:
        for part in self._response.stream():
            yield _event(part)

    def close(self) -> None:
        self._response.close()


def _event(payload: bytes) -> bytes:
    kinds = {":event-type": "PayloadPart", ":message-type": "event"}
    headers = b"".join(
        bytes([len(name)]) + name.encode() + b"\x07" + struct.pack("!H", len(value)) + value.encode()
        for name, value in kinds.items()
    )
    prelude = struct.pack("!II", 16 + len(headers) + len(payload), len(headers))
    message = prelude + struct.pack("!I", binascii.crc32(prelude)) + headers + payload
    return message + struct.pack("!I", binascii.crc32(message))


def connect(served: Served) -> Any:
    session = botocore.session.get_session()
    session.set_credentials("an-id", "a-secret")
    client = session.create_client("sagemaker-runtime", region_name="us-east-1")
    client.meta.events.register_first("before-send.sagemaker-runtime", Front(served))
    return client


def invoke(client: Any, body: Mapping[str, Any]) -> Reply:
    """Call the operation that matches the body's `stream`."""
    fields = {"EndpointName": "tiny", "ContentType": "application/json", "Body": json.dumps(body)}
    fields["CustomAttributes"] = "trace=a-client"
    try:
        if body.get("stream"):
            answer = client.invoke_endpoint_with_response_stream(Accept="application/jsonlines", **fields)
            parts = [event["PayloadPart"]["Bytes"] for event in answer["Body"]]
            return Reply(200, answer["ContentType"], b"".join(parts))
        answer = client.invoke_endpoint(Accept="application/json", **fields)
        return Reply(200, answer["ContentType"], answer["Body"].read())
    except ClientError as error:
        response = error.response
        assert response["Error"]["Code"] == "ModelError", response
        return Reply(response["OriginalStatusCode"], "application/json", response["OriginalMessage"].encode())


def through_sagemaker(example: Example) -> Check:
    @wraps(example)
    def check(served: Served) -> None:
        client = connect(served)
        example(served, lambda body: invoke(client, body))

    return check


def a_stream_comes_in_parts(served: Served) -> None:
    asked = max(served.completions, key=lambda asked: len(asked.output_ids))
    body = json.dumps({**greedy(asked), "stream": True})
    answer = connect(served).invoke_endpoint_with_response_stream(
        EndpointName="tiny", ContentType="application/json", Body=body
    )
    assert len([event["PayloadPart"]["Bytes"] for event in answer["Body"]]) > 3


CHECKS: list[Check] = [*map(through_sagemaker, EXAMPLES), a_stream_comes_in_parts]

if __name__ == "__main__":
    run(CHECKS)
