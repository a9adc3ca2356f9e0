"""Check rows with every sampling parameter at once in whole engines.

The tests cover batches, preemption, half precision, two ranks, grammars, soft prompts, and details of the
model's own logits."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support import plain_sampling
from tests.support.cuda.runners import ENGINES
from tests.support.plain_sampling import Row, single
from tests.support.shard import other_device
from tests.support.shard.checkpoints import write_llama
from tests.support.shard.driver import Request, Router, configure, prompts
from tests.support.shard.messages import EVERY_PARAMETER, GREEDY, SAMPLE, floats, integers, make_bias
from tests.support.shard.portable import plain
from tests.support.shard.prompt_cases import Case
from tests.support.shard.ranks import Ranks
from tests.support.shard.relay import serve
from tests.support.tokenizers.trained import write_byte_level
from tests.support.watermark_detector import score
from tgis.shard.collectives import ProcessGroup
from tgis.shard.runner.interface import ModelRunner
from tgis.shard.startup.load import load

EOS = [2, 11, 30]
ALL_DETAILS = {"logprobs": True, "ranks": True, "top_n": 3}
# The grammar in Lark, as the router writes it.
GRAMMAR = '%llguidance {"no_forcing": true}\nstart: /([a-c]{1,3} ){2,9}\\./'
PENALTIES = {"presence_penalty": 1.5, "frequency_penalty": 0.75}
MARK = {"watermark_gamma": 0.5, "watermark_delta": 2.5}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sampled")
    write_llama(directory, vocab_size=403)
    write_byte_level(directory, 400)
    return directory


@pytest.fixture(scope="module", params=["float32", "float16"])
def either(request: pytest.FixtureRequest, directory: Path) -> ModelRunner:
    return load(configure(directory, dtype=request.param))


@pytest.fixture(scope="module", params=["host", "captured", pytest.param("late", marks=pytest.mark.slow)])
def runner(request: pytest.FixtureRequest, directory: Path) -> ModelRunner:
    return ENGINES[request.param](configure(directory))


@pytest.fixture(scope="module")
def oracle(directory: Path) -> transformers.LlamaForCausalLM:
    return transformers.LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def make_requests() -> list[Request]:
    """Return rows with all parameters, with each parameter alone, and with none."""
    samplings: list[dict[str, Any]] = [
        EVERY_PARAMETER,
        {**EVERY_PARAMETER, "greedy": True},
        GREEDY,
        {**GREEDY, **make_bias({7: 9.0, 2: -9.0})},
        {**GREEDY, **PENALTIES},
        {**SAMPLE, **MARK},
        SAMPLE,
        {**SAMPLE, **PENALTIES, **make_bias({i: i / 50 for i in range(300)})},
    ]
    requests = []
    for i, prompt in enumerate(prompts(3, 16, longest=25)):
        sampling = {**samplings[i % len(samplings)], "seed": i}
        details = [ALL_DETAILS, {}, {**ALL_DETAILS, "raw": True}][i % 3]
        grammar = GRAMMAR if i % 5 == 4 else None
        requests.append(Request(prompt, 14, EOS, sampling, details, grammar))
    return requests


def results(requests: list[Request]) -> list[tuple[list[Any], ...]]:
    return [
        (
            each.generated,
            each.logprobs if each.details else [],
            each.ranks if each.details else [],
            each.tops,
        )
        for each in requests
    ]


def test_company_and_interruptions_change_nothing(either: ModelRunner) -> None:
    either.reset()
    alone = make_requests()
    for request in alone:
        Router(either, depth=1, whole=True).run([request])
    either.reset()
    together = make_requests()
    Router(either, seed=1).run(list(together))
    assert results(together) == results(alone)
    for seed in range(3):
        either.reset()
        stopped = make_requests()
        Router(either, seed, whole=True).run(list(stopped), stop_after=5 + 4 * seed)
        assert any(0 < len(request.generated) < 14 for request in stopped)
        either.reset()
        Router(either, seed).run([request for request in stopped if not request.ended])
        assert results(stopped) == results(alone)


def test_ranks_agree(directory: Path, ranks: Ranks) -> None:
    [(served, digests), (_, theirs)] = ranks.run(2, serve, directory, 1, [make_requests()], 16)
    assert digests == theirs
    [(alone, _)] = ranks.run(1, serve, directory, 1, [make_requests()], 16)
    assert [each.generated for each in served[0]] == [each.generated for each in alone[0]]


@torch.inference_mode()
def check_against_the_rules(
    request: Request, logits_of: Callable[[list[int]], torch.Tensor], num_virtual: int = 0
) -> None:
    """Compare each token of a greedy row to that of the plain rules on transformers' logits."""
    names = Row.__dataclass_fields__.keys() & request.sampling.keys() - {"seed"}
    bias = zip(
        integers(request.sampling.get("bias_token_ids", b"")),
        floats(request.sampling.get("biases", b"")),
        strict=True,
    )
    row = Row([], [], eos=request.eos, logit_bias=dict(bias))
    for name in names:
        value = request.sampling[name]
        setattr(row, name, single(value) if isinstance(value, float) and "gamma" not in name else value)
    num_sure = 0
    for count, token in enumerate(request.generated):
        row.token_ids = request.prompt[num_virtual:] + request.generated[:count]
        row.num_generated = count
        row.logits = logits_of(row.token_ids).tolist()
        best, margin = plain_sampling.choose(row, plain_sampling.process(row).values)
        if margin > 1e-3:
            assert token == best
            num_sure += 1
    assert num_sure > len(request.generated) // 2 > 0


