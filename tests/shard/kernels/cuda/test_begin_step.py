"""begin_step against a reference implementation of its contract, and against the packing of steps for
CPUs."""

import itertools
import random
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.cuda.interpreter import interpreted
from tests.support.cuda.program_order import reversed_programs
from tests.support.shard.messages import NOTHING, Steps, integers, open_row, pack
from tgis.pb import shard_pb2 as pb
from tgis.shard.attention.interface import AttentionKind, StepLayout
from tgis.shard.kernels.cuda import begin_step
from tgis.shard.kernels.cuda.step_state import RowState, StagedStep, StepTensors, Word
from tgis.shard.models.interface import StepInputs
from tgis.shard.runner.batch_builder import BatchBuilder
from tgis.shard.runner.row_table import RowLimits, RowTable

POISON = 7  # of bytes
SWITCH_LEN = 22
LENGTHS = [1, 255, 256, 257, 8191, 8192, 8193, 16384, 16385, 200_000]


def run(how: str, staged: StagedStep, rows: RowState, out: StepTensors) -> None:
    kernel = begin_step.plain if how == "plain" else interpreted().begin_step
    with reversed_programs() if how == "reversed" else nullcontext():
        kernel(staged, rows, out)


def poisoned(shape: list[int], dtype: torch.dtype, before: int = 3, after: int = 1100) -> Tensor:
    """Return a tensor inside memory that is poisoned."""
    numel = int(np.prod(shape))
    memory = torch.full(((before + numel + after) * dtype.itemsize,), POISON, dtype=torch.uint8).view(dtype)
    return memory[before : before + numel].view(shape)


def placed(values: list[int] | list[list[int]] | Tensor, shape: list[int] | None = None) -> Tensor:
    """Return int32 values inside memory that is poisoned."""
    tensor = torch.as_tensor(values, dtype=torch.int32)
    return poisoned(shape or list(tensor.shape), torch.int32).copy_(tensor.view(shape or tensor.shape))


def make_out(num_tokens: int, num_seqs: int, num_single: int) -> StepTensors:
    like = StepTensors.empty(num_tokens, num_seqs, num_single, torch.device("meta"))
    return StepTensors(*(poisoned(list(x.shape), x.dtype) for x in like))


def is_poison_around(x: Tensor) -> bool:
    memory = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
    begin = x.storage_offset() * x.itemsize
    inner = memory.clone()
    inner[begin : begin + x.numel() * x.itemsize] = POISON
    return bool((inner == POISON).all())


@dataclass
class State:
    """State of rows in Python."""

    words: list[list[int]]
    tables: list[list[int]]
    dummy_slot: int

    def on_device(self) -> RowState:
        none = torch.empty(0)
        words, tables = placed(self.words), placed(self.tables)
        return RowState(words, tables, none, none, none, none, none, none, none, self.dummy_slot)


def random_state(rng: random.Random, num_rows: int, max_blocks: int) -> State:
    words = [[rng.randrange(-(2**31), 2**31) for _ in Word] for _ in range(num_rows + 1)]
    for row in words:
        row[Word.ENDED], row[Word.IS_LONG] = int(rng.random() < 0.3), rng.randrange(2)
        row[Word.LAST_TOKEN] = rng.randrange(200_000)
        row[Word.ENCODER_LEN] = rng.choice([0, rng.randint(1, 400), rng.choice(LENGTHS)])
    words[-1][Word.ENDED] = 1
    tables = [[rng.randrange(10**6) for _ in range(max_blocks)] for _ in range(num_rows + 1)]
    return State(words, tables, dummy_slot=16 * rng.randrange(10**8))


@dataclass(frozen=True)
class Size:
    num_rows: int
    single: int
    others: int = 0  # sequences of several tokens
    max_tokens: int = 0  # tokens of those
    idle: int = 0
    new_blocks: int = 0


def random_step(rng: random.Random, size: Size) -> StagedStep:
    idle_row, end = size.num_rows, rng.choice
    seq_rows = rng.sample(range(size.num_rows), size.single + size.others)
    seq_ends = [end([rng.randint(1, 600), end(LENGTHS)]) for _ in seq_rows]
    counts = [1] * size.single + [rng.randint(2, size.max_tokens) for _ in range(size.others)]
    rows = [row for row, count in zip(seq_rows, counts, strict=True) for _ in range(count)]
    token_ids = [rng.choice([-1, 0, rng.randrange(200_000)]) for _ in rows]
    positions, slots = ([rng.randrange(limit) for _ in rows] for limit in (200_000, 2**31))
    padding = [0] * size.idle
    placed_at = rng.sample(range(size.num_rows * 8), max(size.new_blocks - 3, 0))
    blocks = [[*divmod(place, 8), rng.randrange(10**6)] for place in placed_at]
    blocks += [[idle_row, 0, 10**6]] * (size.new_blocks - len(blocks))
    rng.shuffle(blocks)
    staged = StagedStep(
        seq_rows=seq_rows + [idle_row] * size.idle,
        seq_ends=seq_ends + padding,
        token_rows=rows + [idle_row] * size.idle,
        token_ids=token_ids + padding,
        positions=positions + padding,
        slots=slots + padding,
        new_blocks=[word for triple in blocks for word in triple],
        tiles=[],
        cross_tiles=[],
        sampled_rows=[],
        sampled_x=[],
    )
    staged = staged._make(placed(column) for column in staged)
    return staged._replace(new_blocks=staged.new_blocks.view(-1, 3))


