"""Measures the speed of whole steps, attention and products, relative to the limits measured in the same run.

Weights are created on the device. Steps that cannot be captured are measured kernel by kernel."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from bench.gpu.inputs.kernels import load_kernels
from bench.gpu.inputs.roofline import (
    Rates,
    decode_seconds,
    kv_bytes,
    linear_seconds,
    list_linears,
    prefill_operations,
)
from bench.gpu.inputs.runners import CONTEXT, MAX_NEW, capture, count_steps, load_runner, run_steps
from bench.gpu.inputs.scenes import draw_queries, draw_scene
from bench.gpu.results import find_figure
from bench.gpu.target import Target
from bench.steps import Rows
from tgis.shard.runner.device.model_runner import DeviceModelRunner
from tgis.shard.runner.graph_sizes import MAX_PROMPT_TOKENS, GraphSize

NUM_ROWS, PROFILED_STEPS, MAX_KERNELS = (1, 64, 256), 8, 24
# At these numbers of rows, rows with the sampling of most chats are measured beside greedy ones.
FILTERED, FILTERED_ROWS = {"greedy": False, "top_k": 50, "top_p": 0.9}, (64, 256)
# At this number, rows with details, as of OpenAI's API, are measured too.
DETAILS, DETAILED_ROWS = {"logprobs": True, "ranks": True, "top_n": 5, "raw": True}, 64
NUM_TOKENS = (1, 4, 16, 64, 256)
NUM_WEIGHTS = 4  # of each product, larger than any cache
NUM_CALLS = 8
# Numbers of sequences and their lengths.
DECODES = ((1, 640), (1, 32768), (16, 640), (64, 640), (256, 640))
PROMPT, PROMPT_STEPS = 8192, 3
SHORT_PROMPTS = (16, 128, 512, 2048)


def measure_decodes(target: Target, name: str) -> None:
    """Measure steps of one token per row, the most informative numbers of rows first."""
    began = time.perf_counter()
    runner = load_runner(target, target.shape(name))
    target.recorder.figure(f"{name}: weights and cache", time.perf_counter() - began, "s")
    for num_rows in NUM_ROWS[:1] if target.is_rehearsal else NUM_ROWS:
        about = f"{name} decode {num_rows}"
        is_captured = capture(target, runner, [num_rows], f"{about}: steps")
        measure_decode(target, runner, name, num_rows, is_captured)
        if name == "8b" and (target.is_rehearsal or num_rows in FILTERED_ROWS):
            measure_decode(target, runner, name, num_rows, is_captured, FILTERED)
        if name == "8b" and (target.is_rehearsal or num_rows == DETAILED_ROWS):
            measure_decode(target, runner, name, num_rows, is_captured, details=DETAILS)
        runner.graphs.clear()


def measure_float8_cache(target: Target, name: str) -> None:
    """Measure steps with keys and values of 8 bits, at the number of rows where attention takes most of a
    step, and attention alone."""
    kind, num_rows = torch.float8_e4m3fn, 1 if target.is_rehearsal else NUM_ROWS[-1]
    runner = load_runner(target, target.shape(name), cache_type=kind)
    is_captured = capture(target, runner, [num_rows], f"{name} decode {num_rows} with fp8 cache: steps")
    measure_decode(target, runner, name, num_rows, is_captured, cache_type=kind)
    runner.graphs.clear()
    measure_decode_attention(target, kind)


def measure_decode(
    target: Target,
    runner: DeviceModelRunner,
    name: str,
    num_rows: int,
    is_captured: bool,
    sampling: Mapping[str, Any] = {},
    details: Mapping[str, Any] = {},
    cache_type: torch.dtype = torch.bfloat16,
) -> None:
    shape, (count, num_warm) = target.shape(name), count_steps(target)
    context = 2 * count if target.is_rehearsal else CONTEXT
    rows = Rows(runner, num_rows, context - count, MAX_NEW, sampling=sampling, details=details)
    runner.reset()
    runner.launch(rows.resume()).answer()
    run_steps(runner, rows, num_warm)
    start = time.perf_counter()
    run_steps(runner, rows, count - num_warm)
    wall_s = (time.perf_counter() - start) / (count - num_warm)
    about = f"{name} decode {num_rows}"
    about += " with top_k and top_p" if sampling else " with details" if details else ""
    about += "" if cache_type == torch.bfloat16 else " with fp8 cache"
    key = about + ("" if is_captured else ", eager")
    detail = f"{wall_s * 1e3:.2f} ms a step, {num_rows / wall_s:.0f} tokens/s"
    if name == "0.6b" and num_rows == 1:
        target.recorder.figure(key, wall_s * 1e3, "ms")
    share = "bandwidth" if num_rows == 1 else "roofline"
    floor = decode_seconds(shape, num_rows, context, read_rates(target), cache_type.itemsize)
    target.recorder.figure(f"{key}: share of {share}", floor / wall_s, "", detail)
    num_steps = num_warm if target.is_rehearsal else PROFILED_STEPS
    record_kernels(target, key, lambda: run_steps(runner, rows, num_steps), num_steps)
    # The rest is measured last, because it changes the rows' tokens.
    if is_captured and details:
        record_sampling(target, runner, key, num_rows)
    if is_captured and num_rows == 1 and not sampling and not details:
        idle = max(0.0, 1 - time_graphs(target, runner, num_rows) / wall_s)
        target.recorder.figure("idle between steps" if name == "8b" else f"{key}: idle", idle, "")


def time_graphs(target: Target, runner: DeviceModelRunner, num_rows: int) -> float:
    """Return the device's time, in seconds, of the last replayed step."""
    captured = runner.graphs.find(num_rows)
    assert captured is not None, "it was captured"

    def replay() -> None:
        captured.forward.replay()
        captured.sample.replay()

    return target.time(replay)


