"""Creates model runners whose weights are made on the device, and runs steps as the shard does: one is
launched while another is computed."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from bench.gpu.inputs.kernels import load_kernels
from bench.gpu.inputs.random_adapters import draw_adapter
from bench.gpu.inputs.random_weights import build_model
from bench.gpu.target import Target
from bench.shapes import Shape
from bench.steps import Rows
from tgis.pb import shard_pb2 as pb
from tgis.shard.adapters.registry import LoadedAdapters
from tgis.shard.checkpoint.codes import CodeLayout
from tgis.shard.collectives import ProcessGroup
from tgis.shard.kernels.cuda.implementations import Implementations
from tgis.shard.kernels.cuda.ops import CudaKernels
from tgis.shard.memory.kv_cache import KVCache
from tgis.shard.runner.device.build import make_device_runner
from tgis.shard.runner.device.model_runner import DeviceModelRunner
from tgis.shard.runner.device.stream import DeviceStream
from tgis.shard.runner.graph_sizes import GraphSize
from tgis.shard.runner.interface import Pending, RunnerParts
from tgis.shard.runner.row_table import RowLimits
from tgis.shard.sampling.grammar import Guides
from tgis.shard.startup.platforms.gpu.timing import time_captured

BLOCK_SIZE, MAX_ROWS = 16, 256
CONTEXT = 640  # of a row while it is measured
STEPS, WARM_STEPS = 40, 8
REHEARSED_STEPS, REHEARSED_WARM_STEPS = 6, 2
MAX_NEW = 4 * STEPS  # of a row, so that none ends during the measurement


def load_runner(
    target: Target,
    shape: Shape,
    layout: CodeLayout | None = None,
    has_adapters: bool = False,
    has_drafts: bool = False,
    cache_type: torch.dtype = torch.bfloat16,
    uses_few: bool | None = None,
) -> DeviceModelRunner:
    """Return a runner without captured steps. Linear layers have codes of a layout, or bfloat16 weights.
    Adapters, if there are any, are random ones of any digest. With `has_drafts`, captured steps verify
    drafts. Keys and values have `cache_type`. Products of few rows are those of `multiply_few` or cuBLAS, or
    of the faster one if `uses_few` is None."""
    kernels, dtype = choose_kernels(target), torch.bfloat16
    if has_adapters:  # a fallback does not read the table of adapters
        kernels = replace(kernels, add_low_rank=load_kernels(target).add_low_rank)
    stream, platform = make_stream(target), CudaKernels(target.device, kernels, bool(uses_few))
    model = build_model(shape, dtype, platform, layout)
    if uses_few is None and not target.is_rehearsal:
        platform.choose_products(partial(time_captured, stream), lambda value: value)
    max_rows = 2 if target.is_rehearsal else MAX_ROWS
    num_blocks = max_rows * -(-(CONTEXT + MAX_NEW) // BLOCK_SIZE)
    heads = shape.num_kv_heads, shape.head_dim
    cache = KVCache(shape.num_layers, num_blocks + 1, BLOCK_SIZE, *heads, cache_type, target.device)
    info = pb.InfoResponse(
        vocab_size=shape.vocab_size, block_size=BLOCK_SIZE, num_blocks=num_blocks, world_size=1
    )
    parts = RunnerParts(
        model=model,
        cache=cache,
        states=None,
        guides=Guides(_refuse_grammars, shape.vocab_size),
        adapters=LoadedAdapters((lambda _: draw_adapter(model.parts)) if has_adapters else _refuse_adapters),
        info=info,
        limits=RowLimits(shape.max_length, BLOCK_SIZE, shape.vocab_size),
        max_rows=max_rows,
        can_capture=True,
        group=ProcessGroup(0, 1, device=target.device),
        has_drafts=has_drafts,
        has_adapters=has_adapters,
    )
    return make_device_runner(parts, kernels, stream, memory_left=lambda: 1 << 40)


def capture(target: Target, runner: DeviceModelRunner, sizes: Sequence[int], about: str) -> bool:
    """Capture steps, and record whether that succeeds, with the reason if not."""
    runner.graphs.capture([GraphSize(size) for size in sizes])
    refusal = runner.graphs.refusal
    target.recorder.check(f"{about} are captured", refusal is None, refusal or "")
    return refusal is None


def count_steps(target: Target) -> tuple[int, int]:
    """Return the number of steps of a measurement, and of warm-up steps."""
    return (REHEARSED_STEPS, REHEARSED_WARM_STEPS) if target.is_rehearsal else (STEPS, WARM_STEPS)


def choose_kernels(target: Target) -> Implementations:
    """Use reference kernels in a rehearsal: a step in Triton's interpreter takes a second."""
    return Implementations.plain() if target.is_rehearsal else load_kernels(target)


def make_stream(target: Target) -> DeviceStream:
    if target.is_rehearsal:
        from tests.support.cuda.late_device import LateDevice

        return LateDevice()
    from tgis.shard.runner.device.cuda_stream import CudaStream

    return CudaStream(target.device)


def run_steps(
    runner: DeviceModelRunner, rows: Rows, count: int, max_pending: int | None = None
) -> list[bytes]:
    """Decode with as many steps launched ahead as the runner allows, or fewer. Return the tokens of each
    step."""
    pending, tokens = deque[Pending](), list[bytes]()
    for _ in range(count):
        if len(pending) == (max_pending or runner.max_pending):
            tokens.append(pending.popleft().answer().token_ids)
        pending.append(runner.launch(rows.decode()))
    return tokens + [step.answer().token_ids for step in pending]


def _refuse_grammars() -> None:
    raise ValueError("there is no tokenizer")


def _refuse_adapters(digest: str) -> None:
    raise ValueError(f"there is no adapter {digest}")
