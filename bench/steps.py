"""Runs steps on a model runner in this process, without router or service, with given rows or with rows that
pretend to have computed prompts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tgis.config.processes import ShardConfig
from tgis.pb import shard_pb2 as pb
from tgis.shard.runner.interface import ModelRunner
from tgis.shard.startup.load import load

MAX_LENGTH = 4096


def load_runner(
    model: Path,
    dtype: str,
    cache_tokens: int,
    quantize: str | None = None,
    kv_cache_dtype: str = "auto",
    cpu_arithmetic: str = "float32",
    **options: Any,
) -> ModelRunner:
    """Create a model runner like a shard's."""
    config = ShardConfig(
        model_path=str(model),
        dtype=dtype,
        device="cpu",
        quantize=quantize,
        cpu_arithmetic=cpu_arithmetic,
        kv_cache_tokens=cache_tokens,
        kv_cache_dtype=kv_cache_dtype,
        max_sequence_length=MAX_LENGTH,
        **options,
    )
    return load(config)


@dataclass
class Rows:
    """Create sequences with `length` tokens and separate blocks each; greedy unless `sampling` is given,
    without token details unless `details` is given."""

    runner: ModelRunner
    batch: int
    length: int
    max_new: int
    seed: int = 0
    sampling: Mapping[str, Any] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    max_drafts: int = 0
    """Drafts for which each step has blocks."""
    _most: int = field(init=False)
    _num_blocks: list[int] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._most = -(-(self.length + self.max_new + self.max_drafts) // self._block_size)  # blocks of a row

    @property
    def _block_size(self) -> int:
        return self.runner.info.block_size

    def prefill(self, max_tokens: int) -> Iterator[pb.StepRequest]:
        """Run steps of whole prompts, as many at once as `max_tokens` allows; each samples first tokens. The
        rows stay open."""
        opened, at_once = self._open(), max(1, max_tokens // self.length)
        for first in range(0, self.batch, at_once):
            rows = range(first, min(first + at_once, self.batch))
            yield self._request(opened[rows.start : rows.stop], rows, 0, self.length)

    def resume(self) -> pb.StepRequest:
        """Open rows as if all tokens except the last had been computed; the cache's content is arbitrary."""
        return self._request(self._open(), range(self.batch), self.length - 1, self.length)

    def decode(self) -> pb.StepRequest:
        """Run a step with the next token of every row."""
        self.length += 1
        return self._request([], range(self.batch), self.length - 1, self.length)

    def _open(self) -> list[pb.OpenRow]:
        random = np.random.default_rng(self.seed)
        plain = {
            "greedy": True,
            "temperature": 1,
            "top_p": 1,
            "typical_p": 1,
            "repetition_penalty": 1,
            "length_penalty_factor": 1,
        }
        self._num_blocks = [0] * self.batch
        return [
            pb.OpenRow(
                row=row,
                token_ids=_column(random.integers(2, self.runner.info.vocab_size, self.length)),
                prompt_len=self.length,
                max_new_tokens=self.max_new,
                sampling=pb.Sampling(**{**plain, **self.sampling}),
                details=pb.Details(**self.details),
                state_slot=row,
                state_source=-1,
            )
            for row in range(self.batch)
        ]

    def _request(self, opened: Sequence[pb.OpenRow], rows: range, start: int, end: int) -> pb.StepRequest:
        """Return a step with tokens [start, end) of each row."""
        wanted, fresh = -(-(end + self.max_drafts) // self._block_size), []
        for row in rows:
            begin = row * self._most
            fresh.append(range(begin + self._num_blocks[row], begin + wanted))
            self._num_blocks[row] = wanted
        return pb.StepRequest(
            opened_rows=opened,
            rows=_column(rows),
            starts=_column([start] * len(rows)),
            ends=_column([end] * len(rows)),
            num_new_blocks=_column([len(blocks) for blocks in fresh]),
            new_blocks=_column([block for blocks in fresh for block in blocks]),
        )


def _column(values: Sequence[int] | np.ndarray) -> bytes:
    return np.asarray(values, "<i4").tobytes()
