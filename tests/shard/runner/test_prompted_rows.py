"""Check rows with soft prompts in an engine.

The tests cover details of virtual tokens, penalties, preempted rows, shared blocks, and prompts that are
unloaded or missing."""

import math
from copy import deepcopy
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.shard import other_device
from tests.support.shard.driver import Request, Router, configure, opening
from tests.support.shard.family_oracle import check
from tests.support.shard.messages import GREEDY, SAMPLE, Steps, floats, integers, open_row, top_tokens
from tests.support.shard.portable import plain
from tests.support.shard.prompt_cases import PAD, Case
from tests.support.shard.tuning_cells import Asked
from tgis.shard.collectives import ProcessGroup
from tgis.shard.runner.interface import ModelRunner
from tgis.shard.startup.load import load

NAMES = {"decoder": "granite_biases", "encoder_decoder": "bart_scaled"}


class Served:
    def __init__(self, name: str, root: Path) -> None:
        self.case = Case(name, root)
        options = {"uds_path": self.case.copies.uds_path, "kv_cache_tokens": 1024, "block_size": 4}
        self.runner = load(configure(self.case.directory, **options))
        self.load_all()

    def load_all(self) -> None:
        for digest in self.case.copies.digests:
            self.runner.adapters.load(digest)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prompted")


@pytest.fixture(scope="module")
def decoder(root: Path) -> Served:
    return Served(NAMES["decoder"], root)


@pytest.fixture(scope="module", params=NAMES)
def either(request: pytest.FixtureRequest, root: Path, decoder: Served) -> Served:
    return decoder if request.param == "decoder" else Served(NAMES[request.param], root)


@pytest.fixture(autouse=True)
def _fresh(request: pytest.FixtureRequest) -> None:
    for name in {"decoder", "either"} & set(request.fixturenames):
        served: Served = request.getfixturevalue(name)
        served.runner.reset()
        served.load_all()


def execute(
    runner: ModelRunner, steps: Steps, work: list[tuple[int, int, int]], *opened: Request
) -> list[int]:
    """Return the tokens of a step."""
    response = runner.launch(steps.step(work, [opening(request) for request in opened])).answer()
    assert not response.errors
    return integers(response.token_ids)


def test_interrupted_rows_go_on_as_if_nothing_had_happened(either: Served) -> None:
    """Check rows in a batch and with steps in flight; a preempted row continues with the tokens it had
    generated."""
    case, runner = either.case, either.runner
    requests = [case.request(asked) for asked in case.asked]
    sampled = [case.request(asked) for asked in case.asked]
    for request in sampled:
        request.sampling = {**SAMPLE, "seed": 7}
    expected = deepcopy(sampled)
    for request in expected:
        Router(runner, whole=True, depth=1).run([request])
    runner.reset()
    Router(runner, seed=1).run([*requests, *sampled], stop_after=7)
    assert any(0 < len(request.generated) < 8 for request in requests)
    runner.reset()
    Router(runner, seed=2).run([request for request in [*requests, *sampled] if not request.ended])
    for request, asked in zip(requests, case.asked, strict=True):
        check(request, asked.answer)
    assert [request.generated for request in sampled] == [request.generated for request in expected]


def test_nothing_is_left_on_the_cpu(either: Served) -> None:
    """Check that prompts loaded for another device give the same bits."""

    def serve(device: torch.device) -> list[Request]:
        config = configure(either.case.directory, uds_path=either.case.copies.uds_path, kv_cache_tokens=1024)
        runner = load(config, ProcessGroup(0, 1, device=device), plain(device))
        for digest in either.case.copies.digests:
            runner.adapters.load(digest)
        requests = [either.case.request(asked) for asked in either.case.asked]
        Router(runner, seed=1).run(list(requests))
        return requests

    expected = serve(torch.device("cpu"))
    with other_device.present() as device:
        actual = serve(device)
    assert [request.generated for request in actual] == [request.generated for request in expected]
    assert [request.logprobs for request in actual] == [request.logprobs for request in expected]


@pytest.mark.parametrize(("number", "cuts"), [(2, (0, 4, 7)), (3, (0, 4))], ids=["before a text", "alone"])
def test_details_of_virtual_tokens(decoder: Served, number: int, cuts: tuple[int, ...]) -> None:
    """Check that virtual tokens are reported as the pad token, with the probabilities at their positions."""
    case = decoder.case
    asked = case.asked[number]
    request = case.request(asked)
    request.details = {"logprobs": True, "ranks": True, "top_n": 2, "input_tokens": True}
    request.row, steps = 0, Steps(4, decoder.runner.info.num_blocks)
    bounds = pairwise((*cuts, len(request.prompt)))
    work = [steps.step([(0, *span)], [opening(request)] if not span[0] else []) for span in bounds]
    spans = [message for step in work for message in decoder.runner.launch(step).answer().input_details]
    with torch.inference_mode():
        prompt = case.oracle.draw(case.lengths[asked.content][0], 1)
        out = case.oracle.model(inputs_embeds=case.oracle.embed(prompt, asked.token_ids))
    expected = out.logits[0].log_softmax(-1)  # [num_tokens, vocab_size]
    assert [span.start for span in spans] == [cut + (cut > 0) for cut in cuts]
    logprobs = [logprob for span in spans for logprob in floats(span.logprobs)]
    ranks = [rank for span in spans for rank in integers(span.ranks)]
    tops = [top for span in spans for top in top_tokens(span.top_tokens)]
    tokens = [PAD] * len(prompt) + asked.token_ids
    assert (math.isnan(logprobs[0]), ranks[0], tops[0], len(logprobs)) == (True, 0, [], len(tokens))
    index = torch.tensor(tokens[1:])[:, None]
    chosen = expected[:-1].gather(1, index)
    assert logprobs[1:] == pytest.approx(chosen[:, 0].tolist(), abs=1e-4)
    assert ranks[1:] == ((expected[:-1] > chosen).sum(1) + 1).tolist()
    assert [[token for token, _ in top] for top in tops[1:]] == expected[:-1].topk(2).indices.tolist()


