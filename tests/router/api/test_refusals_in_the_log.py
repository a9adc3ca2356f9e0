"""Checks that the log has the reason of every refusal and no text of the request, over all APIs of a real
router: each field of each request gets wrong values that contain a mark."""

import http.client
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import msgspec
import pytest
from tokenizers import Tokenizer

from tests.support.router.messages import batch, single, stopping
from tests.support.router.router_process import Setup, start_router, stop_router, write_usual
from tgis.pb import generation_pb2 as pb
from tgis.router.api.lmi.parameters import LmiParameters
from tgis.router.api.lmi.request import LmiRequest
from tgis.router.api.openai.adapter_routes import LoadAdapterBody, UnloadAdapterBody
from tgis.router.api.openai.chat.types import ChatRequest
from tgis.router.api.openai.completions.types import CompletionRequest
from tgis.router.api.openai.tokenize import DetokenizeBody, TokenizeBody
from tgis.router.api.tgi.types import GenerateParameters, GenerateRequest

MARK = "mArKeD"
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}"
    "{% if m.name %}{{ raise_exception('no name ' + m.name) }}{% endif %}{% endfor %}"
)
NAMED = ("model", "adapter_id", "prefix_id")
"""Fields of a log line for names of models and adapters, which are no text to generate from."""
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": MARK}], "max_tokens": 1}
TEXT: dict[str, Any] = {"prompt": MARK, "max_tokens": 1}
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Form(NamedTuple):
    path: str
    fields: type[msgspec.Struct]
    valid: dict[str, Any]
    inner: str = ""
    """Field of the request with the fields; empty for the request itself."""


FORMS = [
    Form(COMPLETIONS, CompletionRequest, TEXT),
    Form(CHATS, ChatRequest, CHAT),
    Form("/tokenize", TokenizeBody, {"prompt": MARK, "messages": CHAT["messages"]}),
    Form("/detokenize", DetokenizeBody, {"tokens": [10**6]}),
    Form("/v1/load_lora_adapter", LoadAdapterBody, {"lora_name": f" {MARK}", "lora_path": "x"}),
    Form("/v1/unload_lora_adapter", UnloadAdapterBody, {"lora_name": MARK}),
    Form("/generate", GenerateRequest, {"inputs": MARK}),
    Form("/generate", GenerateParameters, {"inputs": MARK}, "parameters"),
    Form("/invocations", LmiRequest, {"inputs": MARK}),
    Form("/invocations", LmiParameters, {"inputs": MARK}, "parameters"),
]
WRONG: list[Any] = [MARK, [{MARK: [MARK]}], {"type": MARK, "value": MARK}]


class Refused(NamedTuple):
    path: str
    body: bytes | dict[str, Any]
    reason: str
    """Text that the line must end with."""


