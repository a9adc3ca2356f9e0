"""Tests LMI's answers over a real socket: each form byte for byte, and streams against whole answers."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.router.fake_shard import EOS, VOCAB_SIZE
from tests.support.router.model_of_contents import Library, adapter
from tests.support.router.model_of_shard import truth
from tests.support.router.served_http import ServedHttp
from tests.support.router.served_inputs import PROMPT, follow, ids_of, inputs, logprob_of
from tests.support.router.served_lmi import ask, open_lmi
from tests.support.streams import join_choices, read_chunks

STORY = " the lazy dog."
SCRIPTED = {"max_new_tokens": 50, "details": True}
KEYS = {"tgi_compat": ("logprob", "special")}


def tokens_of(served: ServedHttp, formatter: str | None) -> list[dict[str, Any]]:
    """Return the script's tokens in the form of the formatter."""
    logprob, special = KEYS.get(formatter or "", ("log_prob", "special_token"))
    tokens: list[dict[str, Any]] = []
    for token_id in served.scene.shard.model.script or []:
        token = {"id": token_id, "text": served.tokenizer.fast.decode([token_id])}
        tokens.append(token | {logprob: logprob_of(token_id)})
        if formatter == "tgi_compat":
            tokens[-1] |= {"text": token["text"] if token_id != EOS else "</s>", special: token_id == EOS}
        elif token_id == EOS:
            tokens[-1] |= {special: True}
    return tokens


def details_of(tokens: list[dict[str, Any]]) -> dict[str, Any]:
    return {"finish_reason": "eos_token", "generated_tokens": len(tokens), "inputs": PROMPT}


def whole(served: ServedHttp, formatter: str | None) -> bytes:
    tokens = tokens_of(served, formatter)
    details, is_tgi = details_of(tokens), formatter == "tgi_compat"
    details |= {"seed": None, "prefill": []} if is_tgi else {}
    answer = {"generated_text": STORY, "details": details | {"tokens": tokens}}
    return dump([answer] if is_tgi else answer)


def streamed(served: ServedHttp, formatter: str | None) -> bytes:
    tokens = tokens_of(served, formatter)
    lines: list[dict[str, Any]] = [{"token": token} for token in tokens]
    last = {"generated_text": STORY, "details": details_of(tokens)}
    if formatter == "tgi_compat":
        none = {"generated_text": None, "details": None}
        lines = [{"index": number} | line | none for number, line in enumerate(lines, 1)]
        last["details"] |= {"seed": None}  # type: ignore[operator]
    lines[-1] |= last
    if formatter in ("sse", "tgi_compat"):
        return b"".join(b"data: %b\n\n" % dump(line) for line in lines)
    return b"".join(dump(line) + b"\n" for line in lines)


def dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


FORMS = {
    None: (whole, "application/json", streamed, "application/jsonlines"),
    "json": (whole, "application/json", whole, "application/json"),
    "jsonlines": (streamed, "application/jsonlines", streamed, "application/jsonlines"),
    "sse": (streamed, "text/event-stream; charset=utf-8", streamed, "text/event-stream; charset=utf-8"),
    "tgi_compat": (whole, "application/json", streamed, "text/event-stream; charset=utf-8"),
}


@pytest.mark.parametrize("formatter", FORMS)
async def test_forms(tmp_path: Path, formatter: str | None) -> None:
    write_whole, whole_type, write_stream, stream_type = FORMS[formatter]
    async with open_lmi(tmp_path, formatter) as served:
        script = served.tokenizer.fast.encode(STORY, add_special_tokens=False).ids
        served.scene.shard.model.script = [*script, EOS]
        body = inputs(**SCRIPTED)
        answer = await ask(served, body)
        assert (answer.status, answer.headers["content-type"]) == (200, whole_type)
        assert answer.body == write_whole(served, formatter)
        answer = await ask(served, body | {"stream": True})
        assert (answer.status, answer.headers["content-type"]) == (200, stream_type)
        assert answer.body == write_stream(served, formatter)
        # without details, which only tgi_compat shows by default
        body = inputs(max_new_tokens=50)
        if formatter in (None, "json"):
            assert (await ask(served, body)).body == dump({"generated_text": STORY})
        if formatter == "tgi_compat":
            assert (await ask(served, body)).body == whole(served, formatter)
        if formatter == "jsonlines":
            last = json.loads((await ask(served, body)).body.splitlines()[-1])
            assert (last["generated_text"], "details" in last) == (STORY, False)


PROMPTS = [PROMPT, "a b c", "The little girl", "naïve café 東京", "1 2 1 2"]


FIELDS: list[dict[str, Any]] = [
    {},
    {"stop_sequences": ["e", "the", " 1"]},
    {"stop_sequences": ["and", "oo", "x"], "include_stop_str_in_output": True},
    {"return_full_text": True, "stop": "a"},
    {"top_n_tokens": 3},
]


