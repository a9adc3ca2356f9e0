"""Tests the engine's parameters for LMI's requests, and which parameters are refused."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.router.fake_shard import EOS
from tests.support.router.served_http import LIMITS_OF_HTTP, ServedHttp
from tests.support.router.served_inputs import PROMPT, inputs
from tests.support.router.served_lmi import ask, open_lmi
from tgis.router.engine.handle import SequenceSpec

UNREADABLE = "Input Parsing failed. Ensure that the request payload is valid. "


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[ServedHttp]:
    async with open_lmi(tmp_path) as served:
        yield served


async def spec_of(served: ServedHttp, **parameters: Any) -> SequenceSpec:
    answer = await ask(served, inputs(**{"max_new_tokens": 1} | parameters))
    assert answer.status == 200, answer.body
    return served.handle.specs[-1]


SAMPLED: list[dict[str, Any]] = [
    {"do_sample": True},
    {"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 7},
    {"temperature": 0.5},
    {"top_k": 3},
    {"top_p": 0.5},
    {"min_p": 0.2},
]
GREEDY: list[dict[str, Any]] = [
    {},
    {"seed": 5},
    {"do_sample": False, "temperature": 0.7, "top_p": 0.9, "top_k": 5},
    {"temperature": 0},
    {"do_sample": True, "temperature": 0},
    {"top_k": -1},
    {"top_k": 0, "top_p": 1, "min_p": 0},
    {"repetition_penalty": 1.2},
    {"do_sample": None, "temperature": None},
    {"no_such_parameter": 1, "top_q": "x"},
]


async def test_sampling(served: ServedHttp) -> None:
    for fields in SAMPLED:
        sampling = (await spec_of(served, **fields)).sampling
        assert not sampling.greedy, fields
        values = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        names = (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))
        assert values == tuple(fields.get(name, default) for name, default in names)
        assert "seed" not in fields or sampling.seed == fields["seed"]
    for fields in GREEDY:
        assert (await spec_of(served, **fields)).sampling.greedy, fields
    fields = {"repetition_penalty": 1.3, "presence_penalty": -1, "frequency_penalty": 2}
    sampling = (await spec_of(served, **fields)).sampling
    assert {name: getattr(sampling, name) for name in fields} == fields
    assert (await spec_of(served, watermark=True)).sampling.watermark_gamma == 0.25


async def test_stopping(served: ServedHttp) -> None:
    spec = await spec_of(served, max_new_tokens=None)
    assert (spec.stopping.max_new_tokens, spec.stopping.eos_token_ids) == (30, {EOS})
    spec = await spec_of(served, max_new_tokens=9, min_tokens=4, stop_token_ids=[5, 6])
    assert (spec.stopping.max_new_tokens, spec.stopping.min_new_tokens) == (9, 4)
    assert spec.stopping.eos_token_ids == {EOS, 5, 6}
    assert (await spec_of(served, ignore_eos_token=True)).stopping.eos_token_ids == frozenset()
    inputs = served.tokenizer.fast.encode(PROMPT).ids
    assert (await spec_of(served, truncate=3)).input_ids == (inputs[0], *inputs[-2:])
    spec = await spec_of(served, max_new_tokens=5000)  # reduced to the remaining length
    assert spec.stopping.max_new_tokens == 200 - len(inputs)


async def test_details(served: ServedHttp) -> None:
    """Only the details in the answer are computed, from the model's own logits."""
    details = (await spec_of(served)).details
    assert (details.generated_tokens, details.logprobs, details.input_tokens) == (False, False, False)
    details = (await spec_of(served, decoder_input_details=True, top_n_tokens=4)).details
    assert (details.generated_tokens, details.input_tokens, details.top_n) == (False, False, 0)
    details = (await spec_of(served, details=True)).details
    flags = (details.generated_tokens, details.logprobs, details.raw, details.input_tokens)
    assert flags == (True, True, True, False)
    details = (await spec_of(served, details=True, prompt_logprobs=0, logprobs=3)).details
    assert (details.input_tokens, details.top_n) == (True, 3)
    assert (await spec_of(served, details=True, top_n_tokens=2, logprobs=3)).details.top_n == 2
    assert (await spec_of(served, best_of=2, do_sample=True)).details.logprobs


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_beams": 2}, "num_beams is not supported. Texts are sampled or decoded greedily."),
    ({"length_penalty": 1.5}, "length_penalty is not supported. It belongs to beam search."),
    ({"early_stopping": True}, "early_stopping is not supported. It belongs to beam search."),
    (
        {"skip_special_tokens": False},
        "skip_special_tokens is not supported. The operator decides if special tokens are shown.",
    ),
    (
        {"guided_json": {"type": "object"}},
        "guided_json is not supported. Use response_format with messages or prompt.",
    ),
    ({"top_k": -2}, "parameters.top_k must be >= -1"),
    ({"top_p": 0}, "parameters.top_p must be > 0.0"),
    ({"temperature": -1}, "parameters.temperature must be >= 0.0"),
    ({"temperature": "hot"}, "parameters.temperature must be a number, not a string"),
    ({"max_new_tokens": 0}, "parameters.max_new_tokens must be >= 1"),
    ({"max_new_tokens": -5}, "parameters.max_new_tokens must be >= 1"),
    ({"min_tokens": 5, "max_new_tokens": 4}, "min_tokens must be <= max_new_tokens"),
    ({"presence_penalty": 3}, "parameters.presence_penalty must be <= 2.0"),
    ({"seed": 2**64}, f"seed must be >= {-(2**63)} and <= {2**64 - 1}"),
    ({"seed": -(2**63) - 1}, f"seed must be >= {-(2**63)} and <= {2**64 - 1}"),
    ({"n": 129}, "n must be <= 128"),
    ({"n": 3, "best_of": 2}, "best_of must be >= n"),
    ({"stop": "a", "stop_sequences": ["b"]}, "only one of stop_sequences and stop may be given"),
    (
        {"stop_sequences": ["x"] * 17},
        "stop_sequences must have at most 16 texts, each of 1 to 240 UTF8 bytes",
    ),
    (
        {"stop_token_ids": [400]},
        "stop_token_ids: token id 400 is beyond the model's vocabulary of 400 tokens",
    ),
]
REFUSED_STREAMS: list[tuple[dict[str, Any], str]] = [
    ({"decoder_input_details": True}, "decoder_input_details cannot be streamed"),
    ({"prompt_logprobs": 1}, "decoder_input_details cannot be streamed"),
    ({"n": 2}, "n and best_of cannot be streamed"),
    ({"best_of": 2}, "n and best_of cannot be streamed"),
]
REFUSED_BODIES: list[tuple[Any, str]] = [
    ({"inputs": ["a", "b"], "stream": True}, "a list of inputs cannot be streamed"),
    ({"inputs": []}, "inputs must be a text that is not empty, or a list of them"),
    ({"inputs": ["a", ""]}, "inputs must be a text that is not empty, or a list of them"),
    ({"inputs": {"text": "a"}}, "inputs must be a string or a list, not an object"),
    ({"parameters": {}}, "the body must have inputs, or messages or a prompt as OpenAI's API has them"),
    ({"inputs": "a", "parameters": []}, "parameters must be an object, not a list"),
    ({"inputs": ["a"] * 129}, "inputs must have at most 128 texts"),
    ([], "the body must be an object, not a list"),
    (b"{", "the body is not valid JSON in UTF-8: it ends too early"),
    ({"inputs": "a " * 500}, "input tokens (502) plus prefix length (0) must be < 200"),
]


