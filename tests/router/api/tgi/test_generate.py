"""Tests TGI's whole answers and streams over a real socket, against simple expectations of a known model."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.router.fake_shard import EOS
from tests.support.router.served_http import ServedHttp
from tests.support.router.served_inputs import PROMPT, call, follow, ids_of, inputs, logprob_of
from tests.support.router.served_tgi import REPLACEMENT, events_of, joined, open_tgi, text_of
from tests.support.tokenizers.trained import write_metaspace
from tgis.pb import shard_pb2 as pb

TIMES = ("total", "validation", "queue", "inference")
DETAILS = ("finish_reason", "generated_tokens", "seed", "prefill", "tokens")


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[ServedHttp]:
    async with open_tgi(tmp_path) as served:
        yield served


async def test_plain_text(served: ServedHttp) -> None:
    answer = await call(served, "/generate", inputs(max_new_tokens=12))
    tokens = follow(ids_of(served, PROMPT), 12)
    assert (answer.status, answer.json) == (200, {"generated_text": text_of(served, tokens)})
    headers = answer.headers
    assert headers["content-type"] == "application/json"
    assert headers["x-compute-type"] == "cpu"
    assert headers["x-compute-characters"] == str(len(PROMPT))
    assert 0 < float(headers["x-compute-time"]) < 10
    assert all(0 <= int(headers[f"x-{name}-time"]) < 10_000 for name in TIMES)
    assert int(headers["x-inference-time"]) + int(headers["x-queue-time"]) <= int(headers["x-total-time"])
    assert int(headers["x-time-per-token"]) == pytest.approx(int(headers["x-inference-time"]) / 12, abs=1)
    assert (headers["x-prompt-tokens"], headers["x-generated-tokens"]) == (
        str(len(ids_of(served, PROMPT))),
        str(len(tokens)),
    )


async def test_details(served: ServedHttp) -> None:
    asked = inputs(max_new_tokens=20, details=True, decoder_input_details=True, top_n_tokens=2)
    prompt = ids_of(served, PROMPT)
    tokens = follow(prompt, 20)
    answer = (await call(served, "/generate", asked)).json
    details = answer["details"]
    assert tuple(details) == (*DETAILS, "top_tokens")
    assert [(one["id"], one["logprob"]) for one in details["prefill"]] == [
        (prompt[0], None),
        *((token, logprob_of(token)) for token in prompt[1:]),
    ]
    assert "".join(one["text"] for one in details["prefill"]) == "<s>" + PROMPT
    assert [(one["id"], one["logprob"]) for one in details["tokens"]] == [
        (token, logprob_of(token)) for token in tokens
    ]
    assert joined(details["tokens"]) == answer["generated_text"] == text_of(served, tokens)
    assert details["seed"] is None
    assert details["generated_tokens"] == len(tokens)
    assert len(details["top_tokens"]) == len(tokens)
    assert details["top_tokens"][0] == [
        {"id": 0, "text": "<s>", "logprob": 0.0, "special": True},
        {"id": 1, "text": "</s>", "logprob": logprob_of(1), "special": True},
    ]
    plain = (await call(served, "/generate", inputs(max_new_tokens=20, details=True))).json["details"]
    assert tuple(plain) == DETAILS
    assert (plain["prefill"], plain["tokens"]) == ([], details["tokens"])


async def test_stream_is_the_whole_answer(served: ServedHttp) -> None:
    fields: dict[str, Any] = {"max_new_tokens": 30, "details": True, "top_n_tokens": 1, "seed": 5}
    for more in ({}, {"do_sample": True}, {"do_sample": True, "stop": ["e"]}, {"return_full_text": True}):
        whole = (await call(served, "/generate", inputs(**fields | more))).json
        answer = await call(served, "/generate_stream", inputs(**fields | more))
        events = events_of(answer)
        details = whole["details"]
        assert [event["index"] for event in events] == list(range(1, len(events) + 1))
        assert [event["token"] for event in events] == details["tokens"]
        assert [event["top_tokens"] for event in events] == details["top_tokens"]
        *before, last = events
        assert all(event["generated_text"] is event["details"] is None for event in before)
        assert last["generated_text"] == whole["generated_text"]
        assert last["details"] == {
            "finish_reason": details["finish_reason"],
            "generated_tokens": details["generated_tokens"],
            "seed": details["seed"],
            "input_length": len(ids_of(served, PROMPT)),
        }
        assert (details["seed"] is None) != bool(more.get("do_sample"))
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-accel-buffering"] == "no"
        assert answer.headers["x-compute-characters"] == str(len(PROMPT))
        assert answer.headers["x-compute-type"] == "cpu"


async def test_bytes_of_an_event(served: ServedHttp) -> None:
    token = follow(ids_of(served, PROMPT), 1)[0]
    answer = await call(served, "/generate_stream", inputs(max_new_tokens=1))
    text = text_of(served, [token])
    shown = {"id": token, "text": text, "logprob": logprob_of(token), "special": False}
    event = {"index": 1, "token": shown, "generated_text": text, "details": None}
    assert answer.body == b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"


@pytest.mark.parametrize("is_stream", [False, True])
async def test_end_of_sequence(served: ServedHttp, is_stream: bool) -> None:
    """It is counted and shown as special with its own name. The text does not contain it."""
    served.scene.shard.model.script = [300, 0, 301, EOS]
    asked = inputs(max_new_tokens=20, details=True)
    if is_stream:
        events = events_of(await call(served, "/generate_stream", asked))
        tokens, text, details = (
            [event["token"] for event in events],
            events[-1]["generated_text"],
            events[-1]["details"],
        )
    else:
        answer = (await call(served, "/generate", asked)).json
        tokens, text, details = answer["details"]["tokens"], answer["generated_text"], answer["details"]
    assert (details["finish_reason"], details["generated_tokens"]) == ("eos_token", 4)
    assert [(token["id"], token["special"]) for token in tokens] == [
        (300, False),
        (0, True),
        (301, False),
        (EOS, True),
    ]
    assert [tokens[1]["text"], tokens[3]["text"]] == ["<s>", "</s>"]
    assert text == joined(tokens) == text_of(served, [300, 301])


async def test_stops_stay_in_the_text(served: ServedHttp) -> None:
    tokens = follow(ids_of(served, PROMPT), 40)
    text = text_of(served, tokens)
    stop = next(text[at : at + 2] for at in range(8, len(text)) if REPLACEMENT not in text[at : at + 2])
    until = text[: text.index(stop) + len(stop)]
    asked = inputs(max_new_tokens=40, stop=["#never#", stop], details=True)
    answer = (await call(served, "/generate", asked)).json
    assert answer["generated_text"] == joined(answer["details"]["tokens"]) == until
    assert answer["details"]["finish_reason"] == "stop_sequence"
    events = events_of(await call(served, "/generate_stream", asked))
    assert [event["token"] for event in events] == answer["details"]["tokens"]


async def test_best_of(served: ServedHttp) -> None:
    """The best text has the highest mean log-probability. The others follow."""
    asked = inputs(max_new_tokens=6, best_of=2, do_sample=True, details=True, return_full_text=True)
    orders = set()
    for _ in range(12):
        served.handle.specs.clear()
        answer = (await call(served, "/generate", asked)).json
        best, (other,) = answer["details"], answer["details"]["best_of_sequences"]
        assert tuple(other) == ("generated_text", *DETAILS)
        means = [
            sum(logprob_of(token["id"]) for token in one["tokens"]) / len(one["tokens"])
            for one in (best, other)
        ]
        assert means[0] >= means[1]
        seeds = [spec.sampling.seed for spec in served.handle.specs]
        assert {best["seed"], other["seed"]} == set(seeds)
        assert len(set(seeds)) == 2
        orders.add(seeds.index(best["seed"]))
        assert answer["generated_text"] == PROMPT + joined(best["tokens"])
        assert other["generated_text"] == PROMPT + joined(other["tokens"])
        assert best["generated_tokens"] == len(best["tokens"])
    assert orders == {0, 1}, "either may win"
    plain = await call(served, "/generate", inputs(max_new_tokens=3, best_of=2, temperature=0.5))
    assert tuple(plain.json) == ("generated_text",)


async def test_any(served: ServedHttp) -> None:
    """`/` answers with a list. By default, the text includes the input."""
    text = text_of(served, follow(ids_of(served, PROMPT), 5))
    for path in ("/", "/invocations"):
        answer = await call(served, path, inputs(max_new_tokens=5))
        assert answer.json == [{"generated_text": PROMPT + text}]
        assert answer.headers["x-generated-tokens"] == "5"
        answer = await call(served, path, inputs(max_new_tokens=5, return_full_text=False))
        assert answer.json == [{"generated_text": text}]
        answer = await call(served, path, inputs(max_new_tokens=5) | {"stream": True})
        assert events_of(answer)[-1]["generated_text"] == PROMPT + text
        assert joined([event["token"] for event in events_of(answer)]) == text
    assert (await call(served, "/generate", inputs(max_new_tokens=5, return_full_text=True))).json == {
        "generated_text": PROMPT + text
    }


async def test_invocations_of_openai(served: ServedHttp) -> None:
    """Chats and prompts are handled by OpenAI's API, with its answers, streams and errors."""
    prompt = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0}
    answer = await call(served, "/invocations", prompt)
    text = text_of(served, follow(ids_of(served, PROMPT), 5))
    assert answer.json["choices"][0]["text"] == text
    answer = await call(served, "/invocations", prompt | {"stream": True})
    assert answer.body.endswith(b"data: [DONE]\n\n")
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    answer = await call(served, "/invocations", chat)
    assert answer.json["object"] == "chat.completion"
    answer = await call(served, "/invocations", prompt | {"temperature": 3})
    assert (answer.status, set(answer.json["error"])) == (400, {"message", "type", "param", "code"})
    answer = await call(served, "/invocations", chat | inputs(max_new_tokens=1))
    assert tuple(answer.json[0]) == ("generated_text",), "inputs come first"