def function(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": fields}]}


STRICT: dict[str, Any] = {"type": "object", "properties": {"a": {"type": MARK}}}
REFUSED = [
    Refused(COMPLETIONS, b'{"prompt": "%s"' % MARK.encode(), "JSON in UTF-8: it ends too early"),
    Refused(
        COMPLETIONS,
        b'{"prompt":\n "%s" 1}' % MARK.encode(),
        "the body is not valid JSON in UTF-8: expected ',' or '}' at line 2, column 11",
    ),
    Refused(COMPLETIONS, MARK.encode() + b"\xff", "invalid character at line 1, column 1"),
    Refused(COMPLETIONS, b'{"prompt": "%s\xff"}' % MARK.encode(), "not UTF-8 at line 1, column 19"),
    Refused(
        "/generate", b'{"inputs": "%s",}' % MARK.encode(), "trailing comma in object at line 1, column 21"
    ),
    Refused(COMPLETIONS, b"", "the body is not valid JSON in UTF-8: it is empty"),
    Refused(COMPLETIONS, {MARK + " ": [0] * 300_000}, "a field has more than 262144 values"),
    Refused(COMPLETIONS, TEXT | {"model": MARK}, "the model does not exist"),
    Refused(
        COMPLETIONS, TEXT | {"max_tokens": -1}, "max_tokens must be >= 1, or 0 with echo or prompt_logprobs"
    ),
    Refused(COMPLETIONS, TEXT | {"guided_regex": f"({MARK}"}, "guided_regex is not valid"),
    Refused(COMPLETIONS, TEXT | {"guided_grammar": f"root ::= {MARK}"}, "guided_grammar is not valid"),
    Refused(
        COMPLETIONS,
        TEXT | {"guided_json": f'{{"a": {MARK}}}'},
        "guided_json is not valid: Expecting value at line 1, column 7",
    ),
    Refused(COMPLETIONS, TEXT | {"logit_bias": {MARK: 1}}, "logit_bias: keys must be token ids in decimal"),
    Refused(CHATS, CHAT | {"guided_json": {"type": MARK}}, "guided_json is not valid"),
    Refused(CHATS, CHAT | {"messages": []}, "messages must not be empty"),
    Refused(
        CHATS,
        {"messages": [{"role": "user", "content": "a", "name": MARK}]},
        "the chat template refuses the chat",
    ),
    Refused(
        CHATS,
        {"messages": [{"role": "user", "content": [{"type": MARK, "text": MARK}]}]},
        "messages[0]: parts must be text",
    ),
    Refused(
        CHATS,
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": MARK, "function": {"name": MARK, "arguments": f"{{{MARK}"}}],
                }
            ]
        },
        "a tool call are not valid JSON: object keys must be strings at line 1, column 2",
    ),
    Refused(CHATS, CHAT | function(name=f"{MARK} "), "must be 1 to 64 letters, digits and characters of _.-"),
    Refused(CHATS, CHAT | {"tool_choice": MARK}, "tool_choice must be none, auto, required or an object"),
    Refused("/v1/unload_lora_adapter", {"lora_name": MARK}, "the LoRA adapter cannot be found"),
    Refused(f"/v1/audio/{MARK}", {}, "this route of the API is not served"),
    Refused(f"/v1/models/{MARK}", {}, "the path is served for GET, HEAD only"),
    Refused(
        "/chat_tokenize", {"messages": [{"role": "user", "name": MARK}]}, "messages[0].content is required"
    ),
    Refused(
        "/generate",
        {"inputs": MARK, "parameters": {"grammar": {"type": "regex", "value": f"({MARK}"}}},
        "grammar is not valid",
    ),
    Refused(
        "/generate",
        {"inputs": MARK, "parameters": {"max_new_tokens": 999}},
        "7 `inputs` tokens and 999 `max_new_tokens`",
    ),
    Refused(f"/predictions/{MARK}", {"inputs": MARK}, "the model is not found"),
    Refused("/invocations", {"inputs": MARK, "adapters": MARK}, "the adapter is not registered"),
]


def write_with_template(directory: Path) -> Tokenizer:
    tokenizer = write_usual(directory)
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return tokenizer


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    flags = ["--json-output", "--http-api", "openai,tgi,lmi", "--runtime-adapters"]
    setup = start_router(tmp_path_factory.mktemp("all"), 1, *flags, write_tokenizer=write_with_template)
    yield setup
    assert stop_router(setup) == 0


class Log:
    """Requests to a router, and the lines that it logs about them."""

    def __init__(self, setup: Setup) -> None:
        self._service = setup.service
        self._begin = len(self._service.lines)
        self._connection = http.client.HTTPConnection(setup.http.removeprefix("http://"), timeout=20)

    def post(self, path: str, body: bytes | dict[str, Any]) -> int:
        """Send a request, and return the answer's status."""
        encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
        # With a token, no lines are left out.
        headers = {"authorization": "Bearer any", "content-type": "application/json"}
        self._connection.request("POST", path, encoded, headers)
        response = self._connection.getresponse()
        response.read()
        return response.status

    def refusals(self, count: int) -> list[str]:
        """Wait for `count` lines about refusals, and return their messages. No line may have the mark, except
        where it is the name of a model or an adapter."""
        self._connection.close()
        deadline = time.monotonic() + 30
        while len(self._refusals()) < count and time.monotonic() < deadline:
            time.sleep(0.02)
        for line in self._service.lines[self._begin :]:
            plain = {name: value for name, value in json.loads(line).items() if name not in NAMED}
            assert MARK not in json.dumps(plain), plain
        messages = self._refusals()
        assert len(messages) == count, messages
        return messages

    def _refusals(self) -> list[str]:
        messages = (str(json.loads(line)["message"]) for line in self._service.lines[self._begin :])
        return [message for message in messages if re.search("(refused|failed) with", message)]


