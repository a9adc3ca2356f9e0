"""The platform of plain torch operators: single kernels against the CPU's and a reference of attention, whole
models against transformers, and everything on a separate device."""

import logging
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig

from tests.support.shard import other_device
from tests.support.shard.attention_scene import FLOAT8_SHAPES, PLAIN, SCORINGS, SHAPES, Scene, Shape, check
from tests.support.shard.checkpoints import LLAMA3_ROPE, SMALL, write_model
from tests.support.shard.driver import Request, Router, configure
from tests.support.shard.family_cases import encoder_decoders, gpts, llamas
from tests.support.shard.family_oracle import NEW_TOKENS, Oracle, draw_inputs
from tests.support.shard.lora_scene import draw_scene
from tests.support.shard.messages import GREEDY, SAMPLE
from tests.support.shard.portable import plain
from tgis.shard.attention.interface import Scoring
from tgis.shard.checkpoint.tensors import TensorInMemory
from tgis.shard.collectives import ProcessGroup
from tgis.shard.kernels.cpu import ops as cpu_ops
from tgis.shard.kernels.cpu.ops import CPU_KERNELS
from tgis.shard.kernels.cpu.pointwise.activations import KINDS
from tgis.shard.kernels.portable import attention as portable_attention
from tgis.shard.kernels.portable import ops as portable
from tgis.shard.kernels.portable import ops as portable_ops
from tgis.shard.kernels.portable.attention import TorchAttention
from tgis.shard.kernels.portable.ops import TorchKernels
from tgis.shard.layers.activation import CLAMPED_SWIGLU
from tgis.shard.layers.lora import AdapterSet, Deltas, LowRank, TokenAdapters
from tgis.shard.layers.ops import HeadNorm
from tgis.shard.memory.host_limits import HostMemory
from tgis.shard.startup.load import load
from tgis.shard.startup.platforms import choose_platform
from tgis.shard.startup.platforms.choose_platform import find_device, make_platform
from tgis.shard.startup.platforms.cpu import ON_CPU
from tgis.shard.startup.platforms.interface import DeviceError, Platform

CPU = torch.device("cpu")
KERNELS = TorchKernels(CPU)
assert_near = partial(torch.testing.assert_close, rtol=2e-5, atol=2e-5)


# Devices on which whole models are compared with transformers: also a GPU if there is one.
PLATFORMS = {"cpu": plain(CPU)}
if torch.cuda.is_available():
    PLATFORMS["cuda"] = plain(torch.device("cuda", 0))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# Tolerance of rounding operands and sums (around 8) to the weights' type.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 0.02, torch.bfloat16: 0.15}


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_products(dtype: torch.dtype) -> None:
    weight, x = torch.randn(40, 64), torch.randn(9, 64)
    expected = x.double() @ weight.to(dtype).double().t()
    product = KERNELS.pack(TensorInMemory(weight, "a weight"), dtype)
    weight.zero_()
    assert product(x).dtype == torch.float32
    torch.testing.assert_close(product(x).double(), expected, rtol=0, atol=TOLERANCES[dtype])


def test_a_weight_beyond_float16_is_kept_exact(caplog: pytest.LogCaptureFixture) -> None:
    weight = torch.tensor([[1.0, 2.0], [70000.0, 3.0]])
    product = KERNELS.pack(TensorInMemory(weight, "file: tensor x"), torch.float16)
    assert caplog.messages == ["file: tensor x does not fit float16 and is kept as float32"]
    assert torch.equal(product(torch.eye(2)), weight.t())


def test_weights_are_read_a_few_rows_at_a_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(portable, "_PIECE", 1000)
    weight = torch.randn(97, 40)
    weight[:30] *= 1e-6
    product = KERNELS.pack(TensorInMemory(weight, "file: tensor x"), torch.float16)
    assert torch.equal(product(torch.eye(40)), weight.half().float().t())
    assert not caplog.messages
    weight[50, 7] = 70000.0
    product = KERNELS.pack(TensorInMemory(weight, "file: tensor x"), torch.float16)
    assert caplog.messages == ["file: tensor x does not fit float16 and is kept as float32"]
    assert torch.equal(product(torch.eye(40)), weight.t())


