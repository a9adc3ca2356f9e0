"""A client that shares no code with the service, @grpc/grpc-js on Node, calls every method, cancels calls and
reaches the limits."""

import base64
import gzip
import json
import os
import struct
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict

from integration_tests.support.greedy_answers import MAX_SEQUENCE_LENGTH as MODEL_LENGTH
from integration_tests.support.greedy_answers import Model
from integration_tests.support.service import Client, serve
from tests.support import npm_packages
from tests.support.router.router_process import Setup, start_router, stop_router
from tests.support.streams import join_stream
from tgis.pb import generation_pb2 as pb

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "integration_tests" / "node"
NEEDED = "the Node client needs node 20 and npm; without them leave this file out: --ignore={file}"

Call = dict[str, Any]


@dataclass(frozen=True)
class Seen:
    """Client's view of one call."""

    messages: list[dict[str, Any]]
    code: str
    details: str
    ms: float


class Node:
    """Run the client against one address."""

    def __init__(self, packages: Path, grpc_port: int) -> None:
        self._packages, self._address = packages, f"127.0.0.1:{grpc_port}"
        self.connected = True
        """True if the last run's channel stayed connected."""

    def run(self, *rounds: list[Call]) -> dict[str, list[Seen]]:
        """Return the results by name of the call, with its copies in order."""
        lines = self._lines(rounds)
        self.connected = all(line["connected"] for line in lines if "round" in line)
        messages: dict[tuple[str, int], list[dict[str, Any]]] = {}
        ends: dict[tuple[str, int], dict[str, Any]] = {}
        for line in lines:
            if "message" in line:
                messages.setdefault((line["name"], line["copy"]), []).append(line["message"])
            elif "code" in line:
                ends[line["name"], line["copy"]] = line
        seen: dict[str, list[Seen]] = {}
        for key in sorted(ends):
            end = ends[key]
            seen.setdefault(key[0], []).append(
                Seen(messages.get(key, []), end["code"], end["details"], end["ms"])
            )
        return seen

    def call(self, method: str, request: dict[str, Any] | None = None, **more: Any) -> Seen:
        [seen] = self.run([{"name": "it", "method": method, "request": request or {}, **more}])["it"]
        return seen

    def _lines(self, rounds: tuple[list[Call], ...]) -> list[dict[str, Any]]:
        result = subprocess.run(
            ["node", SOURCES / "client.js", self._address, ROOT / "protos" / "generation.proto"],
            input=json.dumps(rounds),
            env=os.environ | {"NODE_PATH": str(self._packages / "node_modules")},
            text=True,
            capture_output=True,
            timeout=100,
            check=False,
        )
        assert (result.returncode, result.stderr) == (0, "")
        return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture(scope="session")
def packages() -> Path:
    """Install the locked packages, once per lock file."""
    if not npm_packages.has_npm():
        pytest.fail(NEEDED.format(file=Path(__file__).relative_to(ROOT)))
    return npm_packages.install(SOURCES, "node-client")


@pytest.fixture(scope="module")
def service(model: Model) -> Iterator[Client]:
    yield from serve(model.directory, "--dtype", "float32")


@pytest.fixture(scope="module")
def node(packages: Path, service: Client) -> Node:
    """Run it with the whole service."""
    return Node(packages, service.service.grpc_port)


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    """Run it with slow shards and four permits."""
    setup = start_router(tmp_path_factory.mktemp("router"), 1, "--max-concurrent-requests", "4")
    setup.shards[0].step_s = 0.01
    yield setup
    assert stop_router(setup) == 0, setup.service.output
    assert "Traceback" not in setup.service.output


@pytest.fixture(scope="module")
def slow(packages: Path, router: Setup) -> Node:
    return Node(packages, router.service.grpc_port)


def batch(*texts: str, **params: Any) -> dict[str, Any]:
    return {"requests": [{"text": text} for text in texts], "params": params}


def single(text: str, **params: Any) -> dict[str, Any]:
    return {"request": {"text": text}, "params": params}


def tokens(count: int) -> dict[str, int]:
    """Exactly this many."""
    return {"max_new_tokens": count, "min_new_tokens": count}


