"""Tests statuses and forms of TGI's errors over a real socket."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.http_exchange import HttpReply
from tests.support.router.fake_shard import EOS
from tests.support.router.served_inputs import call, inputs
from tests.support.router.served_tgi import events_of, open_tgi, until
from tgis.router.api.http.serving.app import Phase
from tgis.router.errors import TimedOutError, UnavailableError

NUM_PLACES = 128
WRONG = "Failed to deserialize the JSON body into the target type: "
SYNTAX = "Failed to parse the request body as JSON: "
JSON_TYPE = "Expected request with `Content-Type: application/json`"
PATHS = ("/generate", "/generate_stream", "/", "/invocations", "/chat_tokenize")
TOO_LARGE = "Failed to buffer the request body: length limit exceeded"


def plain(answer: HttpReply) -> tuple[int, str]:
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    return answer.status, answer.body.decode()


def error(answer: HttpReply) -> tuple[int, str, str]:
    assert answer.headers["content-type"] == "application/json"
    assert tuple(answer.json) == ("error", "error_type")
    return answer.status, answer.json["error"], answer.json["error_type"]


async def test_bodies_that_cannot_be_read(tmp_path: Path) -> None:
    deep = b'{"inputs": "a", "parameters": {"grammar": ' + b"[" * 80 + b"]" * 80 + b"}}"
    large = b'{"inputs": "' + b"a" * (4 << 20) + b'"}'
    async with open_tgi(tmp_path) as served:
        for path in PATHS:
            for body in (b"", b"{", b'{"inputs": NaN}', deep):
                status, text = plain(await call(served, path, body))
                assert (status, text.startswith(SYNTAX)) == (400, True), (path, body)
            for kind in ("", "text/plain", "application/x-www-form-urlencoded", "application/jsonl"):
                assert plain(await call(served, path, inputs(), **{"content-type": kind})) == (415, JSON_TYPE)
            assert plain(await call(served, path, large)) == (413, TOO_LARGE)
        assert plain(await call(served, "/tokenize", large)) == (413, TOO_LARGE)
        assert plain(await call(served, "/generate", b'{"inputs": "\xff"}'))[0] == 400
        for kind in ("application/json; charset=utf-8", "application/vnd.api+json"):
            answer = await call(served, "/generate", inputs(max_new_tokens=1), **{"content-type": kind})
            assert answer.status == 200


WRONG_FIELDS: list[tuple[Any, str]] = [
    ([], "the body must be an object, not a list"),
    ({}, "inputs is required"),
    ({"inputs": None}, "inputs must be a string, not null"),
    ({"inputs": ["a"]}, "inputs must be a string, not a list"),
    (inputs(temperature="1"), "parameters.temperature must be "),
    (inputs(max_new_tokens=1.5), "parameters.max_new_tokens must be "),
    (inputs(max_new_tokens=2**32), "parameters.max_new_tokens must be "),
    (inputs(top_k=2**31), "parameters.top_k must be "),
    (inputs(stop="a"), "parameters.stop must be "),
    (inputs(do_sample=1), "parameters.do_sample must be "),
    (inputs(grammar={"type": "yaml", "value": ""}), "parameters.grammar.type must be "),
    (inputs(grammar={"type": "json"}), "parameters.grammar.value is required"),
]


async def test_wrong_fields(tmp_path: Path) -> None:
    async with open_tgi(tmp_path) as served:
        for body, text in WRONG_FIELDS:
            status, message = plain(await call(served, "/generate", body))
            assert status == 422
            assert message.startswith(WRONG + text), (body, message)
        message = plain(await call(served, "/invocations", {"parameters": {}}))[1]
        assert message == WRONG + "it has none of `inputs`, `messages` and `prompt`"


async def test_routes_and_methods(tmp_path: Path) -> None:
    async with open_tgi(tmp_path) as served:
        answer = await call(served, "/generate", method="GET")
        assert (answer.status, answer.headers["allow"], answer.body) == (405, "POST", b"")
        answer = await call(served, "/", method="PUT")
        assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD, POST")
        assert error(await call(served, "/nowhere"))[::2] == (404, "not_found")
        answer = await call(served, "/v1/nowhere")
        assert (answer.status, answer.json["error"]["type"]) == (404, "invalid_request_error")


async def test_tokens(tmp_path: Path) -> None:
    """A wrong key gets an empty answer. Probes need no key."""
    (tmp_path / "tokens").write_text("right\n")
    async with open_tgi(tmp_path, tokens=tmp_path / "tokens") as served:
        body = inputs(max_new_tokens=1)
        for key in ("", "Bearer wrong", "right"):
            for path in ("/generate", "/generate_stream", "/", "/invocations", "/tokenize", "/chat_tokenize"):
                answer = await call(served, path, body, authorization=key)
                assert (answer.status, answer.body) == (401, b"")
                assert answer.headers["www-authenticate"] == "Bearer"
        assert (await call(served, "/generate", body, authorization="Bearer right")).status == 200
        for path in ("/info", "/health", "/ping", "/"):
            assert (await call(served, path, method="GET")).status == 200


async def test_overload_comes_first(tmp_path: Path) -> None:
    """Overload is reported before wrong parameters. Each text of best_of takes a place."""
    async with open_tgi(tmp_path) as served:
        served.scene.shard.step_s = 0.02
        served.scene.shard.model.script = [*range(300, 399)]
        long = inputs(max_new_tokens=60)
        busy = [asyncio.create_task(call(served, "/generate", long)) for _ in range(2)]
        claim_id = await served.handle.acquire(NUM_PLACES - 2)
        await until(lambda: len(served.handle.specs) == 2)
        overloaded = ("Model is overloaded", "overloaded")
        for wrong in ({}, {"temperature": 0}, {"max_new_tokens": 9999}, {"adapter_id": "none"}):
            answer = await call(served, "/generate", inputs(**wrong))
            assert error(answer) == (429, *overloaded)
            assert answer.headers["retry-after"] == "1"
            stream = await call(served, "/generate_stream", inputs(**wrong))
            assert (stream.status, events_of(stream)) == (
                200,
                [{"error": overloaded[0], "error_type": overloaded[1]}],
            )
        served.handle.release(claim_id)
        assert error(await call(served, "/generate", inputs(temperature=0)))[0] == 422
        claim_id = await served.handle.acquire(NUM_PLACES - 3)
        two = inputs(max_new_tokens=1, best_of=2, do_sample=True)
        assert error(await call(served, "/generate", two)) == (429, *overloaded)
        assert (await call(served, "/generate", inputs(max_new_tokens=1))).status == 200
        served.handle.release(claim_id)
        assert [answer.status for answer in await asyncio.gather(*busy)] == [200, 200]


async def test_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure after acceptance has status 424, or is an event of a stream."""
    async with open_tgi(tmp_path) as served:
        served.scene.shard.model.refuses = lambda message: True
        answer = await call(served, "/generate", inputs(max_new_tokens=2))
        status, text, kind = error(answer)
        assert (status, kind) == (424, "generation")
        assert text.startswith("Request failed during generation: ")
        (event,) = events_of(await call(served, "/generate_stream", inputs(max_new_tokens=2)))
        assert tuple(event) == ("error", "error_type")
        assert event["error_type"] == "generation"
        assert error(await call(served, "/generate", inputs(adapter_id="none")))[::2] == (404, "not_found")
        (event,) = events_of(await call(served, "/generate_stream", inputs(adapter_id="none")))
        assert event["error_type"] == "not_found"
        for failure, expected in (
            (ValueError("secret"), (424, "generation")),
            (TimedOutError(1, True), (424, "generation")),
            (UnavailableError("the shards are lost"), (503, "healthcheck")),
        ):
            monkeypatch.setattr(type(served.handle), "open", _raising(failure))
            answer = await call(served, "/generate", inputs(max_new_tokens=2))
            assert error(answer)[::2] == expected
            assert b"secret" not in answer.body


