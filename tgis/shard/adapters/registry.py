"""Holds the soft prompts and adapters that this rank has loaded, by digest. RPC threads load and unload them
while steps read them. Open rows keep using an unloaded adapter until they are closed."""

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
    """Loaded soft prompt: embeddings of the virtual tokens before the tokens of decoder and encoder."""

    decoder: Tensor  # [num_decoder_tokens, prompt_width], in the dtype of the weights
    encoder: Tensor  # [num_encoder_tokens, prompt_width]


LoadedAdapter = LoadedPrompt | Adapter

# Bytes that are unloaded before freed memory is returned to the system. Returning it takes 20 ms while steps
# run. Without it, memory would grow, because the next adapter seldom fits into the gaps.
RELEASE_BYTES = 128 << 20


class LoadedAdapters:
    """Registry of loaded soft prompts and adapters. Safe to use from any thread."""

    def __init__(self, read: Callable[[str], LoadedAdapter]) -> None:
        """Load adapters with `read(digest)`, which may raise any exception."""
        self._read = read
        self._loaded: dict[str, LoadedAdapter] = {}
        self._loading: dict[str, Future[None]] = {}
        self._num_unloaded_bytes = 0
        self._lock = threading.Lock()

    def load(self, digest: str) -> None:
        """Load the adapter with that digest. Concurrent calls read it once. Raises the errors of `read`, and
        MissingArtifactError if the adapter is unloaded while it is read."""
        own: Future[None] = Future()
        with self._lock:
            if digest in self._loaded:
                return
            first = self._loading.setdefault(digest, own)
        if first is own:
            self._load(digest, own)
        first.result()

    def unload(self, digests: Iterable[str]) -> None:
        """Unload these. Adapters that are still being read are discarded, because their requester has given
        up."""
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
        """Digests that are loaded or being read."""
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
            if self._loading.get(digest) is not done:  # unloaded during the read
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
