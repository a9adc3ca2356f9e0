"""Host side of a device's row table.

`length` is the length that a row has after all launched steps, unless it ends earlier. Tokens that the host
does not know yet are -1. A row's words on the device are replaced as a whole; its lists are sent when it
opens."""

from collections.abc import Iterable
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch

from tgis.pb import shard_pb2 as pb
from tgis.shard.adapters.registry import LoadedAdapters
from tgis.shard.kernels.cuda.step_state import MAX_BIASES, MAX_STOP_IDS, MAX_TOP_N, Flag, RowState, Wanted
from tgis.shard.runner.batch_builder import Work
from tgis.shard.runner.columns import NOT_WANTED, read_column
from tgis.shard.runner.device.device_rows import CountedTokens, RowUpdates, count_tokens, make_words
from tgis.shard.runner.device.uploads import Words
from tgis.shard.runner.row_table import Blocks, Booleans, Integers, Layout, RowLimits, RowTable, TokenIds

# Bits of answers, as integers because access to enumeration members is slow.
HAS_SAMPLED = int(Flag.SAMPLED)
HAS_ENDED = int(Flag.ENDED | Flag.UNUSABLE)


class SampledRows(NamedTuple):
    """Samples of a step, with the sequences and positions of their tokens."""

    rows: Integers  # [n], each row once, plus once for each draft
    sequence_numbers: Integers  # [n], as in `DeviceTable`
    positions: Integers  # [n]
    rounds: Integers | None = None  # [n], number of drafts before the token; None: no row has drafts

    @property
    def first_rows(self) -> Integers:
        """Rows, each once."""
        return self.rows if self.rounds is None else self.rows[self.rounds == 0]

    @property
    def num_drafts(self) -> int:
        """Maximum number of drafts of a row."""
        return 0 if self.rounds is None else int(self.rounds.max())

    def read_flags(self, flags: Words) -> Words:
        """Return the flags of answers [n] without errors after a draft. They recur in the row's next step."""
        if self.rounds is None:
            return flags
        return np.where(self.rounds > 0, flags & ~np.int32(Flag.UNUSABLE), flags)


