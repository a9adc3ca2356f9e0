"""Layers with the GPU's kernels, by their twins on the CPU: types of activations, LoRA, range of float16."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.cuda.interpreter import interpreted
from tests.support.cuda.no_values import NoValues
from tests.support.shard.layer_parts import parts
from tests.support.shard.lora_scene import draw_scene
from tests.support.shard.portable import plain
from tgis.shard.checkpoint.tensors import TensorInMemory
from tgis.shard.collectives import CPU, ProcessGroup
from tgis.shard.kernels.cuda.implementations import Implementations
from tgis.shard.kernels.cuda.ops import CudaKernels
from tgis.shard.layers.embedding import Embedding, LMHead
from tgis.shard.layers.linear import ColumnParallel, Replicated, RowParallel
from tgis.shard.layers.lora import Adapter, AdapterSet, LowRank, TokenAdapters
from tgis.shard.layers.norm import Norm, SplitNorm
from tgis.shard.layers.ops import Activation, Parts
from tgis.shard.models.parts.blocks import BranchOutput

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
each_type = pytest.mark.parametrize("dtype", FLOATS)
NUM_TOKENS, SIZE, WIDTH = 4, 48, 40
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": torch.nn.functional.silu, "relu": torch.relu}


def make(directory: Path, dtype: torch.dtype, ranks: ProcessGroup | None = None, **content: Tensor) -> Parts:
    """Return parts of layers with the tensors `content` of module "layer"."""
    save_file({f"layer.{name}": each for name, each in content.items()}, directory / "model.safetensors")
    kernels = CudaKernels(CPU, Implementations.plain())
    return replace(parts(directory, ranks or ProcessGroup(0, 1), dtype), kernels=kernels)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).double()


def check(actual: Tensor, expected: Tensor, dtype: torch.dtype, roundings: int = 3) -> None:
    """Check that values differ by at most this number of roundings of the type."""
    unit = 2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    bound = roundings * unit * float(expected.abs().max())
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=bound)


def normalise(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


@each_type
@pytest.mark.parametrize("then", [None, Activation("silu", True), Activation("relu", False)])
@pytest.mark.parametrize("has_delta", [True, False])
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("has_adapter", [True, False])
def test_a_branch_begins(
    dtype: torch.dtype,
    then: Activation | None,
    has_delta: bool,
    has_norm: bool,
    has_adapter: bool,
    tmp_path: Path,
) -> None:
    weight, bias = torch.randn(2 * WIDTH, SIZE) / 7, torch.randn(2 * WIDTH)
    made = make(tmp_path, dtype, weight=weight, bias=bias)
    linear = ColumnParallel(made, "layer", SIZE, [WIDTH, WIDTH], True)
    norm = make_norm(torch.rand(SIZE), made) if has_norm else None
    x, delta = torch.randn(NUM_TOKENS, SIZE), torch.randn(NUM_TOKENS, SIZE).to(dtype) if has_delta else None
    low = LowRank(torch.randn(SIZE, 2) / 7, torch.randn(2, WIDTH), 5)
    adapters = TokenAdapters(AdapterSet([Adapter({"layer": (low,)})]), torch.tensor([0, -1, 0, 0]).int())
    total = x.double() + (0 if delta is None else delta.double())
    expected = total if norm is None else normalise(total, norm.weight.double(), norm.eps)
    if has_adapter:
        update = (expected @ low.a.double() @ low.b.double()).index_fill_(0, torch.tensor([1]), 0.0)
    expected = expected @ rounded(weight, dtype).t() + rounded(bias, dtype)
    if has_adapter:
        expected[:, 5 : 5 + WIDTH] += update
    if then is not None:
        gate, up = expected.chunk(2, -1) if then.is_gated else (expected, 1.0)
        expected = ACTIVATIONS[then.name](gate) * up
    actual = made.kernels.norm_product(x, delta, norm, linear, then, adapters if has_adapter else None)
    assert actual.dtype == dtype
    check(actual, expected, dtype)
    assert x.dtype == torch.float32
    torch.testing.assert_close(x.double(), total, rtol=1e-6, atol=1e-6)


def make_norm(weight: Tensor, made: Parts) -> Norm:
    norm = object.__new__(Norm)
    norm.weight, norm.bias, norm.eps, norm.is_centred, norm._kernels = weight, None, 1e-5, False, made.kernels
    return norm


@each_type
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("has_adapter", [True, False])
def test_a_branch_ends(dtype: torch.dtype, has_bias: bool, has_adapter: bool, tmp_path: Path) -> None:
    weight, bias = torch.randn(SIZE, WIDTH) / 6, torch.randn(SIZE)
    made = make(tmp_path, dtype, weight=weight, bias=bias)
    linear = RowParallel(made, "layer", WIDTH, SIZE, has_bias)
    x, y = torch.randn(NUM_TOKENS, SIZE), torch.randn(NUM_TOKENS, WIDTH).to(dtype)
    low = LowRank(torch.randn(WIDTH, 2) / 7, torch.randn(2, SIZE), 0)
    adapters = TokenAdapters(AdapterSet([Adapter({"layer": (low,)})]), torch.zeros(NUM_TOKENS).int())
    expected = x.double() + y.double() @ rounded(weight, dtype).t()
    if has_bias:
        expected += rounded(bias, dtype)
    if has_adapter:
        expected += y.double() @ low.a.double() @ low.b.double()
    actual = made.kernels.product_add(x, y, linear, adapters if has_adapter else None)
    assert actual.dtype == (torch.float32 if dtype == torch.float16 else dtype)
    check(x + actual, expected, dtype)


@pytest.mark.parametrize("finish", [None, lambda y: y.mul_(0.5)])
@pytest.mark.parametrize("has_adapter", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_branches_may_exceed_float16(
    finish: Callable[[Tensor], Tensor] | None, has_adapter: bool, has_bias: bool, tmp_path: Path
) -> None:
    """For example those of T5, which the next norm scales down."""
    weight = torch.full((SIZE, WIDTH), 50.0)
    made = make(tmp_path, torch.float16, weight=weight, bias=torch.ones(SIZE))
    output = BranchOutput(made, RowParallel(made, "layer", WIDTH, SIZE, has_bias), finish)
    low = LowRank(torch.zeros(WIDTH, 1), torch.zeros(1, SIZE), 0)
    adapters = TokenAdapters(AdapterSet([Adapter({"layer": (low,)})]), torch.zeros(NUM_TOKENS).int())
    y = torch.full((NUM_TOKENS, WIDTH), 100.0).half()
    actual = output(torch.zeros(NUM_TOKENS, SIZE), y, adapters if has_adapter else None)
    expected = (100.0 * 50.0 * WIDTH + has_bias) * (0.5 if finish else 1)
    assert actual.tolist() == [[expected] * SIZE] * NUM_TOKENS


@each_type
@pytest.mark.parametrize("kind", ["head", "replicated"])
def test_head_and_router_return_float32(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Operands are rounded, results are not."""
    weight, x = torch.randn(WIDTH, SIZE), torch.randn(NUM_TOKENS, SIZE)
    made = make(tmp_path, dtype, weight=weight)
    if kind == "head":
        actual = LMHead(made, "layer", WIDTH, SIZE)(x, None)
    else:
        actual = Replicated(made, "layer", SIZE, WIDTH)(x, None)
    assert actual.dtype == torch.float32
    check(actual, rounded(x, dtype) @ rounded(weight, dtype).t(), torch.float32)


