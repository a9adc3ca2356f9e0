"""int8 products: against integer arithmetic in numpy, within the error bound, and with the same bits in every
batch, for any number of threads and with other machines' instructions."""

import importlib.util
import math
from array import array
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from tgis.shard.checkpoint.tensors import TensorInMemory
from tgis.shard.kernels.cpu.int8 import inner_loop, kernels
from tgis.shard.kernels.cpu.int8 import product as int8
from tgis.shard.kernels.cpu.int8.inner_loop import InstructionSet
from tgis.shard.kernels.cpu.int8.product import Int8Product
from tgis.shard.kernels.cpu.jit import cache
from tgis.shard.kernels.cpu.jit.llvm import has_feature
from tgis.shard.quant.schemes.int8 import Rounded

GROUP = 128
SHAPES = [(1, 64, 33), (13, 33, 7), (37, 1500, 40), (3, 4, 1), (21, 257, 70)]  # rows, inputs, outputs


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def many_threads() -> Iterator[None]:
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(1)


def pack(weight: Tensor) -> Int8Product:
    return int8.pack(Rounded(TensorInMemory(weight, "a weight")))


def round_groups(x: Tensor) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Return integers [num_rows, num_groups, GROUP] and scales [num_rows, num_groups] by the rule of
    rounding."""
    num_rows, size = x.shape
    padded = np.zeros((num_rows, -(-size // GROUP) * GROUP), np.float32)
    padded[:, :size] = x.numpy()
    groups = padded.reshape(num_rows, -1, GROUP)
    largest = np.abs(groups).max(-1)
    factors = np.zeros_like(largest)
    np.divide(np.float32(127), largest, out=factors, where=largest > 0)
    return np.rint(groups * factors[..., None]).astype(np.int64), largest / np.float32(127)


def draw_whole(num_rows: int, size: int) -> Tensor:
    """Return numbers that rounding preserves: integers, with 127 in every group, times a power of two per
    row."""
    x = torch.randint(-127, 128, (num_rows, size)).float()
    x[:, ::GROUP] = torch.where(torch.rand(x[:, ::GROUP].shape) < 0.5, 127.0, -127.0)
    return x * 2.0 ** torch.randint(-9, 9, (num_rows, 1))


@pytest.mark.parametrize(("num_rows", "in_features", "out_features"), SHAPES)
def test_whole_numbers_are_exact(num_rows: int, in_features: int, out_features: int) -> None:
    x, weight = draw_whole(num_rows, in_features), draw_whole(out_features, in_features)
    assert torch.equal(pack(weight)(x).double(), x.double() @ weight.double().t())


def test_the_largest_sums_are_exact() -> None:
    signs = torch.tensor([1.0, -1.0])
    x, weight = (signs.repeat_interleave(2).unsqueeze(1) * 127).expand(4, 512), signs.unsqueeze(1) * 127
    y = pack(weight.expand(2, 512))(x.contiguous())
    assert torch.equal(y, signs.repeat_interleave(2).outer(signs) * 127 * 127 * 512)


@pytest.mark.parametrize(("num_rows", "in_features", "out_features"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_numbers(num_rows: int, in_features: int, out_features: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(num_rows, in_features), torch.randn(out_features, in_features).to(dtype)
    y = pack(weight)(x).double()
    (a, a_scales), (b, b_scales) = round_groups(x), round_groups(weight.float())
    sums = np.einsum("rgk,cgk->rcg", a, b)
    expected = np.einsum("rcg,rg,cg->rc", sums, a_scales.astype(float), b_scales.astype(float))
    torch.testing.assert_close(y, torch.from_numpy(expected), rtol=1e-6, atol=1e-5)
    # Half a step of each factor times the other factor.
    steps = torch.from_numpy(a_scales).max() / 2, torch.from_numpy(b_scales).max() / 2
    bound = (x.abs().sum(1, True) + in_features * steps[0]) * steps[1] + weight.abs().sum(1) * steps[0]
    assert ((y - x.double() @ weight.double().t()).abs() <= bound * (1 + 1e-5)).all()


def test_activations_are_rounded_twice() -> None:
    """A product with the factor is rounded to float32 and then to an integer. Here the first rounding gives a
    tie, which the second rounds to even."""
    factor = np.float32(127) / np.float32(3.0009909)
    halves = np.arange(-126.5, 127).astype(np.float32)
    ties = np.nextafter(halves / factor, np.float32(9), dtype=np.float32)[:, None]
    near = ties + np.spacing(ties) * np.arange(-4, 4, dtype=np.float32)
    is_tie = (near * factor == halves[:, None]) & (near.astype(float) * float(factor) != halves[:, None])
    actual = near[is_tie]
    assert len(actual) > GROUP
    x = torch.from_numpy(actual[: len(actual) // 127 * 127].reshape(-1, 127))
    x = torch.cat((torch.full((len(x), 1), 3.0009909), x), 1)
    (a, scales), y = round_groups(x), pack(torch.eye(GROUP))(x)
    assert np.array_equal(np.rint(y.numpy() / scales), a[:, 0])


def test_rows_are_independent(many_threads: None) -> None:
    product, x = pack(torch.randn(300, 700)), torch.randn(150, 700)
    whole = product(x)
    for count in (*range(1, 18), 47, 49, 97):
        assert torch.equal(product(x[:count]), whole[:count]), f"{count} rows"
        assert torch.equal(product(x[-count:]), whole[-count:]), f"{count} rows"
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        assert torch.equal(product(x), whole), f"{num_threads} threads"
    assert product(x[:0]).shape == (0, 300)


def test_infinity_and_nan_stay_in_their_row_and_column() -> None:
    x, weight = torch.randn(9, 200), torch.randn(20, 200)
    expected = pack(weight)(x)
    x[2, 150], x[4, 3], x[5, :], x[6, 128:], weight[7, 199] = math.nan, -math.inf, 0, 1e-35, math.inf
    y = pack(weight)(x)
    assert y[2].isnan().all()
    assert y[4].isnan().all()
    assert y[:, 7].isnan().all()
    others = [c for c in range(20) if c != 7]
    assert not y[5, others].any()
    assert torch.equal(y[6, others], pack(weight[:, :128])(x[6:7, :128].contiguous())[0, others])
    for row in (0, 1, 3, 7, 8):
        assert torch.equal(y[row, others], expected[row, others])


def test_a_thread_that_lost_its_core_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread has taken the first unit and does not finish it."""
    product, x = pack(torch.randn(40, 300)), torch.randn(5, 300)
    expected = product(x)
    kernel, given, kept = kernels.multiply_int8, [], []

    def keep(*shape: int) -> Tensor:
        kept.append(torch.empty(shape))
        return kept[-1]

    monkeypatch.setattr(type(kernel), "__call__", lambda kernel, *args: given.append(args))
    monkeypatch.setattr(int8, "empty", keep)
    y = product(x)
    y.fill_(math.nan)
    memory = array("q", (1, *given[0]))
    kernel._entry(memory.buffer_info()[0])
    assert torch.equal(y, expected)