async def test_whole_answers_and_streams_are_equal(tmp_path: Path) -> None:
    """Both are the decoded tokens, up to a stop sequence."""
    async with open_lmi(tmp_path) as served:
        for more in FIELDS:
            reasons = [await compare(served, text, more) for text in PROMPTS]
            assert ("stop_sequence" in reasons) == ("stop" in str(more))


@pytest.mark.parametrize("is_included", [False, True])
async def test_a_stop_sequence_of_several_tokens(tmp_path: Path, is_included: bool) -> None:
    """A possible beginning of it waits, and is shown if the stop sequence does not follow."""
    async with open_lmi(tmp_path) as served:
        script = served.tokenizer.fast.encode(" lazy lad lazy dog", add_special_tokens=False).ids
        pieces = [served.tokenizer.fast.decode([token_id]) for token_id in script]
        stop = "y dog"
        assert pieces == [" lazy", " l", "ad", " lazy", " dog"]
        served.scene.shard.model.script = script * 10
        more = {"stop_sequences": [stop], "include_stop_str_in_output": is_included}
        body = inputs(max_new_tokens=50, details=True, **more)
        answer = (await ask(served, body)).json
        lines = (await ask(served, body | {"stream": True})).lines
        assert answer["generated_text"] == " lazy lad laz" + is_included * stop
        tokens = [line["token"] for line in lines]
        assert "".join(token["text"] for token in tokens) == lines[-1]["generated_text"]
        assert answer["details"]["tokens"] == tokens
        assert (lines[-1]["generated_text"], len(tokens)) == (answer["generated_text"], len(script))
        texts = [token["text"] for token in tokens]
        assert texts == (pieces if is_included else [*pieces[:3], " laz", ""])


async def compare(served: ServedHttp, text: str, more: dict[str, Any]) -> str:
    """Compare the whole and the streamed answer for a text. Return the finish reason."""
    body = {"inputs": text, "parameters": {"max_new_tokens": 25, "details": True} | more}
    whole = (await ask(served, body)).json
    lines = (await ask(served, body | {"stream": True})).lines
    details, last = whole["details"], lines[-1]
    assert [line["token"] for line in lines] == details["tokens"]
    assert [line["top_tokens"] for line in lines if "top_tokens" in line] == details.get("top_tokens", [])
    assert last["generated_text"] == whole["generated_text"]
    assert last["details"] == {key: details[key] for key in last["details"]}
    assert all(set(line) <= {"token", "top_tokens"} for line in lines[:-1])
    told_ids = [token["id"] for token in details["tokens"]]
    assert told_ids == follow(ids_of(served, text), 25)[: len(told_ids)]
    assert details["generated_tokens"] == len(told_ids)
    joined = "".join(token["text"] for token in details["tokens"])
    assert whole["generated_text"] == (text if more.get("return_full_text") else "") + joined
    check_text(served, told_ids, joined, details["finish_reason"], more)
    reason: str = details["finish_reason"]
    return reason


def check_text(
    served: ServedHttp, token_ids: list[int], text: str, reason: str, more: dict[str, Any]
) -> None:
    decoded = served.tokenizer.fast.decode(token_ids)
    if reason != "stop_sequence":
        assert text == decoded.rstrip("\N{REPLACEMENT CHARACTER}")
        assert reason == ("eos_token" if token_ids[-1] == EOS else "length")
        return
    stops = more.get("stop_sequences") or [more["stop"]]
    is_included = more.get("include_stop_str_in_output", False)
    assert decoded.startswith(text)
    assert any(text.endswith(stop) for stop in stops) == is_included
    if not is_included:
        assert any(decoded.startswith(text + stop) for stop in stops)


async def test_details_of_inputs_and_of_likely_tokens(tmp_path: Path) -> None:
    async with open_lmi(tmp_path) as served:
        body = inputs(max_new_tokens=2, details=True, decoder_input_details=True, top_n_tokens=2)
        details = (await ask(served, body)).json["details"]
        prompt = ids_of(served, PROMPT)
        assert [token["id"] for token in details["prefill"]] == prompt
        assert [token["log_prob"] for token in details["prefill"]] == [None, *map(logprob_of, prompt[1:])]
        assert "".join(token["text"] for token in details["prefill"][1:]) == PROMPT
        assert [[token["id"] for token in top] for top in details["top_tokens"]] == [[0, 1], [0, 1]]
        assert [token["log_prob"] for token in details["top_tokens"][0]] == [-0.0, -1 / 64]
        body = inputs(max_new_tokens=2, decoder_input_details=True)
        assert set((await ask(served, body)).json) == {"generated_text"}


