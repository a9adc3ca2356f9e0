"""Random inputs of a few tokens for all kernels, by the type of weights and the sizes of a model."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tgis.shard.attention.interface import Heads, Scoring
from tgis.shard.checkpoint.codes import CodeLayout
from tgis.shard.kernels.cuda.attend_tiles import tile_tokens
from tgis.shard.kernels.cuda.attention import QueryTile, cut_tiles
from tgis.shard.kernels.cuda.check.code_inputs import LAYOUTS, draw_packed
from tgis.shard.kernels.cuda.few_rows import multiply_few
from tgis.shard.kernels.cuda.functions.float8 import FLOAT8_TYPES
from tgis.shard.kernels.cuda.grouped.expert_table import (
    FEW_ROWS,
    MANY_ROWS,
    ExpertMatrices,
    ExpertTable,
)
from tgis.shard.kernels.cuda.grouped.group_rows import RowTiles
from tgis.shard.kernels.cuda.grouped.slots import TILE, AdapterSlots, TermBounds
from tgis.shard.kernels.cuda.states.chunks import Spans, StateMemory
from tgis.shard.kernels.cuda.states.keep_inputs import HeadInputs
from tgis.shard.kernels.cuda.step_state import (
    MAX_BIASES,
    MAX_STOP_IDS,
    MAX_TOPS,
    OFF_WORDS,
    STATE_CHUNK,
    DetailQuestions,
    DeviceDetails,
    Flag,
    Query,
    RowState,
    Segments,
    StagedStep,
    StepTensors,
    Wanted,
    Word,
    count_segments,
)
from tgis.shard.layers.lora import Adapter, LowRank
from tgis.shard.layers.ops import Activation, HeadNorm
from tgis.shard.layers.states import DeltaNet, Mamba2
from tgis.shard.memory.kv_cache import UNSCALED, CacheScale
from tgis.shard.memory.state_cache import StateSizes

BLOCK_SIZE, NUM_BLOCKS = 16, 64
NUM_ROWS, MAX_BLOCKS = 6, 40
DUMMY_SLOT = (NUM_BLOCKS - 1) * BLOCK_SIZE


class ExpertSizes(NamedTuple):
    """Sizes of an expert, or of a rank's share of it."""

    width: int  # of its input and output
    size: int  # of what is activated


@dataclass(frozen=True)
class KernelSizes:
    """Sizes of a model, of a rank's share of it, or of a speculator, for which kernels are compiled."""

    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    hidden_size: int = 320
    ffn_size: int = 320
    vocab_size: int = 5000
    states: StateSizes | None = None  # of recurrent layers, if there are any
    experts: ExpertSizes | None = None
    codes: tuple[CodeLayout, ...] = ()  # layouts of weights, if they are kept as codes
    cache_types: tuple[torch.dtype | None, ...] = (None,)  # of keys and values; None: type of weights
    owner: str = field(default="the model's", compare=False)  # for messages

    @property
    def small(self) -> "KernelSizes":
        """Small sizes with the same kinds of layers and weights."""
        return replace(
            SMALL,
            states=self.states and SMALL.states,
            experts=self.experts and SMALL.experts,
            codes=self.codes,
            cache_types=self.cache_types,
        )


SMALL = KernelSizes(
    states=StateSizes(4, 24, 2, 20, 4),
    experts=ExpertSizes(72, 40),
    codes=LAYOUTS,
    cache_types=(None, *FLOAT8_TYPES),
)


class Input(NamedTuple):
    """Arguments of one launch. `run` copies those that a launch changes, so that it can be repeated."""

    args: tuple[Any, ...]
    results: tuple[int, ...] = ()  # indices of arguments that are results
    overwritten: int | None = None  # index of an argument that is undefined afterwards

    def run(self, kernel: Callable[..., Any]) -> list[Tensor]:
        """Return the results, returned and written, of a kernel or its twin."""
        changed = {*self.results, self.overwritten}
        args = [_copy(arg) if i in changed else arg for i, arg in enumerate(self.args)]
        returned = kernel(*args)
        results = [] if returned is None else _list_tensors(returned)
        return results + [tensor for i in self.results for tensor in _list_tensors(args[i])]


