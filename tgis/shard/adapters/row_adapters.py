"""Which of the open rows have a soft prompt or an adapter, and what of them a step's tokens get."""

from collections.abc import Iterable
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from tgis.shard.adapters.registry import Prompt
from tgis.shard.layers.lora import Adapter, AdapterSet, TokenAdapters
from tgis.shard.models.interface import VirtualTokens

Integers = npt.NDArray[np.int64]
Part = Literal["decoder", "encoder"]


class Tuning:
    """Of at most `max_rows` rows; costs next to nothing while none has any."""

    def __init__(self, max_rows: int, device: torch.device):
        self._device = device
        self._prompts: dict[int, Prompt] = {}
        # Tokens of the rows' prompts, so that steps past them need not look at the prompts.
        self._lengths: dict[Part, Integers] = {
            "decoder": np.zeros(max_rows, np.int64),
            "encoder": np.zeros(max_rows, np.int64),
        }
        self._adapters: dict[int, Adapter] = {}
        self._adapter_of = np.full(max_rows, -1, np.int32)  # by row, in the set
        self._set, self._is_set_stale = AdapterSet(()), False

    def reset(self) -> None:
        self.close([*self._prompts, *self._adapters])

    def open(self, row: int, prompt: Prompt | None, adapter: Adapter | None) -> None:
        """The row is new, whatever it had before."""
        self.close([row])
        if prompt is not None:
            self._prompts[row] = prompt
            self._lengths["decoder"][row] = len(prompt.decoder)
            self._lengths["encoder"][row] = len(prompt.encoder)
        if adapter is not None:
            self._adapters[row], self._is_set_stale = adapter, True

    def close(self, rows: Iterable[int]) -> None:
        """Gives up what they had; rows that had nothing may be among them."""
        if not self._prompts and not self._adapters:
            return
        for row in rows:
            if self._prompts.pop(row, None) is not None:
                self._lengths["decoder"][row] = self._lengths["encoder"][row] = 0
            if self._adapters.pop(row, None) is not None:
                self._adapter_of[row], self._is_set_stale = -1, True
        if not self._adapters:
            self._renew_set()

    def place(self, part: Part, rows: Integers, starts: Integers, begins: Integers) -> VirtualTokens | None:
        """The virtual ones among tokens of the decoder or the encoder that are packed row after row, `starts`
        [num_seqs] being their first positions and `begins` [num_seqs + 1] the bounds in the pack; None where
        there are none."""
        if not self._prompts:
            return None
        missing = self._lengths[part][rows] - starts  # [num_seqs], from the first position on
        counts = np.minimum(missing, np.diff(begins))  # [num_seqs]
        having = (counts > 0).nonzero()[0]
        if not len(having):
            return None
        places, embeddings = [], []
        for i in having.tolist():
            start, count, begin = int(starts[i]), int(counts[i]), int(begins[i])
            embeddings.append(getattr(self._prompts[int(rows[i])], part)[start : start + count])
            places.append(torch.arange(begin, begin + count))
        # [num_virtual], [num_virtual, prompt_width]
        return VirtualTokens(torch.cat(places).to(self._device), torch.cat(embeddings).float())

    def adapters(self, rows: Integers, sequence: Integers) -> TokenAdapters | None:
        """`sequence` [num_tokens] tells which of the rows a token is of; None where no row has an adapter."""
        if not self._adapters:
            return None
        if self._is_set_stale:
            self._renew_set()
        of_row = self._adapter_of[rows]  # [num_seqs]
        if (of_row < 0).all():
            return None
        return TokenAdapters(self._set, torch.from_numpy(of_row[sequence]).to(self._device))

    def _renew_set(self) -> None:
        """To exactly those adapters that rows have, so that none is kept for nobody; the same set where they
        are the same, which has looked up much already."""
        if set(self._adapters.values()) != set(self._set.adapters):
            self._set = AdapterSet(list(dict.fromkeys(self._adapters.values())))
        index = {adapter: i for i, adapter in enumerate(self._set.adapters)}
        for row, adapter in self._adapters.items():
            self._adapter_of[row] = index[adapter]
        self._is_set_stale = False
