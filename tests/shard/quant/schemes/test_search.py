"""Rounding with searched scales and offsets, against a float64 search that keeps the best result; compiled
kernels against torch."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgis.shard.checkpoint.codes import CodeLayout
from tgis.shard.kernels.cpu.ops import CPU_KERNELS
from tgis.shard.quant.importance import choose_importance
from tgis.shard.quant.schemes.int4 import LAYOUT as INT4
from tgis.shard.quant.schemes.int4 import SENSITIVE_LAYOUT as SENSITIVE
from tgis.shard.quant.schemes.portable_rounder import PORTABLE
from tgis.shard.quant.schemes.search import RANGES, round_with_offsets

GROUP, BITS = 32, 4
LAYOUT = CodeLayout(torch.int8, BITS, GROUP, has_offsets=True, scale_type="float16")
HALF = 2.0**-10  # relative error of rounding a scale or an offset to float16, with room for the sum of both


def draw(kind: str) -> Tensor:
    torch.manual_seed(0)
    x = torch.randn(48, 3 * GROUP)
    if kind == "skewed":
        return x.exp()
    if kind == "outliers":
        return torch.where(torch.rand_like(x) < 0.03, 8 * x, x)
    return x


def find_errors(group: NDArray[np.float64], importance: NDArray[np.float64]) -> list[float]:
    """Return the squared errors of a group, times importance, for each range, with scale and offset by linear
    regression."""
    low, high = group.min(), group.max()
    errors = []
    for width in RANGES:
        step, middle = (high - low) * width / 15, (low + high) / 2
        codes = np.clip(np.rint((group - middle) / step - 0.5), -8, 7)
        slope, offset = np.polyfit(codes, group, 1, w=np.sqrt(importance))
        errors.append(float((importance * (slope * codes + offset - group) ** 2).sum()))
    return errors


def round_plainly(group: NDArray[np.float64]) -> float:
    """Return the squared error of rounding to 16 equidistant values between minimum and maximum."""
    low, step = group.min(), (group.max() - group.min()) / 15
    return float(((np.rint((group - low) / step) * step + low - group) ** 2).sum())


@pytest.mark.parametrize("kind", ["normal", "skewed", "outliers"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_errors_are_those_of_the_best_range(kind: str, dtype: torch.dtype) -> None:
    weights = draw(kind).to(dtype)
    actual = round_with_offsets(weights, LAYOUT).dequantize().double().numpy().reshape(-1, GROUP)
    groups = weights.double().numpy().reshape(-1, GROUP)
    errors = ((actual - groups) ** 2).sum(1)
    best = np.array([min(find_errors(group, np.ones(GROUP))) for group in groups])
    largest = np.abs(groups).max(1)
    assert (np.sqrt(errors) <= np.sqrt(best) + HALF * largest * np.sqrt(GROUP) + 1e-6).all()
    assert errors.sum() <= best.sum() * 1.001 + 1e-6
    assert errors.sum() < 0.95 * sum(map(round_plainly, groups))


def test_errors_count_by_importance() -> None:
    weights, importance = draw("normal"), torch.randn(3 * GROUP).mul(2).round().exp2()
    actual = round_with_offsets(weights, LAYOUT, importance).dequantize().double()
    errors = (actual - weights.double()).square() * importance
    groups, by_group = (each.double().numpy().reshape(-1, GROUP) for each in (weights, importance))
    best = [min(find_errors(group, by_group[number % len(by_group)])) for number, group in enumerate(groups)]
    assert float(errors.sum()) <= sum(best) * 1.001
    plain = round_with_offsets(weights, LAYOUT).dequantize().double() - weights.double()
    assert float(errors.sum()) < 0.9 * float((plain.square() * importance).sum())


@pytest.mark.parametrize("kind", ["normal", "outliers"])
def test_products_lose_less_if_the_search_knows_the_inputs(kind: str) -> None:
    """Products in float64 of inputs whose mean squares differ between columns."""
    weights = draw(kind)
    sizes = torch.randn(weights.shape[1]).mul(2).exp2().double()
    known, others = torch.randn(2, 500, weights.shape[1], dtype=torch.float64) * sizes
    importance = choose_importance(known.square().mean(0).float())
    exact = others @ weights.double().T

    def lose(known: Tensor | None) -> float:
        rounded = PORTABLE.round_with_offsets(weights, INT4, known).dequantize().double()
        return float((others @ rounded.T - exact).norm())

    assert lose(importance) < 0.85 * lose(None)
    assert lose(importance) < 0.12 * float(exact.norm())


def test_equal_importance_changes_nothing() -> None:
    weights = draw("skewed")
    plain, equal = (round_with_offsets(weights, LAYOUT, each) for each in (None, torch.full((96,), 4.0)))
    assert torch.equal(plain.dequantize(), equal.dequantize())


def test_scales_and_offsets_are_float16() -> None:
    codes = round_with_offsets(draw("normal"), LAYOUT)
    assert codes.offsets is not None
    for numbers in (codes.scales, codes.offsets):
        assert numbers.dtype == torch.float32
        assert torch.equal(numbers.half().float(), numbers)
    assert codes.values.min() == -8
    assert codes.values.max() == 7


def test_sixteen_equidistant_values_are_exact() -> None:
    numbers = torch.arange(16).repeat(2).view(1, GROUP) * 0.25 - 1
    assert torch.equal(round_with_offsets(numbers, LAYOUT).dequantize(), numbers)


def test_groups_do_not_depend_on_their_neighbours() -> None:
    weights = draw("outliers")
    whole = round_with_offsets(weights, LAYOUT).dequantize()
    importance = torch.randn(3 * GROUP).round().exp2()
    weighted = round_with_offsets(weights, LAYOUT, importance).dequantize()
    for columns in (slice(0, GROUP), slice(GROUP, 3 * GROUP)):
        for rows in (slice(0, 1), slice(7, 48)):
            alone = round_with_offsets(weights[rows, columns], LAYOUT).dequantize()
            assert torch.equal(alone, whole[rows, columns])
            alone = round_with_offsets(weights[rows, columns], LAYOUT, importance[columns]).dequantize()
            assert torch.equal(alone, weighted[rows, columns])


@pytest.mark.parametrize("kind", ["normal", "skewed", "outliers"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("factor", [1e-6, 1.0, 1e4])
def test_compiled_kernels_return_the_same_bits(kind: str, dtype: torch.dtype, factor: float) -> None:
    weights = (draw(kind).double().repeat(1, 2)[:, :150] * factor).to(dtype)  # the last group is partial
    weights[1, :64], weights[2, 64:128], weights[3, :64] = 0, weights[2, 64], 1e-38
    weights[4, 7], weights[5, 100], weights[6, 149] = torch.nan, torch.inf, -torch.inf
    importance = torch.randn(150).mul(3).round().exp2()
    for layout, arguments in ((INT4, ()), (INT4, (importance,)), (SENSITIVE, ())):
        name = "round_with_offsets" if layout.has_offsets else "round_to_integers"
        expected, actual = (
            getattr(rounder, name)(weights, layout, *arguments) for rounder in (PORTABLE, CPU_KERNELS)
        )
        assert torch.equal(actual.scales.nan_to_num(-1), expected.scales.nan_to_num(-1))
        assert actual.scales[[4, 5, 6], [0, 1, 2]].isnan().all()
        is_used = ~expected.scales.isnan()
        columns = is_used.repeat_interleave(64, 1)[:, :150]
        assert torch.equal(actual.values[columns], expected.values[columns])
        if layout.has_offsets:
            assert torch.equal(actual.offsets[is_used], expected.offsets[is_used])


@pytest.mark.parametrize("group", [16, 128, None])
def test_whole_rows_and_other_groups_are_rounded_alike(group: int | None) -> None:
    weights, layout = draw("outliers"), CodeLayout(torch.int8, 8, group)
    for part in (weights, weights[:3, :77].contiguous(), weights[:0]):
        expected, actual = (
            rounder.round_to_integers(part, layout).dequantize() for rounder in (PORTABLE, CPU_KERNELS)
        )
        assert torch.equal(actual, expected)