SAMPLED = ({"do_sample": True}, {"temperature": 0.7}, {"top_k": 3}, {"top_p": 0.5}, {"typical_p": 0.4})
GREEDY = ({}, {"temperature": 1.0}, {"top_p": 1.0}, {"typical_p": 1.0}, {"do_sample": False, "seed": 3})


async def test_sampling(served: ServedHttp) -> None:
    """Texts are sampled if a sampling parameter is set or the request has no parameters, otherwise greedy."""
    cases = [(inputs(max_new_tokens=1, **each), False) for each in SAMPLED]
    cases += [(inputs(max_new_tokens=1, **each), True) for each in GREEDY]
    cases += [({"inputs": PROMPT}, False), ({"inputs": PROMPT, "parameters": None}, False)]
    for body, is_greedy in cases:
        served.handle.specs.clear()
        await call(served, "/generate", body)
        assert served.handle.specs[0].sampling.greedy is is_greedy, body


async def test_parameters(served: ServedHttp) -> None:
    """Each parameter reaches the engine with its own meaning."""
    asked = inputs(
        "a b c d e f g h i j",
        do_sample=True,
        temperature=0.5,
        top_k=7,
        top_p=0.25,
        typical_p=0.75,
        repetition_penalty=1.5,
        frequency_penalty=-0.5,
        max_new_tokens=9,
        truncate=4,
        seed=2**64 - 1,
        watermark=True,
        grammar={"type": "json", "value": {"type": "object"}},
    )
    await call(served, "/generate", asked | {"unknown": 1})
    spec = served.handle.specs[0]
    sampling = spec.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.typical_p) == (0.5, 7, 0.25, 0.75)
    assert (sampling.repetition_penalty, sampling.frequency_penalty, sampling.seed) == (1.5, -0.5, 2**64 - 1)
    assert (sampling.watermark_gamma, sampling.watermark_delta) == (0.25, 1.5)
    assert spec.stopping.max_new_tokens == 9
    assert spec.input_ids == (0, *ids_of(served, asked["inputs"])[-3:])
    assert spec.grammar is not None
    assert not spec.details.raw
    assert (spec.details.logprobs, spec.details.generated_tokens) == (False, False), "nobody asked for them"


