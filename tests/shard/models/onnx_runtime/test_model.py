"""Models in ONNX form: same answers as transformers with the same weights, alone, in a batch, in chunks, and
after an interruption."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.support.shard.driver import Request, Router, opening, prompts
from tests.support.shard.family_oracle import NEW_TOKENS, Oracle
from tests.support.shard.messages import NOTHING, SAMPLE, Steps, floats, integers
from tests.support.shard.stepping import ALONE, Stepper, read_config
from tests.support.tokenizers.trained import write_wordpiece
from tgis.pb import shard_pb2 as pb
from tgis.shard.collectives import ProcessGroup
from tgis.shard.kernels.cpu.attention.attention import CpuAttention
from tgis.shard.memory.kv_cache import KVCache, local_kv_heads
from tgis.shard.models.interface import Model
from tgis.shard.models.onnx_runtime import load as onnx_runtime
from tgis.shard.runner.batch_builder import BatchBuilder
from tgis.shard.runner.forward import Forward
from tgis.shard.runner.interface import ModelRunner
from tgis.shard.runner.model_runner import HostModelRunner
from tgis.shard.runner.row_table import RowLimits, RowTable
from tgis.shard.sampling.grammar import Guides, read_tokenizer

DATA = Path(__file__).parents[3] / "data" / "onnx"
# Error of float16 arithmetic, relative to float32.
CLOSE = {"llama": 1e-4, "gpt2": 1e-4, "merged": 1e-4, "half": 1e-2}
BLOCK_SIZE, NUM_BLOCKS = 4, 512


def load(directory: Path, group: ProcessGroup = ALONE) -> Model:
    return onnx_runtime.load(onnx_runtime.make_spec(directory, read_config(directory)), group, num_threads=1)


def make_runner(directory: Path, tokenizer: Path | None = None) -> ModelRunner:
    model, spec = load(directory), onnx_runtime.make_spec(directory, read_config(directory))
    shape = (spec.num_layers, NUM_BLOCKS, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
    limits = RowLimits(192, BLOCK_SIZE, spec.vocab_size)
    read = partial(read_tokenizer, tokenizer or directory, spec.vocab_size, [1])
    info = pb.InfoResponse(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
    attention = CpuAttention(KVCache(*shape, spec.dtype))
    builder = BatchBuilder(RowTable(8, limits, torch.device("cpu"), NOTHING), attention)
    return HostModelRunner(Forward(model, attention), builder, Guides(read, spec.vocab_size), info, NOTHING)


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return make_runner(DATA / "llama")


@pytest.fixture(scope="module")
def oracle() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(DATA / "llama", dtype=torch.float32).eval()


@torch.inference_mode()
def logprobs_of(oracle: Any, token_ids: list[int]) -> Tensor:
    return oracle(torch.tensor([token_ids])).logits[0].double().log_softmax(-1)


@pytest.mark.parametrize("name", CLOSE)
def test_equals_generate(name: str) -> None:
    runner = make_runner(DATA / name)
    oracle = Oracle(DATA / name, transformers.AutoConfig.from_pretrained(DATA / name))
    answers = [oracle.answer(prompt) for prompt in prompts(1, 8)]
    details = {"logprobs": True}
    crowd = [Request(answer.input_ids, NEW_TOKENS, details=details) for answer in answers]
    Router(runner).run(list(crowd))
    alone = [Request(answer.input_ids, NEW_TOKENS, details=details) for answer in answers[:3]]
    for request in alone:
        runner.reset()
        Router(runner, depth=1, whole=True).run([request])
    num_certain = 0
    for request, answer in zip([*crowd, *alone], [*answers, *answers[:3]], strict=True):
        certain = answer.certain if name != "half" else 1
        assert request.generated[:certain] == answer.token_ids[:certain]
        assert request.logprobs[:certain] == pytest.approx(answer.logprobs[:certain], abs=CLOSE[name])
        num_certain += certain
    assert num_certain > NEW_TOKENS * len(crowd) // 2 or name == "half"


def test_an_interrupted_request_continues(runner: ModelRunner) -> None:
    def sampled() -> list[Request]:
        return [
            Request(prompt, 12, [2], {**SAMPLE, "seed": seed, "top_p": 0.9, "repetition_penalty": 1.2})
            for seed, prompt in enumerate(prompts(2, 6, longest=25))
        ]

    alone, stopped = sampled(), sampled()
    for request in alone:
        runner.reset()
        Router(runner, depth=1, whole=True).run([request])
    runner.reset()
    Router(runner, seed=2, whole=True).run(list(stopped), stop_after=6)
    assert not all(request.ended for request in stopped)
    assert len({len(request.generated) for request in stopped}) > 1
    runner.reset()
    Router(runner, seed=3, depth=3).run([request for request in stopped if not request.ended])
    assert [request.generated for request in stopped] == [request.generated for request in alone]


def test_details_of_the_input(runner: ModelRunner, oracle: Any) -> None:
    prompt = [(5 * i + 3) % 90 + 3 for i in range(90)]
    details = {"logprobs": True, "ranks": True, "input_tokens": True}
    request = Request(prompt, 2, details=details)
    runner.reset()
    router = Router(runner, seed=1)
    router.run([request, *(Request(p, 3) for p in prompts(3, 3))])
    expected = logprobs_of(oracle, prompt)
    spans = [message for response in router.responses for message in response.input_details]
    assert len(spans) > 1
    logprobs = [logprob for span in spans for logprob in floats(span.logprobs)]
    ranks = [rank for span in spans for rank in integers(span.ranks)]
    chosen = expected[torch.arange(89), torch.tensor(prompt[1:])]
    assert logprobs[1:] == pytest.approx(chosen.tolist(), abs=1e-4)
    assert ranks[1:] == (1 + (expected[:-1] > chosen[:, None]).sum(1)).tolist()


def test_blocks_of_another_row_are_read(runner: ModelRunner, oracle: Any) -> None:
    prompt = list(range(10, 10 + 2 * BLOCK_SIZE))
    first, second = Request([*prompt, 7], 5, row=0), Request([*prompt, 8, 9], 5, row=1)
    runner.reset()
    steps = Steps(BLOCK_SIZE, NUM_BLOCKS)
    runner.launch(steps.step([(0, 0, len(first.prompt))], [opening(first)])).answer()
    shared = steps.blocks[0][:2]
    request = steps.step([(1, 2 * BLOCK_SIZE, len(second.prompt))], [opening(second)])
    table = shared + steps.blocks[1][2:]
    request.new_blocks = b"".join(block.to_bytes(4, "little") for block in table)
    assert integers(runner.launch(request).answer().token_ids) == [
        int(logprobs_of(oracle, second.prompt)[-1].argmax())
    ]


def test_guided_requests_are_guided(tmp_path: Path) -> None:
    tokenizer = write_wordpiece(tmp_path, vocab_size=90)
    assert tokenizer.get_vocab_size() <= 99
    runner = make_runner(DATA / "llama", tokenizer=tmp_path)
    grammar = '%llguidance {"no_forcing": true}\nstart: /the (fox|dog)/'
    requests = [Request(prompt, 20, [1], grammar=grammar) for prompt in prompts(5, 4)]
    free = Request(prompts(5, 1)[0], 20, [1])
    Router(runner, depth=2).run([*requests, free])
    before = tokenizer.encode("the", add_special_tokens=False).ids  # the first piece of a text has a mark
    texts = [tokenizer.decode([*before, *request.generated]) for request in [*requests, free]]
    assert set(texts[:-1]) <= {"thethe fox", "thethe dog"}
    assert texts[-1] not in texts[:-1]
    assert all(request.generated[-1] == 1 for request in requests)


def test_every_rank_computes_all_heads(caplog: pytest.LogCaptureFixture) -> None:
    whole = load(DATA / "llama")
    with caplog.at_level(logging.WARNING):
        models = [load(DATA / "llama", ProcessGroup(rank, 2)) for rank in range(2)]
    assert [record.getMessage()[:37] for record in caplog.records] == [
        "each of the 2 shards holds the whole "
    ]
    ids = [5, 6, 7, 8, 9]
    expected = Stepper(whole).step({0: (ids, 0)})[0]
    for rank, model in enumerate(models):
        assert local_kv_heads(model.spec, ProcessGroup(rank, 2)) == whole.spec.num_kv_heads
        assert torch.equal(Stepper(model, ProcessGroup(rank, 2)).step({0: (ids, 0)})[0], expected)


def test_bits_do_not_depend_on_the_batch() -> None:
    model = load(DATA / "gpt2")
    together, alone = Stepper(model), Stepper(model)
    one, other = list(range(20, 31)), list(range(50, 67))
    for first, second in (((one[:4], 0), (other[:9], 0)), ((one, 4), (other, 9))):
        both = together.step({0: first, 1: second})
        assert torch.equal(both[0], alone.step({0: first})[0])
        assert torch.equal(both[1], alone.step({1: second})[1])
