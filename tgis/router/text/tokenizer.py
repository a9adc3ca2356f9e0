"""Tokenizes text outside the event loop, and looks up vocabulary pieces."""

import asyncio
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from tgis.hub import model_files
from tgis.process.control_groups import count_cores
from tgis.router.text.token_bound import max_bytes_per_token
from tgis.router.text.tokenization import (
    TokenIds,
    Tokenized,
    TokenizeJob,
    encode_ids,
    encode_plain,
    ids_before_text,
    load_tokenizer,
    read_ids,
)
from tgis.router.text.tokenizer_parts import read_parts
from tgis.router.text.tokenizer_process import TokenizerProcess

MAX_WORKERS = 8
LONG_TEXT_BYTES = 32 << 10  # size above which the tokenizer process handles a call's text
BYTES_PER_TEXT = 64  # minimum cost of a text, in bytes of text

T = TypeVar("T")


def default_workers(cores: int, num_sharing: int) -> int:
    """Return the number of threads per process. One core is reserved for the other work of all processes."""
    return min(max((cores - 1) // num_sharing, 1), MAX_WORKERS)


class Tokenizer:
    """Tokenizer from a `tokenizer.json` and its settings, with its threads and process. Any task can use
    it."""

    def __init__(self, directory: Path, num_workers: int | None = None, num_sharing: int = 1) -> None:
        """Load the tokenizer. By default, `num_sharing` processes share the cores. Raises StartupError if the
        directory has no readable tokenizer."""
        self.fast = load_tokenizer(directory)
        self.max_bytes_per_token = max_bytes_per_token(self.fast)
        """Upper bound from `token_bound`, or None if only tokenization can show that a text is too long."""
        settings = model_files.read_json(directory, "tokenizer_config.json")
        self._settings = model_files.read_json(directory, "special_tokens_map.json") | settings
        self.ids_before_text = ids_before_text(self.fast) or self._bos_of_settings()
        """Ids of the tokens that begin every text and are kept by truncation."""
        self.num_workers = num_workers or default_workers(count_cores(), num_sharing)
        # Read now, because a large vocabulary takes a quarter of a second, and the shards are still loading.
        self._largest_id = max(self.fast.get_vocab().values(), default=-1)
        self._threads = ThreadPoolExecutor(self.num_workers, thread_name_prefix="tokenizer")
        self._process = TokenizerProcess(directory)

    @property
    def vocab_size(self) -> int:
        return self.fast.get_vocab_size()

    @cached_property
    def decoder(self) -> dict[str, Any] | None:
        """Settings of the decoder."""
        decoder: dict[str, Any] | None = read_parts(self.fast)["decoder"]
        return decoder

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """Set with the id of the EOS token in the tokenizer's settings, or empty."""
        token_id = self._special_id("eos_token")
        return frozenset(() if token_id is None else (token_id,))

    @cached_property
    def _added_ids(self) -> dict[str, int]:
        return {token.content: token_id for token_id, token in self.fast.get_added_tokens_decoder().items()}

    @cached_property
    def special_ids(self) -> frozenset[int]:
        added = self.fast.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    def added_token_id(self, text: str) -> int | None:
        """Return the id of the added token with this text; None if there is none."""
        return self._added_ids.get(text)

    def ids_beyond(self, vocab_size: int) -> list[int]:
        """Return the token ids outside a vocabulary of that size, sorted."""
        if self._largest_id < vocab_size:
            return []
        return sorted(token_id for token_id in self.fast.get_vocab().values() if token_id >= vocab_size)

    def piece(self, token_id: int) -> str:
        """Return the vocabulary piece, which is not decoded text; empty for ids outside the vocabulary."""
        return self.fast.id_to_token(token_id) or ""

    async def encode_ids(
        self,
        texts: list[str],
        max_ids: int,
        connection: Hashable,
        are_ids: bool = False,
        adds_special_tokens: bool = True,
    ) -> list[TokenIds]:
        """Encode a call's texts, or parse them if they `are_ids`, and keep the last `max_ids` of each. Raises
        RequestError and OverloadedError."""
        encode = read_ids if are_ids else encode_ids if adds_special_tokens else encode_plain
        num_bytes = sum(max(len(text.encode(errors="replace")), BYTES_PER_TEXT) for text in texts)
        if num_bytes > LONG_TEXT_BYTES:
            return await self._process.run(encode, texts, max_ids, connection=connection, num_bytes=num_bytes)
        return await self._in_thread(encode, texts, max_ids)

    async def tokenize(self, job: TokenizeJob, connection: Hashable) -> Tokenized:
        """Answer a tokenization call. Raises RequestError and OverloadedError."""
        if max(job.num_bytes, BYTES_PER_TEXT * job.num_texts) > LONG_TEXT_BYTES:
            return await self._process.run(
                job.function, *job.arguments, connection=connection, num_bytes=job.num_bytes
            )
        return await self._in_thread(job.function, *job.arguments)

    def truncate(self, ids: TokenIds, max_tokens: int, begins_as_texts: bool = True) -> TokenIds:
        """Keep the last `max_tokens`. With `begins_as_texts`, the first of them are replaced by the tokens
        that begin every text."""
        if not 0 < max_tokens < ids.num_tokens:
            return ids
        before = self.ids_before_text[:max_tokens] if begins_as_texts else []
        last = ids.last[-max_tokens:]
        return TokenIds(max_tokens, before + last[len(before) :])

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._process.close()

    async def _in_thread(self, function: Callable[..., T], *arguments: object) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, function, self.fast, *arguments)

    def _bos_of_settings(self) -> list[int]:
        """Return the BOS token requested by `add_bos_token: true`. As in TGIS, truncated inputs begin with it
        even if the tokenizer does not add it to whole inputs."""
        token_id = self._special_id("bos_token") if self._settings.get("add_bos_token") else None
        return [] if token_id is None else [token_id]

    def _special_id(self, name: str) -> int | None:
        token = self._settings.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        token_id: int | None = self.fast.token_to_id(content) if content else None
        return token_id