def _raising(failure: Exception) -> Any:
    def fail(*_: Any) -> None:
        raise failure

    return fail


async def test_loading_and_draining(tmp_path: Path) -> None:
    is_ready = False
    async with open_tgi(tmp_path, is_ready=lambda: is_ready) as served:
        for phase, text in ((Phase.STARTING, "the model is loading"), (Phase.DRAINING, "the service is")):
            served.gate.phase = phase
            for path in PATHS:
                status, message, kind = error(await call(served, path, inputs()))
                assert (status, message[: len(text)], kind) == (503, text, "healthcheck")
            for path in ("/", "/health", "/ping"):
                message = await call(served, path, method="GET")
                assert error(message) == (503, "unhealthy", "healthcheck")
            assert (await call(served, "/info", method="GET")).status == 200
        served.gate.phase, is_ready = Phase.OPEN, True
        for path in ("/", "/health", "/ping"):
            message = await call(served, path, method="GET")
            assert (message.status, message.body) == (200, b"")


async def test_cut_stream(tmp_path: Path) -> None:
    """A drain that takes too long ends a stream with an error event."""
    async with open_tgi(tmp_path) as served:
        served.scene.shard.step_s = 0.02
        served.scene.shard.model.script = [*range(300, 399), EOS]
        stream = asyncio.create_task(call(served, "/generate_stream", inputs(max_new_tokens=99)))
        await until(lambda: served.scene.shard.num_steps > 5)
        served.gate.cut()
        *tokens, last = events_of(await stream)
        assert tokens
        assert all(event["generated_text"] is None for event in tokens)
        assert last == {"error": "the service is shutting down", "error_type": "healthcheck"}