def metric(http: str, series: str) -> float:
    with urllib.request.urlopen(http + "/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    values = [line.rsplit(" ", 1)[1] for line in lines if line.rsplit(" ", 1)[0] == series]
    return float(values[0]) if values else 0.0


def wait_until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.02)


EVERYTHING = {
    "generated_tokens": True,
    "input_tokens": True,
    "token_logprobs": True,
    "token_ranks": True,
    "top_n_tokens": 2,
}


def test_generate_equals_transformers(node: Node, model: Model) -> None:
    chosen = [expected for expected in model.expected if expected.certain == len(expected.pieces)][:4]
    seen = node.run(
        [
            {
                "name": str(i),
                "method": "Generate",
                "request": batch(
                    expected.prompt, stopping={"max_new_tokens": expected.max_new_tokens}, response=EVERYTHING
                ),
            }
            for i, expected in enumerate(chosen)
        ]
    )
    for i, expected in enumerate(chosen):
        [answer] = seen[str(i)]
        assert (answer.code, answer.details) == ("OK", "")
        [message] = answer.messages
        [response] = message["responses"]
        assert [token["text"] for token in response["tokens"]] == expected.pieces
        logprobs = [token["logprob"] for token in response["tokens"]]
        assert logprobs == pytest.approx(expected.logprobs, rel=1e-4, abs=1e-4)
        assert [token["text"] for token in response["input_tokens"]] == expected.input_pieces
        first, *rest = [token["logprob"] for token in response["input_tokens"]]
        assert first == "NaN"
        assert rest == pytest.approx(expected.input_logprobs, rel=1e-4, abs=1e-4)
        assert all(len(token["top_tokens"]) >= 2 for token in response["tokens"])


@pytest.mark.parametrize("seed", ["7", str(2**64 - 1)])
def test_stream_has_its_shape(node: Node, seed: str) -> None:
    params = {
        "method": "SAMPLE",
        "sampling": {"seed": seed, "temperature": 0.7},
        "stopping": tokens(12),
        "response": {**EVERYTHING, "input_text": True},
    }
    text = "a little café"
    seen = node.run(
        [
            {"name": "stream", "method": "GenerateStream", "request": single(text, **params)},
            {"name": "unary", "method": "Generate", "request": batch(text, **params)},
        ]
    )
    [stream], [unary] = seen["stream"], seen["unary"]
    assert (stream.code, unary.code) == ("OK", "OK")
    header, inputs, *parts = stream.messages
    [whole] = unary.messages[0]["responses"]
    assert header["input_token_count"] == inputs["input_token_count"] == len(inputs["input_tokens"]) > 1
    assert (header["text"], header["seed"], header["generated_token_count"]) == (text, seed, 0)
    assert (inputs["text"], inputs["seed"], inputs["tokens"]) == ("", "0", [])
    sizes = [len(part["tokens"]) for part in parts]
    assert [part["generated_token_count"] for part in parts] == list(accumulate(sizes))
    assert sum(sizes) == 12
    assert {part["stop_reason"] for part in [header, inputs, *parts[:-1]]} == {"NOT_FINISHED"}
    assert (parts[-1]["stop_reason"], parts[-1]["seed"]) == ("MAX_TOKENS", seed)
    assert {part["seed"] for part in parts[:-1]} == {"0"}
    assert header["text"] + "".join(part["text"] for part in parts) == whole["text"]
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    assert inputs["input_tokens"] == whole["input_tokens"]


def test_tokenize_and_model_info(node: Node, model: Model) -> None:
    text = "naïve 🙂 fox"
    request = {"requests": [{"text": text}, {"text": ""}], "return_tokens": True, "return_offsets": True}
    answer = node.call("Tokenize", request)
    whole, empty = answer.messages[0]["responses"]
    assert whole["token_count"] == len(whole["tokens"]) == len(whole["offsets"])
    pieces = [text.encode()[o["start"] : o["end"]] for o in whole["offsets"]]
    assert b"".join(dict.fromkeys(pieces)).decode() == text  # several tokens share the bytes of a character
    assert (whole["offsets"][0], empty["tokens"]) == ({"start": 0, "end": 0}, ["<s>"])
    info = node.call("ModelInfo", {"model_id": "any"}).messages
    assert info == [
        {
            "model_kind": "DECODER_ONLY",
            "max_sequence_length": MODEL_LENGTH,
            "max_new_tokens": MODEL_LENGTH - 1,
        }
    ]


