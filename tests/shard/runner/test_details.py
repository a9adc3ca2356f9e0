"""Check the token details of whole engines, on the host and on a device, against transformers on the same
checkpoint."""

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support.cuda.runners import ENGINES
from tests.support.shard.driver import Request, Router, configure, prompts
from tests.support.shard.messages import GREEDY, SAMPLE, floats, integers, top_tokens
from tgis.shard.runner.interface import ModelRunner


@pytest.fixture(scope="module")
def model_path(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("grouped_queries")


@pytest.fixture(scope="module")
def oracle(model_path: Path) -> transformers.LlamaForCausalLM:
    return transformers.LlamaForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()


@pytest.fixture(scope="module", params=["host", "captured", pytest.param("late", marks=pytest.mark.slow)])
def loaded(request: pytest.FixtureRequest, model_path: Path) -> ModelRunner:
    return ENGINES[request.param](configure(model_path))


@pytest.fixture
def runner(loaded: ModelRunner) -> ModelRunner:
    loaded.reset()
    return loaded


@pytest.fixture(scope="module")
def logprobs_of(oracle: Any) -> Any:
    @torch.inference_mode()
    def logprobs(token_ids: list[int]) -> torch.Tensor:
        return oracle(torch.tensor([token_ids])).logits[0].double().log_softmax(-1)

    return logprobs


def test_details_of_generated_tokens(runner: ModelRunner, logprobs_of: Any) -> None:
    everything = {"logprobs": True, "ranks": True, "top_n": 3}
    requests = [
        Request(prompt, 6, details=[everything, {}, {"ranks": True}, {"top_n": 1}, {"logprobs": True}][i % 5])
        for i, prompt in enumerate(prompts(5, 10))
    ]
    requests += [Request(p, 6, [], {**SAMPLE, "seed": 1}, everything) for p in prompts(6, 3)]
    Router(runner).run(list(requests))
    for request in requests:
        expected = logprobs_of(request.prompt + request.generated)[len(request.prompt) - 1 :]
        for i, token in enumerate(request.generated):
            if request.details.get("logprobs"):
                assert request.logprobs[i] == pytest.approx(expected[i, token].item(), abs=1e-4)
            if request.details.get("ranks"):
                assert request.ranks[i] == 1 + (expected[i] > expected[i, token]).sum()
            top_n = request.details.get("top_n", 0)
            values, ids = expected[i].topk(top_n)
            assert [token for token, _ in request.tops[i]] == ids.tolist()
            assert [value for _, value in request.tops[i]] == pytest.approx(values.tolist(), abs=1e-4)


def test_details_after_filters_and_masks(runner: ModelRunner) -> None:
    details = {"logprobs": True, "ranks": True, "top_n": 2}
    one = Request([5, 6, 7], 4, [], {**SAMPLE, "top_k": 1}, details)
    Router(runner).run([one])
    assert (one.logprobs, one.ranks) == ([0.0] * 4, [1] * 4)
    assert one.tops == [[(token, 0.0)] for token in one.generated]
    masked = Request([5, 6, 7], 4, list(range(98)), {**GREEDY, "min_new_tokens": 4}, details)
    Router(runner).run([masked])
    assert masked.generated == [98] * 4
    assert masked.tops == [[(98, 0.0)]] * 4


def test_only_requested_columns_are_sent(runner: ModelRunner) -> None:
    router = Router(runner)
    router.run([Request([5, 6], 3), Request([7], 3, [], SAMPLE)])
    for response in router.responses:
        assert not response.logprobs
        assert not response.ranks
        assert not response.HasField("top_tokens")
        assert not response.input_details
        assert response.forward_ns > 0
    assert len({response.digest for response in router.responses}) > 1


@pytest.mark.parametrize("requested", [{"logprobs": True, "ranks": True, "top_n": 2}, {"top_n": 1}, {}])
@pytest.mark.parametrize("first", [0, 1, 70])
def test_details_of_the_input(
    runner: ModelRunner, logprobs_of: Any, requested: dict[str, Any], first: int
) -> None:
    rng = random.Random(7)
    prompt = [rng.randrange(3, 99) for _ in range(150)]
    details = {**requested, "input_tokens": True, "input_from": first}
    router = Router(runner, seed=first)
    request = Request(prompt, 3, details=details)
    router.run([request, *(Request(p, 3) for p in prompts(8, 3))])
    expected = logprobs_of(prompt)
    spans = [message for response in router.responses for message in response.input_details]
    assert len(spans) > 1
    reported = []
    for span in spans:
        assert span.row == request.row
        reported += range(span.start, span.start + span.count)
        if not requested:
            assert not span.logprobs
            assert not span.ranks
            assert not span.HasField("top_tokens")
            continue
        columns = zip(floats(span.logprobs), integers(span.ranks), top_tokens(span.top_tokens), strict=True)
        for position, (logprob, rank, top) in enumerate(columns, span.start):
            if position == 0:
                assert math.isnan(logprob)
                assert (rank, top) == (0, [])
                continue
            row, token = expected[position - 1], prompt[position]
            assert logprob == pytest.approx(row[token].item(), abs=1e-4)
            assert rank == 1 + (row > row[token]).sum()
            assert [token for token, _ in top] == row.topk(requested["top_n"]).indices.tolist()
    assert reported == list(range(first, 150))