@pytest.mark.parametrize("has_delta", [True, False])
def test_norms(has_delta: bool) -> None:
    x, more, weight, bias = torch.randn(7, 33), torch.randn(7, 33), torch.randn(33), torch.randn(33)
    for norm in ("rms_norm", "layer_norm"):
        for biases in ([], [None], [bias])[norm == "layer_norm" :][: 1 + (norm == "layer_norm")]:
            mine, theirs = x.clone(), x.clone()
            delta = more if has_delta else None
            actual = getattr(KERNELS, norm)(mine, delta, weight, *biases, 1e-5)
            assert_near(actual, getattr(CPU_KERNELS, norm)(theirs, delta, weight, *biases, 1e-5))
            assert torch.equal(mine, theirs), "x is not the sum"


@pytest.mark.parametrize("name", KINDS)
def test_activations(name: str) -> None:
    x = torch.randn(5, 48) * 4
    for gated in (name, CLAMPED_SWIGLU):
        assert_near(KERNELS.multiply_gated(x, gated), CPU_KERNELS.multiply_gated(x, gated))
    mine = x.clone()
    assert KERNELS.activate(mine, name) is mine
    assert_near(mine, CPU_KERNELS.activate(x, name))


def test_angles() -> None:
    positions, inv_freq = torch.tensor([0, 5, 900, 31]), torch.rand(2, 6)
    amplitudes, factor_sets = torch.tensor([1.0, 1.3]), torch.tensor([1, 0, 1, 0])
    growth = torch.tensor([1.0, 2.5, 8.0, 1.0])
    for more in (
        {},
        {"factor_sets": factor_sets},
        {"growth": growth},
        {"factor_sets": factor_sets, "growth": growth},
    ):
        actual = KERNELS.angles(positions, inv_freq, amplitudes, **more)
        torch.testing.assert_close(
            actual, CPU_KERNELS.angles(positions, inv_freq, amplitudes, **more), rtol=0, atol=2e-4
        )


@pytest.mark.parametrize("turned", [0, 6, 10])
@pytest.mark.parametrize("is_normed", [True, False])
def test_heads(turned: int, is_normed: bool) -> None:
    qkv = torch.randn(5, 8 * 10)
    angles = torch.randn(2, 5, turned // 2) if turned else None
    norm = HeadNorm(torch.randn(10), torch.randn(10), 1e-6) if is_normed else None
    before = qkv.clone()
    actual, expected = (kernels.split_heads(qkv, 4, 2, angles, norm) for kernels in (portable_ops, cpu_ops))
    for mine, theirs in zip(actual, expected, strict=True):
        assert_near(mine, theirs)
        assert mine.is_contiguous()
        mine.zero_()
    assert torch.equal(qkv, before), "results do not share memory"


@pytest.mark.parametrize("num_tokens", [1, 60, 0])
def test_adapters(num_tokens: int) -> None:
    scene = draw_scene(num_tokens, 40, 70)
    tuned = TokenAdapters(AdapterSet(()), scene.indices)
    actual = scene.y.clone()
    KERNELS.add_low_rank(actual, scene.x, scene.deltas, tuned)
    assert_near(actual, scene.add())
    ids = torch.randint(0, 40, (num_tokens,))
    actual, expected = scene.y.clone(), scene.y.clone()
    KERNELS.add_looked_up(actual, ids, scene.deltas, tuned)
    CPU_KERNELS.add_looked_up(expected, ids, scene.deltas, tuned)
    assert_near(actual, expected)


def test_adapters_stay_on_the_device() -> None:
    scene, ids = draw_scene(60, 40, 70), torch.randint(0, 40, (60,))
    expected = scene.y.clone()
    KERNELS.add_low_rank(expected, scene.x, scene.deltas, TokenAdapters(AdapterSet(()), scene.indices))
    KERNELS.add_looked_up(expected, ids, scene.deltas, TokenAdapters(AdapterSet(()), scene.indices))
    with other_device.present() as device:
        parts = tuple(
            tuple(LowRank(one.a.to(device), one.b.to(device), one.first) for one in theirs)
            for theirs in scene.deltas.parts
        )
        tuned = TokenAdapters(AdapterSet(()), scene.indices.to(device))
        actual = scene.y.to(device)
        kernels = TorchKernels(device)
        kernels.prepare_adapters()
        kernels.add_low_rank(actual, scene.x.to(device), Deltas(parts), tuned)
        kernels.add_looked_up(actual, ids.to(device), Deltas(parts), tuned)
    assert actual.tolist() == expected.tolist()


class TorchScene(Scene):
    def __init__(self, shape: Shape, lengths: list[int], num_layers: int = 1):
        super().__init__(shape, lengths, num_layers)
        self.attention = TorchAttention(self.cache)


@pytest.fixture(params=[(1 << 16, 1 << 22), (150, 400)], ids=["at once", "in pieces"])
def _pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, pairs = request.param
    monkeypatch.setattr(portable_attention, "KEYS", keys)
    monkeypatch.setattr(portable_attention, "PAIRS", pairs)


LENGTHS = [1, 16, 65, 150, 33, 130, 40]
MIXED = {0: (0, 1), 1: (0, 16), 2: (64, 65), 3: (70, 150), 4: (0, 33), 5: (128, 130), 6: (39, 40)}


@pytest.mark.usefixtures("_pieces")
# Only CPUs, which have kernels of their own, have a cache of integers.
@pytest.mark.parametrize("shape", (SHAPES | FLOAT8_SHAPES).values(), ids=SHAPES | FLOAT8_SHAPES)
def test_attention_equals_the_reference(shape: Shape) -> None:
    scene = TorchScene(shape, LENGTHS)
    scene.write_all()
    check(scene, MIXED, PLAIN)


@pytest.mark.usefixtures("_pieces")
@pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS)
@pytest.mark.parametrize("block_size", [16, 10])
def test_scoring_options(scoring: dict[str, Any], block_size: int) -> None:
    scene = TorchScene(Shape(block_size=block_size), LENGTHS)
    scene.write_all()
    check(scene, MIXED, replace(PLAIN, **scoring))


