"""Check the packed tensors of random steps against a row-by-row reading of the protocol."""

import random
import time
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tests.support.shard.messages import GREEDY, NOTHING, SAMPLE, Steps, integers, make_bias, open_row, pack
from tgis.pb import shard_pb2 as pb
from tgis.shard.adapters.registry import LoadedAdapters, LoadedPrompt
from tgis.shard.attention.interface import AttentionKind, StepLayout
from tgis.shard.layers.lora import Adapter
from tgis.shard.models.interface import StepInputs
from tgis.shard.runner.batch_builder import Batch, BatchBuilder
from tgis.shard.runner.row_table import RowLimits, RowTable

CPU = torch.device("cpu")
SWITCH_LEN = 22


@dataclass(frozen=True)
class Planned:
    """A plan that records its inputs."""

    layout: StepLayout
    kind: AttentionKind

    def copy_into(self, fixed: "Planned") -> None:
        raise AssertionError("no step is captured")


class Planner:
    def plan(self, layout: StepLayout, kind: AttentionKind) -> Planned:
        return Planned(layout, kind)


def builder(max_rows: int, limits: RowLimits, adapters: LoadedAdapters = NOTHING) -> BatchBuilder:
    return BatchBuilder(RowTable(max_rows, limits, CPU, adapters), Planner())  # type: ignore[arg-type]


@dataclass
class Row:
    """The state that a plain reader keeps of a row."""

    token_ids: list[int]
    prompt_len: int
    limit: int
    eos: list[int]
    encoder_token_ids: list[int]
    cross_blocks: list[int]
    is_encoded: bool
    is_long: bool
    computed: int = 0
    ended: bool = False


def load_some() -> LoadedAdapters:
    """Load soft prompts "p" with three decoder tokens, "e" with two encoder tokens, and an adapter "a"."""
    none, numbers = torch.empty(0, 2), torch.arange(14.0).view(7, 2) // 2
    result = {"p": LoadedPrompt(numbers[:3], none), "e": LoadedPrompt(none, numbers[5:]), "a": Adapter({})}
    adapters = LoadedAdapters(result.__getitem__)
    for digest in result:
        adapters.load(digest)
    return adapters


def tuned(message: pb.OpenRow, prompt: str = "", adapter: str = "") -> pb.OpenRow:
    message.prompt_digest, message.adapter_digest = prompt, adapter
    return message


