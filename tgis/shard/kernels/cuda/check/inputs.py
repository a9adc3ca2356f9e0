"""Small random inputs of all kernels, for weights of a given type."""

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tgis.shard.attention.interface import Heads, Scoring
from tgis.shard.kernels.cuda.step_state import (
    MAX_BIASES,
    MAX_STOP_IDS,
    RowState,
    Segments,
    StagedStep,
    StepTensors,
    Word,
    count_segments,
)
from tgis.shard.layers.ops import HeadNorm

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 8, 2, 64, 16, 64
VOCAB_SIZE, NUM_ROWS, MAX_BLOCKS = 5000, 6, 40
DUMMY_SLOT = (NUM_BLOCKS - 1) * BLOCK_SIZE


class Input(NamedTuple):
    """Arguments of one launch. Those that it changes are copied first, so that `run` can be called again."""

    args: tuple[Any, ...]
    results: tuple[int, ...] = ()  # indices of arguments that it writes
    overwritten: int | None = None  # index of an argument that has no meaning afterwards

    def run(self, kernel: Callable[..., Any]) -> list[Tensor]:
        """Return all that a kernel or its twin returns and writes."""
        changed = {*self.results, self.overwritten}
        args = [_copy(arg) if i in changed else arg for i, arg in enumerate(self.args)]
        returned = kernel(*args)
        found = [] if returned is None else [returned]
        return found + [tensor for i in self.results for tensor in _list_tensors(args[i])]


class Draw:
    """Source of the same random numbers on every device."""

    def __init__(self, device: torch.device):
        self._device, self._generator = device, torch.Generator().manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(self._device, dtype)

    def permutation(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._generator, dtype=torch.int32).to(self._device)

    def integers(self, values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self._device)


def _norms(device: torch.device, dtype: torch.dtype) -> Iterator[Input]:
    draw, size = Draw(device), 320
    x, delta = draw.normal(3, size), draw.normal(3, size, dtype=dtype)
    weight, bias = draw.normal(size), draw.normal(size)
    yield Input((x, delta, weight, None, 1e-5, False, dtype), results=(0,))
    yield Input((x, delta, weight, bias, 1e-5, True, dtype), results=(0,))
    yield Input((x, None, weight, None, 1e-5, False, torch.float32), results=(0,))


def _gates(device: torch.device, dtype: torch.dtype) -> Iterator[Input]:
    x = 3 * Draw(device).normal(3, 320, dtype=dtype)
    for name, is_gated in (("silu", True), ("gelu_tanh", True), ("gelu", False), ("relu", False)):
        yield Input((x, name, is_gated))
    yield Input((x, "quick_gelu", False))