class Draw:
    """Random numbers that are the same on every device."""

    def __init__(self, device: torch.device):
        self.device = device
        self._generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(self.device, dtype)

    def permutation(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._generator, dtype=torch.int32).to(self.device)

    def integers(self, values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self.device)


def _norms(device: torch.device, dtype: torch.dtype, sizes: KernelSizes = SMALL) -> Iterator[Input]:
    draw = Draw(device)
    size = sizes.hidden_size
    x = draw.normal(3, size)
    delta = draw.normal(3, size, dtype=dtype)
    weight, bias = draw.normal(size), draw.normal(size)
    yield Input((x, delta, weight, None, 1e-5, False, dtype), results=(0,))
    yield Input((x, delta, weight, bias, 1e-5, True, dtype), results=(0,))
    yield Input((x, None, weight, None, 1e-5, False, torch.float32), results=(0,))
    parts = draw.normal(4, 3, size)
    of_branch = torch.float32 if dtype == torch.float16 else dtype
    yield Input((x, parts, weight, None, 1e-5, False, dtype, of_branch), results=(0,))


def _gates(device: torch.device, dtype: torch.dtype, sizes: KernelSizes = SMALL) -> Iterator[Input]:
    x = 3 * Draw(device).normal(3, 2 * sizes.ffn_size, dtype=dtype)
    for name, is_gated in (("silu", True), ("gelu_tanh", True), ("gelu", False), ("relu", False)):
        yield Input((x, name, is_gated))
    yield Input((x, "quick_gelu", False))
    yield Input((3 * x, "clamped_swiglu", True))