async def test_rest_of_the_length(served: ServedHttp) -> None:
    prompt = ids_of(served, PROMPT)
    tokens = follow(prompt, 200 - len(prompt))
    answer = (await call(served, "/generate", inputs(details=True))).json
    assert answer["generated_text"] == text_of(served, tokens)
    reason = "eos_token" if tokens[-1] == EOS else "length"
    assert answer["details"]["finish_reason"] == reason


async def test_encoder_decoder(tmp_path: Path) -> None:
    """Texts do not continue the input, and the input has no log-probabilities."""
    info = pb.InfoResponse(model_kind=pb.InfoResponse.MODEL_KIND_ENCODER_DECODER, decoder_start_token_id=5)

    def write(directory: Path, _: int) -> None:
        write_metaspace(directory)

    async with open_tgi(tmp_path, info=info, write_tokenizer=write) as served:
        served.scene.shard.model.script = [*ids_of(served, "The quick brown fox")[1:], EOS]
        asked = inputs("a little girl", max_new_tokens=99, details=True)
        answer = (await call(served, "/generate", asked)).json
        assert answer["generated_text"] == joined(answer["details"]["tokens"]) == "The quick brown fox"
        events = events_of(await call(served, "/generate_stream", asked))
        assert [event["token"] for event in events] == answer["details"]["tokens"]
        asked["parameters"]["decoder_input_details"] = True
        prefill = (await call(served, "/generate", asked)).json["details"]["prefill"]
        assert [token["id"] for token in prefill] == ids_of(served, "a little girl")
        assert {token["logprob"] for token in prefill} == {None}