def test_virtual_tokens_count_where_long_sequences_turn_differently(root: Path) -> None:
    """Check the switch of rotary frequencies at the 21st token, which input and prompt reach only
    together."""
    served = Served("phi3_short_and_long", root)
    token_ids, length = list(range(20, 37)), served.case.lengths["a"][0]
    asked = Asked(token_ids, "a", served.case.oracle.answer(token_ids, length, 1))
    request = served.case.request(asked)
    Router(served.runner).run([request])
    check(request, asked.answer)


@pytest.mark.parametrize("pad", ["an end of sequence", "the best token"])
def test_the_repetition_penalty_does_not_see_virtual_tokens(decoder: Served, pad: str) -> None:
    """Check that penalties ignore virtual tokens, whose ID is the most likely token or the end token."""
    case = decoder.case
    asked = case.asked[0]
    length, options = case.lengths[asked.content][0], {"repetition_penalty": 1.7}
    expected = case.oracle.answer(asked.token_ids, length, 1, **options)
    best = asked.answer.token_ids[0]
    assert best not in asked.token_ids, "it would be penalised anyway"
    request = case.request(asked)
    request.prompt[:length] = [best] * length
    request.sampling, request.details = {**GREEDY, **options}, {}
    request.eos = [best] if pad == "an end of sequence" else []
    Router(decoder.runner).run([request])
    assert request.generated[0] == best
    if pad == "the best token":
        assert request.generated[: expected.certain] == expected.token_ids[: expected.certain]
        assert expected.certain > 1


def test_the_repetition_penalty_of_a_prompt_alone(decoder: Served) -> None:
    """Check a row that starts without visible tokens."""
    case = decoder.case
    [asked] = [asked for asked in case.asked if not asked.token_ids]
    expected = case.oracle.answer_to_nothing(case.lengths[asked.content][0], 1, 1.7)
    assert expected.token_ids != asked.answer.token_ids
    request = case.request(asked)
    request.sampling, request.details = {**GREEDY, "repetition_penalty": 1.7}, {}
    Router(decoder.runner).run([request])
    assert request.generated[: expected.certain] == expected.token_ids[: expected.certain]


def test_blocks_of_another_row_under_the_same_prompt_are_read(decoder: Served) -> None:
    """Check shared blocks that end inside the virtual tokens and after them."""
    case, runner = decoder.case, decoder.runner
    first, other = case.request(case.asked[0]), case.request(case.asked[2])
    size = runner.info.block_size
    for shared in (1, 2):
        other.prompt[: shared * size] = first.prompt[: shared * size]
        expected, again = deepcopy(other), deepcopy(other)
        Router(runner, whole=True).run([expected])
        runner.reset()
        steps = Steps(size, runner.info.num_blocks)
        first.row, again.row = 0, 1
        execute(runner, steps, [(0, 0, len(first.prompt))], first)
        request = steps.step([(1, shared * size, len(again.prompt))], [opening(again)])
        table = steps.blocks[0][:shared] + steps.blocks[1][shared:]
        request.new_blocks = np.array(table, "<i4").tobytes()
        assert integers(runner.launch(request).answer().token_ids) == expected.generated[:1]
        runner.reset()


def test_a_row_keeps_a_prompt_that_is_unloaded(either: Served) -> None:
    case, runner = either.case, either.runner
    steps, request = Steps(4, runner.info.num_blocks), case.request(case.asked[0])
    request.row, request.cross_blocks = 0, [200 + i for i in range(len(request.encoder_token_ids))]
    generated = execute(runner, steps, [(0, 0, 1)], request)
    runner.adapters.unload_others([])
    length, end = len(request.prompt), len(request.prompt) + request.max_new_tokens
    generated += execute(runner, steps, [(0, 1, length)]) if length > 1 else []
    for position in range(length, end - 1):
        generated += execute(runner, steps, [(0, position, position + 1)])
    certain = case.asked[0].answer.certain
    assert generated[:certain] == case.asked[0].answer.token_ids[:certain]


def test_a_row_whose_prompt_is_not_loaded_fails_alone(decoder: Served) -> None:
    case, runner = decoder.case, decoder.runner
    runner.adapters.unload_others([])
    steps, bad, good = Steps(4, runner.info.num_blocks), *(case.request(case.asked[i]) for i in (0, -1))
    bad.row, good.row = 0, 1
    opened = [opening(bad), opening(good), open_row(2, [5, 6])]
    opened[2].adapter_digest = "none"
    response = runner.launch(steps.step([(0, 0, 3), (1, 0, len(good.prompt)), (2, 0, 2)], opened)).answer()
    assert [(error.row, error.message) for error in response.errors] == [
        (0, "its soft prompt is not loaded"),
        (2, "its adapter is not loaded"),
    ]
    assert integers(response.rows) == [1]
    assert integers(response.token_ids) == case.asked[-1].answer.token_ids[:1]
