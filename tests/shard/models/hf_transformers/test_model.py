"""Models that run transformers' code: same answers as its `generate`, alone, in a batch, and in chunks."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn

from tests.support.shard.checkpoints import write_model
from tests.support.shard.family_oracle import NEW_TOKENS, Answer, Oracle
from tests.support.shard.foreign_cases import CASES
from tests.support.shard.stepping import ALONE, Stepper, read_config
from tgis.shard.collectives import ProcessGroup
from tgis.shard.memory.kv_cache import local_kv_heads
from tgis.shard.models.hf_transformers import load as hf_transformers
from tgis.shard.models.hf_transformers.packed_linear import PackedLinear, find_read_weights, pack_linears
from tgis.shard.models.interface import Model

LENGTHS = (1, 9, 15)
Checkpoint = Callable[[str], Path]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    root = tmp_path_factory.mktemp("foreign")

    def find(case: str) -> Path:
        directory = root / case
        if not directory.exists():
            write_model(directory, CASES[case]())
        return directory

    return find


def load(directory: Path, group: ProcessGroup = ALONE, dtype: torch.dtype = torch.float32) -> Model:
    spec = hf_transformers.make_spec(directory, read_config(directory), trust_remote_code=False)
    return hf_transformers.load(directory, spec, group, dtype, trust_remote_code=False)


def compute(stepper: Stepper, sequences: dict[int, list[int]], chunk: int) -> dict[int, Tensor]:
    """Return the logprobs after all tokens of the sequences. Sequence i joins at step i; each advances by
    `chunk` tokens per step."""
    done, parts = dict.fromkeys(sequences, 0), {i: [] for i in sequences}
    for clock in range(1000):
        work = {
            i: (ids[: done[i] + chunk], done[i])
            for i, ids in sequences.items()
            if (clock >= i or len(sequences) == 1) and done[i] < len(ids)
        }
        for i, logits in (stepper.step(work) if work else {}).items():
            parts[i].append(logits.log_softmax(-1))
            done[i] += len(logits)
    return {i: torch.cat(logprobs) for i, logprobs in parts.items()}


def check(answer: Answer, logprobs: Tensor) -> None:
    after = logprobs[len(answer.input_ids) - 1 :]
    greedy = after.argmax(-1).tolist()
    assert greedy[: answer.certain] == answer.token_ids[: answer.certain]
    assert answer.certain > NEW_TOKENS // 2
    expected = torch.tensor(answer.logprobs)
    actual = after[torch.arange(NEW_TOKENS), torch.tensor(answer.token_ids)]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_equals_generate(case: str, checkpoint: Checkpoint) -> None:
    directory = checkpoint(case)
    oracle, model = Oracle(directory, CASES[case]()), load(directory)
    inputs = [[5 + (7 * i + n) % 90 for i in range(n)] for n in LENGTHS]
    answers = [oracle.answer(input_ids) for input_ids in inputs]
    sequences = {i: [*a.input_ids, *a.token_ids[:-1]] for i, a in enumerate(answers)}
    for block_size, chunk in ((4, 1), (4, 5), (16, 100)):
        crowd = compute(Stepper(model, block_size=block_size), sequences, chunk)
        for i, answer in enumerate(answers):
            check(answer, crowd[i])
            alone = compute(Stepper(model, block_size=block_size), {i: sequences[i]}, 100)[i]
            check(answer, alone)
            torch.testing.assert_close(crowd[i], alone, rtol=0, atol=1e-5)


def test_shapes_are_read_from_the_model(checkpoint: Checkpoint) -> None:
    actual = {
        case: load(checkpoint(case)).spec for case in ("cohere2", "gemma4_text", "deepseek_v3", "biogpt")
    }
    shapes = {case: (spec.num_layers, spec.num_kv_heads, spec.head_dim) for case, spec in actual.items()}
    assert shapes == {
        "cohere2": (4, 2, 8),
        "gemma4_text": (4, 2, 16),
        "deepseek_v3": (2, 4, 12),
        "biogpt": (2, 4, 8),
    }
    assert [spec.max_positions for spec in actual.values()] == [0, 0, 0, 64]
    assert {spec.vocab_size for spec in actual.values()} == {99}


def test_every_rank_holds_the_whole_model(checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture) -> None:
    whole = load(checkpoint("stablelm"))
    with caplog.at_level(logging.WARNING):
        models = [load(checkpoint("stablelm"), ProcessGroup(rank, 2)) for rank in range(2)]
    assert [record.getMessage()[:37] for record in caplog.records] == [
        "each of the 2 shards holds the whole "
    ]
    ids = [5, 6, 7, 8]
    expected = Stepper(whole).step({0: (ids, 0)})[0]
    for rank, model in enumerate(models):
        assert local_kv_heads(model.spec, ProcessGroup(rank, 2)) == whole.spec.num_kv_heads
        assert torch.equal(Stepper(model, ProcessGroup(rank, 2)).step({0: (ids, 0)})[0], expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_weights_are_rounded_and_arithmetic_is_not(dtype: torch.dtype, checkpoint: Checkpoint) -> None:
    directory = checkpoint("phi")
    rounded = transformers.PhiForCausalLM.from_pretrained(directory, dtype=dtype).eval().float()
    ids = list(range(5, 25))
    with torch.inference_mode():
        expected = rounded(torch.tensor([ids])).logits[0].log_softmax(-1)
    actual = Stepper(load(directory, dtype=dtype)).step({0: (ids, 0)})[0].log_softmax(-1)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_packed_linears() -> None:
    """A linear layer that several modules share stays one layer; other kinds of layers are not replaced."""

    class Twice(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    torch.manual_seed(0)
    shared = nn.Linear(24, 16, bias=False)
    model = nn.ModuleDict({"one": nn.Linear(24, 16), "twice": Twice(24, 16), "a": shared})
    model["b"] = model["a"]
    x = torch.randn(2, 5, 24)
    expected = {name: model[name](x) for name in model}
    pack_linears(model.half(), torch.float16)
    assert model["a"] is model["b"]
    for name, y in expected.items():
        assert isinstance(model[name], PackedLinear) == (name != "twice")
        torch.testing.assert_close(model[name](x), y, rtol=2e-3, atol=2e-3)
    whole = model["one"](x).flatten(0, 1)
    for i, row in enumerate(x.flatten(0, 1)):
        assert torch.equal(model["one"](row[None])[0], whole[i])
    assert find_read_weights(model) == set()
    assert not hasattr(model["one"], "weight")
    assert find_read_weights(model) == {"one"}