class DeviceTable(RowTable):
    """Row table with a copy of the rows on a device, in `state`."""

    def __init__(
        self,
        max_rows: int,
        limits: RowLimits,
        device: torch.device,
        adapters: LoadedAdapters,
        state: RowState,
    ):
        super().__init__(max_rows, limits, device, adapters)
        self.seen = self._counted = CountedTokens(state.token_counts)
        self._sequence_numbers = np.zeros(max_rows, np.int64)  # incremented when a row's sequence changes
        self._host_paths = np.zeros(max_rows, np.int64)  # StepPath: why the host must sample the row
        self._has_counts = np.zeros(max_rows, np.bool_)  # a penalty reads the token counts
        self._is_guided = np.zeros(max_rows, np.bool_)
        self.is_marked = np.zeros(max_rows, np.bool_)  # has a watermark
        self.wants_details = np.zeros(max_rows, np.bool_)
        self._is_biased = np.zeros(max_rows, np.bool_)  # on the device
        self._stale: set[int] = set()  # rows whose words must be sent
        self._opened: set[int] = set()  # rows whose lists must be sent
        self._fresh_blocks: list[Words] = []  # [n, 3] each, see `StagedStep`

    def reset(self) -> None:
        super().reset()
        self._sequence_numbers += 1
        self._stale.clear()
        self._opened.clear()
        self._fresh_blocks.clear()

    def close(self, rows: Integers) -> None:
        super().close(rows)
        self._sequence_numbers[rows] += 1
        self._stale.difference_update(rows.tolist())
        self._opened.difference_update(rows.tolist())

    def open(self, message: pb.OpenRow) -> str | None:
        problem = super().open(message)
        row = message.row
        params = self.rows[row]
        self._sequence_numbers[row] += 1
        self._host_paths[row] = _find_host_path(message)
        self.is_marked[row] = params["watermark_gamma"] > 0
        self.wants_details[row] = params["logprobs"] or params["ranks"] or params["top_n"] > 0
        penalties = params["repetition_penalty"] != 1, params["presence_penalty"], params["frequency_penalty"]
        self._has_counts[row] = any(penalties)
        self._is_guided[row] = message.HasField("grammar")
        if problem is None:
            self._opened.add(row)
            self._stale.add(row)
        else:  # the row has ended, so no step reads its state
            self._opened.discard(row)
            self._stale.discard(row)
        return problem

    def fail(self, rows: Integers) -> None:
        super().fail(rows)
        self.renew(rows)

    def append(self, rows: Integers, token_ids: TokenIds) -> Booleans:
        ended = super().append(rows, token_ids)
        counted = self._has_counts[rows]
        if counted.any():
            self._counted.count(rows[counted], token_ids[counted])
        self.renew(rows)
        return ended

    def renew(self, rows: Integers) -> None:
        """Send the words of rows again with the next step."""
        self._stale.update(rows.tolist())

    def find_host_path(self, request: pb.StepRequest) -> pb.StepPath:
        """Return why the host must sample in a step; unspecified if the device can."""
        rows, starts, ends = (
            read_column(column).astype(np.int64) for column in (request.rows, request.starts, request.ends)
        )
        is_reported = (self.input_from[rows] != NOT_WANTED) & (starts < self.rows["prompt_len"][rows])
        if (is_reported & (self.rows["top_n"][rows] > MAX_TOP_N)).any():
            return pb.STEP_PATH_DETAILS
        paths = self._host_paths[rows[(ends == self.lengths[rows]) & ~self.ended[rows]]]
        return cast(pb.StepPath, int(paths.max(initial=pb.STEP_PATH_UNSPECIFIED)))

    def name_sampled(self, work: Work) -> SampledRows:
        rows = work.sampled_rows
        numbers, positions = self._sequence_numbers[rows], self.lengths[rows]
        if work.drafts is None:
            return SampledRows(rows, numbers, positions)
        rounds = work.count_drafts()
        return SampledRows(rows, numbers, positions + rounds, rounds)

    def plan_tokens(self, rows: Integers) -> None:
        """Extend rows by the token that they sample in the launched step, unless they end earlier. Accepted
        drafts are added with the answer, and no step before it computes rows with drafts."""
        lengths = self.lengths[rows]
        self.token_ids[rows, lengths] = -1
        self.lengths[rows] = lengths + 1
        self.ended[rows] |= lengths + 1 >= self.limit[rows]

    def number_sequences(self, rows: Integers) -> Integers:
        """Return the numbers of the sequences of rows. Rows that are opened or closed get other numbers."""
        numbers: Integers = self._sequence_numbers[rows]
        return numbers

    def are_current(self, sampled: SampledRows) -> Booleans:
        """Return bool [n], True for samples of rows that still have the same sequence."""
        current: Booleans = self._sequence_numbers[sampled.rows] == sampled.sequence_numbers
        return current

    def apply(
        self, sampled: SampledRows, token_ids: TokenIds, flags: Words
    ) -> tuple[Integers, TokenIds, Booleans]:
        """Apply the device's answers [n]. Return the rows that sampled a token for their current sequence,
        once for each token, the tokens, and True where the sequence has ended with one."""
        is_current = self.are_current(sampled)
        known = sampled.read_flags(flags)
        has_ended = (known & HAS_ENDED) != 0
        self.ended[sampled.rows[is_current & has_ended]] = True
        kept = is_current & ((flags & HAS_SAMPLED) != 0)
        rows = sampled.rows[kept]
        token_ids = token_ids[kept]
        positions = sampled.positions[kept]
        self.token_ids[rows, positions] = token_ids
        if sampled.rounds is not None:
            np.maximum.at(self.lengths, rows, positions + 1)
            self.renew(sampled.rows[is_current & (known != flags)])  # the device has ended these rows
        return rows, token_ids, has_ended[kept]

    def take_blocks(self) -> Words:
        """Return the blocks added to rows since the last call, as in `StagedStep`."""
        blocks = _stack(self._fresh_blocks, 3)
        self._fresh_blocks.clear()
        return blocks

    def take_updates(self) -> RowUpdates[Words] | None:
        """Return the pending updates of rows, or None if there are none."""
        if not self._stale:
            return None
        rows = np.array(sorted(self._stale), np.int64)
        opened = np.array(sorted(self._opened), np.int64)
        self._stale.clear()
        self._opened.clear()
        num_biases = self.ragged["bias_token_ids"].lengths[opened].clip(max=MAX_BIASES)
        biased = opened[self._is_biased[opened] | (num_biases > 0)]
        self._is_biased[opened] = num_biases > 0
        counted = opened[self._has_counts[opened]]
        return RowUpdates(
            rows=rows.astype(np.int32),
            words=self._make_words(rows),
            opened_rows=opened.astype(np.int32),
            stop_ids=_widen(self.ragged["eos_token_ids"].take(opened), MAX_STOP_IDS),
            cross_blocks=_stack(map(self._list_cross_blocks, opened.tolist()), 3),
            unbiased_rows=biased.astype(np.int32),
            biases=_stack(map(self._list_biases, biased.tolist()), 4),
            uncounted_rows=counted.astype(np.int32),
            counts=_stack(map(self._list_counts, counted.tolist()), 3),
        )

    def append_blocks(self, rows: Integers, counts: Integers, blocks: Blocks) -> None:
        before = self.num_blocks[rows]
        added = Layout.of(before, before + counts)
        fresh = _columns(rows[added.sequence], added.positions, blocks)
        # Ended rows need no blocks. Sent late, their blocks could reach the table of the row's next sequence.
        self._fresh_blocks.append(fresh[~self.ended[fresh[:, 0]]])
        super().append_blocks(rows, counts, blocks)

    def _make_words(self, rows: Integers) -> Words:
        state = self.rows[rows]
        lengths = self.lengths[rows]
        eos = self.ragged["eos_token_ids"]
        biases = self.ragged["bias_token_ids"]
        switch_len = self.limits.rope_switch_len
        wanted = np.where(state["raw"], int(Wanted.RAW), int(Wanted.FINAL))
        return make_words(
            state,
            last_token=self.token_ids[rows, np.maximum(lengths - 1, 0)],
            is_long=state["opened_len"] > switch_len if switch_len else np.zeros_like(lengths),
            num_stop_ids=eos.lengths[rows].clip(max=MAX_STOP_IDS),
            num_biases=biases.lengths[rows].clip(max=MAX_BIASES),
            is_guided=self._is_guided[rows],
            details=wanted * self.wants_details[rows],
        )

    def _list_cross_blocks(self, row: int) -> Words:
        count = -(-int(self.rows["encoder_len"][row]) // self.block_size)
        count = min(count, self.cross_tables.shape[1]) if self.limits.is_encoder_decoder else 0
        return _columns(row, np.arange(count), self.cross_tables[row, :count])

    def _list_biases(self, row: int) -> Words:
        token_ids, biases = (
            self.ragged[name].take(np.array([row]))[0, :MAX_BIASES] for name in ("bias_token_ids", "biases")
        )
        return _columns(row, np.arange(len(token_ids)), token_ids, biases.view(np.int32))

    def _list_counts(self, row: int) -> Words:
        token_ids = self.token_ids[row]
        prompt_len = int(self.rows["prompt_len"][row])
        first = self.row_adapters.count_virtual(row)
        ids, counts = count_tokens(token_ids[first:prompt_len], token_ids[prompt_len : self.lengths[row]])
        return _columns(row, ids, counts)


def _find_host_path(message: pb.OpenRow) -> pb.StepPath:
    """Return why the host must sample the row; unspecified if the device can."""
    if message.details.top_n > MAX_TOP_N:
        return pb.STEP_PATH_DETAILS
    num_stop_ids = len(message.eos_token_ids) // 4
    num_biases = len(message.sampling.bias_token_ids) // 4
    if num_stop_ids > MAX_STOP_IDS or num_biases > MAX_BIASES:
        return pb.STEP_PATH_LISTS
    return pb.STEP_PATH_UNSPECIFIED


def _columns(row: int | Integers, *columns: npt.NDArray[np.generic]) -> Words:
    """Join a row number and columns into int32 [n, 1 + len(columns)]."""
    joined = np.empty((len(columns[0]), 1 + len(columns)), np.int32)
    for i, column in enumerate((row, *columns)):
        joined[:, i] = column
    return joined


def _stack(parts: Iterable[Words], width: int) -> Words:
    return np.concatenate([np.empty((0, width), np.int32), *parts])


def _widen(lists: Words, width: int) -> Words:
    """Pad lists [n, any] with -1 to [n, width]."""
    padded = np.full((len(lists), width), -1, np.int32)
    padded[:, : lists.shape[1]] = lists[:, :width]
    return padded
