"""Compares tiny models of every family with transformers, with captured steps and without, one step at a time
and ahead."""

from dataclasses import replace
from typing import Any

from bench.gpu.cases.models import load_model, record_comparison, run_on, temporary_directory
from bench.gpu.target import Target
from tests.support.shard.checkpoints import write_model
from tests.support.shard.driver import Request, Router, configure
from tests.support.shard.family_cases.all import CASES
from tests.support.shard.family_oracle import NEW_TOKENS, Answer, Oracle, check, draw_inputs
from tests.support.shard.messages import GREEDY, SAMPLE

SIZES = {"kv_cache_tokens": 2048, "max_sequence_length": 128, "max_step_tokens": 64, "dtype": "float32"}


def check_family(target: Target, name: str) -> None:
    config = CASES[name]()
    with temporary_directory() as directory:
        write_model(directory, config)
        oracle = Oracle(directory, config)
        answers = [oracle.answer(ids) for ids in draw_inputs()]
        captured = configure(directory, **SIZES, cuda_graphs="3,8")
        runner = load_model(target, captured)
        detailed = make_requests(oracle, answers, {"logprobs": True, "ranks": True})
        runner.reset()
        Router(runner, seed=1).run(list(detailed))

        def compare() -> None:
            for request, answer in zip(detailed, answers, strict=True):
                check(request, answer)

        record_comparison(target, f"{name}: as transformers", compare)
        requests = make_requests(oracle, answers, {})
        ahead, alone = (run_on(runner, requests, depth) for depth in (2, 1))
        target.recorder.check(f"{name}: ahead and one by one are equal", ahead == alone)
        eager = run_on(load_model(target, replace(captured, cuda_graphs="0")), requests, 2)
        target.recorder.check(f"{name}: captured and eager are equal", ahead == eager)


def make_requests(oracle: Oracle, answers: list[Answer], details: dict[str, bool]) -> list[Request]:
    """Create greedy requests, and sampled ones without token details."""
    requests = []
    for sampling in (GREEDY,) if details else (GREEDY, {**SAMPLE, "seed": 7}):
        for answer in answers:
            is_encoded = oracle.is_encoder_decoder
            prompt = [oracle.start_token_id] if is_encoded else answer.input_ids
            encoder = answer.input_ids if is_encoded else []
            given: dict[str, Any] = {"sampling": sampling, "details": details, "encoder_token_ids": encoder}
            requests.append(Request(list(prompt), NEW_TOKENS, **given))
    return requests
