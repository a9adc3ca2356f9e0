"""turn_and_keep against its definition in float64."""

from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from tests.support.cuda.interpreter import interpreted
from tests.support.cuda.program_order import reversed_programs
from tgis.shard.attention.interface import Heads
from tgis.shard.kernels.cuda import turn_and_keep
from tgis.shard.layers.ops import HeadNorm

Doubles = npt.NDArray[np.float64]

BLOCK_SIZE, NUM_BLOCKS = 3, 4


@dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    half: int | None = None
    has_norm: bool = False
    num_tokens: int = 3

    def __str__(self) -> str:
        norm = "-norm" if self.has_norm else ""
        return f"{self.num_heads}-{self.num_kv_heads}x{self.head_dim}-{self.half}{norm}"


SHAPES = [
    Shape(4, 2, 64, 32),
    Shape(4, 2, 64, 32, has_norm=True, num_tokens=1),
    Shape(9, 5, 128, 64, has_norm=True),  # two programs of queries, the second of one head
    Shape(5, 5, 256, 128, num_tokens=2),  # two programs each
    Shape(3, 1, 13, 6),
    Shape(3, 3, 13, 5, has_norm=True),
    Shape(5, 5, 24, 12),
    Shape(2, 2, 80, 16),
    Shape(2, 1, 80, 16, has_norm=True),
    Shape(2, 2, 112, 56),
    Shape(7, 1, 64),
    Shape(33, 2, 16, has_norm=True),
    Shape(5, 3, 13),
    Shape(2, 1, 16, 1),
]


@dataclass(frozen=True)
class Case:
    qkv: Tensor  # [num_tokens, heads * head_dim]
    heads: Heads
    angles: Tensor | None
    keys: Tensor
    values: Tensor
    slots: Tensor


def inside(x: Tensor, before: int = 16, after: int = 300) -> Tensor:
    """Return the same values surrounded by NaN in memory."""
    memory = x.new_full((before + x.numel() + after,), torch.nan)
    view = memory[before : before + x.numel()].view(x.shape)
    return view.copy_(x)


def make_case(shape: Shape, dtype: torch.dtype, slots: list[int]) -> Case:
    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    generator = torch.Generator().manual_seed(1)
    num_tokens, dim = len(slots), shape.head_dim
    norm = HeadNorm(inside(random(dim)), inside(random(dim)), 0.25) if shape.has_norm else None
    num_all = shape.num_heads + 2 * shape.num_kv_heads
    pages = torch.full((NUM_BLOCKS, shape.num_kv_heads, BLOCK_SIZE, dim), torch.nan, dtype=dtype)
    return Case(
        inside(random(num_tokens, num_all * dim).to(dtype)),
        Heads(shape.num_heads, shape.num_kv_heads, norm),
        None if shape.half is None else inside(random(2, num_tokens, shape.half)),
        inside(pages),
        inside(pages),
        torch.tensor(slots),
    )


def turn(x: Tensor, weight: Tensor | None, eps: float, angles: Tensor | None, token: int) -> Doubles:
    """Return one head of one token by the definition."""
    head = x.double().numpy()  # [head_dim]
    if weight is not None:
        head = head / np.sqrt((head**2).mean() + eps) * weight.double().numpy()
    if angles is None:
        return head
    cosines, sines = angles[:, token].double().numpy()
    half = len(cosines)
    turned = (head[:half] + 1j * head[half : 2 * half]) * (cosines + 1j * sines)
    return np.concatenate([turned.real, turned.imag, head[2 * half :]])


def check_close(actual: Tensor, expected: Doubles) -> None:
    """Check the values after rounding, with a tolerance for errors of float32."""
    bound = torch.finfo(actual.dtype).eps / 2 * 1.001 * np.abs(expected) + 5e-6
    assert (np.abs(actual.double().numpy() - expected) <= bound).all()


def check(case: Case, q: Tensor, slots: dict[int, int]) -> None:
    """Check the results. slots: slots to which tokens were written."""
    heads, dim = case.heads, case.keys.shape[3]
    num_heads, num_kv, norm = heads.num_heads, heads.num_kv_heads, heads.norm
    assert (q.shape, q.dtype) == ((len(case.qkv), num_heads, dim), case.qkv.dtype)
    is_kept = torch.zeros(case.keys.shape, dtype=torch.bool)
    for token, row in enumerate(case.qkv.view(len(q), -1, dim)):
        for head in range(num_heads):
            weight, eps = (None, 0.0) if norm is None else (norm.q_weight, norm.eps)
            check_close(q[token, head], turn(row[head], weight, eps, case.angles, token))
        if token not in slots:
            continue
        block, offset = divmod(slots[token], BLOCK_SIZE)
        is_kept[block, :, offset] = True
        for head in range(num_kv):
            weight, eps = (None, 0.0) if norm is None else (norm.k_weight, norm.eps)
            k = turn(row[num_heads + head], weight, eps, case.angles, token)
            check_close(case.keys[block, head, offset], k)
            assert case.values[block, head, offset].equal(row[num_heads + num_kv + head])
    for pages in (case.keys, case.values):
        assert pages.isnan().equal(~is_kept)
        edge = pages.as_strided((300,), (1,), pages.storage_offset() + pages.numel())
        assert edge.isnan().all()


def run(case: Case, how: str) -> Tensor:
    kernel = turn_and_keep.plain if how == "plain" else interpreted().turn_and_keep
    with reversed_programs() if how == "reversed" else nullcontext():
        return kernel(case.qkv, case.heads, case.angles, case.keys, case.values, case.slots)


@pytest.mark.parametrize(
    ("dtype", "how"),
    [
        (torch.float32, "plain"),
        (torch.bfloat16, "plain"),
        (torch.float16, "plain"),
        (torch.bfloat16, "triton"),
        (torch.float16, "reversed"),
        pytest.param(torch.float32, "triton", marks=pytest.mark.slow),
        pytest.param(torch.float16, "triton", marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_heads_are_rotated_and_stored(shape: Shape, dtype: torch.dtype, how: str) -> None:
    slots = [7, 2, 10][: shape.num_tokens]
    case = make_case(shape, dtype, slots)
    before = case.qkv.clone()
    check(case, run(case, how), dict(enumerate(slots)))
    assert case.qkv.equal(before)


@pytest.mark.parametrize("how", ["plain", "triton"])
def test_idle_tokens_share_the_dummy_slot(how: str) -> None:
    case = make_case(Shape(2, 1, 16, 8), torch.float32, [9, 4, 9])
    q = run(case, how)
    assert not case.keys[3, :, 0].isnan().any()
    for pages in (case.keys, case.values):
        pages[3, :, 0] = torch.nan
    check(case, q, {1: 4})


@pytest.mark.parametrize("how", ["plain", "triton"])
def test_infinity_and_nan_stay_with_their_head(how: str) -> None:
    case = make_case(Shape(2, 2, 16, 4, has_norm=True), torch.float16, [5])
    heads = case.qkv.view(6, 16)
    heads[1, 0], heads[3, 15], heads[4, 9] = torch.nan, torch.inf, torch.inf
    q = run(case, how)
    assert q.isnan().any(2).tolist() == [[False, True]]
    assert case.keys[1, :, 2].isfinite().all(1).tolist() == [True, False]
    assert case.values[1, :, 2].equal(heads[4:])