def record_sampling(target: Target, runner: DeviceModelRunner, key: str, num_rows: int) -> None:
    """Record the device's time of the last step's sampling, with and without details."""
    captured = runner.graphs.find(num_rows)
    assert captured is not None, "it was captured"
    for about, graph in (("", captured.sample), (" and details", captured.sample_detailed)):
        target.recorder.figure(f"{key}: sampling{about}", target.time(graph.replay) * 1e6, "us")


def measure_prompt(target: Target, name: str) -> None:
    """Measure the step of a whole prompt."""
    runner, length = load_runner(target, target.shape(name)), 40 if target.is_rehearsal else PROMPT
    seconds = min(
        time_prompt(runner, length, seed) for seed in range(1 if target.is_rehearsal else PROMPT_STEPS)
    )
    rates, key = read_rates(target), f"{name} prefill {length}"
    rate = prefill_operations(target.shape(name), length) / seconds
    detail = f"{seconds * 1e3:.1f} ms, {length / seconds:.0f} tokens/s"
    target.recorder.figure(f"{key}: share of gemm", rate / rates.gemm, "", detail)
    record_kernels(target, key, lambda: time_prompt(runner, length, PROMPT_STEPS), 1)


def measure_short_prompts(target: Target, name: str) -> None:
    """Measure the steps of short prompts: launched by the host kernel by kernel, with the device's share of
    the time, and as graphs."""
    runner = load_runner(target, target.shape(name))
    lengths = (40,) if target.is_rehearsal else SHORT_PROMPTS
    for length in lengths:
        seconds = measure_short_prompt(target, runner, f"{name} prompt {length}", length)
        spent = sum_kernels(target, partial(time_prompt, runner, length, PROMPT_STEPS))
        share = f"{name} prompt {length}: share of the device"
        target.recorder.figure(share, spent / seconds, "", f"{spent * 1e3:.2f} ms")
    captured = [length for length in lengths if length <= MAX_PROMPT_TOKENS]
    start = time.perf_counter()
    runner.graphs.capture([GraphSize(2, length) for length in captured])
    refusal = runner.graphs.refusal
    seconds = (time.perf_counter() - start) / len(captured)
    target.recorder.check(
        f"{name}: prompts are captured", refusal is None, refusal or f"{seconds:.2f} s each"
    )
    for length in captured if refusal is None else ():
        measure_short_prompt(target, runner, f"{name} prompt {length}, captured", length)


def measure_short_prompt(target: Target, runner: DeviceModelRunner, key: str, length: int) -> float:
    """Return the seconds of a step, and record them."""
    seconds = statistics.median(time_prompt(runner, length, seed) for seed in range(PROMPT_STEPS + 4))
    target.recorder.figure(key, seconds * 1e3, "ms")
    return seconds


def time_prompt(runner: DeviceModelRunner, length: int, seed: int) -> float:
    """Return the seconds of a prompt's step."""
    runner.reset()
    [step] = Rows(runner, 1, length, 2, seed=seed).prefill(length)
    start = time.perf_counter()
    runner.launch(step).answer()
    return time.perf_counter() - start