def new_row(rng: random.Random, has_encoder: bool) -> Row:
    token_ids = [rng.randrange(50) for _ in range(rng.randint(1, 30))]
    prompt_len = rng.randint(1, len(token_ids))
    length = rng.choice([1, 4, 5, 30]) if has_encoder else 0
    return Row(
        token_ids,
        prompt_len,
        limit=len(token_ids) + rng.randint(0, 20),
        eos=rng.sample(range(50), rng.randint(0, 6)),
        encoder_token_ids=[rng.randrange(50) for _ in range(length)],
        cross_blocks=rng.sample(range(200, 300), -(-length // 4)),
        is_encoded=rng.random() < 0.3,
        is_long=len(token_ids) > SWITCH_LEN,
    )


def opening(number: int, row: Row) -> pb.OpenRow:
    new = row.limit - row.prompt_len
    message = open_row(number, row.token_ids, prompt_len=row.prompt_len, max_new_tokens=new, eos=row.eos)
    message.encoder_token_ids, message.cross_blocks = pack(row.encoder_token_ids), pack(row.cross_blocks)
    message.is_encoded = row.is_encoded
    return message


def check_encoder(inputs: StepInputs | None, fresh: list[Row]) -> None:
    rows = [row for row in fresh if row.encoder_token_ids and not row.is_encoded and not row.ended]
    if not rows:
        assert inputs is None
        return
    lengths = [len(row.encoder_token_ids) for row in rows]
    assert inputs.token_ids.tolist() == [token for row in rows for token in row.encoder_token_ids]
    assert inputs.positions.tolist() == [position for length in lengths for position in range(length)]
    layout = inputs.layout
    assert inputs.plan == Planned(layout, "encoder")
    assert layout.positions is inputs.positions
    assert layout.seq_lens.tolist() == lengths
    assert layout.cu_seqlens_q.tolist() == [sum(lengths[:i]) for i in range(len(rows) + 1)]
    slots = [row.cross_blocks[i // 4] * 4 + i % 4 for row in rows for i in range(len(row.encoder_token_ids))]
    assert layout.find_slots(4).tolist() == slots
    for row, table in zip(rows, layout.block_tables.tolist(), strict=True):
        assert table[: len(row.cross_blocks)] == row.cross_blocks


def check_cross(inputs: StepInputs, worked: list[Row]) -> None:
    if not worked[0].encoder_token_ids:
        assert inputs.cross is None
        return
    layout = inputs.cross.layout
    assert inputs.cross.kind == "cross"
    assert layout.cu_seqlens_q is inputs.layout.cu_seqlens_q
    assert layout.seq_lens.tolist() == [len(row.encoder_token_ids) for row in worked]
    for row, table in zip(worked, layout.block_tables.tolist(), strict=True):
        assert table[: len(row.cross_blocks)] == row.cross_blocks


def check(
    batch: Batch, work: list[tuple[int, int, int]], rows: dict[int, Row], tables: dict[int, list[int]]
) -> None:
    work = [(row, start, end) for row, start, end in work if not rows[row].ended]
    tokens = [(row, position) for row, start, end in work for position in range(start, end)]
    assert batch.inputs.token_ids.tolist() == [rows[row].token_ids[position] for row, position in tokens]
    assert batch.inputs.positions.tolist() == [position for _, position in tokens]
    slots = [tables[row][position // 4] * 4 + position % 4 for row, position in tokens]
    layout = batch.inputs.layout
    assert batch.inputs.plan == Planned(layout, "self")
    assert layout.positions is batch.inputs.positions
    assert layout.find_slots(4).tolist() == slots
    lengths = [end - start for _, start, end in work]
    assert layout.cu_seqlens_q.tolist() == [sum(lengths[:i]) for i in range(len(work) + 1)]
    assert layout.seq_lens.tolist() == [end for _, _, end in work]
    for (row, _, end), table in zip(work, layout.block_tables.tolist(), strict=True):
        used = -(-end // 4)
        assert table[:used] == tables[row][:used]
    sampled = [row for row, _, end in work if end == len(rows[row].token_ids)]
    assert batch.sampled_rows.tolist() == sampled
    last = [i for i, (row, position) in enumerate(tokens) if position + 1 == len(rows[row].token_ids)]
    assert batch.sampled_x.tolist() == last
    worked = [rows[row] for row, _, _ in work]
    check_cross(batch.inputs, worked)
    if any(row.is_long for row in worked):
        assert batch.inputs.is_long.tolist() == [rows[row].is_long for row, _ in tokens]
    else:
        assert batch.inputs.is_long is None
    assert layout.block_tables.dtype == layout.seq_lens.dtype == torch.int32


@pytest.mark.parametrize("has_encoder", [False, True])
def test_random_steps(has_encoder: bool) -> None:
    rng = random.Random(1)
    options = {"rope_switch_len": SWITCH_LEN, "is_encoder_decoder": has_encoder}
    packer, steps = builder(8, RowLimits(64, 4, 50, **options)), Steps(4, 8 * 16)
    table = packer.table
    rows: dict[int, Row] = {}
    num_ended = 0
    for _ in range(400):
        closed = [row for row in rows if rng.random() < 0.1]
        for row in closed:
            del rows[row]
        fresh = {
            row: new_row(rng, has_encoder)
            for row in range(8)
            if rng.random() < (0.05 if row in rows else 0.4)
        }
        rows |= fresh
        work = []
        for number in rng.sample(list(rows), rng.randint(0, len(rows))):
            row = rows[number]
            start, length = row.computed, len(row.token_ids)
            if not row.ended:
                row.computed = rng.randint(start + 1, length)
            work.append((number, start, row.computed if not row.ended else length))
        request = steps.step(work, [opening(number, row) for number, row in fresh.items()], closed)
        table.close(np.array(integers(request.closed_rows), np.int64))
        assert [table.open(message) for message in request.opened_rows] == [None] * len(fresh)
        for row in fresh.values():
            row.ended = len(row.token_ids) >= row.limit
        check_encoder(packer.pack_encoder(request.opened_rows), list(fresh.values()))
        batch = packer.pack(request)
        if batch is None:
            assert all(rows[number].ended for number, _, _ in work)
            continue
        check(batch, work, rows, steps.blocks)
        sampled = batch.sampled_rows
        new = np.array([rng.randrange(50) for _ in sampled], np.int32)
        ended = table.append(sampled, new)
        for number, token, end in zip(sampled.tolist(), new.tolist(), ended.tolist(), strict=True):
            row = rows[number]
            row.token_ids.append(token)
            row.ended = token in row.eos or len(row.token_ids) == row.limit
            assert row.ended == end
            num_ended += end
    assert num_ended > 50


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (open_row(0, [], prompt_len=0), "no token"),
        (open_row(0, [3, 50]), "vocabulary size 50"),
        (open_row(0, [3, -1]), "vocabulary size 50"),
        (open_row(0, [3], sampling=GREEDY | make_bias({4: 1.0, 50: 1.0})), "a bias is not below"),
        (open_row(0, [3], sampling=GREEDY | make_bias({-1: 1.0})), "a bias is not below"),
        (open_row(0, [3], sampling=GREEDY | {"bias_token_ids": pack([4])}), "one bias per biased"),
        (
            open_row(0, [3], sampling=GREEDY | make_bias({4: 1.0}) | {"bias_token_ids": b""}),
            "one bias per biased",
        ),
        (open_row(0, [1] * 60, max_new_tokens=5), "65 tokens exceed the maximum sequence length 64"),
        (tuned(open_row(0, [1] * 9), adapter="x"), "its adapter is not loaded"),
        (tuned(open_row(0, [1] * 9), adapter="p"), "its adapter is not loaded"),
        (tuned(open_row(0, [1] * 9), prompt="x"), "its soft prompt is not loaded"),
        (tuned(open_row(0, [1] * 9), prompt="a"), "its soft prompt is not loaded"),
        (tuned(open_row(0, [1] * 9, prompt_len=2), prompt="p"), "fewer tokens than its soft prompt"),
        (tuned(open_row(0, [1] * 9), prompt="e"), "fewer tokens than its soft prompt"),
        (pb.OpenRow(row=0, token_ids=pack([1]), prompt_len=1, encoder_token_ids=pack([1])), "no encoder"),
    ],
)
def test_a_row_that_cannot_be_served_has_ended(message: pb.OpenRow, problem: str) -> None:
    packer, steps = builder(2, RowLimits(64, 4, 50), load_some()), Steps(4, 32)
    table = packer.table
    answer = table.open(message)
    assert answer is not None
    assert problem in answer
    table.open(open_row(1, [1, 2]))
    batch = packer.pack(steps.step([(0, 0, 1), (1, 0, 2)]))
    assert batch is not None
    assert batch.sampled_rows.tolist() == [1]


@pytest.mark.parametrize(
    ("encoder_token_ids", "cross_blocks", "problem"),
    [
        ([], [1], "no token ids for the encoder"),
        ([3, 50], [1], "for the encoder is not below the model's vocabulary size 50"),
        ([-1], [1], "for the encoder is not below the model's vocabulary size 50"),
        ([1] * 5, [1], "5 tokens for the encoder do not fit into 1 cross blocks"),
        ([1], [], "1 tokens for the encoder do not fit into 0 cross blocks"),
        ([1] * 65, range(17), "65 tokens for the encoder exceed the maximum 64"),
        ([1] * 64, range(16), None),
        ([1] * 5, [1, 2, 3], None),
    ],
)
def test_encoder_inputs_that_cannot_be_served(
    encoder_token_ids: list[int], cross_blocks: list[int], problem: str | None
) -> None:
    packer, steps = builder(2, RowLimits(64, 4, 50, is_encoder_decoder=True)), Steps(4, 32)
    table = packer.table
    message = open_row(0, [1])
    message.encoder_token_ids, message.cross_blocks = pack(encoder_token_ids), pack(cross_blocks)
    answer = table.open(message)
    assert (answer is None) == (problem is None)
    assert problem is None or problem in answer
    assert (packer.pack_encoder([message]) is None) == (packer.pack(steps.step([(0, 0, 1)])) is None)
    assert (packer.pack_encoder([message]) is None) == (problem is not None)


def test_drafts_are_sequences_of_their_own_where_single_tokens_come_first() -> None:
    table = RowTable(4, RowLimits(64, 4, 50), CPU, NOTHING)
    builder, steps = BatchBuilder(table, Planner(), singles_first=True), Steps(4, 64)  # type: ignore[arg-type]
    for row, length in enumerate((6, 3, 9, 4)):
        table.open(open_row(row, list(range(1, length + 1)), max_new_tokens=30))
    request = steps.step([(0, 2, 5), (1, 2, 3), (2, 8, 9), (3, 3, 4)], drafts={1: [7, 8, 9], 3: [4]})
    work = builder.find_work(request)
    assert work is not None
    assert work.drafts is not None
    assert work.rows.tolist() == [1, 1, 1, 1, 2, 3, 3, 0]
    assert work.starts.tolist() == [2, 3, 4, 5, 8, 3, 4, 2]
    assert work.ends.tolist() == [3, 4, 5, 6, 9, 4, 5, 5]
    assert work.layout.begins.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 10]
    assert work.layout.positions.tolist() == [2, 3, 4, 5, 8, 3, 4, 2, 3, 4]
    assert work.sampled_rows.tolist() == [1, 1, 1, 1, 2, 3, 3]
    assert work.sampled_x.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert work.drafts.tolist() == [7, 8, 9, -1, -1, 4, -1]
    assert table.token_ids[1, :6].tolist() == [1, 2, 3, 7, 8, 9]


def test_a_row_keeps_nothing_of_the_one_before() -> None:
    packer = builder(2, RowLimits(64, 4, 50))
    table = packer.table
    penalised = {**SAMPLE, "repetition_penalty": 2.0, "top_k": 3, "seed": 2**64 - 1, **make_bias({3: 1.0})}
    table.open(open_row(1, [5, 6, 7], eos=[1, 2, 3], sampling=penalised, top_n=3))
    table.append(np.array([1]), np.array([9], np.int32))
    assert table.seen.select(np.array([1]))[0].nonzero().flatten().tolist() == [5, 6, 7, 9]
    table.open(open_row(1, [8, 4], prompt_len=1, eos=[2]))
    batch = table.sampling_batch(np.array([1]), np.array([False]), np.array([True]))
    assert (batch.eos_token_ids.tolist(), batch.bias) == ([[2]], None)
    assert batch.params["greedy"].tolist() == [True]
    assert (batch.params["seed"][0], batch.params["top_k"][0], batch.params["temperature"][0]) == (0, 0, 1)
    assert (batch.num_generated.tolist(), batch.positions.tolist()) == ([1], [2])
    assert not table.traits(np.array([1])).wants_details.any()
    table.open(open_row(1, [8], sampling=penalised))
    assert table.seen.select(np.array([1]))[0].nonzero().flatten().tolist() == [8]


def test_virtual_tokens_are_placed_and_not_penalised() -> None:
    """Check that virtual tokens are not counted as seen, although they share the ID 7 with real tokens."""
    adapters = load_some()
    packer, steps = builder(4, RowLimits(64, 4, 50), adapters), Steps(4, 64)
    table = packer.table
    penalised = {**SAMPLE, "repetition_penalty": 2.0}
    rows = [
        tuned(open_row(0, [7, 7, 7, 8, 9], prompt_len=4, sampling=penalised), prompt="p"),
        tuned(open_row(1, [7, 7, 7, 7], sampling=penalised), prompt="p", adapter="a"),
        open_row(2, [7, 7, 7], sampling=penalised),
    ]
    assert [table.open(message) for message in rows] == [None] * 3
    seen = table.seen.select(np.arange(3)).tolist()
    assert [[i for i, is_seen in enumerate(row) if is_seen] for row in seen] == [[8, 9], [7], [7]]
    adapters.unload(["p", "a"])
    batch = packer.pack(steps.step([(2, 0, 3), (0, 0, 2), (1, 0, 4)]))
    assert batch is not None
    assert batch.inputs.virtual is not None
    assert batch.inputs.virtual.places.tolist() == [3, 4, 5, 6, 7]
    assert batch.inputs.virtual.embeddings[:, 0].tolist() == [0, 1, 0, 1, 2]
    assert batch.inputs.adapters is not None
    assert batch.inputs.adapters.indices.tolist() == [-1] * 5 + [0] * 4
    batch = packer.pack(steps.step([(0, 2, 5), (2, 2, 3)]))
    assert batch is not None
    assert batch.inputs.virtual is not None
    assert batch.inputs.virtual.places.tolist() == [0]
    assert (batch.inputs.virtual.embeddings[0, 0], batch.inputs.adapters) == (2, None)
    table.close(np.array([0]))
    table.open(open_row(0, [7, 7, 7, 8]))
    batch = packer.pack(steps.step([(0, 0, 4)], [open_row(0, [])]))
    assert batch is not None
    assert batch.inputs.virtual is None, "the row's previous content"


def test_virtual_tokens_of_the_encoder() -> None:
    packer = builder(4, RowLimits(64, 4, 50, is_encoder_decoder=True), load_some())
    table = packer.table
    messages = [open_row(row, [2]) for row in range(3)]
    for message, count in zip(messages, (2, 3, 5), strict=True):
        message.encoder_token_ids, message.cross_blocks = pack([7] * count), pack([1, 2])
    tuned(messages[1], prompt="e", adapter="a")
    tuned(messages[2], prompt="e")
    messages[0].is_encoded = True
    assert [table.open(message) for message in messages] == [None] * 3
    inputs = packer.pack_encoder(messages)
    assert inputs is not None
    assert inputs.virtual is not None
    assert inputs.virtual.places.tolist() == [0, 1, 3, 4]
    assert inputs.virtual.embeddings[:, 0].tolist() == [5, 6, 5, 6]
    assert inputs.adapters is not None
    assert inputs.adapters.indices.tolist() == [0] * 3 + [-1] * 5


def test_spans_of_reported_input() -> None:
    packer, steps = builder(3, RowLimits(64, 4, 50)), Steps(4, 48)
    table = packer.table

    def spans(
        work: list[tuple[int, int, int]], opened: list[pb.OpenRow]
    ) -> list[tuple[int, int, list[int], int]]:
        assert [table.open(message) for message in opened] == [None] * len(opened)
        batch = packer.pack(steps.step(work, opened))
        assert batch is not None
        return [(span.row, span.start, span.token_ids.tolist(), span.first_x) for span in batch.input_spans]

    prompts = [
        open_row(0, [10, 11, 12, 13, 14, 15], prompt_len=5, input_tokens=True),
        open_row(1, [20, 21, 22, 23], input_tokens=True, input_from=2),
        open_row(2, [30, 31, 32], logprobs=True),
    ]
    assert spans([(2, 0, 1), (0, 0, 2), (1, 0, 1)], prompts) == [(0, 0, [10, 11, 12], 1)]
    assert spans([(2, 1, 3), (0, 2, 3), (1, 1, 4)], []) == [(0, 3, [13], 2), (1, 2, [22, 23], 3)]
    assert spans([(0, 3, 6)], []) == [(0, 4, [14], 0)]
    assert spans([(0, 0, 1)], [open_row(0, [10], input_tokens=True)]) == [(0, 0, [10], 0)]
    assert spans([(0, 0, 3)], [open_row(0, [10, 11, 12], input_tokens=True, input_from=3)]) == []
    again = [open_row(0, [10, 11, 12], input_tokens=True, input_from=1)]
    assert spans([(0, 0, 3)], again) == [(0, 1, [11, 12], 0)]


def test_256_rows_take_about_a_millisecond() -> None:
    packer, steps = builder(256, RowLimits(4096, 16, 1000)), Steps(16, 256 * 64)
    table = packer.table
    for row in range(256):
        table.open(open_row(row, [row] * 900, max_new_tokens=100))
    packer.pack(steps.step([(row, 0, 900) for row in range(256)]))
    rows, best = np.arange(256), 1.0
    for length in range(900, 930):
        table.append(rows, np.zeros(256, np.int32))
        request = steps.step([(row, length, length + 1) for row in range(256)])
        began = time.perf_counter()
        batch = packer.pack(request)
        best = min(best, time.perf_counter() - began)
        assert batch is not None
        assert len(batch.sampled_rows) == 256
    assert best < 3e-3