@pytest.mark.parametrize("shape", [SHAPES["odd_sizes"], SHAPES["plain"]])
def test_reads_written_keys_and_values(shape: Shape) -> None:
    """The CPU's layout of pages differs, but the values read are the same."""
    scene, other = TorchScene(shape, [70, 50], num_layers=2), Scene(shape, [70, 50], num_layers=2)
    layout = scene.layout([(0, 70), (0, 50)], [0, 1])
    for each in (scene, other):
        each.attention.keep(1, scene.k, scene.v, each.attention.plan(layout, "self"))
    for sequence, length in ((0, 70), (1, 17), (0, 0)):
        table = layout.block_tables[sequence]
        actual = scene.attention.read(1, table, length)
        for mine, theirs in zip(actual, other.attention.read(1, table, length), strict=True):
            assert mine.shape == theirs.shape
            assert torch.equal(mine, theirs)


def test_entries_behind_a_table_are_not_read() -> None:
    scene = TorchScene(Shape(), [100, 20])
    scene.write_all()
    scene.tables[1][2:4] = [-(10**6), 10**6]
    check(scene, {0: (99, 100), 1: (19, 20)}, PLAIN)


def test_memory_of_scores_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    largest: list[tuple[int, int]] = []

    def note(q: Tensor, k: Tensor, *rest: Any) -> Tensor:
        largest.append((k.shape[0] * k.shape[2], q.shape[0] * q.shape[1] * k.shape[2]))
        return torch.zeros_like(q)

    monkeypatch.setattr(portable_attention, "KEYS", 320)
    monkeypatch.setattr(portable_attention, "PAIRS", 640)
    monkeypatch.setattr(portable_attention, "_attend", note)
    TorchScene(Shape(), [100] * 9).attend(dict.fromkeys(range(9), (99, 100)) | {3: (60, 100)}, PLAIN)
    rounded = 112  # rounded up to blocks
    assert max(keys for keys, _ in largest) <= 3 * rounded
    assert max(pairs for _, pairs in largest) <= 6 * rounded
    assert len(largest) == 3 + 7


def test_a_plan_is_copied() -> None:
    scene = TorchScene(Shape(), [150, 40, 90])
    scene.write_all()
    first, second = (scene.plan([(69, 70), (9, 10)], [0, 1]), scene.plan([(89, 90), (149, 150)], [2, 0]))
    q, k = scene.q[:2], scene.k[:2]
    expected = scene.attention.attend(0, q, second, PLAIN)
    second.copy_into(first)
    assert torch.equal(scene.attention.attend(0, q, first, PLAIN), expected)
    scene.attention.keep(0, k, k, first)
    kept, _ = scene.attention.read(0, scene.layout([(89, 90)], [2]).block_tables[0], 90)
    assert torch.equal(kept[:, 89], k[0])


