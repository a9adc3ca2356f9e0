"""Tracks the soft prompts and adapters of open rows, and selects them for the tokens of a step."""

from collections.abc import Iterable
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from tgis.shard.adapters.registry import LoadedPrompt
from tgis.shard.layers.lora import Adapter, AdapterSet, TokenAdapters
from tgis.shard.models.interface import VirtualTokens

Integers = npt.NDArray[np.int64]
Part = Literal["decoder", "encoder"]


class RowAdapters:
    """Soft prompts and adapters of at most `max_rows` rows. The cost is negligible while no row has any."""

    def __init__(self, max_rows: int, device: torch.device):
        self._device = device
        self._prompts: dict[int, LoadedPrompt] = {}
        # Number of virtual tokens per row, so that later steps need not look at the prompts.
        self._lengths: dict[Part, Integers] = {
            "decoder": np.zeros(max_rows, np.int64),
            "encoder": np.zeros(max_rows, np.int64),
        }
        self._adapters: dict[int, Adapter] = {}
        self._adapter_indices = np.full(max_rows, -1, np.int32)  # index in the set, by row
        self._set = AdapterSet(())
        self._is_set_stale = False

    def reset(self) -> None:
        self.close([*self._prompts, *self._adapters])

    def open(self, row: int, prompt: LoadedPrompt | None, adapter: Adapter | None) -> None:
        """Attach a prompt and an adapter to a new row, and detach those it had before."""
        self.close([row])
        if prompt is not None:
            self._prompts[row] = prompt
            self._lengths["decoder"][row] = len(prompt.decoder)
            self._lengths["encoder"][row] = len(prompt.encoder)
        if adapter is not None:
            self._adapters[row] = adapter
            self._is_set_stale = True

    def close(self, rows: Iterable[int]) -> None:
        """Detach the prompts and adapters of rows. Rows without one are ignored."""
        if not self._prompts and not self._adapters:
            return
        for row in rows:
            if self._prompts.pop(row, None) is not None:
                self._lengths["decoder"][row] = self._lengths["encoder"][row] = 0
            if self._adapters.pop(row, None) is not None:
                self._adapter_indices[row] = -1
                self._is_set_stale = True
        if not self._adapters:
            self._rebuild_set()

    def count_virtual(self, row: int) -> int:
        """Return the number of virtual tokens at the start of a row's decoder input."""
        return int(self._lengths["decoder"][row])

    def virtual_tokens(
        self, part: Part, rows: Integers, starts: Integers, begins: Integers
    ) -> VirtualTokens | None:
        """Return the virtual tokens in a packed batch of decoder or encoder tokens, or None. `starts`
        [num_seqs] has the first position of each row, `begins` [num_seqs + 1] the row bounds in the batch."""
        if not self._prompts:
            return None
        remaining = self._lengths[part][rows] - starts  # [num_seqs], virtual tokens from `starts` on
        counts = np.minimum(remaining, np.diff(begins))  # [num_seqs]
        with_prompt = (counts > 0).nonzero()[0]
        if not len(with_prompt):
            return None
        indices = []
        embeddings = []
        for i in with_prompt.tolist():
            start, count, begin = int(starts[i]), int(counts[i]), int(begins[i])
            embeddings.append(getattr(self._prompts[int(rows[i])], part)[start : start + count])
            indices.append(torch.arange(begin, begin + count))
        # [num_virtual], [num_virtual, prompt_width]
        return VirtualTokens(torch.cat(indices).to(self._device), torch.cat(embeddings).float())

    @property
    def adapter_set(self) -> AdapterSet:
        """The adapters of open rows. It is another object if they have changed."""
        if self._is_set_stale:
            self._rebuild_set()
        return self._set

    def has_any(self, rows: Integers) -> bool:
        """Return True if any of the rows has an adapter."""
        return bool(self._adapters) and bool((self.indices(rows) >= 0).any())

    def indices(self, rows: Integers) -> npt.NDArray[np.int32]:
        """Return the indices of rows' adapters in `adapter_set`, int32 [n]; -1: none."""
        if self._is_set_stale:
            self._rebuild_set()
        return self._adapter_indices[rows]

    def token_adapters(self, rows: Integers, sequence: Integers) -> TokenAdapters | None:
        """Return each token's adapter, or None if no row has one. `sequence` [num_tokens] indexes `rows`."""
        if not self._adapters:
            return None
        adapter_set = self.adapter_set
        indices = self.indices(rows)  # [num_seqs]
        if (indices < 0).all():
            return None
        return TokenAdapters(adapter_set, torch.from_numpy(indices[sequence]).to(self._device))

    def _rebuild_set(self) -> None:
        """Rebuild the set if its adapters differ from the rows' adapters. This frees unused adapters."""
        if set(self._adapters.values()) != set(self._set.adapters):
            self._set = AdapterSet(list(dict.fromkeys(self._adapters.values())))
        index = {adapter: i for i, adapter in enumerate(self._set.adapters)}
        for row, adapter in self._adapters.items():
            self._adapter_indices[row] = index[adapter]
        self._is_set_stale = False
