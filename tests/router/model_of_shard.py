"""What a shard must do with a step, in plain Python: an independent reading of shard.proto. The next token is
a function of the whole prefix, and every cache slot remembers which prefix it was computed for, so any
mistake in scheduling, sharing or bookkeeping changes an outcome or fails an assertion."""

import zlib
from array import array
from dataclasses import dataclass, field

from tgis.pb import shard_pb2 as pb

EOS = 0


def next_token(prefix: list[int], vocab_size: int) -> int:
    return zlib.crc32(array("i", prefix).tobytes()) % vocab_size


def truth(prompt: list[int], max_new_tokens: int, vocab_size: int) -> list[int]:
    """All tokens of an undisturbed generation."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_new_tokens:
        tokens.append(next_token(tokens, vocab_size))
        if tokens[-1] == EOS:
            break
    return tokens


def integers(column: bytes) -> list[int]:
    return array("i", column).tolist()


def column(values: list[int]) -> bytes:
    return array("i", values).tobytes()


@dataclass
class Row:
    token_ids: list[int]
    limit: int
    eos: list[int]
    details: pb.Details
    prompt_len: int
    min_new_tokens: int
    block_table: list[int] = field(default_factory=list)
    ended: bool = False


class ModelOfShard:
    def __init__(self, num_blocks: int, block_size: int, vocab_size: int) -> None:
        self.num_blocks, self.block_size, self.vocab_size = num_blocks, block_size, vocab_size
        self.rows: dict[int, Row] = {}
        self.cache: dict[tuple[int, int], int] = {}
        self.num_computed = 0
        self.last_step = -1

    def execute(self, request: pb.StepRequest) -> pb.StepResponse:
        assert request.step_id > self.last_step
        self.last_step = request.step_id
        for row in integers(request.closed_rows):
            del self.rows[row]
        for opened in request.opened_rows:
            assert opened.row not in self.rows, "a row is closed before it is opened again"
            self.rows[opened.row] = Row(
                integers(opened.token_ids),
                opened.prompt_len + opened.max_new_tokens,
                integers(opened.eos_token_ids),
                opened.details,
                opened.prompt_len,
                opened.sampling.min_new_tokens,
            )
        new_blocks = iter(integers(request.new_blocks))
        work = zip(
            *map(integers, (request.rows, request.starts, request.ends, request.num_new_blocks)), strict=True
        )
        sampled: list[tuple[int, int, bool]] = []
        details: list[pb.InputDetails] = []
        for number, start, end, num_new in work:
            row = self.rows[number]
            row.block_table += [next(new_blocks) for _ in range(num_new)]
            assert end < row.limit, "the router never schedules past a limit"
            if row.ended:
                continue
            self._compute(row, start, end)
            details += self._input_details(number, row, start, end)
            if end == len(row.token_ids):
                token = next_token(row.token_ids, self.vocab_size)
                if token in row.eos and len(row.token_ids) - row.prompt_len < row.min_new_tokens:
                    token += 1  # masked; what a real shard takes instead matters to nobody here
                row.token_ids.append(token)
                row.ended = token in row.eos or len(row.token_ids) == row.limit
                sampled.append((number, token, row.ended))
        assert next(new_blocks, None) is None
        rows, tokens, ended = zip(*sampled, strict=True) if sampled else ((), (), ())
        return pb.StepResponse(
            step_id=request.step_id,
            digest=zlib.crc32(repr(sampled).encode()),
            forward_ns=1000,
            rows=column(list(rows)),
            token_ids=column(list(tokens)),
            ended=bytes(ended),
            input_details=details,
        )

    def _compute(self, row: Row, start: int, end: int) -> None:
        assert 0 <= start < end <= len(row.token_ids)
        assert len(row.block_table) * self.block_size >= end, "the block table covers what is computed"
        assert all(0 <= block < self.num_blocks for block in row.block_table)
        self.num_computed += end - start
        prefix = 0
        for position, token in enumerate(row.token_ids[:end]):
            prefix = zlib.crc32(array("q", [prefix, token]).tobytes())
            slot = row.block_table[position // self.block_size], position % self.block_size
            if position >= start:
                self.cache[slot] = prefix
            assert self.cache.get(slot) == prefix, "a cached token is of another prefix"

    def _input_details(self, number: int, row: Row, start: int, end: int) -> list[pb.InputDetails]:
        if not row.details.input_tokens:
            return []
        first = 0 if start == 0 else start + 1
        tokens = [i for i in range(first, min(end + 1, row.prompt_len)) if i >= row.details.input_from]
        if not tokens:
            return []
        ranks = column([0 if i == 0 else i for i in tokens])
        return [pb.InputDetails(row=number, start=tokens[0], count=len(tokens), ranks=ranks)]