def test_attention_across() -> None:
    """Sequences of 20 and 0 keys, to each of which 3 tokens attend."""
    scene = TorchScene(Shape(), [20, 5])
    scene.write_all()
    layout = scene.layout([(0, 3), (0, 3)], [0, 1])
    encoded = replace(layout, seq_lens=torch.tensor([20, 0], dtype=torch.int32))
    scoring = Scoring(scale=0.3, causal=False)
    actual = scene.attention.attend(0, scene.q[:6], scene.attention.plan(encoded, "cross"), scoring)
    k, v = (x[:20].repeat_interleave(2, 1).double() for x in (scene.k, scene.v))
    weights = (torch.einsum("qhd,khd->hqk", scene.q[:3].double(), k) * 0.3).softmax(-1)
    assert_near(actual[:3].double(), torch.einsum("hqk,khd->qhd", weights, v))
    assert not actual[3:].any()


def test_writes_only_to_its_slots() -> None:
    scene = TorchScene(Shape(), [40], num_layers=2)
    scene.tables[0][1] = -1
    scene.attention.keep(1, scene.k, scene.v, scene.plan([(0, 40)], [0]))
    assert scene.cache.keys[0].isnan().all()
    assert (~scene.cache.values[1].isnan()).sum() == 24 * scene.k[0].numel()


