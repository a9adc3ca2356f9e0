"""Rounding by GPTQ against the paper's equations in float64."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.shard import gptq_oracle
from tgis.shard.quantize import gptq
from tgis.shard.quantize.gptq import round_by_gptq, solve
from tgis.shard.quantize.group_codes import GroupCodes, assemble, find_grid, round_to_nearest
from tgis.shard.quantize.refinement import refine
from tgis.shard.quantize.settings import QuantizeError, QuantizeSettings

ROWS, COLUMNS = 12, 150  # more than a block
CASES: dict[str, dict[str, Any]] = {
    "as TGIS": {"group_size": 32},
    "act_order": {"group_size": 32, "act_order": True},
    "asymmetric": {"group_size": 32, "sym": False},
    "asymmetric, act_order": {"group_size": 32, "sym": False, "act_order": True},
    "all columns in a group": {"group_size": -1},
    "groups wider than a block": {"group_size": 140, "sym": False},
    "2 bits": {"bits": 2, "group_size": 64},
    "3 bits": {"bits": 3, "group_size": 64, "sym": False},
    "8 bits": {"bits": 8, "group_size": 64},
    "little damping": {"group_size": 128, "percdamp": 0.001},
}


def draw(seed: int = 0, num_inputs: int = 400) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix and the Hessian of correlated inputs. Two columns have only zero inputs."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(ROWS, COLUMNS, generator=generator)
    weight[0, :64] = weight[0, :64].abs()
    mixed = torch.randn(num_inputs, 40, generator=generator) @ torch.randn(40, COLUMNS, generator=generator)
    inputs = mixed + 0.3 * torch.randn(num_inputs, COLUMNS, generator=generator)
    inputs[:, [5, 133]] = 0
    return weight, 2 / num_inputs * inputs.T @ inputs


def round_once(weight: torch.Tensor, hessian: torch.Tensor, settings: QuantizeSettings) -> GroupCodes:
    """Round a matrix by GPTQ without refinement."""
    columns, hessian = weight.double().T.clone(), hessian.double()
    is_dead = hessian.diagonal() == 0
    columns[is_dead], hessian.diagonal()[is_dead] = 0, 1
    _, codes, grids = round_by_gptq(columns, hessian, settings)
    return assemble(codes, grids, settings.group_length(len(columns)))


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_equals_the_paper(options: dict[str, Any]) -> None:
    settings = QuantizeSettings(**{"group_size": 128, "sym": True, **options})
    weight, hessian = draw()
    actual = round_once(weight, hessian, settings)
    expected = gptq_oracle.solve(
        weight.double().numpy(),
        hessian.double().numpy(),
        settings.bits,
        settings.group_length(COLUMNS),
        settings.sym,
        settings.act_order,
        settings.percdamp,
    )
    is_certain = expected.edges > 1e-4
    assert is_certain.mean() > 0.99
    assert (actual.codes.T.numpy() == expected.codes)[is_certain].all()
    assert np.array_equal(actual.scales.T.double().numpy(), expected.scales)
    assert np.array_equal(actual.zeros.T.numpy(), expected.zeros)
    assert actual.group_of.tolist() == [k // settings.group_length(COLUMNS) for k in range(COLUMNS)]
    assert not actual.dequantize()[:, [5, 133]].any()
    assert actual.zeros.min() > 0, "a stored zero wraps around"


@pytest.mark.parametrize("sym", [True, False])
def test_tiny_weights_and_zeros(sym: bool) -> None:
    weight, hessian = draw()
    weight[0], weight[1] = 0, weight[1] * 1e-9
    actual = solve(weight, hessian, QuantizeSettings(group_size=32, sym=sym)).dequantize()
    assert not actual[:2].any()
    assert actual.isfinite().all()


def output_error(weight: torch.Tensor, hessian: torch.Tensor, codes: GroupCodes) -> float:
    off = (weight - codes.dequantize()).double()
    return float((off @ hessian.double() * off).sum())


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_errors_are_smaller_than_by_rounding_to_nearest(options: dict[str, Any]) -> None:
    settings = QuantizeSettings(**{"group_size": 128, "sym": True, **options})
    weight, hessian = draw(1)
    ours, nearest = solve(weight, hessian, settings), round_to_nearest(weight, settings)
    assert output_error(weight, hessian, ours) < 0.5 * output_error(weight, hessian, nearest)
    assert (weight - nearest.dequantize()).norm() < (weight - ours.dequantize()).norm()


def test_rounding_to_nearest() -> None:
    weight, _ = draw(2)
    settings = QuantizeSettings(bits=3, group_size=32, sym=False)
    actual = round_to_nearest(weight, settings)
    steps = torch.arange(8) - actual.zeros.T[:, actual.group_of].unsqueeze(-1).double()
    choices = steps * actual.scales.T[:, actual.group_of].unsqueeze(-1).double()  # [rows, columns, 8]
    best = (choices - weight.double().unsqueeze(-1)).abs().amin(-1)
    assert torch.equal(best, (weight.double() - actual.dequantize().double()).abs())


@pytest.mark.parametrize("act_order", [False, True])
def test_damping_increases_until_the_hessian_can_be_inverted(act_order: bool) -> None:
    """The only input that the Hessian knows has all columns, and it is not quite positive definite."""
    weight, _ = draw()
    hessian = torch.ones(COLUMNS, COLUMNS).fill_diagonal_(1 - 1e-3)
    settings = QuantizeSettings(group_size=32, percdamp=1e-6, act_order=act_order)
    before = weight.clone(), hessian.clone()
    actual = solve(weight, hessian, settings)
    assert torch.equal(weight, before[0])
    assert torch.equal(hessian, before[1])
    damped = solve(weight, hessian, replace(settings, percdamp=0.01))
    assert torch.equal(actual.codes, damped.codes)
    assert torch.equal(actual.scales, damped.scales)


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("bits", [2, 4])
def test_searched_grids_lose_less_than_grids_that_span_the_weights(bits: int, sym: bool) -> None:
    """Every element of a group counts by its importance."""
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(32, 100, generator=generator).double() ** 3
    importance = torch.rand(32, generator=generator).double() ** 4
    grid = find_grid(weights, importance, bits, sym)
    actual = importance @ (weights - grid.decode(grid.encode(weights))) ** 2
    for row, column in enumerate(weights.T.numpy()):
        scale, zero = gptq_oracle.span_weights(column, bits, sym)
        codes = np.clip(np.round(column / scale) + zero, 0, 2**bits - 1)
        spanned = importance.numpy() @ (column - (codes - zero) * scale) ** 2
        assert actual[row] < spanned * 1.001
        scale, zero = gptq_oracle.find_grid(column, importance.numpy(), bits, sym)
        assert grid.zeros[row] == zero
        assert float(grid.scales[row]) == pytest.approx(scale, rel=2**-10), "scales are float16"


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_refinement_finds_the_best_code_and_scale_of_each_turn(options: dict[str, Any]) -> None:
    """Every code and every scale is tried, in float64, by the error of the outputs."""
    settings = QuantizeSettings(**{"group_size": 128, "sym": True, **options})
    weight, hessian = draw(4)
    columns, hessian = weight.double().T[:64].clone(), hessian.double()[:64, :64]
    hessian += torch.eye(64)
    length = settings.group_length(64)
    _, codes, grids = round_by_gptq(columns.clone(), hessian, settings)
    refined = assemble(*refine(columns, hessian, codes, grids, length), length)
    for row in range(2):
        expected = gptq_oracle.refine(
            columns[:, row].numpy(),
            hessian.numpy(),
            codes[:, row].numpy(),
            [(float(grid.scales[row]), float(grid.zeros[row])) for grid in grids],
            settings.bits,
        )
        assert refined.dequantize()[row].double().numpy() == pytest.approx(expected, rel=2**-10, abs=1e-6)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_refinement_loses_less(options: dict[str, Any]) -> None:
    settings = QuantizeSettings(**{"group_size": 128, "sym": True, **options})
    weight, hessian = draw(5)
    ours, once = solve(weight, hessian, settings), round_once(weight, hessian, settings)
    assert output_error(weight, hessian, ours) < 0.95 * output_error(weight, hessian, once)


@pytest.mark.parametrize("act_order", [False, True])
def test_products_lose_less_if_the_search_knows_the_inputs(
    act_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products in float64 of inputs whose mean squares differ between columns."""
    weight, _ = draw(6)
    sizes = torch.randn(COLUMNS, generator=torch.Generator().manual_seed(7)).mul(2).exp2().double()
    known, others = torch.randn(2, 600, COLUMNS, dtype=torch.float64) * sizes
    settings = QuantizeSettings(group_size=32, act_order=act_order)
    exact = others @ weight.double().T

    def lose() -> float:
        codes = round_once(weight, 2 / len(known) * known.T @ known, settings)
        return float((others @ codes.dequantize().double().T - exact).norm())

    informed = lose()
    monkeypatch.setattr(gptq, "find_grid", lambda x, known, *how: find_grid(x, torch.ones_like(known), *how))
    assert informed < 0.8 * lose()
    assert informed < 0.08 * float(exact.norm())


def test_a_hessian_that_cannot_be_inverted_is_an_error() -> None:
    weight, hessian = draw()
    hessian[3, 4] = hessian[4, 3] = torch.nan
    with pytest.raises(QuantizeError, match="cannot be inverted: use a larger --percdamp"):
        solve(weight, hessian, QuantizeSettings(group_size=32))