async def test_grammars(served: ServedHttp) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    cases: list[tuple[str, Any, str]] = [
        ("json", schema, "json_schema"),
        ("json_object", schema, "json_schema"),
        ("json", json.dumps(schema), "json_schema"),
        ("json_schema", {"name": "x", "schema": schema}, "json_schema"),
        ("regex", "[ab]+", "regex"),
    ]
    for kind, value, field in cases:
        served.handle.specs.clear()
        answer = await call(
            served, "/generate", inputs(max_new_tokens=1, grammar={"type": kind, "value": value})
        )
        assert answer.status == 200, answer
        grammar = served.handle.specs[0].grammar
        assert grammar is not None
        assert grammar.field == field


async def test_silence(served: ServedHttp, monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle stream sends comments, even before its first token."""
    monkeypatch.setattr("tgis.router.api.tgi.handler.SILENCE_S", 0.05)
    served.scene.shard.step_s = 0.2
    answer = await call(served, "/generate_stream", inputs(max_new_tokens=3))
    frames = answer.body.split(b"\n\n")
    comments = [index for index, frame in enumerate(frames) if frame == b":"]
    assert comments[0] == 0
    assert len(comments) >= 5
    events = [json.loads(frame[6:]) for frame in frames if frame.startswith(b"data: ")]
    assert [event["index"] for event in events] == [1, 2, 3]
    served.scene.shard.step_s = 0.05
    monkeypatch.setattr("tgis.router.api.tgi.handler.SILENCE_S", 1.0)
    answer = await call(served, "/generate_stream", inputs(max_new_tokens=30))
    assert len(events_of(answer)) == 30, "none while events come"


async def test_client_that_goes(served: ServedHttp) -> None:
    """Its text ends, and its resources are freed."""
    served.scene.shard.step_s = 0.02
    host, port = served.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps(inputs(max_new_tokens=150)).encode()
    fields = f"host: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    head = f"POST /generate_stream HTTP/1.1\r\n{fields}\r\n\r\n"
    writer.write(head.encode() + body)
    await reader.readuntil(b'"index":2')
    writer.close()
    await writer.wait_closed()
    num_steps = served.scene.shard.num_steps
    await asyncio.sleep(0.3)
    assert served.scene.shard.num_steps < num_steps + 8
