"""Holds the soft prompts and adapters that this rank has loaded, by digest. Threads of RPCs load and unload
them while steps read them. Rows keep using what is unloaded until they are closed."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from torch import Tensor

from tgis.prompts.errors import MissingArtifactError
from tgis.shard.layers.lora import Adapter
from tgis.shard.memory.host_limits import release_memory


@dataclass(frozen=True, eq=False)
class LoadedPrompt:
    """Loaded soft prompt: embeddings of virtual tokens that precede the tokens of decoder and encoder."""

    decoder: Tensor  # [num_decoder_tokens, prompt_width], in the dtype of the weights
    encoder: Tensor  # [num_encoder_tokens, prompt_width]


LoadedAdapter = LoadedPrompt | Adapter

# Bytes unloaded between two returns of freed memory to the system. A return takes 20 ms beside the steps.
# Without it memory would grow, because what is loaded next seldom fits into the gaps.
RELEASE_BYTES = 128 << 20


class LoadedAdapters:
    """Registry of loaded soft prompts and adapters. Safe to use from any thread."""

    def __init__(self, read: Callable[[str], LoadedAdapter]) -> None:
        """Use `read` to load what has a digest. It may raise any exception."""
        self._read = read
        self._loaded: dict[str, LoadedAdapter] = {}
        self._loading: dict[str, Future[None]] = {}
        self._num_unloaded_bytes = 0
        self._lock = threading.Lock()

    def load(self, digest: str) -> None:
        """Load what has that digest. Concurrent calls read it once. Raises what `read` raises, and
        MissingArtifactError if it is unloaded before it is loaded."""
        mine: Future[None] = Future()
        with self._lock:
            if digest in self._loaded:
                return
            first = self._loading.setdefault(digest, mine)
        if first is mine:
            self._load(digest, mine)
        first.result()

    def unload(self, digests: Iterable[str]) -> None:
        """Unload these. What is still being read is not kept, because its requester has given up."""
        with self._lock:
            for digest in digests:
                self._num_unloaded_bytes += _count_bytes(self._loaded.pop(digest, None))
                self._loading.pop(digest, None)
            is_due = self._num_unloaded_bytes >= RELEASE_BYTES
            if is_due:
                self._num_unloaded_bytes = 0
        if is_due:
            release_memory()

    def unload_others(self, digests: Iterable[str]) -> None:
        self.unload(self.digests - set(digests))

    @property
    def digests(self) -> set[str]:
        """Digests of what is loaded or being read."""
        with self._lock:
            return {*self._loaded, *self._loading}

    def prompt(self, digest: str) -> LoadedPrompt | None:
        prompt = self._loaded.get(digest)
        return prompt if isinstance(prompt, LoadedPrompt) else None

    def adapter(self, digest: str) -> Adapter | None:
        adapter = self._loaded.get(digest)
        return adapter if isinstance(adapter, Adapter) else None

    def _load(self, digest: str, done: Future[None]) -> None:
        adapter = error = None
        try:
            adapter = self._read(digest)
        except BaseException as caught:
            error = caught
        with self._lock:
            if self._loading.get(digest) is not done:  # it was unloaded meanwhile
                error = error or MissingArtifactError(digest)
            else:
                del self._loading[digest]
                if adapter is not None:
                    self._loaded[digest] = adapter
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)


def _count_bytes(adapter: LoadedAdapter | None) -> int:
    if adapter is None:
        return 0
    if isinstance(adapter, LoadedPrompt):
        return adapter.decoder.nbytes + adapter.encoder.nbytes
    return sum(part.a.nbytes + part.b.nbytes for parts in adapter.deltas.values() for part in parts)
