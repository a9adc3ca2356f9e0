"""Chosen experts by the kernels in the interpreter and by their twin, against float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.cuda.interpreter import interpreted
from tests.support.cuda.program_order import reversed_programs
from tgis.shard.kernels.cuda.grouped import mix_experts
from tgis.shard.kernels.cuda.grouped.expert_table import FEW_ROWS, MANY_ROWS, ExpertMatrices, ExpertTable
from tgis.shard.kernels.portable.ops import ACTIVATIONS
from tgis.shard.layers.activation import CLAMPED_SWIGLU
from tgis.shard.layers.ops import Activation

COMPUTE: dict[str, Callable[..., Tensor]] = {"kernel": interpreted().mix_experts, "twin": mix_experts.plain}
each_way = pytest.mark.parametrize("compute", COMPUTE.values(), ids=COMPUTE)
# Differences relative to the largest result, which the rounding of activations causes.
BOUNDS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
WIDTH, SIZE = 70, 88


def draw_table(
    num_experts: int,
    activation: Activation,
    dtype: torch.dtype = torch.float32,
    has_bias: bool = False,
    gate_scale: float = 1.0,
    scales_input: bool = False,
) -> ExpertTable:
    experts = []
    for _ in range(num_experts):
        up = torch.randn((1 + activation.is_gated) * SIZE, WIDTH) / WIDTH**0.5
        down = torch.randn(WIDTH, SIZE) / SIZE**0.5
        biases = [torch.randn(len(each)) if has_bias else None for each in (up, down)]
        experts.append(ExpertMatrices(up.to(dtype), biases[0], down.to(dtype), biases[1]))
    return ExpertTable.of(experts, activation, gate_scale, scales_input)


def draw_choices(num_tokens: int, num_experts: int, num_chosen: int) -> tuple[Tensor, Tensor]:
    scores = torch.randn(num_tokens, num_experts)
    return scores.topk(num_chosen).values.softmax(-1), scores.topk(num_chosen).indices


def activate(x: Tensor, table: ExpertTable) -> Tensor:
    name = table.activation.name
    if not table.activation.is_gated:
        return ACTIVATIONS[name](x)
    gate, up = x.chunk(2)
    if name == CLAMPED_SWIGLU:
        return ACTIVATIONS["quick_gelu"](gate.clamp(max=7)) * (up.clamp(-7, 7) + 1)
    return ACTIVATIONS[name](gate * table.gate_scale) * up


def expected(x: Tensor, weights: Tensor, chosen: Tensor, table: ExpertTable) -> Tensor:
    y = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for weight, number in zip(weights[token].double(), chosen[token].tolist(), strict=True):
            up, up_bias, down, down_bias = (
                None if each is None else each.double() for each in table.experts[number].tensors
            )
            taken = x[token].double() * (weight if table.scales_input else 1)
            assert up is not None
            assert down is not None
            out = down @ activate(up @ taken + (0 if up_bias is None else up_bias), table)
            out += 0 if down_bias is None else down_bias
            y[token] += out * (1 if table.scales_input else weight)
    return y


def check(actual: Tensor, x: Tensor, weights: Tensor, chosen: Tensor, table: ExpertTable) -> None:
    correct = expected(x, weights, chosen, table)
    assert actual.dtype == torch.float32
    bound = BOUNDS[table.dtype] * float(correct.abs().max())
    torch.testing.assert_close(actual.double(), correct, rtol=0, atol=bound)


@each_way
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("tile", [FEW_ROWS, MANY_ROWS])
def test_types_and_tiles(tile: int, dtype: torch.dtype, compute: Callable[..., Tensor]) -> None:
    """More tokens of an expert than a tile has rows, and experts without tokens."""
    table = draw_table(5, Activation("silu", True), dtype)
    x, (weights, chosen) = torch.randn(75, WIDTH), draw_choices(75, 4, 2)
    check(compute(x, weights, chosen, table, tile), x, weights, chosen, table)


OPTIONS: dict[str, dict[str, object]] = {
    "biases": {"has_bias": True},
    "biases, not gated": {"activation": Activation("relu2", False), "has_bias": True},
    "clamped": {"activation": Activation(CLAMPED_SWIGLU, True), "has_bias": True},
    "scaled gates": {"activation": Activation("gelu_tanh", True), "gate_scale": 0.3},
    "scaled inputs": {"scales_input": True, "has_bias": True},
}


@each_way
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("num_chosen", [1, 3])
def test_kinds_of_experts(
    num_chosen: int, options: dict[str, object], compute: Callable[..., Tensor]
) -> None:
    table = draw_table(**{"num_experts": 4, "activation": Activation("silu", True), **options})  # type: ignore[arg-type]
    x, (weights, chosen) = torch.randn(6, WIDTH), draw_choices(6, 4, num_chosen)
    check(compute(x, weights, chosen, table, FEW_ROWS), x, weights, chosen, table)


@pytest.mark.parametrize("tile", [FEW_ROWS, MANY_ROWS])
def test_bits_do_not_depend_on_other_tokens(tile: int) -> None:
    compute, table = interpreted().mix_experts, draw_table(6, Activation("silu", True), torch.bfloat16)
    x, (weights, chosen) = torch.randn(40, WIDTH), draw_choices(40, 6, 2)
    with reversed_programs():
        together = compute(x, weights, chosen, table, tile)
    for part in (torch.randperm(40)[:9], torch.tensor([39])):
        assert compute(x[part], weights[part], chosen[part], table, tile).equal(together[part])


@each_way
def test_no_tokens(compute: Callable[..., Tensor]) -> None:
    table = draw_table(3, Activation("silu", True))
    none = torch.empty(0, 2)
    assert compute(torch.empty(0, WIDTH), none, none.long(), table, FEW_ROWS).shape == (0, WIDTH)
