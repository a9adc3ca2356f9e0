"""Which products of few rows use `multiply_few`: by measured times, on all ranks and after restarts alike."""

import itertools
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from tgis.shard.checkpoint.tensors import TensorInMemory
from tgis.shard.collectives import CPU
from tgis.shard.kernels.cuda.few_rows import multiply_few
from tgis.shard.kernels.cuda.few_rows.multiply_few import MAX_ROWS
from tgis.shard.kernels.cuda.implementations import Implementations
from tgis.shard.kernels.cuda.ops import CudaKernels
from tgis.shard.kernels.cuda.products.choice import ProductChoices
from tgis.shard.kernels.cuda.products.few_rows import FewRows, MatrixSize
from tgis.shard.kernels.cuda.products.floats import CudaProduct
from tgis.shard.kernels.cuda.products.stored_choices import StoredChoices
from tgis.shard.kernels.cuda.products.timing import MAX_MATRICES, MAX_SECONDS, SizeTimer
from tgis.shard.layers.ops import Activation, BiasedProduct, ExpertProducts


class Counted:
    """`multiply_few` that lists its calls, and a timer of them. Work of cuBLAS takes a microsecond."""

    def __init__(self, cost: dict[int, float]):
        self.cost = cost  # number of columns -> microseconds of a call
        self.calls: list[tuple[int, ...]] = []  # shapes

    def multiply(self, x: Tensor, weight: Tensor, *rest: object) -> Tensor:
        self.calls.append(tuple(weight.shape))
        return multiply_few.plain(x, weight, *rest)  # type: ignore[arg-type]

    def time(self, work: Callable[[], None]) -> float:
        before = len(self.calls)
        work()
        calls = self.calls[before:]
        return sum(self.cost[columns] for _, columns in calls) * 1e-6 if calls else 1e-6