def with_instructions(isa: InstructionSet, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Yield the kernels of another machine. Their code is not cached."""
    monkeypatch.setattr(cache, "_bases", [])
    monkeypatch.setattr(inner_loop, "INSTRUCTION_SET", isa)
    monkeypatch.setattr(inner_loop.make_tile, "__defaults__", (isa,))
    spec = importlib.util.spec_from_file_location("other_int8", kernels.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SETS = {"generic": inner_loop.GENERIC, "avx2": inner_loop.AVX2, "avx_vnni": inner_loop.AVX_VNNI}
NEEDS = {"generic": (), "avx2": ("avx2",), "avx_vnni": ("avx512vnni", "avx512vl")}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("generic", marks=pytest.mark.slow),
        "avx2",
        pytest.param("avx_vnni", marks=pytest.mark.slow),
    ],
)
def test_other_machines_give_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    isa = SETS[name]
    if isa is inner_loop.INSTRUCTION_SET or not all(has_feature(feature) for feature in NEEDS[name]):
        pytest.skip("these are this machine's own instructions, or it lacks them")
    weight, x = torch.randn(70, 333), torch.randn(17, 333)
    expected = pack(weight)(x)
    monkeypatch.setattr(int8, "kernels", with_instructions(isa, monkeypatch))
    product = pack(weight)
    for count in (17, 6, 3, 2, 1):
        assert torch.equal(product(x[:count]), expected[:count])