async def test_refusals(served: ServedHttp) -> None:
    """Refusals use this API's name of the parameter, and come before any step."""
    streamed = [(inputs(**fields) | {"stream": True}, text) for fields, text in REFUSED_STREAMS]
    bodies = [(inputs(**fields), text) for fields, text in REFUSED] + streamed + REFUSED_BODIES
    for body, text in bodies:
        answer = await ask(served, body)
        assert (answer.status, answer.json) == (424, {"code": 424, "error": UNREADABLE + text}), body
    assert not served.handle.specs


async def test_parameters_at_their_off_value_are_accepted(served: ServedHttp) -> None:
    fields = {"num_beams": 1, "length_penalty": 1.0, "early_stopping": False, "skip_special_tokens": True}
    await spec_of(served, **fields, spaces_between_special_tokens=True, use_beam_search=False)


async def test_the_operator_s_bounds(tmp_path: Path) -> None:
    limits = replace(LIMITS_OF_HTTP, max_best_of=3, max_client_batch_size=2)
    async with open_lmi(tmp_path, limits=limits) as served:
        for body, text in (
            (inputs(best_of=4), "best_of must be <= 3"),
            ({"inputs": ["a"] * 3}, "inputs must have at most 2 texts"),
        ):
            assert (await ask(served, body)).json["error"] == UNREADABLE + text
        assert (await ask(served, {"inputs": ["a"] * 2, "parameters": {"best_of": 3}})).status == 200