def draw(num_outputs: int, num_columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(num_outputs, num_columns).to(dtype)


def choose_alone(value: int) -> int:
    return value


def ask(asked: list[int], value: int) -> int:
    asked.append(value)
    return value


def test_the_faster_one_is_used() -> None:
    """It must win by two percent."""
    counted = Counted({32: 0.97, 48: 0.99, 64: 1.5})
    choices = ProductChoices(counted.multiply)
    weights = [draw(24, columns) for columns in counted.cost]
    all_few = [choices.add(weight, False) for weight in weights]
    choices.measure(counted.time, choose_alone)
    assert [few is not None and few.is_used for few in all_few] == [True, False, False]


def test_one_and_16_rows_are_timed_with_all_matrices_of_a_size() -> None:
    counted = Counted({32: 1 / 3})
    choices = ProductChoices(counted.multiply)
    weights = [draw(24, 32) for _ in range(4)]
    all_few = [choices.add(weight, False) for weight in weights]
    del weights[3]  # of a model that is no longer used
    assert all(each is all_few[0] for each in all_few)
    choices.measure(counted.time, choose_alone)
    assert len(counted.calls) == 3 * 2
    many = ProductChoices(counted.multiply)
    kept = [draw(24, 32) for _ in range(MAX_MATRICES + 5)]
    for weight in kept:
        many.add(weight, False)
    counted.calls.clear()
    many.measure(counted.time, choose_alone)
    assert len(counted.calls) == MAX_MATRICES * 2


def test_freed_matrices_leave_their_places_to_others() -> None:
    """Those of a model that was measured before this one is loaded."""
    counted = Counted({32: 0.5})
    choices = ProductChoices(counted.multiply)
    for _ in range(MAX_MATRICES):
        choices.add(draw(24, 32), False)
    weight = draw(24, 32)
    few = choices.add(weight, False)
    choices.measure(counted.time, choose_alone)
    assert few is not None
    assert few.is_used


@pytest.mark.parametrize(
    "weight", [draw(24, 32, torch.float32), draw(24, 40)], ids=["float32", "no loads of 16 bytes"]
)
def test_other_matrices_are_left_to_cublas(weight: Tensor) -> None:
    counted = Counted({32: 0.1, 40: 0.1})
    choices = ProductChoices(counted.multiply, is_used=True)
    few = choices.add(weight, False)
    assert few is not None
    choices.measure(counted.time, choose_alone)
    assert not few.is_used
    assert not counted.calls
    assert choices.add(draw(32, 24).t(), False) is None


def test_ranks_agree() -> None:
    counted = Counted({32: 0.5, 48: 0.5})
    choices = ProductChoices(counted.multiply)
    weights = [draw(24, columns) for columns in counted.cost]
    first, second = (choices.add(weight, False) for weight in weights)
    answers = iter([2, -2, 0, 1, 0])  # of all ranks: numbers of sizes, stored choices, and new ones
    choices.measure(counted.time, lambda value: next(answers))
    assert first is not None
    assert second is not None
    assert (first.is_used, second.is_used) == (True, False)


def test_ranks_with_other_sizes_use_cublas() -> None:
    counted = Counted({32: 0.5})
    choices = ProductChoices(counted.multiply)
    weight = draw(24, 32)
    few = choices.add(weight, False)
    asked: list[int] = []
    choices.measure(counted.time, lambda value: min(ask(asked, value), -2 if value < 0 else value))
    assert few is not None
    assert not few.is_used
    assert asked == [1, -1], "further values would meet other ones of the ranks with more sizes"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            RuntimeError("not permitted when stream is capturing\nmore"),
            "not permitted when stream is capturing)",
        ),
        (OutOfResources(300_000, 232_448, "shared memory"), "out of resource: shared memory"),
    ],
)
def test_failed_measurements_leave_cublas(
    error: Exception, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Triton's errors are no RuntimeErrors."""

    def fail(work: Callable[[], None]) -> float:
        raise error

    choices = ProductChoices(multiply_few.plain)
    weight = draw(24, 32)
    few = choices.add(weight, False)
    with caplog.at_level(logging.INFO):
        choices.measure(fail, choose_alone)
    assert few is not None
    assert not few.is_used
    assert f"24 x 32: cuBLAS (not timed: {reason}" in caplog.text


def test_a_rank_without_the_kernel_takes_part_in_the_choice(caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise, the other ranks' values would meet those of its next agreement."""
    values: list[list[int]] = []
    for kernels in (Implementations.choose(), Implementations.plain()):
        values.append([])
        shard = CudaKernels(CPU, kernels)
        product = shard.pack(TensorInMemory(draw(24, 32), "weight"), torch.bfloat16)
        with caplog.at_level(logging.INFO):
            shard.choose_products(lambda work: 1e-6, partial(ask, values[-1]))
        assert product.multiply_parts(torch.randn(1, 32)) is None
    assert values == [[1, -1, 0, 0], [1, -1, 0, 0]]
    assert "24 x 32: cuBLAS (not timed: multiply_few is replaced)" in caplog.messages[1]


def test_figures_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    counted = Counted({32: 0.5})
    choices = ProductChoices(counted.multiply)
    weight = draw(24, 32)
    choices.add(weight, False)
    with caplog.at_level(logging.INFO):
        choices.measure(counted.time, choose_alone)
    assert "at 1 and 16 rows: 24 x 32: multiply_few (0.5 and 1.0, 0.5 and 1.0)" in caplog.text


def test_the_matrices_of_which_a_step_reads_most_are_timed_until_the_time_is_over() -> None:
    counted = Counted(dict.fromkeys((32, 48, 64), 0.1))
    weights = [draw(24, columns) for columns in (32, 32, 32, 48, 64, 64)]
    sizes = {
        MatrixSize(24, each, torch.bfloat16, False): FewRows(counted.multiply, False) for each in counted.cost
    }
    for weight in weights:
        sizes[MatrixSize(24, weight.shape[1], weight.dtype, False)].add(weight)
    clock = itertools.count(step=0.6 * MAX_SECONDS).__next__
    timings = SizeTimer(counted.time, clock).time_all(sizes)
    assert [size.in_features for size in timings] == [64, 32, 48]
    assert [timing.is_faster for timing in timings.values()] == [True, False, False]
    assert [timing.figures for timing in timings.values()][1:] == ["not timed: 10 s are over"] * 2


def start(path: Path, microseconds: float, agree: Callable[[int], int] = choose_alone) -> list[bool]:
    """Return the choices of a shard that starts, for matrices of 32 and 48 columns."""
    counted = Counted({32: microseconds, 48: 2.0})
    choices = ProductChoices(counted.multiply)
    weights = [draw(24, columns) for columns in counted.cost]
    all_few = [choices.add(weight, False) for weight in weights]
    choices.measure(counted.time, agree, StoredChoices(path))
    return [few is not None and few.is_used for few in all_few]


def test_a_shard_that_starts_again_chooses_as_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it would measure now."""
    path = tmp_path / "of this run" / "products-0.json"
    assert start(path, 0.5) == [True, False]
    with caplog.at_level(logging.INFO):
        caplog.clear()
        assert start(path, 1.5) == [True, False]
    assert caplog.messages == [
        "products of up to 16 rows as before the restart: 24 x 32: multiply_few; 24 x 48: cuBLAS"
    ]


def test_products_are_timed_again_if_a_rank_has_no_stored_choices(tmp_path: Path) -> None:
    path = tmp_path / "products-0.json"
    assert start(path, 0.5) == [True, False]
    answers = iter([2, -2, 0, 1, 0])
    assert start(path, 0.5, lambda value: next(answers)) == [True, False]
    assert next(answers, None) is None


@pytest.mark.parametrize("text", ["", '{"24 x 32 torch.bfloat16": true}'], ids=["cut", "another model"])
def test_other_files_store_no_choices(text: str, tmp_path: Path) -> None:
    path = tmp_path / "products-0.json"
    path.write_text(text)
    assert start(path, 1.5) == [False, False]
    assert start(path, 0.5) == [False, False], "the file was replaced"


def test_choices_that_cannot_be_stored_are_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert start(tmp_path / "file" / "products-0.json", 0.5) == [True, False]
    assert "a shard that is started again will time products again: " in caplog.text


def test_experts_are_left_out() -> None:
    """`mix_experts` multiplies their matrices."""
    counted = Counted({32: 0.5, 24: 0.5})
    shard = CudaKernels(CPU, replace(Implementations.plain(), multiply_few=counted.multiply))
    up, down, other = (
        shard.pack(TensorInMemory(draw(*shape), "weight"), torch.bfloat16)
        for shape in ((48, 32), (32, 24), (48, 32))
    )
    expert = ExpertProducts(BiasedProduct(up, None), BiasedProduct(down, None))
    assert shard.join_experts([expert], Activation("silu", True), 1.0, False) is not None
    shard.choose_products(counted.time, choose_alone)
    assert set(counted.calls) == {(48, 32)}
    assert len(counted.calls) == 2
    x = torch.randn(1, 32)
    assert other.multiply_parts(x) is not None
    assert up.multiply_parts(x) is None


def test_a_model_without_matrices_logs_no_figures(caplog: pytest.LogCaptureFixture) -> None:
    """transformers computes its products, or all are of codes."""
    with caplog.at_level(logging.INFO):
        ProductChoices(multiply_few.plain).measure(lambda work: 1e-6, choose_alone)
    assert not caplog.messages


@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_of_more_rows_are_cublas_s(is_wide: bool, has_bias: bool) -> None:
    counted, weight, bias = Counted({}), draw(24, 32), torch.randn(24)
    few = ProductChoices(counted.multiply, is_used=True).add(weight, is_wide)
    chosen, other = CudaProduct(weight, is_wide, few), CudaProduct(weight, is_wide)
    for num_rows, num_calls in ((1, 1), (MAX_ROWS, 2), (MAX_ROWS + 1, 2)):
        x = torch.randn(num_rows, 32)
        mine, theirs = (partial(each.add_bias, bias=bias) if has_bias else each for each in (chosen, other))
        actual, expected = mine(x), theirs(x)
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)
        assert len(counted.calls) == num_calls
    parts = chosen.multiply_parts(torch.randn(MAX_ROWS, 32))
    assert parts is not None
    assert parts.shape == (1, MAX_ROWS, 24)
    assert chosen.multiply_parts(torch.randn(MAX_ROWS + 1, 32)) is None
    assert other.multiply_parts(torch.randn(1, 32)) is None