CASES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": partial(LlamaConfig, **SMALL, rope_parameters=LLAMA3_ROPE),
    "gemma2": llamas.CASES["gemma2"],
    "gemma4": llamas.CASES["gemma4_text"],
    "qwen3": llamas.CASES["qwen3"],
    "phi3": llamas.CASES["phi3_short_and_long"],
    "mixtral": llamas.CASES["mixtral"],
    "bloom": gpts.CASES["bloom"],
    "opt": gpts.CASES["opt"],
    "t5": encoder_decoders.CASES["t5"],
}
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
OTHERS: dict[str, Callable[[], PretrainedConfig]] = {
    "bart": encoder_decoders.CASES["bart"],
    "dynamic": partial(LlamaConfig, **SMALL, rope_parameters=DYNAMIC_ROPE),
    "olmo2": llamas.CASES["olmo2"],
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("plain")

    def find(case: str) -> Path:
        if not (root / case).exists():
            write_model(root / case, (CASES | OTHERS)[case]())
        return root / case

    return find


def serve(
    directory: Path,
    on: Platform,
    requests: list[Request],
    ranks: ProcessGroup | None = None,
    dtype: str = "float32",
) -> list[Request]:
    world_size = ranks.size if ranks else 1
    small = {"kv_cache_tokens": 2048, "block_size": 4, "max_step_tokens": 64}
    config = configure(directory, dtype=dtype, world_size=world_size, **small)
    Router(load(config, ranks, on), 1).run(list(requests))
    return requests


def ask(input_ids: list[int], is_encoder_decoder: bool, sampling: dict[str, Any] = GREEDY) -> Request:
    prompt, encoder = ([0], input_ids) if is_encoder_decoder else (input_ids, [])
    details = {"logprobs": True, "ranks": True, "top_n": 3}
    return Request(prompt, NEW_TOKENS, sampling=sampling, details=details, encoder_token_ids=encoder)


@pytest.mark.parametrize("on", PLATFORMS.values(), ids=PLATFORMS)
@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(case: str, on: Platform, checkpoint: Callable[[str], Path]) -> None:
    directory = checkpoint(case)
    oracle = Oracle(directory, CASES[case]())
    answers = [oracle.answer(ids) for ids in draw_inputs()]
    requests = [ask(answer.input_ids, oracle.is_encoder_decoder) for answer in answers]
    serve(directory, on, requests)
    for request, answer in zip(requests, answers, strict=True):
        certain = answer.certain
        assert certain, "nothing was compared"
        assert request.generated[:certain] == answer.token_ids[:certain]
        assert request.logprobs[:certain] == pytest.approx(answer.logprobs[:certain], rel=1e-4, abs=1e-4)


# Every way of sampling.
SAMPLINGS = [
    GREEDY,
    {**GREEDY, "repetition_penalty": 1.3, "min_new_tokens": 3},
    {**SAMPLE, "seed": 1, "temperature": 0.7, "repetition_penalty": 1.2},
    {**SAMPLE, "seed": 2, "top_k": 5, "typical_p": 0.8},
    {**SAMPLE, "seed": 3, "top_p": 0.6, "length_penalty_start": 2, "length_penalty_factor": 1.2},
    {**SAMPLE, "seed": 4, "typical_p": 0.5},
]


class Half(ProcessGroup):
    """First of two ranks. It uses its own part as that of the other."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x.mul_(2)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat((x, x), -1)

    def min(self, value: int) -> int:
        return value


@pytest.mark.parametrize(
    ("case", "dtype", "size"),
    [
        ("dynamic", "bfloat16", 1),
        ("gemma2", "float32", 1),
        ("mixtral", "float32", 1),
        pytest.param("phi3", "bfloat16", 1, marks=pytest.mark.slow),
        pytest.param("bloom", "bfloat16", 1, marks=pytest.mark.slow),
        pytest.param("t5", "float32", 1, marks=pytest.mark.slow),
        ("bart", "bfloat16", 1),
        ("olmo2", "float32", 2),
    ],
)
def test_nothing_is_left_on_the_cpu(
    case: str, dtype: str, size: int, checkpoint: Callable[[str], Path]
) -> None:
    """A whole engine, including loading and warm-up, on a separate device gives the same bits."""
    directory, group = checkpoint(case), ProcessGroup if size == 1 else Half
    asked = [
        ask(ids, case in ("t5", "bart"), sampling)
        for ids, sampling in zip(cycle(draw_inputs()), SAMPLINGS, strict=False)
    ]
    for request in asked:
        request.eos = [2, 7]
    asked[1].details["input_tokens"] = True
    expected = serve(directory, plain(CPU), deepcopy(asked), group(0, size), dtype=dtype)
    with other_device.present() as device:
        ranks = group(0, size, device=device)
        actual = serve(directory, plain(device), deepcopy(asked), ranks, dtype=dtype)
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.generated == theirs.generated
        assert mine.logprobs == theirs.logprobs
        assert mine.tops == theirs.tops


def test_the_other_device_is_one() -> None:
    """Otherwise the test above could not fail."""
    with other_device.present() as device:
        x = torch.ones(3, device=device)
        assert x.device == (x + 1).device == device
        with pytest.raises(other_device.MixedDevicesError):
            x + torch.ones(3)
        with pytest.raises(other_device.MixedDevicesError):
            x.gather(0, torch.tensor([1]))
        assert x[torch.tensor([0, 2])].tolist() == [1.0, 1.0]
        assert x.numpy(force=True).sum() == 3


def test_the_cpu_is_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device("auto", 0, 1) == find_device("cpu", 0, 1) == CPU
    assert make_platform(CPU) is ON_CPU
    with pytest.raises(DeviceError, match="torch cannot use a GPU"):
        find_device("cuda", 0, 1)


def test_idle_gpus_are_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for has_gpus, messages in ((False, 0), (True, 1)):
        monkeypatch.setattr(choose_platform, "has_gpus", lambda _, actual=has_gpus: actual)
        with caplog.at_level(logging.WARNING):
            assert find_device("auto", 0, 1) == CPU
        assert len(caplog.messages) == messages


@pytest.mark.parametrize(
    ("cuda", "has_gpus", "reason"),
    [
        (None, True, ": its build supports only CPUs"),
        ("13.0", False, ""),
        ("13.0", True, ": the driver does not work, or is too old for CUDA 13.0"),
    ],
)
def test_the_reason_of_an_unusable_gpu_is_reported(
    cuda: str | None, has_gpus: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(choose_platform, "has_gpus", lambda _: has_gpus)
    text = f"torch cannot use a GPU{reason}; --device cpu needs none"
    with pytest.raises(DeviceError, match=f"^{text}$"):
        find_device("cuda", 0, 1)


def test_every_shard_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    actual = [find_device("auto", rank, 2) for rank in range(2)]
    assert actual == [torch.device("cuda", 0), torch.device("cuda", 1)]
    with pytest.raises(DeviceError, match=r"^3 shards configured but only 2 GPUs detected$"):
        find_device("cuda", 0, 3)


def test_memory_of_ranks() -> None:
    """Ranks of one machine, here two of four."""

    class Two:
        size, local_size = 4, 2

        def min(self, value: int) -> int:
            return value

    one = HostMemory().memory_left()
    assert ON_CPU.memory_left(Two()) == pytest.approx(one, rel=0.2)
    assert replace(ON_CPU, is_memory_shared=False).memory_left(Two()) == pytest.approx(2 * one, rel=0.2)
