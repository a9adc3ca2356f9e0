"""Steps of a model with one new token per row in fixed memory, as captured on a GPU."""

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tgis.shard.kernels.cuda.attention import CudaAttention, CudaPlan
from tgis.shard.kernels.cuda.implementations import Implementations
from tgis.shard.kernels.cuda.step_state import (
    MAX_TOPS,
    STATE_CHUNK,
    DetailQuestions,
    DeviceDetails,
    Segments,
    StagedStep,
    StepTensors,
    Word,
)
from tgis.shard.memory.kv_cache import KVCache
from tgis.shard.memory.state_cache import StateCache
from tgis.shard.models.interface import StepInputs
from tgis.shard.models.parts.states import find_state_shape
from tgis.shard.runner.device.device_rows import allocate_rows
from tgis.shard.runner.device.device_step import find_states
from tgis.shard.runner.device.graphs import StepParts
from tgis.shard.runner.graph_sizes import GraphSize
from tgis.shard.runner.row_table import RowLimits

CPU = torch.device("cpu")
MAX_ROWS, BLOCK_SIZE, MAX_BLOCKS, CROSS_BLOCKS = 6, 4, 5, 2
MAX_LEN = BLOCK_SIZE * MAX_BLOCKS
NO_TILES = torch.empty((0, 5), dtype=torch.int32)


@dataclass(frozen=True)
class Bucket:
    """Fixed memory of steps with the same number of rows."""

    staged: StagedStep
    tensors: StepTensors
    logits: Tensor  # float32 [num_rows, vocab_size]
    answers: Tensor  # int32 [num_rows, 2]
    details: DeviceDetails


