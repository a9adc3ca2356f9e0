"""Text to token ids in a pool of threads, and token ids to the vocabulary's own pieces."""

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import tokenizers

from tgis import hub
from tgis.router.errors import RequestError, StartupError

MAX_WORKERS = 8
TEXTS_PER_JOB = 64  # a job for each of many small texts would cost more than the texts
CLASSES_THAT_ADD_BOS = {"LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer"}
"""Values of `tokenizer_class`, less "Fast", for which an absent `add_bos_token` means yes."""

T = TypeVar("T")


@dataclass(frozen=True)
class Encoding:
    """A text's tokens, special ones included."""

    token_ids: list[int]
    pieces: list[str]
    offsets: list[tuple[int, int]]
    """Of each token in the text, in characters; (0, 0) for special tokens."""


class Tokenizer:
    """A `tokenizer.json` with what its directory says beside it. Safe to use from any task; owns its
    threads."""

    def __init__(self, directory: Path, num_workers: int | None = None) -> None:
        """Raises StartupError when the directory holds no tokenizer that can be read."""
        self.fast = _load(directory / "tokenizer.json")
        settings = hub.read_json(directory, "tokenizer_config.json")
        self._settings = hub.read_json(directory, "special_tokens_map.json") | settings
        default = min(max(len(os.sched_getaffinity(0)) - 1, 1), MAX_WORKERS)
        self._num_workers = num_workers or default
        self._threads = ThreadPoolExecutor(self._num_workers, thread_name_prefix="tokenizer")

    @property
    def vocab_size(self) -> int:
        return self.fast.get_vocab_size()

    @cached_property
    def bos_token_id(self) -> int | None:
        """Only where the model's settings say that inputs begin with it; that the tokenizer adds it by itself
        does not count."""
        adds_bos = self._settings.get("add_bos_token")
        if adds_bos is None:
            adds_bos = str(self._settings.get("tokenizer_class")).removesuffix("Fast") in CLASSES_THAT_ADD_BOS
        return self._special_id("bos_token") if adds_bos else None

    @cached_property
    def eos_token_id(self) -> int | None:
        return self._special_id("eos_token")

    @cached_property
    def special_ids(self) -> frozenset[int]:
        added = self.fast.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    def ids_beyond(self, vocab_size: int) -> list[int]:
        """Return the token ids that a model of that many tokens does not have, the largest last."""
        return sorted(token_id for token_id in self.fast.get_vocab().values() if token_id >= vocab_size)

    def piece(self, token_id: int) -> str:
        """The vocabulary's piece, not decoded text; empty for ids outside the vocabulary."""
        return self.fast.id_to_token(token_id) or ""

    async def encode(self, texts: Sequence[str], pieces: bool = True, offsets: bool = True) -> list[Encoding]:
        """All texts, in order, off the event loop; pieces and offsets cost time of their own. Raises
        RequestError."""

        def read(encoding: tokenizers.Encoding) -> Encoding:
            return Encoding(
                encoding.ids, encoding.tokens if pieces else [], encoding.offsets if offsets else []
            )

        return await self._encode_all(texts, pieces or offsets, read)

    async def encode_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """As `encode`, but only the token ids. Raises RequestError."""
        return await self._encode_all(texts, False, lambda encoding: encoding.ids)

    def truncate(self, token_ids: list[int], max_tokens: int) -> list[int]:
        """The last `max_tokens`; a beginning-of-text token the tokenizer adds takes the place of the first of
        them."""
        if not 0 < max_tokens < len(token_ids):
            return token_ids
        kept = token_ids[-max_tokens:]
        if self.bos_token_id is not None:
            kept[0] = self.bos_token_id
        return kept

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _encode_all(
        self, texts: Sequence[str], in_full: bool, read: Callable[[tokenizers.Encoding], T]
    ) -> list[T]:
        """In jobs, of which each worker has one at a time, so that other calls get their turns."""
        # Only the library's batch calls let other threads run; the fast one gives ids alone.
        encode_batch = self.fast.encode_batch if in_full else self.fast.encode_batch_fast
        jobs = [texts[i : i + TEXTS_PER_JOB] for i in range(0, len(texts), TEXTS_PER_JOB)]
        results: dict[int, list[T]] = {}
        loop = asyncio.get_running_loop()

        def encode(job: Sequence[str]) -> list[T]:
            return [read(encoding) for encoding in _or_refuse(lambda: encode_batch(list(job)))]

        async def work(first: int) -> None:
            for i in range(first, len(jobs), self._num_workers):
                results[i] = await loop.run_in_executor(self._threads, encode, jobs[i])

        await asyncio.gather(*(work(first) for first in range(min(self._num_workers, len(jobs)))))
        return [result for i in range(len(jobs)) for result in results[i]]

    def _special_id(self, name: str) -> int | None:
        token = self._settings.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        token_id: int | None = self.fast.token_to_id(content) if content else None
        return token_id


def byte_offsets(text: str, offsets: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Character offsets into `text` as offsets into its UTF-8 bytes."""
    if text.isascii():
        return list(offsets)
    ends = [0]
    for character in text:
        ends.append(ends[-1] + len(character.encode()))
    return [(ends[start], ends[end]) for start, end in offsets]


def _or_refuse(encode: Callable[[], T]) -> T:
    try:
        return encode()
    except Exception as error:  # the library raises bare Exception, and its text may quote the input
        raise RequestError("tokenizer error the text could not be encoded") from error


def _load(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise StartupError("No existing fast tokenizer (tokenizer.json) found")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        raise StartupError(f"Problem loading tokenizer for model: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
