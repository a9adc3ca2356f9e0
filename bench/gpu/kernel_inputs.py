"""Random inputs of kernels in the sizes of well-known models."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from bench.gpu.scenes import Scene, draw_queries, draw_scene
from bench.gpu.target import Target
from bench.shapes import Shape
from tgis.shard.attention.interface import Heads, Scoring
from tgis.shard.kernels.cuda.attend_tiles import tile_tokens
from tgis.shard.kernels.cuda.attention import Tile, cut_tiles
from tgis.shard.kernels.cuda.check.inputs import Input
from tgis.shard.kernels.cuda.step_state import Segments, count_segments
from tgis.shard.layers.ops import HeadNorm

DTYPES = torch.bfloat16, torch.float16, torch.float32
# Numbers of query heads, of heads of keys and values, and channels of a head.
HEADS = ((32, 8, 128), (9, 3, 64), (32, 32, 80), (16, 8, 256), (28, 4, 128), (48, 1, 128), (32, 32, 96))
LENGTHS = (1, 255, 256, 257, 640, 4097, 0, 9000)
SMALL_HEADS, SMALL_LENGTHS = ((4, 2, 16),), (1, 40, 257, 0)
WINDOW = 512


class Case(NamedTuple):
    kernel: str
    label: str
    input: Input
    dtype: torch.dtype


def draw_cases(target: Target) -> Iterator[Case]:
    """Yield fresh random inputs, one after the other, because together they do not fit into memory."""
    for dtype in DTYPES:
        yield from _draw_rows(target, dtype)
        for heads in SMALL_HEADS if target.is_rehearsal else HEADS:
            yield from _draw_attention(target, dtype, heads)


def _draw_rows(target: Target, dtype: torch.dtype) -> Iterator[Case]:
    num_tokens, device = 7 if target.is_rehearsal else 513, target.device
    for size in (320,) if target.is_rehearsal else (576, 4096, 14336):
        x = torch.randn(num_tokens, size, device=device)
        delta = torch.randn(num_tokens, size, device=device).to(dtype)
        weight, bias = torch.randn(2, size, device=device).unbind()
        for is_centred in (False, True):
            given = (x, delta, weight, bias if is_centred else None, 1e-5, is_centred, dtype)
            yield Case("norm", f"{size}", Input(given, results=(0,)), dtype)
        gated = torch.randn(num_tokens, 2 * size, device=device).to(dtype)
        for name in ("silu", "gelu", "gelu_tanh"):
            yield Case("gate", f"{name} {size}", Input((gated, name, True)), dtype)


def _draw_attention(target: Target, dtype: torch.dtype, heads: tuple[int, int, int]) -> Iterator[Case]:
    num_heads, num_kv_heads, head_dim = heads
    shape = Shape(1, 64, num_heads, num_kv_heads, head_dim, 64, 64)
    lengths = SMALL_LENGTHS if target.is_rehearsal else LENGTHS
    scene = draw_scene(target, shape, len(lengths), max(lengths), dtype)
    label = f"{num_heads}/{num_kv_heads} x {head_dim}"
    for scoring in (scene.scoring, Scoring(scale=0.1, window=WINDOW, soft_cap=30.0)):
        about = f"{label}{' window' if scoring.window else ''}"
        yield Case("attend_segments", about, _draw_segments(scene, lengths, scoring), dtype)
        yield Case("attend_tiles", about, _draw_tiles(scene, scoring), dtype)
    yield Case("turn_and_keep", label, _draw_turn(scene, head_norm=num_heads == 16), dtype)


def _draw_segments(scene: Scene, lengths: tuple[int, ...], scoring: Scoring) -> Input:
    device = scene.keys.device
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=device)
    starts[1:] = count_segments(seq_lens).cumsum(0)
    segments = Segments(torch.arange(len(lengths), dtype=torch.int32, device=device), seq_lens, starts)
    where = scene.keys, scene.values, scene.block_tables
    return Input((draw_queries(scene, len(lengths)), *where, segments, scene.length, scoring))


def _draw_tiles(scene: Scene, scoring: Scoring) -> Input:
    """Draw the end of one sequence, a whole short one, and one token."""
    most, longest = tile_tokens(scene.shape.num_heads // scene.shape.num_kv_heads), scene.length
    count = min(200, longest - 1)
    spans = [
        Tile(0, 0, count, longest - count, longest),
        Tile(1, count, 33, 0, 33),
        Tile(2, count + 33, 1, 9, 10),
    ]
    tiles = torch.tensor(list(cut_tiles(spans, most)), dtype=torch.int32, device=scene.keys.device)
    q = draw_queries(scene, count + 34)
    out = torch.full_like(q, torch.nan)
    where = scene.keys, scene.values, scene.block_tables
    return Input((q, *where, tiles, longest, scoring, out), results=(7,))


def _draw_turn(scene: Scene, head_norm: bool) -> Input:
    shape, device, num_tokens = scene.shape, scene.keys.device, 67
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    qkv = torch.randn(num_tokens, width, device=device).to(scene.keys.dtype)
    angles = torch.randn(2, num_tokens, shape.head_dim // 2, device=device)
    weights = torch.randn(2, shape.head_dim, device=device).unbind()
    norm = HeadNorm(*weights, 1e-6) if head_norm else None
    slots = torch.randperm(scene.keys.shape[0] * scene.keys.shape[2], device=device)[:num_tokens]
    heads = Heads(shape.num_heads, shape.num_kv_heads, norm)
    return Input((qkv, heads, angles, scene.keys, scene.values, slots), results=(3, 4))