def wrong_requests() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a path and a body for each wrong value of each field."""
    for form in FORMS:
        for name in form.fields.__struct_encode_fields__:
            if name == "adapter_id":
                continue  # the log names the missing adapter
            for value in WRONG:
                wrong = {name: value}
                yield form.path, form.valid | ({form.inner: wrong} if form.inner else wrong)


@pytest.mark.slow
def test_no_wrong_field_comes_into_the_log(setup: Setup) -> None:
    log = Log(setup)
    statuses = [log.post(path, body) for path, body in wrong_requests()]
    num_refused = sum(status >= 400 for status in statuses)
    assert num_refused > 300
    for line in log.refusals(num_refused):
        assert re.search(r"(refused|failed) with \w+: \w", line), line


def test_each_refusal_over_http_has_its_reason(setup: Setup) -> None:
    log = Log(setup)
    statuses = [log.post(one.path, one.body) for one in REFUSED]
    assert all(400 <= status < 500 for status in statuses), statuses
    for line, one in zip(log.refusals(len(REFUSED)), REFUSED, strict=True):
        assert line.endswith(one.reason), (one, line)


def grpc_requests() -> Iterator[tuple[pb.BatchedGenerationRequest, str]]:
    def decoding(**fields: Any) -> pb.BatchedGenerationRequest:
        return batch(MARK, decoding=pb.DecodingParameters(**fields))

    yield batch(MARK, stopping=stopping(9999)), "max_new_tokens must be <= 199"
    stops = ["a" * 241 + MARK]
    yield batch(MARK, stopping=stopping(9, stop_sequences=stops)), "each not more than 240 UTF8 bytes"
    yield decoding(regex=f"({MARK}"), "regex is not valid"
    yield decoding(grammar=f"root ::= {MARK}"), "grammar is not valid"
    yield decoding(json_schema=f"{{{MARK}"), "in double quotes at line 1, column 2"
    yield decoding(choice=pb.DecodingParameters.StringChoices(choices=[MARK])), "at least two choices"
    yield batch(MARK * 500), "must be < 200"


def test_each_refusal_over_grpc_has_its_reason(setup: Setup) -> None:
    log = Log(setup)
    requests = list(grpc_requests())
    for request, _ in requests:
        with pytest.raises(grpc.RpcError) as caught:
            setup.stub.Generate(request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.RpcError):
        setup.stub.Generate(batch(MARK), metadata=[("tgis-top-k", MARK)])
    [*_] = [setup.stub.Generate(batch(MARK)), *setup.stub.GenerateStream(single(MARK))]
    for line, (_, reason) in zip(log.refusals(len(requests) + 1), requests, strict=False):
        assert line.endswith(reason), line


def test_names_in_the_log_are_short(setup: Setup) -> None:
    """Names of adapters, models and metadata keys that do not exist, each far too long."""
    log, begin = Log(setup), len(setup.service.lines)
    name, key = 'a\n"b" c=d' * 2_000, "tgis-" + "k" * 5_000
    inputs = [pb.GenerationRequest(text="a")]
    calls = [
        lambda: setup.stub.Generate(pb.BatchedGenerationRequest(requests=inputs, adapter_id=name)),
        lambda: setup.stub.Generate(pb.BatchedGenerationRequest(requests=inputs, prefix_id=name)),
        lambda: setup.stub.Generate(batch("a"), metadata=[(key, "1")]),
        lambda: setup.stub.ModelInfo(pb.ModelInfoRequest(model_id="a"), metadata=[(key, "1")]),
    ]
    for call in calls:
        with pytest.raises(grpc.RpcError):
            call()
    bodies: dict[str, dict[str, Any]] = {
        COMPLETIONS: TEXT | {"model": name},
        "/v1/unload_lora_adapter": {"lora_name": name},
        "/invocations": {"inputs": "a", "adapters": name},
    }
    for path, body in bodies.items():
        assert log.post(path, body) in (400, 404, 424)
    log.post("/v1/" + "x" * 5_000, {})
    log.refusals(len(calls) + len(bodies) + 1)
    assert max(map(len, setup.service.lines[begin:])) < 1_500