class DecodeScene:
    """Rows of one model. Two scenes with the same seed have identical steps."""

    def __init__(self, model: Any, kernels: Implementations, dtype: torch.dtype, seed: int = 0):
        self._model, self._kernels, self._rng = model, kernels, random.Random(seed)
        spec = model.spec
        num_blocks = MAX_ROWS * (MAX_BLOCKS + CROSS_BLOCKS)
        shape = (spec.num_layers, num_blocks + 1, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
        self.cache = KVCache(*shape, dtype)
        for pages in (self.cache.keys, self.cache.values):
            pages.fill_(torch.nan)
        self._blocks = list(range(num_blocks))
        self._rng.shuffle(self._blocks)
        group_size = 1 if spec.is_encoder_decoder else max(1, spec.num_heads // max(1, spec.num_kv_heads))
        state_shape = find_state_shape(spec, 1, STATE_CHUNK)
        self.states = None if state_shape is None else StateCache(state_shape, MAX_ROWS + 1)
        self._attention = CudaAttention(self.cache, kernels, group_size)
        limits = RowLimits(MAX_LEN, BLOCK_SIZE, spec.vocab_size, is_encoder_decoder=spec.is_encoder_decoder)
        self.rows = allocate_rows(MAX_ROWS, limits, num_blocks, CPU)
        self._lengths = [0] * MAX_ROWS  # planned by the host; 0: not open
        self._tables: list[list[int]] = [[] for _ in range(MAX_ROWS)]
        self._buckets: dict[int, Bucket] = {}
        for row in range(MAX_ROWS if spec.is_encoder_decoder else 0):
            self._encode(row)

    def make_parts(self, size: GraphSize) -> StepParts:
        assert not size.num_prompt_tokens
        bucket = self.bucket(size.num_rows)

        def forward() -> None:
            self._kernels.begin_step(bucket.staged, self.rows, bucket.tensors)
            inputs = self._inputs(bucket)
            x = self._model.forward(inputs, self._attention)
            bucket.logits.copy_(self._model.logits(x))

        def sample() -> None:
            self._kernels.sample(bucket.logits, self.rows, bucket.staged.sampled_rows, bucket.answers)

        def sample_detailed() -> None:
            questions = DetailQuestions.empty(*bucket.logits.shape, CPU)
            args = bucket.logits, self.rows, bucket.staged.sampled_rows, bucket.answers
            self._kernels.sample(*args, questions)
            self._kernels.describe(questions, bucket.details)

        return StepParts(forward, sample, sample_detailed)

    def bucket(self, num_rows: int) -> Bucket:
        if num_rows not in self._buckets:
            self._buckets[num_rows] = new_bucket(num_rows, self._model.spec.vocab_size)
            self._stage(num_rows, [])
        return self._buckets[num_rows]

    def stage(self, num_rows: int, count: int) -> None:
        """Stage a step of `count` rows, some of which may be new or may have ended."""
        rows = self._rng.sample(range(MAX_ROWS), count)
        for row in rows:
            if self._lengths[row] in (0, MAX_LEN) or self._rng.random() < 0.1:
                self._open(row)
        self._stage(num_rows, rows)

    def _stage(self, num_rows: int, rows: list[int]) -> None:
        """Stage the rows' next tokens, padded with the idle row."""
        staged, idle, blocks = self.bucket(num_rows).staged, self.rows.idle_row, []
        tokens = []
        for row in rows:
            position = self._lengths[row] - 1
            if position % BLOCK_SIZE == 0:
                self._tables[row].append(self._blocks.pop())
                blocks.append((row, position // BLOCK_SIZE, self._tables[row][-1]))
            slot = self._tables[row][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            tokens.append((row, position + 1, -1, position, slot))
            self._lengths[row] += 1
        num_idle = num_rows - len(rows)
        dummy_slot = self.rows.dummy_slot
        tokens += [(idle, 0, 0, 0, dummy_slot)] * num_idle
        blocks += [(idle, 0, dummy_slot // BLOCK_SIZE)] * (num_rows - len(blocks))
        row, end, token_id, position, slot = torch.tensor(tokens, dtype=torch.int32).unbind(1)
        for memory, values in (
            (staged.spans[0, :-1], row),  # a row's state has its number, and the idle row's is the dummy
            (staged.spans[1], torch.arange(num_rows + 1)),
            (staged.spans[2, :-1], position),
            (staged.seq_rows, row),
            (staged.seq_ends, end),
            (staged.token_rows, row),
            (staged.token_ids, token_id),
            (staged.positions, position),
            (staged.slots, slot),
            (staged.new_blocks, torch.tensor(blocks, dtype=torch.int32)),
            (staged.sampled_rows, row),
            (staged.sampled_x, torch.arange(num_rows)),
        ):
            memory.copy_(values)

    def _open(self, row: int) -> None:
        """Begin another sequence of one token, which may end before the host knows."""
        self._blocks = self._tables[row] + self._blocks
        self._tables[row], self._lengths[row] = [], 1
        if self.states is not None:
            self.states.clear(row)
        words = self.rows.words[row]
        token_id = self._rng.randrange(3, self._model.spec.vocab_size)
        values = {
            Word.LENGTH: 1,
            Word.PROMPT_LEN: 1,
            Word.LIMIT: self._rng.randrange(3, MAX_LEN),
            Word.ENDED: 0,
            Word.LAST_TOKEN: token_id,
            Word.GREEDY: self._rng.randrange(2),
            Word.DETAILS: (row + 1) % 3,
            Word.TOP_N: row,
            Word.SEED_LOW: self._rng.randrange(1000),
            Word.IS_LONG: self._rng.randrange(2),
        }
        for word, value in values.items():
            words[word] = value
        self.rows.token_counts[row] = 0
        self.rows.block_tables[row] = self.rows.dummy_slot // BLOCK_SIZE

    def _encode(self, row: int) -> None:
        """Write keys and values like an encoder."""
        blocks = [self._blocks.pop() for _ in range(CROSS_BLOCKS)]
        self.rows.cross_tables[row, :CROSS_BLOCKS] = torch.tensor(blocks)
        self.rows.words[row, Word.ENCODER_LEN] = self._rng.randrange(1, CROSS_BLOCKS * BLOCK_SIZE)
        generator = torch.Generator().manual_seed(row)
        for pages in (self.cache.keys, self.cache.values):
            pages[:, blocks] = torch.randn(pages[:, blocks].shape, generator=generator).to(pages.dtype)

    def _inputs(self, bucket: Bucket) -> StepInputs:
        staged, tensors, spec = bucket.staged, bucket.tensors, self._model.spec
        segments = Segments(staged.seq_rows, tensors.seq_lens, tensors.work_starts)
        plan = CudaPlan(tensors.slot_mapping, self.rows.block_tables, segments, NO_TILES, MAX_LEN)
        cross = None
        if spec.is_encoder_decoder:
            segments = Segments(staged.seq_rows, tensors.cross_lens, tensors.cross_work_starts)
            where = self.rows.cross_tables, segments, NO_TILES, CROSS_BLOCKS * BLOCK_SIZE
            cross = CudaPlan(tensors.slot_mapping, *where)
        is_long = tensors.is_long if spec.rope_switch_len else None
        layout: Any = None
        states = None if self.states is None else find_states(self.states, staged.spans)
        return StepInputs(tensors.token_ids, tensors.positions, layout, plan, cross, is_long, states=states)


def new_bucket(num_rows: int, vocab_size: int) -> Bucket:
    def integers(*shape: int) -> Tensor:
        return torch.full(shape, torch.iinfo(torch.int32).max, dtype=torch.int32)

    names = ("seq_rows", "seq_ends", "token_rows", "token_ids", "positions", "slots", "sampled_rows")
    staged = StagedStep(
        **{name: integers(num_rows) for name in names},
        sampled_x=integers(num_rows),
        new_blocks=integers(num_rows, 3),
        tiles=NO_TILES,
        cross_tiles=NO_TILES,
        spans=torch.zeros((3, num_rows + 1), dtype=torch.int32),
    )
    tensors = StepTensors.empty(num_rows, num_rows, num_rows, CPU)
    logits = torch.full((num_rows, vocab_size), torch.nan)
    details = DeviceDetails(integers(num_rows, 2 + MAX_TOPS), torch.full((num_rows, 1 + MAX_TOPS), -7.0))
    return Bucket(staged, tensors, logits, integers(num_rows, 2), details)