@pytest.mark.slow
def test_hundreds_of_streams_on_one_channel(node: Node, service: Client) -> None:
    """Each response equals that of the same call alone."""
    request = single("once upon a time", stopping=tokens(8))
    alone = node.call("GenerateStream", request)
    calls = [{"name": "crowd", "method": "GenerateStream", "request": request, "copies": 400}]
    crowd = node.run(calls)["crowd"]
    assert [answer.code for answer in crowd] == ["OK"] * 400
    assert {_joined(answer) for answer in crowd} == {_joined(alone)}
    assert node.connected
    wait_until(lambda: metric(service.service.http, "tgi_requests_running") == 0)


def _joined(answer: Seen) -> bytes:
    whole = join_stream(ParseDict(message, pb.GenerationResponse()) for message in answer.messages)
    return whole.SerializeToString(deterministic=True)


def test_cancelling_a_stream_ends_its_work(slow: Node, router: Setup) -> None:
    cancelled = 'tgi_request_failure{err="cancelled"}'
    before = metric(router.http, cancelled)
    answer = slow.call("GenerateStream", single("a", stopping=tokens(190)), cancelAfter=3)
    assert answer.code == "CANCELLED"
    assert 3 <= len(answer.messages) < 20
    wait_until(lambda: metric(router.http, "tgi_requests_running") == 0)
    assert metric(router.http, cancelled) == before + 1
    num_steps = router.shards[0].num_steps
    time.sleep(0.1)
    assert router.shards[0].num_steps == num_steps


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
@pytest.mark.parametrize("how", [{"deadlineMs": 1000}, {"cancelAfter": 2}])
def test_cancelled_calls_are_forgotten(slow: Node, router: Setup, method: str, how: dict[str, int]) -> None:
    """Cancel by a deadline, or by a cancellation: a unary call after milliseconds."""
    make = batch if method == "Generate" else single
    series = 'tgi_request_failure{err="cancelled"}'
    before = metric(router.http, series)
    if how.get("cancelAfter") and method == "Generate":
        how = {"cancelAfter": 1000}
    answer = slow.call(method, make("a", stopping=tokens(190)), **how)
    assert answer.code == ("DEADLINE_EXCEEDED" if "deadlineMs" in how else "CANCELLED")
    wait_until(lambda: metric(router.http, series) == before + 1)
    wait_until(lambda: metric(router.http, "tgi_requests_running") == 0)


def test_a_bad_parameter_is_reported(slow: Node) -> None:
    params = {"method": "SAMPLE", "sampling": {"temperature": 0.01}}
    for method, request in (("Generate", batch("a", **params)), ("GenerateStream", single("a", **params))):
        answer = slow.call(method, request)
        assert (answer.code, answer.details) == ("INVALID_ARGUMENT", "temperature must be >= 0.05")
    answer = slow.call("Generate", batch("a") | {"prefix_id": "naïve\n🙂%"})
    cause = 'prefix id "naïve\n🙂%" not found'
    assert answer.details == f"can't retrieve prompt prefix with id 'naïve\n🙂%': {cause}"


def test_unknown_methods(slow: Node) -> None:
    for path in ("/fmaas.GenerationService/Nothing", "/fmaas.Other/Generate", "/nothing"):
        assert slow.call(path).code == "UNIMPLEMENTED"


def test_a_message_over_the_limit_leaves_the_connection_up(slow: Node) -> None:
    short = {"name": "short", "method": "Generate", "request": batch("a", stopping=tokens(2))}
    long = {"name": "long", "method": "Tokenize", "request": {"requests": [{"text": "x" * (5 << 20)}]}}
    alive = {"name": "alive", "method": "GenerateStream", "request": single("a", stopping=tokens(60))}
    seen = slow.run([short | {"name": "before"}], [alive, long], [short | {"name": "after"}])
    assert seen["long"][0].code in ("RESOURCE_EXHAUSTED", "OUT_OF_RANGE")
    assert [seen[name][0].code for name in ("before", "alive", "after")] == ["OK"] * 3
    assert slow.connected