def _turns(device: torch.device, dtype: torch.dtype) -> Iterator[Input]:
    draw, num_tokens = Draw(device), 5
    qkv = draw.normal(num_tokens, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, dtype=dtype)
    angles = draw.normal(2, num_tokens, HEAD_DIM // 2)
    norm = HeadNorm(draw.normal(HEAD_DIM), draw.normal(HEAD_DIM), 1e-6)
    pages = draw.normal(2, NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=dtype).unbind()
    slots = draw.permutation(DUMMY_SLOT)[:num_tokens].long()
    for head_norm in (None, norm):
        heads = Heads(NUM_HEADS, NUM_KV_HEADS, head_norm)
        yield Input((qkv, heads, angles, *pages, slots), results=(3, 4))


# Scores as most models have them, and all that can change them.
def _scorings(draw: Draw) -> list[Scoring]:
    slopes, bias = -draw.normal(NUM_HEADS).abs() / 8, draw.normal(NUM_HEADS, 41)
    changed = Scoring(scale=0.2, window=100, soft_cap=5.0, slopes=slopes, bias=bias)
    return [Scoring(scale=HEAD_DIM**-0.5), changed]


def _draw_cache(draw: Draw, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return keys, values and block tables of 3 rows without common blocks."""
    pages = draw.normal(2, NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=dtype).unbind()
    return *pages, draw.permutation(NUM_BLOCKS - 1).view(3, -1)


def _segments(device: torch.device, dtype: torch.dtype) -> Iterator[Input]:
    draw = Draw(device)
    q, cache = draw.normal(4, NUM_HEADS, HEAD_DIM, dtype=dtype), _draw_cache(draw, dtype)
    seq_lens = draw.integers([1, 300, 0, 17])
    starts = torch.zeros_like(draw.integers([0] * 5))
    starts[1:] = count_segments(seq_lens).cumsum(0)
    segments = Segments(draw.integers([2, 0, 1, 1]), seq_lens, starts)
    for scoring in _scorings(draw):
        yield Input((q, *cache, segments, 320, scoring))


def _tiles(device: torch.device, dtype: torch.dtype) -> Iterator[Input]:
    draw = Draw(device)
    q, cache = draw.normal(39, NUM_HEADS, HEAD_DIM, dtype=dtype), _draw_cache(draw, dtype)
    tiles = draw.integers([[2, 1, 32, 40, 77], [2, 33, 5, 72, 77], [0, 38, 1, 300, 301], [1, 0, 0, 0, 0]])
    for scoring in _scorings(draw):
        yield Input((q, *cache, tiles, 320, scoring, torch.ones_like(q)), results=(7,))


def _steps(device: torch.device, dtype: torch.dtype) -> Iterator[Input]:
    """Two single tokens, the second of an ended row, and two tokens of one more sequence."""
    draw, rows = Draw(device), draw_rows(device)
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


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Input]:
    draw, rows = Draw(device), draw_rows(device)
    logits = 3 * draw.normal(NUM_ROWS, VOCAB_SIZE)
    logits[5, 7] = torch.nan
    sampled, answers = draw.integers([3, 1, NUM_ROWS, 0, 4, 2]), draw.integers([[-1, -1]] * NUM_ROWS)
    yield Input((logits, rows, sampled, answers), results=(1, 3), overwritten=0)


INPUTS: dict[str, Callable[[torch.device, torch.dtype], Iterator[Input]]] = {
    "begin_step": _steps,
    "norm": _norms,
    "turn_and_keep": _turns,
    "attend_segments": _segments,
    "attend_tiles": _tiles,
    "gate": _gates,
    "sample": _samples,
}

# Words of rows beside their lengths: what each changes is off unless it is listed.
_OFF = {Word.LIMIT: 500, Word.TEMPERATURE: 1.0, Word.REPETITION_PENALTY: 1.0, Word.LENGTH_PENALTY_FACTOR: 1.0}
_ROWS: tuple[dict[Word, float], ...] = (
    {Word.GREEDY: 1, Word.REPETITION_PENALTY: 1.3, Word.PRESENCE_PENALTY: 0.5, Word.FREQUENCY_PENALTY: 0.3},
    {Word.SEED_LOW: 7, Word.TEMPERATURE: 0.7, Word.MIN_P: 0.02, Word.LIMIT: 101},
    {
        Word.SEED_HIGH: -3,
        Word.IS_GUIDED: 1,
        Word.NUM_BIASES: 9,
        Word.NUM_STOP_IDS: 5,
        Word.MIN_NEW_TOKENS: 90,
    },
    {Word.GREEDY: 1, Word.NUM_STOP_IDS: 5, Word.LENGTH_PENALTY_START: 2, Word.LENGTH_PENALTY_FACTOR: 1.4},
    {Word.ENDED: 1, Word.ENCODER_LEN: 30},
    {Word.SEED_LOW: -1, Word.IS_LONG: 1, Word.ENCODER_LEN: 70},
    {Word.ENDED: 1},
)


def draw_rows(device: torch.device) -> RowState:
    """Return rows of 100 tokens, 60 of them a prompt's, with everything that can change a sample."""
    draw, num_rows = Draw(device), NUM_ROWS + 1
    words = torch.zeros(num_rows, len(Word), dtype=torch.int32)
    for row, given in enumerate(_ROWS):
        words[row, Word.LENGTH], words[row, Word.PROMPT_LEN], words[row, Word.LAST_TOKEN] = 100, 60, row
        for word, value in {**_OFF, **given}.items():
            is_float = isinstance(value, float)
            bits = torch.tensor(value, dtype=torch.float32 if is_float else torch.int32)
            words[row, word] = bits.view(torch.int32)
    stop_ids = draw.integers([[2, 5, 9, 17, 900] + [-1] * (MAX_STOP_IDS - 5)] * num_rows)
    bias_ids = torch.full((num_rows, MAX_BIASES), -1, dtype=torch.int32)
    bias_ids[:, :9] = torch.arange(9) * 111
    counts = draw.normal(num_rows, VOCAB_SIZE).clamp(min=0).short()
    seen = draw.normal(num_rows, VOCAB_SIZE) > 1
    num_masks = -(-VOCAB_SIZE // 32)
    return RowState(
        words=words.to(device),
        block_tables=draw.integers([[NUM_BLOCKS - 1] * MAX_BLOCKS] * num_rows),
        cross_tables=draw.integers([[NUM_BLOCKS - 1] * MAX_BLOCKS] * num_rows),
        stop_ids=stop_ids,
        bias_token_ids=bias_ids.to(device),
        biases=4 * draw.normal(num_rows, MAX_BIASES),
        token_counts=counts | (seen.short() << 15),
        masks=(draw.normal(num_rows, num_masks) * 2**30).int(),
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
