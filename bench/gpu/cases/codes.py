"""Measures weights that are kept as codes, beside weights in bfloat16: products of a layer, and steps."""

import time
from functools import partial

import torch
import torch.nn.functional as F

from bench.gpu.cases.speed import NUM_WEIGHTS, read_rates
from bench.gpu.inputs.kernels import load_kernels
from bench.gpu.inputs.random_codes import FOUR_BITS, draw_packed
from bench.gpu.inputs.roofline import list_linears
from bench.gpu.inputs.runners import CONTEXT, MAX_NEW, capture, count_steps, load_runner, run_steps
from bench.gpu.target import Target
from bench.steps import Rows
from tgis.shard.checkpoint.codes import CodeLayout
from tgis.shard.kernels.cuda.codes.multiply_codes import MAX_ROWS
from tgis.shard.runner.device.model_runner import DeviceModelRunner

NUM_ROWS = 1, 16, 64, 256
NUM_TOKENS = *NUM_ROWS, MAX_ROWS, 2 * MAX_ROWS
LAYOUTS = {"4 bits": FOUR_BITS, "8 bits": CodeLayout(torch.int8, 8, 128)}


def measure_products(target: Target) -> None:
    """Measure the products of a layer of the 8B, up to the number of rows where weights are widened first."""
    for name in LAYOUTS:
        for num_tokens in NUM_TOKENS[:1] if target.is_rehearsal else NUM_TOKENS:
            measure_layer(target, name, num_tokens)


def measure_layer(target: Target, name: str, num_tokens: int) -> None:
    kernels, device, dtype = load_kernels(target), target.device, torch.bfloat16
    spent = plain = widening = num_bytes = 0.0
    for rows, columns in list_linears(target.shape("8b")):
        x = torch.randn(num_tokens, columns, device=device).to(dtype)
        packed = [draw_packed(LAYOUTS[name], rows, columns, device) for _ in range(NUM_WEIGHTS)]
        spent += target.time_on_device(
            [partial(kernels.multiply_codes, x, each, None, dtype) for each in packed]
        )
        if num_tokens >= MAX_ROWS:
            widening += target.time_on_device([partial(kernels.widen_codes, each, dtype) for each in packed])
        weights = torch.randn(NUM_WEIGHTS, rows, columns, device=device, dtype=dtype)
        plain += target.time_on_device([partial(F.linear, x, weight) for weight in weights])
        num_bytes += packed[0].codes.nbytes + packed[0].scales.nbytes
    about, record = f"8b products of {name}, {num_tokens} rows", target.recorder.figure
    record(f"{about}: times faster than bfloat16", plain / spent, "", f"{spent * 1e6:.0f} us a layer")
    record(f"{about}: share of bandwidth", num_bytes / spent / read_rates(target).bandwidth, "")
    if widening:
        record(f"{about}: widened first", (plain + widening) / spent, "times as long")


def measure_steps(target: Target) -> None:
    """Measure steps of the 8B with linear layers of 4 bits, relative to bfloat16."""
    times = {}
    for name, layout in (("bfloat16", None), ("4 bits", FOUR_BITS)):
        runner = load_runner(target, target.shape("8b"), layout)
        for num_rows in NUM_ROWS[:1] if target.is_rehearsal else NUM_ROWS:
            capture(target, runner, [num_rows], f"8b of {name}, {num_rows} rows: steps")
            times[name, num_rows] = time_step(target, runner, num_rows)
            runner.graphs.clear()
        del runner
        if target.device.type == "cuda":
            torch.cuda.empty_cache()
    for (name, num_rows), seconds in times.items():
        if name == "4 bits":
            key, detail = (
                f"8b decode {num_rows}: 4 bits, times faster than bfloat16",
                f"{seconds * 1e3:.2f} ms",
            )
            target.recorder.figure(key, times["bfloat16", num_rows] / seconds, "", detail)


def time_step(target: Target, runner: DeviceModelRunner, num_rows: int) -> float:
    """Return the seconds of a step in which each row generates a token."""
    count, num_warm = count_steps(target)
    context = 2 * count if target.is_rehearsal else CONTEXT
    rows = Rows(runner, num_rows, context - count, MAX_NEW)
    runner.reset()
    runner.launch(rows.resume()).answer()
    run_steps(runner, rows, num_warm)
    start = time.perf_counter()
    run_steps(runner, rows, count - num_warm)
    return (time.perf_counter() - start) / (count - num_warm)
