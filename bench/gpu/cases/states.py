"""Measures the kernels of recurrent layers: of one token in each of many sequences, and of a prompt."""

from collections.abc import Callable
from functools import partial

import torch

from bench.gpu.cases.speed import read_rates
from bench.gpu.inputs.kernels import load_kernels
from bench.gpu.target import Target
from tgis.shard.kernels.cuda.check.inputs import Draw, draw_delta, draw_mamba
from tgis.shard.kernels.cuda.states.mix import mix_delta, mix_states
from tgis.shard.kernels.cuda.step_state import STATE_CHUNK
from tgis.shard.memory.state_cache import StateCache, StateShape, StateSizes, StepStates

# Granite 4.0 H Tiny and Qwen 3 Next.
SIZES = {"mamba": StateSizes(48, 64, 1, 128, 4), "delta": StateSizes(32, 128, 16, 128, 4)}
REHEARSED = StateSizes(2, 16, 1, 16, 4)
NUM_ROWS, PROMPT, NUM_CALLS = 256, 8192, 20
PLACE = 7  # of the tokens of single steps in their chunks


def measure(target: Target) -> None:
    bandwidth = read_rates(target).bandwidth
    for kind, sizes in SIZES.items():
        sizes = REHEARSED if target.is_rehearsal else sizes
        rows, length = (2, 20) if target.is_rehearsal else (NUM_ROWS, PROMPT)
        seconds = target.time_on_device([make_step(target, kind, sizes, rows, 1)] * NUM_CALLS)
        floor = 4 * rows * sizes.width * sizes.state_size / bandwidth  # the sums are read once
        detail = f"{seconds * 1e6:.1f} us a layer"
        target.recorder.figure(
            f"{kind} states of {rows} rows: share of bandwidth", floor / seconds, "", detail
        )
        seconds = target.time(make_step(target, kind, sizes, 1, length))
        target.recorder.figure(f"{kind} states of a prompt of {length}", seconds * 1e6, "us a layer")


def make_step(
    target: Target, kind: str, sizes: StateSizes, num_rows: int, count: int
) -> Callable[[], object]:
    """Return a function that computes a layer of a step with `count` new tokens of each of the rows."""
    device, kernels, draw = target.device, load_kernels(target), Draw(target.device)
    cache = StateCache(StateShape(1, sizes, STATE_CHUNK), num_rows, device)
    numbers = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
    starts = torch.full_like(numbers[:-1], PLACE if count == 1 else 0)
    states = StepStates(cache, numbers[:-1], numbers * count, starts)
    num_tokens = num_rows * count
    width = sizes.width + sizes.num_channels
    if kind == "mamba":
        rows = torch.randn(num_tokens, width + sizes.num_heads, device=device).bfloat16()
        return partial(mix_states, kernels, rows, draw_mamba(draw, sizes), 0, states)
    mixer = draw_delta(draw, sizes)
    rows = torch.randn(num_tokens, width, device=device).bfloat16()
    gates = torch.randn(num_tokens, 2 * mixer.total_heads, device=device)
    return partial(mix_delta, kernels, rows, gates, mixer, 0, states)