def _turns(device: torch.device, dtype: torch.dtype, sizes: KernelSizes = SMALL) -> Iterator[Input]:
    draw = Draw(device)
    num_tokens = 5
    width = sizes.num_heads + 2 * sizes.num_kv_heads
    head_dim = sizes.head_dim
    qkv = draw.normal(num_tokens, width * head_dim, dtype=dtype)
    angles = draw.normal(2, num_tokens, head_dim // 2)
    norm = HeadNorm(draw.normal(head_dim), draw.normal(head_dim), 1e-6)
    pages = _draw_pages(draw, dtype, sizes)
    slots = draw.permutation(DUMMY_SLOT)[:num_tokens].long()
    for cache_type, head_norm in itertools.product(sizes.cache_types, (None, norm)):
        heads = Heads(sizes.num_heads, sizes.num_kv_heads, head_norm)
        kept = (page.to(cache_type or dtype) for page in pages)
        scale = _find_scale(cache_type)
        yield Input((qkv, heads, angles, *kept, slots, scale), results=(3, 4))


# The scoring of most models, and one with all options.
def _scorings(draw: Draw, sizes: KernelSizes) -> list[Scoring]:
    slopes = -draw.normal(sizes.num_heads).abs() / 8
    bias = draw.normal(sizes.num_heads, 41)
    scale = sizes.head_dim**-0.5
    sinks = draw.normal(sizes.num_heads)
    changed = Scoring(scale=1.6 * scale, window=100, soft_cap=5.0, slopes=slopes, bias=bias, sinks=sinks)
    return [Scoring(scale=scale), changed]


def _draw_pages(draw: Draw, dtype: torch.dtype, sizes: KernelSizes) -> tuple[Tensor, ...]:
    size = 2, NUM_BLOCKS, sizes.num_kv_heads, BLOCK_SIZE, sizes.head_dim
    return draw.normal(*size, dtype=dtype).unbind()


def _find_scale(cache_type: torch.dtype | None) -> CacheScale:
    return UNSCALED if cache_type is None else CacheScale(0.5, 2.0)


class _DrawnCache(NamedTuple):
    pages: tuple[Tensor, ...]  # keys, values, and block tables of 3 rows that share no blocks
    scale: CacheScale


def _draw_caches(draw: Draw, dtype: torch.dtype, sizes: KernelSizes) -> list[_DrawnCache]:
    """Return the same keys and values for each type of the cache."""
    pages = _draw_pages(draw, dtype, sizes)
    tables = draw.permutation(NUM_BLOCKS - 1).view(3, -1)
    return [
        _DrawnCache((*(page.to(each or dtype) for page in pages), tables), _find_scale(each))
        for each in sizes.cache_types
    ]


def _segments(device: torch.device, dtype: torch.dtype, sizes: KernelSizes = SMALL) -> Iterator[Input]:
    draw = Draw(device)
    q = draw.normal(4, sizes.num_heads, sizes.head_dim, dtype=dtype)
    caches = _draw_caches(draw, dtype, sizes)
    seq_lens = draw.integers([1, 300, 0, 17])
    starts = torch.zeros_like(draw.integers([0] * 5))
    starts[1:] = count_segments(seq_lens).cumsum(0)
    segments = Segments(draw.integers([2, 0, 1, 1]), seq_lens, starts)
    for cache, scoring in itertools.product(caches, _scorings(draw, sizes)):
        yield Input((q, *cache.pages, segments, 320, scoring, cache.scale))


def _tiles(device: torch.device, dtype: torch.dtype, sizes: KernelSizes = SMALL) -> Iterator[Input]:
    draw = Draw(device)
    q = draw.normal(39, sizes.num_heads, sizes.head_dim, dtype=dtype)
    caches = _draw_caches(draw, dtype, sizes)
    spans = QueryTile(2, 1, 37, 40, 77), QueryTile(0, 38, 1, 300, 301)
    cut = cut_tiles(spans, tile_tokens(sizes.num_heads // sizes.num_kv_heads))
    tiles = draw.integers([*cut, QueryTile(1, 0, 0, 0, 0)])
    for cache, scoring in itertools.product(caches, _scorings(draw, sizes)):
        args = q, *cache.pages, tiles, 320, scoring, torch.ones_like(q), cache.scale
        yield Input(args, results=(7,))


def _steps(device: torch.device, dtype: torch.dtype, sizes: KernelSizes = SMALL) -> Iterator[Input]:
    """Yield a step with two single tokens, the second in an ended row, and two tokens of another sequence."""
    draw = Draw(device)
    rows = draw_rows(device, sizes.vocab_size)
    staged = StagedStep(
        seq_rows=draw.integers([1, 4, 2]),
        seq_ends=draw.integers([300, 9, 40]),
        token_rows=draw.integers([1, 4, 2, 2]),
        token_ids=draw.integers([-1, -1, 7, 8]),
        positions=draw.integers([299, 8, 38, 39]),
        slots=draw.integers([30, 40, 50, 51]),
        new_blocks=draw.integers([[1, 18, 5], [2, 2, 6], [NUM_ROWS, 0, NUM_BLOCKS - 1]]),
        tiles=draw.integers([[2, 2, 2, 38, 40]]),
        cross_tiles=draw.integers([[2, 2, 2, 0, 5]]),
        sampled_rows=draw.integers([1, 4, 2]),
        sampled_x=draw.integers([0, 1, 3]),
    )
    out = StepTensors.empty(4, 3, 2, device)
    for tensor in out:
        tensor.fill_(1)
    yield Input((staged, rows, out), results=(1, 2))


def _samples(device: torch.device, dtype: torch.dtype, sizes: KernelSizes = SMALL) -> Iterator[Input]:
    draw = Draw(device)
    rows = draw_rows(device, sizes.vocab_size)
    logits = 3 * draw.normal(NUM_ROWS, sizes.vocab_size)
    logits[5, 7] = torch.nan
    sampled = draw.integers([3, 1, NUM_ROWS, 0, 4, 2])
    answers = draw.integers([[-1, -1]] * NUM_ROWS)
    yield Input((logits, rows, sampled, answers), results=(1, 3), overwritten=0)
    logits = 3 * draw.normal(NUM_ROWS - 1, sizes.vocab_size)
    asked = DetailQuestions(torch.zeros_like(logits), draw.integers([[0] * len(Query)] * len(logits)))
    answers = draw.integers([[-1, -1]] * len(logits))
    yield Input((logits, rows, sampled[:-1], answers, asked), results=(1, 3, 4), overwritten=0)
    filtered = 3 * draw.normal(2, sizes.vocab_size), rows, draw.integers([5, 2])
    yield Input((*filtered, draw.integers([[-1, -1]] * 2)), results=(1, 3), overwritten=0)


def _questions(device: torch.device, dtype: torch.dtype, sizes: KernelSizes = SMALL) -> Iterator[Input]:
    """Yield questions of which one is not asked, about scores with ties and excluded tokens."""
    draw = Draw(device)
    count = 4
    scores = 3 * draw.normal(count, sizes.vocab_size)
    scores[1] = scores[1].round()
    scores[2, 3:] = -torch.inf
    queries = draw.integers([[7, 10, 1], [9, 5, 1], [1, 4, 1], [0, 0, 0]])
    details = DeviceDetails.empty(count, MAX_TOPS, device)
    for tensor in details:
        tensor.zero_()
    yield Input((DetailQuestions(scores, queries), details), results=(1,))


def _accepted(device: torch.device, dtype: torch.dtype, sizes: KernelSizes = SMALL) -> Iterator[Input]:
    """Yield samples of four rows: after an accepted draft, after a wrong one, after an end, and of a single
    token and a prompt."""
    draw = Draw(device)
    token_rows = draw.integers([1, 1, 1, 2, 2, 3, 3, 0, 4, 4])
    staged = StagedStep(
        seq_rows=token_rows[:9],
        seq_ends=draw.integers([9] * 9),
        token_rows=token_rows,
        token_ids=draw.integers([-1, 7, 8, -1, 9, -1, 2, -1, 5, 6]),
        positions=draw.integers([8] * 10),
        slots=draw.integers([8] * 10),
        new_blocks=draw.integers([[NUM_ROWS, 0, NUM_BLOCKS - 1]]),
        tiles=draw.integers([[4, 8, 2, 8, 10]]),
        cross_tiles=draw.integers([[4, 8, 2, 0, 5]]),
        sampled_rows=draw.integers([1, NUM_ROWS, NUM_ROWS, 2, NUM_ROWS, 3, NUM_ROWS, 0, 4]),
        sampled_x=draw.integers([0, 1, 2, 3, 4, 5, 6, 7, 9]),
    )
    is_sampled = int(Flag.SAMPLED)
    has_ended = int(Flag.SAMPLED | Flag.ENDED)
    first = [7, is_sampled]
    none = [0, 0]
    alone = [[3, is_sampled], none, [2, has_ended], none, [6, is_sampled], [5, is_sampled]]
    for second in (none, [8, is_sampled]):
        answers = draw.integers([first, second, none, *alone])
        rows = draw_rows(device, sizes.vocab_size)
        yield Input((staged, rows, answers, torch.ones_like(answers[:, 0])), results=(3,))


# New tokens of four sequences: in their first and later chunks, at and around ends of chunks. One has none.
_COUNTS, _STARTS = (1, 37, 0, 16), (0, 27, 5, 15)
_HEADS_OF_OTHERS = 2


def _draw_memory(draw: Draw, sizes: StateSizes) -> StateMemory:
    num_slots = 6
    shape = num_slots, sizes.num_heads, sizes.head_dim // sizes.block, sizes.state_size, sizes.block
    return StateMemory(
        draw.normal(num_slots, sizes.kernel_size - 1, sizes.num_channels),
        draw.normal(*shape),
        draw.normal(num_slots, STATE_CHUNK, sizes.pending_width),
    )


def _draw_spans(draw: Draw) -> Spans:
    begins = [0, *itertools.accumulate(_COUNTS)]
    return Spans(draw.integers([4, 0, 2, 5]), draw.integers(begins), draw.integers(_STARTS))


def draw_mamba(draw: Draw, sizes: StateSizes) -> Mamba2:
    channels, heads = sizes.num_channels, sizes.num_heads
    kernel = draw.normal(sizes.kernel_size, channels)
    bias = draw.normal(channels)
    decay = -draw.normal(heads).abs()
    time_bias = draw.normal(heads)
    skip = draw.normal(heads)
    return Mamba2(sizes, kernel, bias, decay, time_bias, skip, draw.normal(sizes.width), 1e-5)


def draw_delta(draw: Draw, sizes: StateSizes) -> DeltaNet:
    channels, heads = sizes.num_channels, sizes.num_heads
    kernel = draw.normal(sizes.kernel_size, channels)
    bias = draw.normal(channels)
    decay = -draw.normal(heads).abs()
    time_bias = draw.normal(heads)
    weight = draw.normal(sizes.head_dim)
    return DeltaNet(sizes, 1, heads + _HEADS_OF_OTHERS, kernel, bias, decay, time_bias, weight, 1e-5)


def _convolutions(device: torch.device, dtype: torch.dtype, sizes: KernelSizes = SMALL) -> Iterator[Input]:
    if (states := sizes.states) is not None:
        draw = Draw(device)
        rows = draw.normal(sum(_COUNTS), states.width + states.num_channels, dtype=dtype)
        weights = draw.normal(states.kernel_size, states.num_channels), draw.normal(states.num_channels)
        yield Input((rows, states.width, *weights, _draw_memory(draw, states).windows, _draw_spans(draw)))


def _mamba_scans(device: torch.device, dtype: torch.dtype, sizes: KernelSizes = SMALL) -> Iterator[Input]:
    if (states := sizes.states) is not None:
        draw, num_tokens = Draw(device), sum(_COUNTS)
        width = states.width + states.num_channels + states.num_heads
        rows = draw.normal(num_tokens, width, dtype=dtype)
        channels = draw.normal(num_tokens, states.num_channels)
        memory = _draw_memory(draw, states)
        spans = _draw_spans(draw)
        yield Input((rows, channels, draw_mamba(draw, states), memory, spans), results=(3,))


def _delta_scans(device: torch.device, dtype: torch.dtype, sizes: KernelSizes = SMALL) -> Iterator[Input]:
    if (states := sizes.states) is not None:
        draw, num_tokens = Draw(device), sum(_COUNTS)
        mixer = draw_delta(draw, states)
        gates = draw.normal(num_tokens, 2 * mixer.total_heads)
        channels = draw.normal(num_tokens, states.num_channels)
        memory = _draw_memory(draw, states)
        spans = _draw_spans(draw)
        yield Input((gates, channels, mixer, memory, spans), results=(3,))


def _keeps(device: torch.device, dtype: torch.dtype, sizes: KernelSizes = SMALL) -> Iterator[Input]:
    if (states := sizes.states) is not None:
        draw = Draw(device)
        num_tokens = sum(_COUNTS)
        num_heads = states.num_heads
        rows = draw.normal(num_tokens, states.width + states.num_channels + num_heads, dtype=dtype)
        gates = draw.normal(num_tokens, 2 * (num_heads + _HEADS_OF_OTHERS))
        channels = draw.normal(num_tokens, states.num_channels)
        memory = _draw_memory(draw, states)
        spans = _draw_spans(draw)
        last = rows.shape[1] - num_heads
        for heads in (HeadInputs(rows, (last,), num_heads), HeadInputs(gates, (1, num_heads), num_heads)):
            yield Input((rows, states.width, channels, heads, memory, spans), results=(4,))


# Slots of a step's tokens; two tokens have no adapter, and the third of three slots has none.
_SLOTS = (1, -1, 0, 1, 1, 2, -1)
_SLOT_ORDER = (2, 0, 3, 4, 5, 0, 0)


def _groups(device: torch.device, dtype: torch.dtype, sizes: KernelSizes = SMALL) -> Iterator[Input]:
    draw = Draw(device)
    yield Input((draw.integers(_SLOTS), 3, TILE))
    yield Input((draw.integers(_SLOTS * 9), 4, 16))


def _low_ranks(device: torch.device, dtype: torch.dtype, sizes: KernelSizes = SMALL) -> Iterator[Input]:
    """Yield a product whose second half has an update of its own, and an embedding. The kernel needs the same
    resources at all sizes, and few services load adapters, so it is checked at small sizes only."""
    draw, num_tokens = Draw(device), len(_SLOTS)
    hidden_size, width = SMALL.hidden_size, SMALL.ffn_size
    tiles = draw.integers([[0, 0, 1], [1, 1, 3], [2, 4, 1], [0, 0, 0]])
    rows = RowTiles(draw.integers(_SLOT_ORDER), tiles), draw.integers(_SLOTS)
    terms = ((3, 0, width), (16, width, width)), ((20, width, width),), ()
    slots = _fill_slots(draw, hidden_size, terms, is_table=False)
    x, y = draw.normal(num_tokens, hidden_size, dtype=dtype), draw.normal(num_tokens, 2 * width, dtype=dtype)
    yield Input((y, x, slots.at("layer"), *rows, 20), results=(0,))
    ids = draw.integers(range(num_tokens), torch.int64)
    slots = _fill_slots(draw, num_tokens, (((3, 0, hidden_size),), (), ()), is_table=True)
    yield Input((draw.normal(num_tokens, hidden_size), ids, slots.at("layer"), *rows, 20), results=(0,))


def _fill_slots(
    draw: Draw, in_features: int, terms: Sequence[Sequence[tuple[int, int, int]]], is_table: bool
) -> AdapterSlots:
    """Return slots with an adapter each of one layer. `terms` has the rank, first column and width of its
    updates."""
    layers = {"layer": TermBounds(max(map(len, terms)), gcd(16, *itertools.chain(*itertools.chain(*terms))))}
    slots = AdapterSlots.allocate(layers, len(terms), draw.device)
    for slot, of_slot in enumerate(terms):
        parts = []
        for rank, first, width in of_slot:
            shape = (in_features, rank) if is_table else (rank, in_features)
            a = draw.normal(*shape) / in_features**0.5
            b = draw.normal(rank, width) / rank**0.5
            parts.append(LowRank(a if is_table else a.t(), b, first))
        adapter = slots.held[slot] = Adapter({"layer": tuple(parts)})
        words = torch.from_numpy(slots.describe(adapter)).to(draw.device)
        slots.memory[slot].copy_(words.view(torch.int64))
    return slots


def _mixes(device: torch.device, dtype: torch.dtype, sizes: KernelSizes = SMALL) -> Iterator[Input]:
    if (experts := sizes.experts) is None:
        return
    draw = Draw(device)
    num_tokens = 5
    x = draw.normal(num_tokens, experts.width)
    factors = draw.normal(num_tokens, 2).abs()
    chosen = draw.integers([[0, 2], [2, 0], [3, 2], [2, 3], [0, 3]], torch.int64)  # of four experts
    for name, is_gated, has_bias, tile in (
        ("silu", True, False, FEW_ROWS),
        ("silu", True, False, MANY_ROWS),
        ("relu2", False, True, FEW_ROWS),
    ):
        matrices = [_draw_expert(draw, experts, dtype, is_gated, has_bias) for _ in range(4)]
        table = ExpertTable.of(matrices, Activation(name, is_gated), 1.0, scales_input=has_bias)
        yield Input((x, factors, chosen, table, tile))


def _draw_expert(
    draw: Draw, sizes: ExpertSizes, dtype: torch.dtype, is_gated: bool, has_bias: bool
) -> ExpertMatrices:
    width, size = sizes
    up = draw.normal((1 + is_gated) * size, width) / width**0.5
    down = draw.normal(width, size) / size**0.5
    biases = [draw.normal(len(weight)) if has_bias else None for weight in (up, down)]
    return ExpertMatrices(up.to(dtype), biases[0], down.to(dtype), biases[1])


def _few_products(device: torch.device, dtype: torch.dtype, sizes: KernelSizes = SMALL) -> Iterator[Input]:
    """Yield products with and without parts of the columns, a bias and results of float32."""
    draw = Draw(device)
    num_outputs = multiply_few.OUTPUTS + 6
    for in_features in (sizes.hidden_size, max(sizes.ffn_size, 8 * multiply_few.TILE)):
        x = draw.normal(3, in_features, dtype=dtype)
        weight = (draw.normal(num_outputs, in_features) / in_features**0.5).to(dtype)
        bias = draw.normal(num_outputs, dtype=dtype)
        yield Input((x, weight, bias, dtype))
        yield Input((x, weight, None, torch.float32))
    yield Input((x, weight, None, dtype, True))


def _parts(device: torch.device, dtype: torch.dtype, sizes: KernelSizes = SMALL) -> Iterator[Input]:
    draw = Draw(device)
    parts = draw.normal(4, 3, sizes.hidden_size)
    bias = draw.normal(sizes.hidden_size, dtype=dtype)
    yield Input((parts, bias, dtype))
    yield Input((parts, None, torch.float32))


def _products(device: torch.device, dtype: torch.dtype, sizes: KernelSizes = SMALL) -> Iterator[Input]:
    """Yield products of each layout, of the first with all numbers of rows for which kernels are compiled."""
    draw = Draw(device)
    for number, layout in enumerate(sizes.codes):
        weight = draw_packed(layout, sizes.hidden_size).to(device)
        bias = draw.normal(weight.out_features, dtype=dtype)
        for num_rows in (3,) if number else (3, 20, 70):
            x = draw.normal(num_rows, sizes.hidden_size, dtype=dtype)
            yield Input((x, weight, bias, dtype))


def _widenings(device: torch.device, dtype: torch.dtype, sizes: KernelSizes = SMALL) -> Iterator[Input]:
    for layout in sizes.codes:
        yield Input((draw_packed(layout, sizes.hidden_size).to(device), dtype))


# Name of a kernel -> function of a device, a type of weights, and sizes.
INPUTS: dict[str, Callable[..., Iterator[Input]]] = {
    "begin_step": _steps,
    "norm": _norms,
    "turn_and_keep": _turns,
    "attend_segments": _segments,
    "attend_tiles": _tiles,
    "gate": _gates,
    "sample": _samples,
    "describe": _questions,
    "accept_drafts": _accepted,
    "convolve": _convolutions,
    "scan_mamba": _mamba_scans,
    "scan_delta": _delta_scans,
    "keep_inputs": _keeps,
    "multiply_few": _few_products,
    "add_parts": _parts,
    "multiply_codes": _products,
    "widen_codes": _widenings,
    "group_rows": _groups,
    "add_low_rank": _low_ranks,
    "mix_experts": _mixes,
}

# Words of rows other than their lengths. Parameters that a row does not list are off.
_OFF: dict[Word, float] = {Word.LIMIT: 500, **OFF_WORDS}
_ROWS: tuple[dict[Word, float], ...] = (
    {
        Word["GREEDY"]: 1,
        Word["REPETITION_PENALTY"]: 1.3,
        Word["PRESENCE_PENALTY"]: 0.5,
        Word["FREQUENCY_PENALTY"]: 0.3,
        Word.DETAILS: int(Wanted.FINAL),
        Word.TOP_N: 3,
    },
    {
        Word.SEED_LOW: 7,
        Word["TEMPERATURE"]: 0.7,
        Word["TOP_P"]: 0.8,
        Word["MIN_P"]: 0.001,
        Word["WATERMARK_GAMMA"]: 0.5,
        Word["WATERMARK_DELTA"]: 1.5,
        Word.LIMIT: 101,
        Word.DETAILS: int(Wanted.FINAL),
    },
    {
        Word.SEED_HIGH: -3,
        Word.IS_GUIDED: 1,
        Word.NUM_BIASES: 9,
        Word.NUM_STOP_IDS: 5,
        Word["MIN_NEW_TOKENS"]: 90,
        Word["TYPICAL_P"]: 0.7,
    },
    {
        Word["GREEDY"]: 1,
        Word.NUM_STOP_IDS: 5,
        Word["LENGTH_PENALTY_START"]: 2,
        Word["LENGTH_PENALTY_FACTOR"]: 1.4,
        Word.DETAILS: int(Wanted.RAW),
    },
    {Word.ENDED: 1, Word.ENCODER_LEN: 30},
    {
        Word.SEED_LOW: -1,
        Word["TOP_K"]: 50,
        Word["TOP_P"]: 0.9,
        Word.IS_LONG: 1,
        Word.ENCODER_LEN: 70,
    },
    {Word.ENDED: 1},
)


def draw_rows(device: torch.device, vocab_size: int, num_rows: int = NUM_ROWS) -> RowState:
    """Return rows of 100 tokens, of which 60 are prompt, with all sampling parameters in use, and the idle
    row."""
    draw = Draw(device)
    num_rows += 1
    words = torch.zeros(num_rows, len(Word), dtype=torch.int32)
    for row in range(num_rows):
        given = _ROWS[row % NUM_ROWS if row < num_rows - 1 else -1]
        words[row, Word.LENGTH], words[row, Word.PROMPT_LEN], words[row, Word.LAST_TOKEN] = 100, 60, row
        for word, value in {**_OFF, **given}.items():
            is_float = isinstance(value, float)
            bits = torch.tensor(value, dtype=torch.float32 if is_float else torch.int32)
            words[row, word] = bits.view(torch.int32)
    stop_ids = draw.integers([[2, 5, 9, 17, 90] + [-1] * (MAX_STOP_IDS - 5)] * num_rows)
    bias_ids = torch.full((num_rows, MAX_BIASES), -1, dtype=torch.int32)
    bias_ids[:, :9] = torch.arange(9) * min(111, vocab_size // 9)
    counts = draw.normal(num_rows, vocab_size).clamp(min=0).short()
    in_prompt = draw.normal(num_rows, vocab_size) > 1
    num_masks = -(-vocab_size // 32)
    return RowState(
        words=words.to(device),
        block_tables=draw.integers([[NUM_BLOCKS - 1] * MAX_BLOCKS] * num_rows),
        cross_tables=draw.integers([[NUM_BLOCKS - 1] * MAX_BLOCKS] * num_rows),
        stop_ids=stop_ids,
        bias_token_ids=bias_ids.to(device),
        biases=4 * draw.normal(num_rows, MAX_BIASES),
        token_counts=counts | (in_prompt.short() << 15),
        masks=(draw.normal(num_rows, num_masks) * 2**30).int(),
        greens=(draw.normal(num_rows, num_masks) * 2**30).int(),
        dummy_slot=DUMMY_SLOT,
    )


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, RowState):
        copies = {each.name: _copy(getattr(value, each.name)) for each in fields(value)}
        return RowState(**copies)
    return type(value)(*map(_copy, value)) if isinstance(value, tuple) else value


def _list_tensors(value: Any) -> list[Tensor]:
    if isinstance(value, RowState):
        value = [getattr(value, each.name) for each in fields(value)]
    parts = [value] if isinstance(value, Tensor) else value
    return [part for part in parts if isinstance(part, Tensor)]
