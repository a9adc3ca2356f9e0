"""Conversion between messages of a shard and plain Python."""

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tgis.pb import shard_pb2 as pb
from tgis.shard.adapters.registry import LoadedAdapters

GREEDY = {"greedy": True, "repetition_penalty": 1.0, "length_penalty_factor": 1.0}
NOTHING = LoadedAdapters({}.__getitem__)
SAMPLE = {**GREEDY, "greedy": False, "temperature": 1.0, "top_p": 1.0, "typical_p": 1.0}


def pack(values: Iterable[int]) -> bytes:
    values = list(values)
    return struct.pack(f"<{len(values)}i", *values)


def integers(column: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(column) // 4}i", column))


def floats(column: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(column) // 4}f", column))


def make_bias(biases: dict[int, float]) -> dict[str, bytes]:
    """Return the fields of Sampling."""
    values = struct.pack(f"<{len(biases)}f", *biases.values())
    return {"bias_token_ids": pack(biases), "biases": values}


def rows_of_tokens(response: pb.StepResponse) -> list[tuple[int, bool]]:
    """Return each token's row, and whether the token ends it."""
    rows = integers(response.rows)
    counts = integers(response.num_tokens) or [1] * len(rows)
    return [
        (row, bool(ended) and i == count - 1)
        for row, count, ended in zip(rows, counts, response.ended, strict=True)
        for i in range(count)
    ]


def top_tokens(message: pb.TopTokens) -> list[list[tuple[int, float]]]:
    pairs = iter(zip(integers(message.token_ids), floats(message.logprobs), strict=True))
    return [[next(pairs) for _ in range(count)] for count in integers(message.counts)]


def open_row(
    row: int,
    token_ids: list[int],
    *,
    prompt_len: int | None = None,
    max_new_tokens: int = 10,
    eos: Iterable[int] = (),
    sampling: dict[str, Any] = GREEDY,
    **details: Any,
) -> pb.OpenRow:
    return pb.OpenRow(
        row=row,
        token_ids=pack(token_ids),
        prompt_len=len(token_ids) if prompt_len is None else prompt_len,
        eos_token_ids=pack(eos),
        max_new_tokens=max_new_tokens,
        sampling=pb.Sampling(**sampling),
        details=pb.Details(**details),
    )


EVERY_PARAMETER = {
    **SAMPLE,
    **make_bias({3: 2.5, 8: -3.0, 17: 1.5, 40: -100.0}),
    "temperature": 0.9,
    "top_k": 60,
    "top_p": 0.95,
    "min_p": 0.001,
    "typical_p": 0.95,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.7,
    "frequency_penalty": 0.4,
    "watermark_gamma": 0.5,
    "watermark_delta": 2.0,
    "min_new_tokens": 3,
    "length_penalty_start": 4,
    "length_penalty_factor": 1.1,
}


@dataclass
class Steps:
    """Builder of requests like the router's. Blocks are assigned when positions need them, in an irregular
    order."""

    block_size: int
    num_blocks: int
    step_id: int = 0
    blocks: dict[int, list[int]] = field(default_factory=dict)
    reserved_len: int = 0
    """Number of tokens for which a row gets blocks when it opens; 0 if it gets them as it grows."""

    def __post_init__(self) -> None:
        self.free = [*range(0, self.num_blocks, 2), *range(1, self.num_blocks, 2)]

    def step(
        self,
        work: list[tuple[int, int, int]],
        opened: Iterable[pb.OpenRow] = (),
        closed: Iterable[int] = (),
        drafts: dict[int, list[int]] | None = None,
        max_drafts: dict[int, int] | None = None,
        is_followed: bool = True,
    ) -> pb.StepRequest:
        """Return a request. Work is (row, start, end); `drafts` and `max_drafts` are by row."""
        opened, guesses = list(opened), [(drafts or {}).get(row, []) for row, _, _ in work]
        own_drafts = [(max_drafts or {}).get(row, 0) for row, _, _ in work]
        for row in [*closed, *(message.row for message in opened)]:
            self.free += self.blocks.pop(row, [])
        lasts = [
            end + len(ids) + own for (_, _, end), ids, own in zip(work, guesses, own_drafts, strict=True)
        ]
        new = [
            self._extend(row, max(last, self.reserved_len))
            for (row, _, _), last in zip(work, lasts, strict=True)
        ]
        self.step_id += 1
        return pb.StepRequest(
            step_id=self.step_id,
            closed_rows=pack(closed),
            opened_rows=opened,
            rows=pack(row for row, _, _ in work),
            starts=pack(start for _, start, _ in work),
            ends=pack(end for _, _, end in work),
            num_new_blocks=pack(len(blocks) for blocks in new),
            new_blocks=pack(block for blocks in new for block in blocks),
            num_drafts=pack(map(len, guesses)) if drafts else b"",
            draft_ids=pack(token_id for ids in guesses for token_id in ids),
            max_drafts=pack(own_drafts) if max_drafts else b"",
            followed=bytes([1] * len(work)) if is_followed else b"",
        )

    def _extend(self, row: int, end: int) -> list[int]:
        table = self.blocks.setdefault(row, [])
        new = [self.free.pop() for _ in range(-(-end // self.block_size) - len(table))]
        table += new
        return new
