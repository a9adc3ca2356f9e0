"""Measures products of few rows by `multiply_few` beside cuBLAS, and steps of few rows with and without it.

Kernels start before their predecessors end, or one by one."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F

from bench.gpu.cases.codes import time_step
from bench.gpu.cases.speed import NUM_WEIGHTS, read_rates
from bench.gpu.inputs.kernels import load_kernels
from bench.gpu.inputs.roofline import decode_seconds, linear_seconds, list_linears
from bench.gpu.inputs.runners import CONTEXT, capture, load_runner
from bench.gpu.target import Target
from bench.shapes import Shape
from tgis.shard.kernels.cuda.functions import dependent_launch

NUM_ROWS = 1, 4, 16
STEP_ROWS = 1, 16


def measure_products(target: Target) -> None:
    """Measure each matrix of the 8B."""
    shape = target.shape("8b")
    for matrix in (*list_linears(shape), (shape.vocab_size, shape.hidden_size)):
        for num_rows in NUM_ROWS[:1] if target.is_rehearsal else NUM_ROWS:
            measure_product(target, matrix, num_rows)


def measure_product(target: Target, matrix: tuple[int, int], num_rows: int) -> None:
    """Measure a product alone, and one that starts while the one before it ends."""
    kernels, dtype, (rows, columns) = load_kernels(target), torch.bfloat16, matrix
    weights = torch.randn(NUM_WEIGHTS, rows, columns, device=target.device, dtype=dtype)
    x = torch.randn(num_rows, columns, device=target.device).to(dtype)
    floor = linear_seconds(num_rows, matrix, read_rates(target))
    spent = {"cuBLAS": target.time_on_device([partial(F.linear, x, weight) for weight in weights])}
    works = [partial(kernels.multiply_few, x, weight, None, dtype) for weight in weights]
    with started_one_by_one():
        spent["multiply_few"] = target.time_on_device(works)
    spent["multiply_few, early"] = target.time_on_device(works)
    for name, seconds in spent.items():
        key = f"{rows} x {columns}, {num_rows} rows, {name}: share of bandwidth"
        target.recorder.figure(key, floor / seconds, "", f"{seconds * 1e6:.1f} us")


def measure_steps(target: Target) -> None:
    """Measure steps of the 8B."""
    shape = target.shape("8b")
    for name, uses_few in (("multiply_few", True), ("cuBLAS", False)):
        runner = load_runner(target, shape, uses_few=uses_few)
        for num_rows in STEP_ROWS[:1] if target.is_rehearsal else STEP_ROWS:
            for is_early in (True, False):
                about = f"8b decode {num_rows} with {name}{', early' * is_early}"
                with started_early() if is_early else started_one_by_one():
                    capture(target, runner, [num_rows], f"{about}: steps")
                    record_step(target, shape, about, num_rows, time_step(target, runner, num_rows))
                runner.graphs.clear()
        del runner
        if target.device.type == "cuda":
            torch.cuda.empty_cache()


def record_step(target: Target, shape: Shape, about: str, num_rows: int, seconds: float) -> None:
    floor = decode_seconds(shape, num_rows, CONTEXT, read_rates(target))
    target.recorder.figure(f"{about}: share of bandwidth", floor / seconds, "", f"{seconds * 1e3:.2f} ms")


@contextmanager
def started_early() -> Iterator[None]:
    dependent_launch.refuse(None)
    yield


@contextmanager
def started_one_by_one() -> Iterator[None]:
    dependent_launch.refuse("it is measured")
    try:
        yield
    finally:
        dependent_launch.refuse(None)