async def test_tokens_and_places(tmp_path: Path) -> None:
    """`/tokenize` returns the positions of characters. A body with `prompt` gets OpenAI's answer."""
    async with open_tgi(tmp_path) as served:
        text = "The naïve 🙂 fox"
        tokens = (await call(served, "/tokenize", {"inputs": text})).json
        encoding = served.tokenizer.fast.encode(text)
        assert [one["id"] for one in tokens] == encoding.ids
        assert [(one["start"], one["stop"]) for one in tokens] == encoding.offsets
        assert tokens[0] == {"id": 0, "text": "", "start": 0, "stop": 0}
        assert all(one["text"] == text[one["start"] : one["stop"]] for one in tokens)
        assert (await call(served, "/tokenize", inputs(text, truncate=3))).json == tokens[-3:]
        other = (await call(served, "/tokenize", {"prompt": text})).json
        assert other["tokens"] == encoding.ids
        chat = (await call(served, "/chat_tokenize", {"messages": [{"role": "user", "content": "hi"}]})).json
        assert tuple(chat) == ("tokenize_response", "templated_text")
        assert chat["templated_text"] == "<user>hi<assistant>"
        ids = served.tokenizer.fast.encode(chat["templated_text"], add_special_tokens=False).ids
        assert [one["id"] for one in chat["tokenize_response"]] == ids
        status, message, kind = error(await call(served, "/chat_tokenize", {"messages": []}))
        assert (status, kind) == (422, "template_error")
        assert message.startswith("Template error: ")


async def test_info(tmp_path: Path) -> None:
    async with open_tgi(tmp_path) as served:
        info = json.loads((await call(served, "/info", method="GET")).body)
        assert {name: info[name] for name in info if name not in ("version", "router")} == {
            "model_id": "served-model",
            "model_sha": None,
            "model_pipeline_tag": None,
            "max_concurrent_requests": 512,
            "max_best_of": 2,
            "max_stop_sequences": 4,
            "max_input_tokens": 199,
            "max_total_tokens": 200,
            "validation_workers": 1,
            "max_client_batch_size": 128,
            "sha": None,
            "docker_label": None,
        }


async def test_openapi(tmp_path: Path) -> None:
    """The document of OpenAI's API describes TGI's operations, and both operations of a shared path."""
    async with open_tgi(tmp_path) as served:
        document = (await call(served, "/openapi.json", method="GET")).json
    paths, schemas = document["paths"], document["components"]["schemas"]
    assert {"/generate", "/generate_stream", "/", "/info", "/chat_tokenize", "/v1/completions"} <= set(paths)
    assert set(schemas["GenerateParameters"]["properties"]) >= {"best_of", "typical_p", "adapter_id"}
    body = paths["/tokenize"]["post"]["requestBody"]["content"]["application/json"]["schema"]["anyOf"]
    names = [each["$ref"].rpartition("/")[2] for each in body]
    assert names == ["TokenizeBody", "GenerateRequest"]
    responses = paths["/generate"]["post"]["responses"]
    assert set(responses) >= {"200", "400", "401", "404", "413", "415", "422", "424", "429", "503"}
    schema = responses["422"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    assert set(schemas[schema]["properties"]) == {"error", "error_type"}
    assert "content" not in responses["401"]
    assert "text/event-stream" in paths["/generate_stream"]["post"]["responses"]["200"]["content"]