def test_overload_is_reported_at_once(slow: Node, router: Setup) -> None:
    """Four of eight are accepted; the others are refused long before those have ended."""
    calls = [
        {
            "name": "crowd",
            "method": "GenerateStream",
            "request": single("a", stopping=tokens(60)),
            "copies": 8,
        }
    ]
    answers = sorted(slow.run(calls)["crowd"], key=lambda answer: answer.code)
    assert [answer.code for answer in answers] == ["OK"] * 4 + ["RESOURCE_EXHAUSTED"] * 4
    assert {answer.details for answer in answers[4:]} == {"Model is overloaded"}
    assert max(answer.ms for answer in answers[4:]) < min(answer.ms for answer in answers[:4]) / 2
    assert slow.call("Generate", batch("a", "b", "c", "d", stopping=tokens(1))).code == "OK"
    assert slow.call("Generate", batch("a", "b", "c", "d", "e")).details == "Model is overloaded"


def test_compressed_messages_are_read(slow: Node) -> None:
    request = batch("a little girl " * 9, stopping=tokens(3))
    plain, packed = (slow.call("Generate", request, gzip=how) for how in (False, True))
    assert (packed.code, packed.messages) == ("OK", plain.messages)


def frame(data: bytes, flag: int = 0, length: int | None = None) -> bytes:
    """Frame a gRPC message: flag, length, data."""
    return struct.pack(">BI", flag, len(data) if length is None else length) + data


EMPTY_BATCH = frame(b"")
GZIP = {"grpc-encoding": "gzip"}
# Bytes sent, and the expected status. Half a message waits for its other half.
WAITS = "no answer"
FRAMES: dict[str, tuple[dict[str, str], bytes, set[str]]] = {
    "well": ({}, EMPTY_BATCH, {"0"}),
    "well compressed": (GZIP, frame(gzip.compress(b""), 1), {"0"}),
    "compressed garbage": (GZIP, frame(b"garbage", 1), {"3", "13"}),
    "half a gzip stream": (GZIP, frame(gzip.compress(b"x" * 99)[:20], 1), {"3", "13"}),
    "compressed, but nobody said how": ({}, frame(gzip.compress(b""), 1), {"12", "13"}),
    "an encoding nobody knows": ({"grpc-encoding": "lzma"}, frame(b"", 1), {"12", "13"}),
    "a gzip bomb": (GZIP, frame(gzip.compress(b"\0" * (64 << 20)), 1), {"8", "11"}),
    "an unknown flag": ({}, frame(b"", 77), {"0", "12", "13"}),
    "no message": ({}, b"", {"12", "13", WAITS}),
    "half a frame header": ({}, b"\0\0", {"3", "12", "13", WAITS}),
    "less than the frame says": ({}, frame(b"abc", length=99), {"3", "12", "13", WAITS}),
    "four gibibytes announced": ({}, frame(b"", length=2**32 - 1), {"8", "11"}),
    "a message and then another": ({}, EMPTY_BATCH * 2, {"0", "12", "13"}),
    "not gRPC": ({"content-type": "text/html"}, EMPTY_BATCH, {"0", "2", "13"}),
}


def test_frames_that_no_library_would_send(slow: Node, router: Setup) -> None:
    path = "/fmaas.GenerationService/Generate"
    calls = [
        {
            "name": name,
            "raw": {"headers": {":path": path, **headers}, "body": base64.b64encode(body).decode()},
            "deadlineMs": 3000,
        }
        for name, (headers, body, _) in FRAMES.items()
    ]
    seen = slow.run(calls)
    codes = {name: seen[name][0].code for name in FRAMES}
    assert {name: code for name, code in codes.items() if code not in FRAMES[name][2]} == {}
    assert slow.call("Generate", batch("a", stopping=tokens(1))).code == "OK"
    wait_until(lambda: metric(router.http, "tgi_requests_running") == 0)
