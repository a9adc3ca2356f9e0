"""Measures steps whose rows have LoRA adapters, and layers with experts."""

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from bench.gpu.cases.speed import read_rates, record_kernels
from bench.gpu.inputs.kernels import load_kernels
from bench.gpu.inputs.runners import CONTEXT, MAX_NEW, count_steps, load_runner, run_steps
from bench.gpu.target import Target
from bench.steps import Rows
from tgis.pb import shard_pb2 as pb
from tgis.shard.kernels.cuda.grouped.expert_table import ExpertMatrices, ExpertTable
from tgis.shard.layers.ops import Activation
from tgis.shard.runner.device.model_runner import DeviceModelRunner
from tgis.shard.runner.graph_sizes import GraphSize

NUM_ROWS, NUM_ADAPTERS = 64, 8
# Experts, chosen ones, width and size: Qwen 3 30B A3B. The layers are larger than any cache.
EXPERTS, REHEARSED_EXPERTS = (128, 8, 2048, 768), (4, 2, 32, 48)
NUM_LAYERS, PROMPT = 2, 4096


def measure_adapters(target: Target, name: str) -> None:
    """Measure steps of rows of several adapters, relative to steps without adapters."""
    runner = load_runner(target, target.shape(name), has_adapters=True)
    num_rows = 2 if target.is_rehearsal else NUM_ROWS
    runner.graphs.capture([GraphSize(num_rows), GraphSize(num_rows, has_adapters=True)])
    refusal = runner.graphs.refusal
    target.recorder.check(f"{name}: steps with adapters are captured", refusal is None, refusal or "")
    digests = [str(number) for number in range(2 if target.is_rehearsal else NUM_ADAPTERS)]
    for digest in digests:
        runner.adapters.load(digest)
    bare, tuned = (time_steps(target, runner, num_rows, each) for each in ((), digests))
    detail = f"{tuned * 1e3:.2f} and {bare * 1e3:.2f} ms a step"
    key = f"{name} decode {num_rows} with {len(digests)} adapters"
    target.recorder.figure(f"{key}: relative to none", tuned / bare, "", detail)


def time_steps(target: Target, runner: DeviceModelRunner, num_rows: int, digests: Sequence[str]) -> float:
    """Return the seconds of a step, and check that steps are replayed."""
    count, num_warm = count_steps(target)
    length = (2 * count if target.is_rehearsal else CONTEXT) - count
    rows = Rows(runner, num_rows, length, MAX_NEW, adapter_digests=digests)
    runner.reset()
    runner.launch(rows.resume()).answer()
    run_steps(runner, rows, num_warm)
    start = time.perf_counter()
    run_steps(runner, rows, count - num_warm)
    seconds = (time.perf_counter() - start) / (count - num_warm)
    about = f"{len(digests)} adapters"
    path = runner.launch(rows.decode()).answer().path
    target.recorder.check(f"{about}: the step is a graph", path == pb.STEP_PATH_GRAPH, pb.StepPath.Name(path))
    record_kernels(target, about, lambda: run_steps(runner, rows, num_warm), num_warm)
    return seconds


def measure_experts(target: Target) -> None:
    """Measure layers of experts, as parts of the time in which their weights are read or multiplied."""
    _, num_chosen, width, size = REHEARSED_EXPERTS if target.is_rehearsal else EXPERTS
    rates = read_rates(target)
    for num_tokens in (2, 5) if target.is_rehearsal else (1, NUM_ROWS, PROMPT):
        works, num_used = zip(
            *(make_layer(target, num_tokens) for _ in range(1 if target.is_rehearsal else NUM_LAYERS)),
            strict=True,
        )
        seconds = target.time_on_device(works)
        num_weights = 3 * width * size
        read = 2 * num_weights * sum(num_used) / len(num_used) / rates.bandwidth
        floor = max(read, 2 * num_weights * num_tokens * num_chosen / rates.gemm)
        detail = f"{seconds * 1e6:.1f} us a layer"
        target.recorder.figure(f"experts of {num_tokens} tokens: share", floor / seconds, "", detail)


def make_layer(target: Target, num_tokens: int) -> tuple[Callable[[], object], int]:
    """Return a function that computes a layer of experts, and the number of experts that tokens have
    chosen."""
    num_experts, num_chosen, width, size = REHEARSED_EXPERTS if target.is_rehearsal else EXPERTS
    device = target.device
    experts = [
        ExpertMatrices(
            (torch.randn(2 * size, width, device=device) * 0.02).bfloat16(),
            None,
            (torch.randn(width, size, device=device) * 0.02).bfloat16(),
            None,
        )
        for _ in range(num_experts)
    ]
    table = ExpertTable.of(experts, Activation("silu", is_gated=True), 1.0, scales_input=False)
    weights, chosen = torch.randn(num_tokens, num_experts, device=device).softmax(-1).topk(num_chosen)
    x, tile = torch.randn(num_tokens, width, device=device), table.choose_tile(chosen.numel())
    return partial(load_kernels(target).mix_experts, x, weights, chosen, table, tile), len(chosen.unique())