def record_kernels(target: Target, key: str, work: Callable[[], object], num_steps: int) -> None:
    """Record the device's time in each kernel."""
    profiled = sorted(profile_kernels(target, work), key=lambda each: -each.seconds)
    for each in profiled[: 2 if target.is_rehearsal else MAX_KERNELS]:
        detail = f"{each.count / num_steps:.4g} launches"
        target.recorder.figure(
            f"{key}: kernel {each.name[:80]}", each.seconds / num_steps * 1e6, "us", detail
        )


def sum_kernels(target: Target, work: Callable[[], object]) -> float:
    """Return the seconds in kernels, without the gaps between them."""
    return sum(each.seconds for each in profile_kernels(target, work))


@dataclass(frozen=True)
class KernelTime:
    name: str
    seconds: float
    count: int


def profile_kernels(target: Target, work: Callable[[], object]) -> list[KernelTime]:
    activity = ProfilerActivity.CPU if target.is_rehearsal else ProfilerActivity.CUDA
    with profile(activities=[activity]) as profiler:
        work()
        target.synchronize()
    return [
        KernelTime(
            each.key,
            (each.self_cpu_time_total if target.is_rehearsal else each.self_device_time_total) / 1e6,
            each.count,
        )
        for each in profiler.key_averages()
    ]


def read_rates(target: Target) -> Rates:
    """Return the limits measured in this run, or those of an H100 or H200."""
    read, copy = (find_figure(target.path, f"{name} bandwidth") for name in ("read", "copy"))
    gemm = find_figure(target.path, "gemm bf16")
    if read is None or copy is None or gemm is None:
        target.recorder.fact("limits", "were not measured: shares are of 3.0 TB/s and 780 TFLOP/s")
        return Rates(3.0e12, 780e12)
    return Rates(max(read, copy) * 1e12, gemm * 1e12)


def measure_linears(target: Target) -> None:
    shape, rates = target.shape("8b"), read_rates(target)
    for num_tokens in NUM_TOKENS:
        measured = floor = 0.0
        for rows, columns in list_linears(shape):
            weights = torch.randn(NUM_WEIGHTS, rows, columns, device=target.device, dtype=torch.bfloat16)
            x = torch.randn(num_tokens, columns, device=target.device).bfloat16()
            measured += target.time_on_device([partial(F.linear, x, weight) for weight in weights])
            floor += linear_seconds(num_tokens, (rows, columns), rates)
        target.recorder.figure(f"8b linears {num_tokens}: share", floor / measured, "", "products of a layer")


def measure_attention(target: Target) -> None:
    measure_decode_attention(target, torch.bfloat16)
    shape, kernels = target.shape("8b"), load_kernels(target)
    length = 40 if target.is_rehearsal else PROMPT
    scene = draw_scene(target, shape, 1, length, torch.bfloat16)
    q = draw_queries(scene, length)
    seconds = target.time(lambda: scene.attend_tiles(kernels, q))
    operations = prefill_operations(shape, length) / shape.num_layers
    operations -= sum(2 * rows * columns for rows, columns in list_linears(shape)) * length
    target.recorder.figure(f"attention of a prompt of {length}", operations / seconds / 1e12, "TFLOP/s")


def measure_decode_attention(target: Target, cache_type: torch.dtype) -> None:
    """Measure attention of single tokens to keys and values of a type."""
    shape, kernels, rates = target.shape("8b"), load_kernels(target), read_rates(target)
    about = "" if cache_type == torch.bfloat16 else " with fp8 cache"
    for num_rows, length in DECODES:
        length = 40 if target.is_rehearsal else length
        scene = draw_scene(target, shape, num_rows, length, torch.bfloat16, cache_type)
        q = draw_queries(scene, num_rows)
        seconds = target.time_on_device([partial(scene.attend_segments, kernels, q)] * NUM_CALLS)
        num_bytes = kv_bytes(shape, num_rows * length, cache_type.itemsize) / shape.num_layers
        key, detail = f"attention {num_rows} x {length}{about}", f"{seconds * 1e6:.1f} us a layer"
        target.recorder.figure(
            f"{key}: share of bandwidth", num_bytes / rates.bandwidth / seconds, "", detail
        )
        if target.is_rehearsal:
            break
