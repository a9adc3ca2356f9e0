"""Codes of GGUF files on the CPU: values with the bits of the `gguf` package, products against float64 within
the error bound, the same bits in every batch, and memory."""

from collections.abc import Iterator

import pytest
import torch

from tests.support.shard.gguf_tensors import NUM_COLUMNS, count_magnitudes, make_tensor
from tests.support.shard.products import check_replay
from tgis.shard.checkpoint.gguf.codes import CODINGS
from tgis.shard.checkpoint.gguf.tensor import GgufTensor
from tgis.shard.checkpoint.tensors import Sliced
from tgis.shard.kernels.cpu.codes.integer_sums import CAN_ROUND
from tgis.shard.kernels.cpu.codes.layout import COLUMNS
from tgis.shard.kernels.cpu.codes.product import CodeProduct, JoinedProduct, find_table_packer
from tgis.tensor_files.gguf_types import TYPES

STEP = 2.0**-24  # rounding error of float32
PARTS = [slice(0, 1024), slice(96, 608), slice(896, 928)]
NAMES = list(CODINGS)
ROUNDED = [name for name in NAMES if not CODINGS[name].layout.table]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def many_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def pack(stored: GgufTensor | Sliced, rounds_activations: bool = False) -> CodeProduct:
    layout = stored.layout()
    assert layout is not None
    actual = find_table_packer(layout, rounds_activations)
    assert actual is not None
    return actual(stored)


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_the_package_s_numbers(name: str) -> None:
    tensor, expected = make_tensor(name)
    ids = torch.tensor([0, 69, 31, 32, 15, 16, 47, 48, 0, 5])
    for part in PARTS:
        view = Sliced(tensor, slice(None), part)
        assert torch.equal(view.codes().dequantize(), expected[:, part])
        assert torch.equal(pack(view).look_up(ids), expected[ids][:, part])
        if name in ROUNDED and CAN_ROUND:
            assert torch.equal(pack(view, rounds_activations=True).look_up(ids), expected[ids][:, part])


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_near_the_file_s(name: str) -> None:
    tensor, _ = make_tensor(name, 4 * COLUMNS)
    product, size = pack(tensor), next(each for each in TYPES.values() if each.name == name)
    kept = product.panels.nbytes + (0 if product.factors is None else product.factors.nbytes)
    assert kept <= 1.15 * 4 * COLUMNS * NUM_COLUMNS * size.block_bytes / size.block_elements
    assert kept == CODINGS[name].layout.bytes_per_weight * 4 * COLUMNS * NUM_COLUMNS


@pytest.mark.parametrize("name", NAMES)
def test_sums_are_within_the_bound_of_their_roundings(name: str) -> None:
    tensor, expected = make_tensor(name)
    for part in PARTS:
        view = Sliced(tensor, slice(None), part)
        product, magnitudes = pack(view), count_magnitudes(view.codes())
        for num_rows in (1, 7, 33):
            x = torch.randn(num_rows, magnitudes.shape[1])
            # One rounding per column of a group of up to 32, some for scales and offsets, and two per
            # group.
            bound = (32 + 20 + 2 * x.shape[1] / 16) * STEP * (x.double().abs() @ magnitudes.T)
            actual = product(x)
            assert ((actual.double() - x.double() @ expected[:, part].double().T).abs() <= bound).all()


@pytest.mark.skipif(not CAN_ROUND, reason="the processor has no AVX2, VNNI or ARM dot product")
@pytest.mark.parametrize("name", ROUNDED)
def test_rounded_activations(name: str) -> None:
    tensor, expected = make_tensor(name)
    product, x = pack(tensor, rounds_activations=True), torch.randn(13, NUM_COLUMNS)
    assert product.kind.rounds_activations
    groups = x.view(13, -1, product.pieces.columns)
    largest = groups.abs().amax(-1, keepdim=True)
    rounded = ((groups * (127 / largest)).round().double() * (largest / 127).double()).flatten(1)
    bound = (20 + 2 * NUM_COLUMNS / 16) * STEP * (rounded.abs() @ count_magnitudes(tensor.codes()).T)
    assert ((product(x).double() - rounded @ expected.double().T).abs() <= bound).all()


@pytest.mark.parametrize("rounds_activations", [False, True])
@pytest.mark.parametrize("name", ["Q4_1", "Q2_K", "Q3_K", "Q5_0", "Q6_K", "Q8_0", "IQ4_XS"])
def test_rows_are_independent(name: str, rounds_activations: bool, many_threads: None) -> None:
    product, x = pack(make_tensor(name)[0], rounds_activations), torch.randn(40, NUM_COLUMNS)
    whole = product(x)
    for count in (*range(1, 14), 27):
        assert torch.equal(product(x[:count]), whole[:count]), f"{count} rows"
    torch.set_num_threads(1)
    assert torch.equal(product(x), whole)
    check_replay(product, x[:9])


def test_matrices_of_several_types_are_one_product() -> None:
    tensors = [make_tensor(name)[0] for name in ("Q4_K", "Q6_K", "Q4_0")]
    products, x = [pack(tensor) for tensor in tensors], torch.randn(9, NUM_COLUMNS)
    joined = JoinedProduct(products)
    assert torch.equal(joined(x), torch.cat([product(x) for product in products], 1))
    check_replay(joined, x)