def test_a_watermark_is_found_and_only_where_there_is_one(runner: ModelRunner) -> None:
    """Check the watermark by TGI's formula in neighbouring rows, and by the share of green tokens."""
    runner.reset()
    mark = {"watermark_gamma": 0.25, "watermark_delta": 4.0}
    samplings = [{**SAMPLE, "temperature": 3.0, "seed": i, **(mark if i % 2 else {})} for i in range(6)]
    requests = [Request([5, 6, 7 + i], 100, sampling=sampling) for i, sampling in enumerate(samplings)]
    Router(runner).run(list(requests))
    scores = [score([each.prompt[-1], *each.generated], 0.25, 403) for each in requests]
    assert max(scores[::2]) < 4 < min(scores[1::2])
    others = [score([each.prompt[-1], *each.generated], 0.5, 403) for each in requests]
    assert max(others) < min(scores[1::2])


def test_tokens_are_those_of_the_rules(runner: ModelRunner, oracle: Any) -> None:
    runner.reset()
    everything = {**EVERY_PARAMETER, "greedy": True}
    requests = [
        Request(prompt, 10, EOS, {**sampling})
        for prompt in prompts(5, 3)
        for sampling in (everything, {**GREEDY, **PENALTIES}, {**GREEDY, **MARK})
    ]
    Router(runner).run(list(requests))
    for request in requests:
        check_against_the_rules(request, lambda ids: oracle(torch.tensor([ids])).logits[0, -1])


def test_virtual_tokens_are_not_counted(tmp_path: Path) -> None:
    case = Case("granite_biases", tmp_path)
    runner = load(configure(case.directory, uds_path=case.copies.uds_path, kv_cache_tokens=1024))
    for digest in case.copies.digests:
        runner.adapters.load(digest)
    asked = case.asked[0]
    length = case.lengths[asked.content][0]
    request = case.request(asked)
    best = asked.answer.token_ids[0]
    assert best not in asked.token_ids
    request.prompt[:length] = [best] * length
    request.sampling, request.details, request.eos = {**GREEDY, **PENALTIES, **MARK}, {}, []
    Router(runner).run([request])
    virtual = case.oracle.draw(length, 1)

    def logits_of(token_ids: list[int]) -> torch.Tensor:
        embeddings = case.oracle.embed(virtual, token_ids)
        last: torch.Tensor = case.oracle.model(inputs_embeds=embeddings).logits[0, -1]
        return last

    check_against_the_rules(request, logits_of, num_virtual=length)


def test_grammars_hold_whatever_is_added(runner: ModelRunner, directory: Path) -> None:
    """Check that the bias chooses among the tokens that the grammar allows."""
    runner.reset()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    banned, wanted = tokenizer.encode("z")[-1], tokenizer.encode("b")[-1]
    outside = {**GREEDY, **PENALTIES, **make_bias({banned: 100.0, 1: 90.0})}
    inside = {**outside, **make_bias({banned: 100.0, wanted: 50.0})}
    requests = [Request([5, 6], 20, [1], sampling, {}, GRAMMAR) for sampling in (outside, inside)]
    Router(runner).run(list(requests))
    for request in requests:
        text = tokenizer.decode(request.generated, skip_special_tokens=True)
        assert set(text) <= set("abc .")
    assert requests[0].generated[-1] == 1, "the end is likely as soon as it is allowed"
    assert requests[1].generated.count(wanted) > requests[0].generated.count(wanted)


@pytest.mark.parametrize("sampling", [EVERY_PARAMETER, GREEDY])
def test_raw_details_are_those_of_the_model(runner: ModelRunner, oracle: Any, sampling: Any) -> None:
    """Check a row with raw details beside a row whose details are of the masked logits.

    If the mask leaves one token, its masked probability is 1."""
    runner.reset()
    raw = Request([5, 6, 7], 8, [], {**sampling, "seed": 3}, {**ALL_DETAILS, "raw": True}, GRAMMAR)
    usual = deepcopy(raw)
    usual.details = ALL_DETAILS
    Router(runner).run([raw, usual])
    assert raw.generated == usual.generated
    with torch.inference_mode():
        logits = oracle(torch.tensor([raw.prompt + raw.generated])).logits[0].double()
    expected = logits.log_softmax(-1)[len(raw.prompt) - 1 :]
    for i, token in enumerate(raw.generated):
        assert raw.logprobs[i] == pytest.approx(expected[i, token].item(), abs=1e-4)
        assert raw.ranks[i] == 1 + (expected[i] > expected[i, token]).sum()
        values, ids = expected[i].topk(3)
        assert [token for token, _ in raw.tops[i]] == ids.tolist()
        assert [value for _, value in raw.tops[i]] == pytest.approx(values.tolist(), abs=1e-4)
    assert max(usual.ranks) < max(raw.ranks), "the mask excludes most of the model's best tokens"


@pytest.mark.slow
def test_other_devices_sample_the_same(directory: Path) -> None:
    """Check that penalties and biases are moved to the device of the logits."""

    def generate(device: torch.device) -> list[Request]:
        config = configure(directory, kv_cache_tokens=1024)
        served = load(config, ProcessGroup(0, 1, device=device), plain(device))
        requests = make_requests()[:8]
        Router(served, seed=1).run(list(requests))
        return requests

    expected = generate(torch.device("cpu"))
    with other_device.present() as device:
        actual = generate(device)
    assert results(actual) == results(expected)
