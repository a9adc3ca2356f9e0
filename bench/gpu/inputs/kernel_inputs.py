"""Creates random inputs of kernels in the sizes of models, and in caches of more than 2^32 elements."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from bench.gpu.inputs.scenes import Scene, draw_queries, draw_scene
from bench.gpu.target import Target
from bench.shapes import Shape
from tgis.shard.attention.interface import Heads, Scoring
from tgis.shard.kernels.cuda.attend_tiles import tile_tokens
from tgis.shard.kernels.cuda.attention import QueryTile, cut_tiles
from tgis.shard.kernels.cuda.check.code_inputs import LAYOUTS, draw_packed
from tgis.shard.kernels.cuda.check.inputs import INPUTS, SMALL, ExpertSizes, Input, KernelSizes, draw_rows
from tgis.shard.kernels.cuda.grouped.expert_table import FEW_ROWS, MANY_ROWS
from tgis.shard.kernels.cuda.grouped.slots import TILE
from tgis.shard.kernels.cuda.implementations import STATE_KERNELS
from tgis.shard.kernels.cuda.step_state import (
    MAX_TOPS,
    DetailQuestions,
    DeviceDetails,
    Flag,
    Segments,
    StagedStep,
    StepTensors,
    count_segments,
)
from tgis.shard.layers.ops import HeadNorm
from tgis.shard.memory.state_cache import StateSizes


class Group(NamedTuple):
    """Models whose sizes are used."""

    heads: tuple[tuple[int, int, int], ...]  # query heads, key heads, and channels of a head
    sizes: tuple[tuple[int, int], ...]  # hidden and feed-forward size
    vocab_sizes: tuple[int, ...]
    states: tuple[StateSizes, ...] = ()  # of recurrent layers


GROUPS = {
    "models": Group(
        ((32, 8, 128), (16, 8, 128)),
        ((4096, 14336), (1024, 3072)),
        (128256, 151936),
        (StateSizes(48, 64, 1, 128, 4), StateSizes(32, 128, 16, 128, 4)),
    ),
    "others": Group(
        ((9, 3, 64), (32, 32, 80), (16, 8, 256), (28, 4, 128), (48, 1, 128), (32, 32, 96)),
        ((576, 1536),),
        (50257,),
        (StateSizes(24, 128, 1, 256, 4), StateSizes(4, 80, 2, 40, 4)),
    ),
}
REHEARSED = Group(((4, 2, 16),), ((320, 320),), (512,))
LENGTHS, SMALL_LENGTHS = (1, 255, 256, 257, 640, 4097, 0, 9000), (1, 40, 257, 0)
WINDOW, NUM_ROWS = 512, 256
FAR_ELEMENTS = (1 << 31) + (1 << 26)


class KernelInput(NamedTuple):
    kernel: str
    label: str
    input: Input
    dtype: torch.dtype


def draw_inputs(target: Target, kernel: str, dtype: torch.dtype, group: str) -> Iterator[KernelInput]:
    """Yield new random inputs, one after the other, because together they do not fit into memory."""
    shapes = REHEARSED if target.is_rehearsal else GROUPS[group]
    for label, given in _DRAWS[kernel](target, dtype, shapes):
        yield KernelInput(kernel, label, given, dtype)


Drawn = Iterator[tuple[str, Input]]


def _draw_norms(target: Target, dtype: torch.dtype, group: Group) -> Drawn:
    num_tokens, device = 7 if target.is_rehearsal else 513, target.device
    for size, _ in group.sizes:
        x = torch.randn(num_tokens, size, device=device)
        delta = torch.randn(num_tokens, size, device=device).to(dtype)
        weight, bias = torch.randn(2, size, device=device).unbind()
        for is_centred in (False, True):
            given = (x, delta, weight, bias if is_centred else None, 1e-5, is_centred, dtype)
            yield f"{size}", Input(given, results=(0,))


def _draw_gates(target: Target, dtype: torch.dtype, group: Group) -> Drawn:
    num_tokens = 7 if target.is_rehearsal else 513
    for _, size in group.sizes:
        gated = torch.randn(num_tokens, 2 * size, device=target.device).to(dtype)
        for name in ("silu", "gelu", "gelu_tanh"):
            yield f"{name} {size}", Input((gated, name, True))


def _draw_scenes(target: Target, dtype: torch.dtype, group: Group) -> Iterator[tuple[str, Scene]]:
    lengths = SMALL_LENGTHS if target.is_rehearsal else LENGTHS
    for num_heads, num_kv_heads, head_dim in group.heads:
        shape = Shape(1, 64, num_heads, num_kv_heads, head_dim, 64, 64)
        for cache_type in (None, torch.float8_e4m3fn):
            label = f"{num_heads}/{num_kv_heads} x {head_dim}" + (" fp8" if cache_type else "")
            yield label, draw_scene(target, shape, len(lengths), max(lengths), dtype, cache_type)


def _scorings(scene: Scene) -> Iterator[tuple[str, Scoring]]:
    yield "", scene.scoring
    yield " window", Scoring(scale=0.1, window=WINDOW, soft_cap=30.0)


def _draw_all_segments(target: Target, dtype: torch.dtype, group: Group) -> Drawn:
    lengths = SMALL_LENGTHS if target.is_rehearsal else LENGTHS
    for label, scene in _draw_scenes(target, dtype, group):
        for about, scoring in _scorings(scene):
            yield label + about, _draw_segments(scene, lengths, scoring)


def _draw_all_tiles(target: Target, dtype: torch.dtype, group: Group) -> Drawn:
    for label, scene in _draw_scenes(target, dtype, group):
        for about, scoring in _scorings(scene):
            yield label + about, _draw_tiles(scene, scoring)


def _draw_turns(target: Target, dtype: torch.dtype, group: Group) -> Drawn:
    for label, scene in _draw_scenes(target, dtype, group):
        yield label, _draw_turn(scene, head_norm=scene.shape.num_heads == 16)


def _draw_segments(scene: Scene, lengths: tuple[int, ...], scoring: Scoring) -> Input:
    device = scene.keys.device
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=device)
    starts[1:] = count_segments(seq_lens).cumsum(0)
    segments = Segments(torch.arange(len(lengths), dtype=torch.int32, device=device), seq_lens, starts)
    where = scene.keys, scene.values, scene.block_tables
    return Input((draw_queries(scene, len(lengths)), *where, segments, scene.length, scoring))


def _draw_tiles(scene: Scene, scoring: Scoring) -> Input:
    """Create the end of one sequence, a whole short one, and one token."""
    max_tokens, longest = tile_tokens(scene.shape.num_heads // scene.shape.num_kv_heads), scene.length
    count = min(200, longest - 1)
    spans = [
        QueryTile(0, 0, count, longest - count, longest),
        QueryTile(1, count, 33, 0, 33),
        QueryTile(2, count + 33, 1, 9, 10),
    ]
    tiles = torch.tensor(list(cut_tiles(spans, max_tokens)), dtype=torch.int32, device=scene.keys.device)
    q = draw_queries(scene, count + 34)
    out = torch.full_like(q, torch.nan)
    where = scene.keys, scene.values, scene.block_tables
    return Input((q, *where, tiles, longest, scoring, out), results=(7,))


def _draw_turn(scene: Scene, head_norm: bool) -> Input:
    shape, device, num_tokens = scene.shape, scene.keys.device, 67
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    qkv = torch.randn(num_tokens, width, device=device).to(scene.dtype)
    angles = torch.randn(2, num_tokens, shape.head_dim // 2, device=device)
    weights = torch.randn(2, shape.head_dim, device=device).unbind()
    norm = HeadNorm(*weights, 1e-6) if head_norm else None
    slots = torch.randperm(scene.keys.shape[0] * scene.keys.shape[2], device=device)[:num_tokens]
    heads = Heads(shape.num_heads, shape.num_kv_heads, norm)
    return Input((qkv, heads, angles, scene.keys, scene.values, slots), results=(3, 4))


def _draw_steps(target: Target, dtype: torch.dtype, group: Group) -> Drawn:
    """Create a step of single tokens, with as many rows as the largest batch."""
    num_rows = 7 if target.is_rehearsal else NUM_ROWS
    device = target.device
    rows = draw_rows(device, group.vocab_sizes[0], num_rows)
    staged = _stage_rows(torch.randperm(num_rows, dtype=torch.int32).to(device))
    out = StepTensors.empty(num_rows, num_rows, num_rows, device)
    for tensor in out:
        tensor.fill_(1)
    yield f"{num_rows} rows", Input((staged, rows, out), results=(1, 2))


def _draw_accepted(target: Target, dtype: torch.dtype, group: Group) -> Drawn:
    """Create a step of as many tokens as the largest batch, in which rows have up to three drafts. Half of
    the drafts are accepted."""
    num_tokens = 7 if target.is_rehearsal else NUM_ROWS
    device = target.device
    numbers = torch.arange(num_tokens, dtype=torch.int32, device=device)
    staged = _stage_rows(numbers // 4)._replace(token_ids=numbers % 5)
    tokens = torch.randint(2, (num_tokens,), device=device) + numbers % 5 + 1
    answers = torch.stack([tokens, (numbers % 4 == 0) * int(Flag.SAMPLED)], 1).int()
    next_rows = torch.full_like(numbers, -1)
    rows = draw_rows(device, group.vocab_sizes[0], num_tokens)
    yield f"{num_tokens} tokens", Input((staged, rows, answers, next_rows), results=(3,))


def _stage_rows(order: Tensor) -> StagedStep:
    """Return a step of one token of each of these rows, int32 [n]; each token is sampled."""
    device = order.device
    numbers = torch.arange(len(order), dtype=torch.int32, device=device)
    none = torch.empty(0, 5, dtype=torch.int32, device=device)
    return StagedStep(
        seq_rows=order,
        seq_ends=torch.full_like(order, 101),
        token_rows=order,
        token_ids=torch.full_like(order, -1),
        positions=torch.full_like(order, 100),
        slots=numbers,
        new_blocks=torch.stack([order, torch.full_like(order, 6), numbers % 60], 1).contiguous(),
        tiles=none,
        cross_tiles=none,
        sampled_rows=order,
        sampled_x=numbers,
    )


def _draw_samples(target: Target, dtype: torch.dtype, group: Group) -> Drawn:
    num_rows, device = 7 if target.is_rehearsal else NUM_ROWS, target.device
    for vocab_size in group.vocab_sizes:
        rows = draw_rows(device, vocab_size, num_rows)
        logits = 3 * torch.randn(num_rows, vocab_size, device=device)
        order = torch.randperm(num_rows, dtype=torch.int32).to(device)
        answers = torch.full((num_rows, 2), -1, dtype=torch.int32, device=device)
        given = Input((logits, rows, order, answers), results=(1, 3), overwritten=0)
        yield f"{num_rows} x {vocab_size}", given


def _draw_questions(target: Target, dtype: torch.dtype, group: Group) -> Drawn:
    num_tokens, device = 7 if target.is_rehearsal else NUM_ROWS, target.device
    for vocab_size in group.vocab_sizes:
        for about in ("", " with ties"):
            scores = 3 * torch.randn(num_tokens, vocab_size, device=device)
            numbers = torch.arange(num_tokens, dtype=torch.int32, device=device)
            queries = torch.stack([numbers, numbers % 21, (numbers % 9 > 0).int()], 1).contiguous()
            details = DeviceDetails.empty(num_tokens, MAX_TOPS, device)
            for tensor in details:
                tensor.zero_()
            questions = DetailQuestions(scores.round() if about else scores, queries)
            yield f"{num_tokens} x {vocab_size}{about}", Input((questions, details), results=(1,))


def _draw_states(kernel: str, target: Target, dtype: torch.dtype, group: Group) -> Drawn:
    for sizes in (SMALL.states,) if target.is_rehearsal else group.states:
        given = KernelSizes(states=sizes)
        for number, each in enumerate(INPUTS[kernel](target.device, dtype, given)):
            yield f"{sizes} {number}", each


def _draw_groups(target: Target, dtype: torch.dtype, group: Group) -> Drawn:
    num_rows = 70 if target.is_rehearsal else 8192
    for num_groups, tile in ((NUM_ROWS, TILE), (128, FEW_ROWS), (128, MANY_ROWS)):
        groups = torch.randint(-1, num_groups, (num_rows,), dtype=torch.int32).to(target.device)
        yield f"{num_rows} rows of {num_groups} groups", Input((groups, num_groups, tile))


def _draw_low_ranks(target: Target, dtype: torch.dtype, group: Group) -> Drawn:
    for number, each in enumerate(INPUTS["add_low_rank"](target.device, dtype)):
        yield f"input {number}", each


def _draw_experts(target: Target, dtype: torch.dtype, group: Group) -> Drawn:
    for width, size in group.sizes:
        sizes = KernelSizes(experts=ExpertSizes(width, size // 4))
        for number, each in enumerate(INPUTS["mix_experts"](target.device, dtype, sizes)):
            yield f"{width} {number}", each


def _draw_few_products(target: Target, dtype: torch.dtype, group: Group) -> Drawn:
    """Create matrices with tails of outputs, in parts and whole, and their parts."""
    for size, ffn_size in group.sizes:
        for num_rows in (3,) if target.is_rehearsal else (1, 7, 16):
            weight = torch.randn(200, ffn_size, device=target.device) / ffn_size**0.5
            x = torch.randn(num_rows, ffn_size, device=target.device).to(dtype)
            bias = torch.randn(200, device=target.device).to(dtype)
            for keeps_parts in (False, True):
                about = f"{ffn_size}, {num_rows} rows{', parts' * keeps_parts}"
                yield about, Input((x, weight.to(dtype), None if keeps_parts else bias, dtype, keeps_parts))
        if not target.is_rehearsal:
            whole = (torch.randn(8 * size, size, device=target.device) / size**0.5).to(dtype)
            yield f"{size}, whole", Input((x[:, :size].contiguous(), whole, None, torch.float32))


def _draw_parts(target: Target, dtype: torch.dtype, group: Group) -> Drawn:
    for size, _ in group.sizes:
        parts, bias = torch.randn(8, 16, size, device=target.device), torch.randn(size, device=target.device)
        yield str(size), Input((parts, bias.to(dtype), dtype))


def _draw_products(target: Target, dtype: torch.dtype, group: Group) -> Drawn:
    """Create matrices with tails of panels and tiles, of all layouts that the check at start has."""
    num_rows = 3 if target.is_rehearsal else 100
    for size, _ in group.sizes:
        for number, layout in enumerate(LAYOUTS):
            weight = draw_packed(layout, size, 200).to(target.device)
            bias = torch.randn(200, device=target.device).to(dtype)
            x = torch.randn(num_rows, size, device=target.device).to(dtype)
            yield f"layout {number}, {size}", Input((x, weight, bias, dtype))


def _draw_widenings(target: Target, dtype: torch.dtype, group: Group) -> Drawn:
    for size, _ in group.sizes:
        for number, layout in enumerate(LAYOUTS):
            yield f"layout {number}, {size}", Input((draw_packed(layout, size, 200).to(target.device), dtype))


_DRAWS: dict[str, Callable[[Target, torch.dtype, Group], Drawn]] = {
    "begin_step": _draw_steps,
    "norm": _draw_norms,
    "turn_and_keep": _draw_turns,
    "attend_segments": _draw_all_segments,
    "attend_tiles": _draw_all_tiles,
    "gate": _draw_gates,
    "sample": _draw_samples,
    "describe": _draw_questions,
    "multiply_few": _draw_few_products,
    "add_parts": _draw_parts,
    "multiply_codes": _draw_products,
    "widen_codes": _draw_widenings,
    "accept_drafts": _draw_accepted,
    **{kernel: partial(_draw_states, kernel) for kernel in sorted(STATE_KERNELS)},
    "group_rows": _draw_groups,
    "add_low_rank": _draw_low_ranks,
    "mix_experts": _draw_experts,
}


def draw_far_inputs(target: Target, kernel: str) -> Iterator[tuple[str, Input, Input]]:
    """Yield inputs with a small cache, and the same with the blocks at the end of a large one."""
    sizes = KernelSizes(32, 8, 128)
    inputs = INPUTS[kernel](target.device, torch.bfloat16, sizes)
    for number, near in enumerate(inputs):
        keys_at = next(i for i, x in enumerate(near.args) if isinstance(x, Tensor) and x.dim() == 4)
        num_blocks, *block = near.args[keys_at].shape
        num_elements = near.args[keys_at].numel()
        total = 4 * num_blocks if target.is_rehearsal else FAR_ELEMENTS * num_blocks // num_elements
        shift, args = total - num_blocks, list(near.args)
        for at in (keys_at, keys_at + 1):
            pages = torch.zeros(total, *block, dtype=torch.bfloat16, device=target.device)
            pages[shift:] = near.args[at]
            args[at] = pages
        if kernel == "turn_and_keep":
            args[keys_at + 2] = args[keys_at + 2] + shift * block[1]
        else:
            args[keys_at + 2] = args[keys_at + 2] + shift
        yield f"input {number}", near, near._replace(args=tuple(args))