def test_a_weight_beyond_float16_stays_float32(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weight = torch.randn(2 * WIDTH, SIZE)
    weight[3, 4] = 1e5
    made = make(tmp_path, torch.float16, weight=weight)
    linear = ColumnParallel(made, "layer", SIZE, [2 * WIDTH], False)
    assert caplog.messages == [
        f"{tmp_path}/model.safetensors: tensor layer.weight does not fit float16 and is kept as float32"
    ]
    x = torch.randn(NUM_TOKENS, SIZE) / 20
    actual = made.kernels.norm_product(x, None, None, linear, None, None)
    check(actual, rounded(x, torch.float16) @ weight.double().t(), torch.float16)
    assert made.kernels.pack(TensorInMemory(weight, "x"), torch.float16, "head")(x).dtype == torch.float32


@each_type
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norms_alone_give_float32(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """For example those of a branch's output, which has the weights' type."""
    weight, bias = torch.randn(SIZE), torch.randn(SIZE)
    norm = Norm(make(tmp_path, dtype, weight=weight, bias=bias), "layer", SIZE, 1e-5, kind)
    x = torch.randn(NUM_TOKENS, SIZE).to(dtype)
    expected = x.double() - (x.double().mean(-1, keepdim=True) if kind == "layer" else 0.0)
    expected = normalise(expected, rounded(weight, dtype), 1e-5)
    if kind == "layer":
        expected += rounded(bias, dtype)
    actual = norm(x)
    assert actual.dtype == torch.float32
    check(actual, expected, torch.float32)


class Pair(ProcessGroup):
    """First of two ranks. It uses its own part as that of the other."""

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat((x, x), -1)


@each_type
def test_split_norms_keep_the_type(dtype: torch.dtype, tmp_path: Path) -> None:
    weight = torch.randn(2 * SIZE)
    norm = SplitNorm(make(tmp_path, dtype, Pair(0, 2), weight=weight), "layer", 2 * SIZE, 2, 1e-5)
    x = (torch.randn(NUM_TOKENS, SIZE) * 200).to(dtype)
    actual = norm(x)
    assert actual.dtype == dtype
    check(actual, normalise(x.double(), rounded(weight[:SIZE], dtype), 1e-5), dtype)


@each_type
def test_adapters_compute_in_float32(dtype: torch.dtype) -> None:
    scene = draw_scene(60, 40, 70)
    scene.x, scene.y = scene.x.to(dtype), scene.y.to(dtype)
    kernels, actual = CudaKernels(CPU, Implementations.plain()), scene.y.clone()
    kernels.add_low_rank(actual, scene.x, scene.deltas, TokenAdapters(AdapterSet(()), scene.indices))
    assert actual.dtype == dtype
    check(actual, scene.expected(), dtype)


@each_type
def test_small_operators(dtype: torch.dtype) -> None:
    """Operators in place return their argument."""
    kernels, theirs = CudaKernels(CPU, Implementations.plain()), plain(CPU).kernels
    x, other, row = (
        (torch.randn(NUM_TOKENS, SIZE) * 3).to(dtype),
        torch.randn(NUM_TOKENS, SIZE),
        torch.randn(SIZE),
    )
    calls: list[Callable[[CudaKernels, Tensor], Tensor]] = [
        lambda kernels, x: kernels.add(x, other),
        lambda kernels, x: kernels.add(x, row),
        lambda kernels, x: kernels.scale(x, 0.3),
        lambda kernels, x: kernels.scale_rows(x, other[:, 0]),
        lambda kernels, x: kernels.clamp(x, 1.0),
        lambda kernels, x: kernels.soft_cap(x, 2.0),
        lambda kernels, x: kernels.activate(x, "gelu_tanh"),
    ]
    for call in calls:
        mine, expected = x.clone(), call(theirs, x.float())
        assert call(kernels, mine) is mine
        check(mine, expected.double(), dtype)
    actual = kernels.multiply_gated(x, "silu")
    assert actual.dtype == dtype
    check(actual, theirs.multiply_gated(x.float(), "silu").double(), dtype)


class Alone(ProcessGroup):
    """Rank whose sums are its own summand."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("size", [2, 3, 5])
def test_embeddings_of_several_ranks(size: int, tmp_path: Path) -> None:
    """Each id belongs to one rank, and other ranks have zeros. The last of five ranks has no rows of four."""
    table, ids = torch.randn(4, SIZE), torch.tensor([3, 0, 2, 2, 1])
    table[0] = torch.nan  # must not spread
    actual = []
    for rank in range(size):
        made = make(tmp_path, torch.float32, Alone(rank, size), weight=table)
        embedding = Embedding(made, "layer", 4, SIZE)
        with NoValues():
            actual.append(embedding(ids, None))
    owners = (~(torch.stack(actual) == 0).all(-1)).sum(0)
    assert owners.tolist() == [1] * len(ids)
    torch.testing.assert_close(sum(actual), table[ids], equal_nan=True)


@each_type
def test_a_norm_adds_the_parts_of_a_product(dtype: torch.dtype, tmp_path: Path) -> None:
    """The sum has the bits of the product, so that rows beside rows with adapters keep theirs."""
    kernels = CudaKernels(CPU, interpreted(), uses_few=True)
    made = replace(make(tmp_path, dtype, weight=torch.randn(SIZE, 512) / 20), kernels=kernels)
    linear = RowParallel(made, "layer", 512, SIZE, bias=False)
    x, y, scale = torch.randn(NUM_TOKENS, SIZE), torch.randn(NUM_TOKENS, 512).to(dtype), torch.randn(SIZE)
    parts, whole = kernels.product_add(x, y, linear, None), linear(y, None)
    assert parts is not None
    assert parts.shape == (2, NUM_TOKENS, SIZE)
    assert whole.shape == x.shape
    summed, expected = x.clone(), x.clone()
    normalised = kernels.rms_norm(summed, parts, scale, 1e-5)
    assert torch.equal(normalised, kernels.rms_norm(expected, whole, scale, 1e-5))
    assert torch.equal(summed, expected)
    assert not torch.equal(summed, x)
    other = torch.randn(NUM_TOKENS, SIZE).to(whole.dtype)
    assert torch.equal(kernels.add(parts, other), kernels.add(whole, other))
    assert torch.equal(kernels.add(x, parts), expected)
