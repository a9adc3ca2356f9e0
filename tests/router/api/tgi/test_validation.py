"""Tests every refusal of a request by TGI's API, over a real socket: TGI's own words, in its order."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.router.served_http import LIMITS_OF_HTTP
from tests.support.router.served_inputs import PROMPT, call, ids_of, inputs
from tests.support.router.served_tgi import events_of, open_tgi

TOTAL, MAX_INPUT = 40, 20
LIMITS = replace(LIMITS_OF_HTTP, max_sequence_length=TOTAL, max_input_tokens=MAX_INPUT)
LONG = "a b c d e f g h i j k l m n o p q r s t u v w x y z"
SAMPLED = {"do_sample": True}
REGEX = {"type": "regex", "value": "("}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"best_of": 0}, "`best_of` must be > 0 and <= 2. Given: 0"),
    ({"best_of": -1}, "`best_of` must be > 0 and <= 2. Given: -1"),
    ({"best_of": 3} | SAMPLED, "`best_of` must be > 0 and <= 2. Given: 3"),
    ({"best_of": 2}, "you must use sampling when `best_of` is > 1"),
    ({"best_of": 2, "seed": 1} | SAMPLED, "`seed` must not be set when `best_of` > 1"),
    ({"temperature": 0.0}, "`temperature` must be strictly positive"),
    ({"temperature": -1}, "`temperature` must be strictly positive"),
    ({"repetition_penalty": 0}, "`repetition_penalty` must be strictly positive"),
    ({"frequency_penalty": 2.1}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ({"frequency_penalty": -2.1}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ({"top_p": 0.0}, "`top_p` must be > 0.0 and < 1.0"),
    ({"top_p": 1.1}, "`top_p` must be > 0.0 and < 1.0"),
    ({"typical_p": 0.0}, "`typical_p` must be > 0.0 and < 1.0"),
    ({"typical_p": 1.1}, "`typical_p` must be > 0.0 and < 1.0"),
    ({"top_k": 0}, "`top_k` must be strictly positive"),
    ({"top_k": -1}, "`top_k` must be strictly positive"),
    ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
    ({"max_new_tokens": -5}, "`max_new_tokens` must be strictly positive"),
    ({"stop": ["a"] * 5}, "`stop` supports up to 4 stop sequences. Given: 5"),
    ({"stop": [""]}, "`stop` must have texts of 1 to 240 UTF8 bytes"),
    ({"seed": 2**64}, f"`seed` must be >= 0 and <= {2**64 - 1}"),
    ({"seed": -1}, f"`seed` must be >= 0 and <= {2**64 - 1}"),
    ({"top_n_tokens": -1}, "`top_n_tokens` must be >= 0 and <= 5. Given: -1"),
    ({"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
    ({"truncate": 0}, "`truncate` must be strictly positive and less than 20. Given: 0"),
    ({"truncate": -1}, "`truncate` must be strictly positive and less than 20. Given: -1"),
    ({"truncate": 21}, "`truncate` must be strictly positive and less than 20. Given: 21"),
    ({"grammar": REGEX}, "grammar is not valid: unclosed group"),
    (
        {"grammar": {"type": "regex", "value": {}}},
        "grammar is not valid: it must be a regular expression",
    ),
    ({"grammar": {"type": "json", "value": 1}}, "grammar is not valid: it must be a JSON schema"),
    (
        {"grammar": {"type": "json_schema", "value": {"name": "x"}}},
        "grammar is not valid: it must be an object with a `schema`",
    ),
    (
        {"grammar": {"type": "regex", "value": "a" * 1001}},
        "grammar is not valid: it must have at most 1000 UTF8 bytes",
    ),
    # The first error in TGI's order is reported.
    (
        {"temperature": 0, "top_p": 2, "top_k": 0, "stop": ["a"] * 5},
        "`temperature` must be strictly positive",
    ),
    ({"top_p": 2, "top_k": 0, "truncate": 0}, "`top_p` must be > 0.0 and < 1.0"),
    (
        {"stop": ["a"] * 5, "truncate": 0, "max_new_tokens": 99},
        "`stop` supports up to 4 stop sequences. Given: 5",
    ),
]
STREAMED: list[tuple[dict[str, Any], str]] = [
    ({"best_of": 2} | SAMPLED, "`best_of` != 1 is not supported when streaming tokens"),
    (
        {"decoder_input_details": True},
        "`decoder_input_details` == true is not supported when streaming tokens",
    ),
]
ACCEPTED: list[dict[str, Any]] = [
    {"best_of": 1, "seed": 1},
    {"top_p": 1.0, "typical_p": 1.0},
    {"frequency_penalty": -2.0, "repetition_penalty": 0.1, "temperature": 0.0001},
    {"stop": ["a", "b", "c", "d"], "top_n_tokens": 5, "truncate": 20},
    dict.fromkeys(("best_of", "temperature", "top_p", "do_sample", "stop", "details", "seed", "grammar")),
]


def invalid(text: str) -> dict[str, str]:
    return {"error": f"Input validation error: {text}", "error_type": "validation"}


async def test_refused_parameters(tmp_path: Path) -> None:
    async with open_tgi(tmp_path, limits=LIMITS) as served:
        for given, text in REFUSED:
            answer = await call(served, "/generate", inputs(**{"max_new_tokens": 2} | given))
            assert (answer.status, answer.json) == (422, invalid(text)), given
            if "best_of" not in given:
                stream = await call(served, "/generate_stream", inputs(**{"max_new_tokens": 2} | given))
                assert (stream.status, events_of(stream)) == (200, [invalid(text)]), given
        for given, text in STREAMED:
            stream = await call(served, "/", inputs(**given) | {"stream": True})
            assert (stream.status, events_of(stream)) == (200, [invalid(text)])
        for given in ACCEPTED:
            answer = await call(served, "/generate", inputs(**{"max_new_tokens": 2} | given))
            assert answer.status == 200, (given, answer)
        answer = await call(served, "/generate", inputs("", max_new_tokens=2, truncate=0))
        assert (answer.status, answer.json) == (422, invalid("`inputs` cannot be empty"))


@pytest.mark.parametrize("max_input", [None, MAX_INPUT])
async def test_lengths(tmp_path: Path, max_input: int | None) -> None:
    """The total is checked first. Without max_new_tokens, the rest of the length counts."""
    async with open_tgi(tmp_path, limits=replace(LIMITS, max_input_tokens=max_input)) as served:
        limit = max_input or TOTAL - 1
        for length in (2, 12, 19, 20, 21, 22, 30, 38, 39, 40, 41, 44):
            text = served.tokenizer.fast.decode(ids_of(served, LONG * 3)[1:length])
            n = len(ids_of(served, text))
            for new in (None, 1, TOTAL - n, TOTAL - n + 1, 5000):
                if not text or (new is not None and new < 1):
                    continue
                given = {} if new is None else {"max_new_tokens": new}
                m = max(TOTAL - n, 0) if new is None else new
                expected = ""
                if n + m > TOTAL:
                    expected = (
                        f"`inputs` tokens + `max_new_tokens` must be <= {TOTAL}. "
                        f"Given: {n} `inputs` tokens and {m} `max_new_tokens`"
                    )
                elif n > limit:
                    expected = f"`inputs` must have less than {limit} tokens. Given: {n}"
                elif length % 10:
                    continue  # accepted requests generate, which takes a while
                answer = await call(served, "/generate", inputs(text, **given))
                assert (answer.status, answer.json.get("error")) == (
                    (422, f"Input validation error: {expected}") if expected else (200, None)
                ), (n, new)


async def test_operators_bounds(tmp_path: Path) -> None:
    limits = replace(LIMITS, max_best_of=1, max_stop_sequences=8, allows_guided=False, max_new_tokens=10)
    grammar = {"type": "json", "value": {"type": "object"}}
    cases = [
        ({"best_of": 2} | SAMPLED, "`best_of` != 1 is not allowed for this endpoint"),
        ({"stop": ["a"] * 9}, "`stop` supports up to 8 stop sequences. Given: 9"),
        ({"grammar": grammar}, "grammar is not supported"),
        ({"max_new_tokens": 11}, "`max_new_tokens` must be <= 10. Given: 11"),
    ]
    async with open_tgi(tmp_path, limits=limits) as served:
        for given, text in cases:
            answer = await call(served, "/generate", inputs(**given))
            assert (answer.status, answer.json) == (422, invalid(text))
        answer = await call(
            served, "/generate", inputs(stop=[f"#{number}" for number in range(8)], max_new_tokens=1)
        )
        assert answer.status == 200, answer


async def test_nothing_of_a_text_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with open_tgi(tmp_path, limits=LIMITS) as served:
        secret = "my secret text"
        await call(served, "/generate", inputs(secret, stop=[secret], max_new_tokens=1, adapter_id="x"))
        await call(served, "/generate", inputs(secret, grammar={"type": "regex", "value": f"({secret}"}))
        await call(served, "/generate", inputs(secret, temperature=secret))
    assert len(caplog.messages) == 3
    assert "secret" not in " ".join([*caplog.messages, *(str(vars(record)) for record in caplog.records)])
    assert PROMPT not in caplog.text
