"""The speed of whole steps: as the shard takes them, one launched while another is computed, and the device's
part of it alone."""

import gc
import time
from collections import deque

import torch

from bench.gpu.random_weights import build_model
from bench.gpu.roofline import Rates, decode_seconds, prefill_operations
from bench.gpu.target import Target
from bench.shapes import Shape
from bench.steps import Rows
from tgis.pb import shard_pb2 as pb
from tgis.shard.adapters.registry import LoadedAdapters
from tgis.shard.kernels.cuda.implementations import Implementations
from tgis.shard.kernels.cuda.ops import CudaKernels
from tgis.shard.memory.kv_cache import KVCache
from tgis.shard.runner.device.build import make_device_runner
from tgis.shard.runner.device.model_runner import DeviceModelRunner
from tgis.shard.runner.device.stream import DeviceStream
from tgis.shard.runner.interface import Pending
from tgis.shard.runner.row_table import RowLimits
from tgis.shard.sampling.grammar import Guides

BLOCK_SIZE, MAX_ROWS = 16, 256
NUM_ROWS, CONTEXT = (1, 16, 64, 256), 640
PROMPTS = (2048, 8192)
STEPS, WARM_STEPS = 40, 8
MOST_NEW = 4 * STEPS  # of a row, so that none ends while it is measured


def measure_steps(target: Target, rates: Rates) -> None:
    for name in ("8b", "0.6b"):
        shape = target.shape(name)
        start = time.perf_counter()
        runner = load_runner(target, shape)
        seconds = time.perf_counter() - start
        target.recorder.figure(
            f"{name}: weights, cache and graphs", seconds, "s", "weights made on the device"
        )
        for num_rows in (1, 2) if target.is_rehearsal else NUM_ROWS:
            measure_decode(target, rates, runner, name, num_rows)
        for length in (40,) if target.is_rehearsal else PROMPTS:
            measure_prompt(target, rates, runner, name, length)
        del runner
        gc.collect()
        torch.cuda.empty_cache()


def load_runner(target: Target, shape: Shape) -> DeviceModelRunner:
    """Return a runner with captured steps."""
    kernels, dtype = choose_kernels(target), torch.bfloat16
    model = build_model(shape, dtype, CudaKernels(target.device, kernels))
    max_rows = 2 if target.is_rehearsal else MAX_ROWS
    num_blocks = max_rows * -(-(CONTEXT + MOST_NEW) // BLOCK_SIZE)
    heads = shape.num_kv_heads, shape.head_dim
    cache = KVCache(shape.num_layers, num_blocks + 1, BLOCK_SIZE, *heads, dtype, target.device)
    info = pb.InfoResponse(
        vocab_size=shape.vocab_size, block_size=BLOCK_SIZE, num_blocks=num_blocks, world_size=1
    )
    runner = make_device_runner(
        model,
        cache,
        kernels,
        make_stream(target),
        RowLimits(shape.max_length, BLOCK_SIZE, shape.vocab_size),
        max_rows,
        Guides(_refuse_grammars, shape.vocab_size),
        info,
        LoadedAdapters(_refuse_adapters),
        memory_left=lambda: 1 << 40,
    )
    runner.graphs.capture([1, 2] if target.is_rehearsal else NUM_ROWS)
    return runner


def choose_kernels(target: Target) -> Implementations:
    """Choose twins for a rehearsal: a step in Triton's interpreter takes a second."""
    return Implementations.plain() if target.is_rehearsal else Implementations.choose()


def make_stream(target: Target) -> DeviceStream:
    if target.is_rehearsal:
        from tests.support.cuda.late_device import LateDevice

        return LateDevice()
    from tgis.shard.runner.device.cuda_stream import CudaStream

    return CudaStream(target.device)


def measure_decode(target: Target, rates: Rates, runner: DeviceModelRunner, name: str, num_rows: int) -> None:
    shape, context = target.shape(name), 2 * STEPS if target.is_rehearsal else CONTEXT
    rows = Rows(runner, num_rows, context - STEPS, MOST_NEW)
    runner.reset()
    runner.launch(rows.resume()).answer()
    run_steps(runner, rows, WARM_STEPS)
    start = time.perf_counter()
    run_steps(runner, rows, STEPS - WARM_STEPS)
    wall_s = (time.perf_counter() - start) / (STEPS - WARM_STEPS)
    device_s = time_graphs(target, runner, num_rows)
    floor = decode_seconds(shape, num_rows, context, rates)
    key, detail = (
        f"{name} decode {num_rows}",
        f"{wall_s * 1e3:.2f} ms a step, {num_rows / wall_s:.0f} tokens/s",
    )
    if name == "0.6b" and num_rows == 1:
        target.recorder.figure(key, wall_s * 1e3, "ms")
    share = "bandwidth" if num_rows == 1 else "roofline"
    target.recorder.figure(f"{key}: share of {share}", floor / wall_s, "", detail)
    if name == "8b" and num_rows == 1:
        target.recorder.figure("idle between steps", max(0.0, 1 - device_s / wall_s), "")


def run_steps(runner: DeviceModelRunner, rows: Rows, count: int) -> None:
    """Decode, with as many steps launched ahead as the runner allows."""
    pending: deque[Pending] = deque()
    for _ in range(count):
        if len(pending) == runner.max_pending:
            pending.popleft().answer()
        pending.append(runner.launch(rows.decode()))
    for step in pending:
        step.answer()


def time_graphs(target: Target, runner: DeviceModelRunner, num_rows: int) -> float:
    """Return the seconds of the device's part of the step that was replayed last."""
    captured = runner.graphs.find(num_rows)
    assert captured is not None, "it was captured"

    def replay() -> None:
        captured.forward.replay()
        captured.sample.replay()

    return target.time(replay)


def measure_prompt(target: Target, rates: Rates, runner: DeviceModelRunner, name: str, length: int) -> None:
    seconds = []
    for seed in range(3):
        runner.reset()
        [step] = Rows(runner, 1, length, 2, seed=seed).prefill(length)
        start = time.perf_counter()
        runner.launch(step).answer()
        seconds.append(time.perf_counter() - start)
    rate = prefill_operations(target.shape(name), length) / min(seconds)
    detail = f"{min(seconds) * 1e3:.1f} ms, {length / min(seconds):.0f} tokens/s"
    target.recorder.figure(f"{name} prefill {length}: share of gemm", rate / rates.gemm, "", detail)


def _refuse_grammars() -> None:
    raise ValueError("there is no tokenizer")


def _refuse_adapters(digest: str) -> None:
    raise ValueError(f"there is no adapter {digest}")