def segments(seq_len: int) -> int:
    """Return the number of segments: up to 32, whose length is the smallest sufficient multiple of 256."""
    length = next(length for length in itertools.count(256, 256) if seq_len <= 32 * length)
    return -(-seq_len // length)


def expect(state: State, staged: StagedStep, num_single: int) -> dict[str, list[int]]:
    """Return the results of begin_step by the contract. Also update the tables of `state`."""
    lists = staged._make(column.tolist() for column in staged)
    for row, place, block in lists.new_blocks:
        state.tables[row][place] = block
    rows = [state.words[row] for row in lists.token_rows]
    last = [row[Word.LAST_TOKEN] for row in rows]
    ended = [row[Word.ENDED] for row in rows]
    seqs = [state.words[row] for row in lists.seq_rows]
    live = [not row[Word.ENDED] for row in seqs]
    lens = [end if is_live else 0 for end, is_live in zip(lists.seq_ends, live, strict=True)]
    cross = [row[Word.ENCODER_LEN] if is_live else 0 for row, is_live in zip(seqs, live, strict=True)]
    starts, cross_starts = (
        list(itertools.accumulate(map(segments, some[:num_single]), initial=0)) for some in (lens, cross)
    )
    return {
        "token_ids": [theirs if i == -1 else i for i, theirs in zip(lists.token_ids, last, strict=True)],
        "positions": lists.positions,
        "slot_mapping": [state.dummy_slot if e else s for e, s in zip(ended, lists.slots, strict=True)],
        "is_long": [row[Word.IS_LONG] for row in rows],
        "seq_lens": lens,
        "work_starts": starts,
        "cross_lens": cross,
        "cross_work_starts": cross_starts,
    }


SIZES = [
    Size(1, single=1),
    Size(3, single=2, idle=2, new_blocks=5),
    Size(7, single=0, others=2, max_tokens=6, new_blocks=7),
    Size(300, single=255, idle=2, new_blocks=255),
    Size(300, single=256, new_blocks=256),
    Size(300, single=100, others=9, max_tokens=200, new_blocks=700),
    Size(1024, single=1023, idle=1, new_blocks=257),
    Size(2300, single=1500, others=600, max_tokens=3, new_blocks=10),
    Size(4095, single=4000, idle=96, new_blocks=1000),
]


@pytest.mark.parametrize(
    ("size", "how"), [*itertools.product(SIZES, ["plain", "triton"]), (SIZES[5], "reversed")], ids=str
)
def test_everything_that_a_step_reads_is_written(size: Size, how: str) -> None:
    rng = random.Random(size.num_rows)
    state, staged = random_state(rng, size.num_rows, 8), random_step(rng, size)
    num_single = size.single + size.idle
    rows, out = state.on_device(), make_out(len(staged.token_rows), len(staged.seq_rows), num_single)
    words, before = rows.words.clone(), staged._make(column.clone() for column in staged)
    run(how, staged, rows, out)
    for name, expected in expect(state, staged, num_single).items():
        actual = getattr(out, name)
        actual = actual.view(torch.uint8) if actual.dtype == torch.bool else actual
        assert actual.tolist() == expected, name
    assert rows.block_tables.tolist() == state.tables
    assert rows.words.equal(words)
    assert all(map(torch.equal, staged, before))
    assert all(map(is_poison_around, (*out, *staged, rows.words, rows.block_tables)))


class Planner:
    """Attention that records what it plans."""

    def plan(self, layout: StepLayout, kind: AttentionKind) -> StepLayout:
        return layout


class Host:
    """Host that knows prompts, lengths and blocks, but neither sampled tokens nor which rows have ended."""

    def __init__(self, num_rows: int, limits: RowLimits):
        self._block_size, max_blocks = limits.block_size, limits.max_sequence_length // limits.block_size
        self.steps = Steps(self._block_size, num_rows * max_blocks)
        self.prompts, self.computed = [[0]] * num_rows, [0] * num_rows
        words = [[-1] * len(Word) for _ in range(num_rows + 1)]
        tables, dummy_slot = [[-1] * max_blocks] * (num_rows + 1), num_rows * max_blocks * self._block_size
        self.rows = State(words, tables, dummy_slot).on_device()

    def open(self, rng: random.Random, row: int) -> pb.OpenRow:
        prompt = [rng.randrange(50) for _ in range(rng.randint(1, 30))]
        message = open_row(row, prompt, max_new_tokens=rng.randint(1, 12))
        encoder_ids = [rng.randrange(50) for _ in range(rng.randint(1, 9))]
        message.encoder_token_ids, message.cross_blocks = pack(encoder_ids), pack(range(3))
        self.prompts[row], self.computed[row] = prompt, 0
        words = self.rows.words[row]
        words[Word.ENDED], words[Word.ENCODER_LEN] = 0, len(encoder_ids)
        words[Word.IS_LONG] = len(prompt) > SWITCH_LEN
        return message

    def choose_work(self, rng: random.Random) -> list[tuple[int, int, int]]:
        work = []
        for row, start in enumerate(self.computed):
            left = max(len(self.prompts[row]) - start, 1)
            end = start + rng.randint(1, left)
            if rng.random() < 0.8 and end < 50:
                work.append((row, start, end))
                self.computed[row] = end
        return sorted(work, key=lambda one: one[2] - one[1] > 1)

    def stage(self, work: list[tuple[int, int, int]], request: pb.StepRequest) -> StagedStep:
        tokens = [(row, at) for row, start, end in work for at in range(start, end)]
        blocks, size = self.steps.blocks, self._block_size
        counts, new = integers(request.num_new_blocks) or [0] * len(work), integers(request.new_blocks)
        places = [
            (row, len(blocks[row]) - count + i)
            for (row, _, _), count in zip(work, counts, strict=True)
            for i in range(count)
        ]
        prompt_ids = [dict(enumerate(self.prompts[row])).get(at, -1) for row, at in tokens]
        slots = [blocks[row][at // size] * size + at % size for row, at in tokens]
        added = [word for place, block in zip(places, new, strict=True) for word in (*place, block)]
        rows, _, ends = zip(*work, strict=True)
        token_rows, positions = zip(*tokens, strict=True)
        columns = rows, ends, token_rows, prompt_ids, positions, slots, added
        staged = StagedStep(*map(placed, columns), *[placed([])] * 4)
        return staged._replace(new_blocks=staged.new_blocks.view(-1, 3))


@pytest.mark.parametrize("how", ["plain", "triton"])
def test_a_step_equals_the_one_packed_on_the_cpu(how: str) -> None:
    rng = random.Random(1)
    limits = RowLimits(64, 4, 50, rope_switch_len=SWITCH_LEN, is_encoder_decoder=True)
    table = RowTable(6, limits, torch.device("cpu"), NOTHING)
    builder = BatchBuilder(table, Planner())  # type: ignore[arg-type]
    host, ended, num_checked = Host(6, limits), set(range(6)), 0
    words = host.rows.words
    for _ in range(25):
        opened = [host.open(rng, row) for row in list(ended) if rng.random() < 0.3]
        assert not any(map(table.open, opened))
        ended -= {message.row for message in opened}
        work = [one for one in host.choose_work(rng) if one[0] in host.steps.blocks or one[0] not in ended]
        if not work:
            continue
        request = host.steps.step(work, opened)
        staged, num_single = host.stage(work, request), sum(end - start == 1 for _, start, end in work)
        out = make_out(len(staged.token_rows), len(work), num_single)
        run(how, staged, host.rows, out)
        assert (out.seq_lens == 0).tolist() == [row in ended for row, _, _ in work]
        batch = builder.pack(request)
        if batch is None:
            continue
        num_checked += 1
        check_packed(batch.inputs, staged, host.rows, out)
        sampled = batch.sampled_rows
        token_ids = np.array([rng.randrange(50) for _ in sampled], np.int32)
        has_ended = table.append(sampled, token_ids)
        words[sampled, Word.LAST_TOKEN] = torch.from_numpy(token_ids)
        words[sampled, Word.ENDED] = torch.from_numpy(has_ended).int()
        ended |= set(sampled[has_ended].tolist())
    assert num_checked > 15


def check_packed(inputs: StepInputs, staged: StagedStep, rows: RowState, out: StepTensors) -> None:
    is_live = out.slot_mapping != rows.dummy_slot
    assert out.token_ids[is_live].equal(inputs.token_ids)
    assert out.positions[is_live].equal(inputs.positions)
    assert out.slot_mapping[is_live].equal(inputs.layout.find_slots(4))
    is_long = inputs.is_long if inputs.is_long is not None else torch.zeros(int(is_live.sum())).bool()
    assert out.is_long[is_live].equal(is_long)
    has_work = out.seq_lens > 0
    assert out.seq_lens[has_work].equal(inputs.layout.seq_lens)
    assert isinstance(inputs.cross, StepLayout)
    assert out.cross_lens[has_work].equal(inputs.cross.seq_lens)
    assert (out.cross_lens[~has_work] == 0).all()
    tables = rows.block_tables[staged.seq_rows[has_work].long()]
    for seq_len, ours, theirs in zip(inputs.layout.seq_lens, tables, inputs.layout.block_tables, strict=True):
        used = -(-int(seq_len) // 4)
        assert ours[:used].equal(theirs[:used])