async def test_the_best_of_several_texts_is_first(tmp_path: Path) -> None:
    """The best text has the largest sum of log-probabilities. The others are ordered too."""
    async with open_lmi(tmp_path) as served:
        served.scene.shard.model.uses_seeds = True
        for fields, num_shown in (({"best_of": 6}, 6), ({"best_of": 6, "n": 2}, 2), ({"n": 6}, 6)):
            answer = (await ask(served, inputs(max_new_tokens=4, do_sample=True, seed=9, **fields))).json
            details = answer["details"]
            texts = [details, *details["best_of_sequences"]]
            sums = [sum(token["log_prob"] for token in text["tokens"]) for text in texts]
            seeds = [spec.sampling.seed for spec in served.handle.specs[-6:]]
            prompt = served.tokenizer.fast.encode(PROMPT).ids
            all_sums = sorted(
                (
                    sum(map(logprob_of, truth(prompt, 4, VOCAB_SIZE, sampling_seed=seed)[len(prompt) :]))
                    for seed in seeds
                ),
                reverse=True,
            )
            assert len(set(all_sums)) == 6
            assert sums == all_sums[:num_shown]
            assert answer["generated_text"] == "".join(token["text"] for token in details["tokens"])
            for other in details["best_of_sequences"]:
                assert list(other) == ["finish_reason", "generated_tokens", "tokens", "generated_text"]
                assert other["generated_text"] == "".join(token["text"] for token in other["tokens"])


async def test_batches_have_an_adapter_for_each_input(tmp_path: Path) -> None:
    library = Library()
    for name in ("sql", "chat"):
        library.put(adapter(f"d-{name}"), name)
    async with open_lmi(tmp_path, library=library) as served:
        texts = [PROMPT, "a b c", PROMPT, PROMPT]
        fields = {"max_new_tokens": 5}
        body: dict[str, Any] = {"inputs": texts, "parameters": fields}

        async def alone(text: str, **more: Any) -> Any:
            return (await ask(served, {"inputs": text, "parameters": fields} | more)).json

        assert (await ask(served, body)).json == [await alone(text) for text in texts]
        names = ["sql", None, "chat", ""]
        each = [await alone(text, adapters=name or None) for text, name in zip(texts, names, strict=True)]
        assert len({one["generated_text"] for one in each}) == 4
        assert (await ask(served, body | {"adapters": names})).json == each
        header = {"X-Amzn-SageMaker-Adapter-Identifier": "sql"}
        all_sql = [await alone(text, adapters="sql") for text in texts]
        assert (await ask(served, body, **header)).json == all_sql
        assert (await ask(served, body | {"adapters": "sql"})).json == all_sql
        answer = await ask(served, body | {"adapters": ["sql"]})
        assert (answer.status, answer.json["error"].rpartition(". ")[2]) == (
            424,
            "Number of adapters is not equal to the number of inputs",
        )
        answer = await ask(served, body | {"adapters": ["sql", "nix", None, "chat"]})
        assert answer.json["error"].endswith(". Adapter nix is not registered")
        one = {"inputs": [PROMPT], "parameters": fields}
        assert (await ask(served, one)).json == [await alone(PROMPT)]
        streamed = (await ask(served, one | {"stream": True, "adapters": ["sql"]})).lines
        assert streamed[-1]["generated_text"] == all_sql[0]["generated_text"]


async def test_openai_s_bodies_get_openai_s_answers(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hello"}]
    bodies = {"/v1/chat/completions": {"messages": messages}, "/v1/completions": {"prompt": PROMPT}}
    async with open_lmi(tmp_path) as served:
        for path, body in bodies.items():
            fields = body | {"max_tokens": 4, "temperature": 0, "model": "alias"}
            own, other = await ask(served, fields, path), await ask(served, fields)
            assert own.status == other.status == 200
            assert other.json["choices"] == own.json["choices"]
            streamed = fields | {"stream": True, "stream_options": {"include_usage": True}}
            chunks = read_chunks((await ask(served, streamed, path)).body)
            lines = (await ask(served, streamed)).lines
            assert join_choices(lines) == join_choices(chunks)
            assert lines[-1]["usage"]["completion_tokens"] == 4
            own, other = await ask(served, fields | {"n": -1}, path), await ask(served, fields | {"n": -1})
            assert (other.status, other.json) == (own.status, own.json)
            assert (other.status, other.json["error"]["param"]) == (400, "n")
            adapted = await ask(served, fields, **{"X-Amzn-SageMaker-Adapter-Identifier": "sql"})
            assert (adapted.status, list(adapted.json)) == (424, ["code", "error"])


async def test_bodies_of_plain_text_and_other_routes(tmp_path: Path) -> None:
    async with open_lmi(tmp_path) as served:
        expected = (await ask(served, {"inputs": PROMPT})).json
        text = {"content-type": "text/plain; charset=utf-8"}
        assert (await ask(served, PROMPT.encode(), **text)).json == expected
        for path in (
            "/predictions/served-model",
            "/predictions/served-model/1.0",
            "/models/alias/invoke",
            "/invocations?model_name=alias",
        ):
            assert (await ask(served, {"inputs": PROMPT, "model_name": "alias"}, path)).json == expected
