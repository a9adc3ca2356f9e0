"""Updates of adapters: against double precision, token by token, with the same bits in every batch, for every
split of prompts and alignment."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.support.shard.lora_scene import RANKS, Scene, draw_int, draw_low_rank, draw_scene
from tgis.shard.kernels.cpu import lora as lora_kernels
from tgis.shard.kernels.cpu import ops
from tgis.shard.kernels.cpu.ops import CPU_KERNELS
from tgis.shard.layers.lora import LORA_TILE, Adapter, AdapterSet, Deltas, LowRank, TokenAdapters

PATH = "layer"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def _threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Also use several threads for small products."""
    monkeypatch.setattr(ops, "_PRODUCTS", 0)
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)


SHAPES = [
    (1, 1, 1),
    (1, 40, 200),
    (3, 5, 7),
    (5, 64, 48),
    (9, 33, 1),
    (40, 100, 77),
    (70, 31, 150),
    (0, 8, 8),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_token_gets_its_own(shape: tuple[int, int, int]) -> None:
    for _ in range(5):
        scene = draw_scene(*shape)
        torch.testing.assert_close(scene.add().double(), scene.expected(), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("rank", RANKS)
def test_any_rank(rank: int) -> None:
    """Memory before and after the operands is NaN."""
    x, y = (torch.full((9, size), torch.nan) for size in (50, 60))
    a, b = torch.full((52, rank), torch.nan), torch.full((rank + 2, 60), torch.nan)
    for x_or_y in (x, y):
        x_or_y[1:-1] = torch.randn(7, x_or_y.shape[1])
    a[1:-1], b[1:-1] = torch.randn(50, rank) / 7, torch.randn(rank, 60) / rank**0.5
    scene = Scene(x[1:-1], y[1:-1], Deltas(((LowRank(a[1:-1], b[1:-1], 0),),)), torch.zeros(7).int())
    torch.testing.assert_close(scene.add().double(), scene.expected(), rtol=1e-5, atol=2e-5)
    CPU_KERNELS.add_low_rank(y[1:-1], x[1:-1], scene.deltas, TokenAdapters(AdapterSet(()), scene.indices))
    assert y[[0, -1]].isnan().all()


def test_other_columns_do_not_change() -> None:
    x, y = torch.ones(6, 4), torch.full((6, 50), -0.0)
    deltas = Deltas(((LowRank(torch.ones(4, 3), torch.ones(3, 21), 13),),))
    CPU_KERNELS.add_low_rank(
        y, x, deltas, TokenAdapters(AdapterSet(()), torch.tensor([0, -1, 0, 0, 0, 0]).int())
    )
    expected = torch.full((6, 50), -0.0)
    expected[[0, 2, 3, 4, 5], 13:34] = 12
    assert torch.equal(y.view(torch.int32), expected.view(torch.int32))


def test_nan_stays_with_its_token() -> None:
    scene = draw_scene(40, 30, 50)
    scene.indices[:] = 0
    expected = scene.add()
    scene.x[7] = torch.nan
    actual = scene.add()
    assert actual[7].isnan().any()
    actual[7] = expected[7]
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("shape", [(61, 150, 200), (50, 37, 100), (40, 64, 19)])
def test_bits_do_not_depend_on_the_batch(shape: tuple[int, int, int]) -> None:
    for _ in range(4):
        scene = draw_scene(*shape)
        scene.indices[10:35] = draw_int(0, 2)
        whole = scene.add()
        for t in range(shape[0]):
            assert torch.equal(scene.add(slice(t, t + 1))[0], whole[t])
        for _ in range(20):
            some = torch.randperm(shape[0])[: draw_int(2, shape[0])]
            assert torch.equal(scene.add(some), whole[some])


def test_bits_do_not_depend_on_chunks() -> None:
    scene = draw_scene(150, 70, 90)
    scene.indices[:] = 1
    whole = scene.add()
    for _ in range(30):
        sizes = torch.randint(1, 3 * LORA_TILE, (200,)).tolist()
        pieces, begin = [], 0
        while begin < 150:
            size = sizes.pop()
            pieces.append(scene.add(slice(begin, begin + size)))
            begin += size
        assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.usefixtures("_threads")
def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    for shape in ((90, 40, 77), (5, 130, 300)):
        scene = draw_scene(*shape)
        many = [scene.add() for _ in range(10)]
        torch.set_num_threads(1)
        one = scene.add()
        assert all(torch.equal(each, one) for each in many)
        torch.set_num_threads(3)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("columns", [5, 64, 100])
def test_bits_do_not_depend_on_slices_of_columns(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns are sliced only if there are few tiles."""
    scene = draw_scene(20, 40, 333)
    monkeypatch.setattr(ops, "_FEW_TILES", -1)
    whole = scene.add()
    monkeypatch.setattr(ops, "_FEW_TILES", 1000)
    monkeypatch.setattr(ops, "_COLUMNS", columns)
    assert torch.equal(scene.add(), whole)


def test_bits_do_not_depend_on_where_operands_lie() -> None:
    for rank, width in ((5, 24), (16, 40), (40, 150)):
        scene = draw_scene(6, 30, width)
        scene.indices[:] = 0
        one = draw_low_rank(30, rank, 0, width)
        actual = set()
        for gap in range(40):
            arena, end = torch.zeros(20000), gap

            def place(source: Tensor, arena: Tensor = arena, gap: int = gap) -> Tensor:
                nonlocal end
                begin, end = end, end + source.numel() + gap
                return arena[begin : begin + source.numel()].view(source.shape).copy_(source)

            a, x, y, b = (place(source) for source in (one.a, scene.x, scene.y, one.b))
            deltas = Deltas(((LowRank(a, b, 0),),))
            CPU_KERNELS.add_low_rank(y, x, deltas, TokenAdapters(AdapterSet(()), scene.indices))
            actual.add(y.numpy().tobytes())
        assert len(actual) == 1


@pytest.mark.parametrize("num_tokens", [1, 6, 75])
def test_looked_up(num_tokens: int) -> None:
    """The result equals a product with rows of an identity matrix."""
    scene = draw_scene(num_tokens, 90, 70)
    ids = torch.randint(0, 90, (num_tokens,))
    scene.x = torch.eye(90)[ids]
    actual = scene.y.clone()
    CPU_KERNELS.add_looked_up(actual, ids, scene.deltas, TokenAdapters(AdapterSet(()), scene.indices))
    torch.testing.assert_close(actual, scene.add(), rtol=0, atol=0)


def test_nothing_is_left_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = vars(lora_kernels.add_low_rank)
    monkeypatch.delitem(kernel, "_entry", raising=False)
    CPU_KERNELS.prepare_adapters()
    prepared = kernel["_entry"]
    scene = draw_scene(3, 4, 5)
    scene.add()
    CPU_KERNELS.add_looked_up(
        scene.y, torch.zeros(3, dtype=torch.int64), scene.deltas, TokenAdapters(AdapterSet(()), scene.indices)
    )
    assert kernel["_entry"] is prepared


def test_sorts_tokens_by_adapter() -> None:
    for _ in range(30):
        indices = torch.randint(-1, draw_int(0, 5), (draw_int(0, 100),), dtype=torch.int32)
        tuned = TokenAdapters(AdapterSet(()), indices)
        assert {i: tokens.tolist() for i, tokens in tuned.groups} == {
            i: (indices == i).nonzero()[:, 0].tolist() for i in indices.unique().tolist() if i >= 0
        }
        taken = [(i, tuned.order[start : start + n].tolist()) for i, start, n in tuned.tiles.tolist()]
        assert all(0 < len(tokens) <= LORA_TILE for _, tokens in taken)
        assert sorted((t, i) for i, tokens in taken for t in tokens) == [
            (t, i) for t, i in enumerate(indices.tolist()) if i >= 0
        ]


def test_look_ups_of_layers_are_cached() -> None:
    one = Adapter({PATH: (draw_low_rank(4, 2, 0, 4),)})
    adapters = AdapterSet([Adapter({}), one])
    deltas = adapters.at(PATH)
    assert deltas is not None
    assert deltas.parts == ((), one.deltas[PATH])
    assert adapters.at(PATH) is deltas
    assert adapters.at("another layer") is None
