"""Measures the GPU memory that this process may use, and that of its tensors."""

import torch

# Share of the free memory kept for what no warm-up measures: other processes, and fragmentation.
MARGIN = 0.2


class CudaMemory:
    def __init__(self, device: torch.device):
        self._device = device

    def memory_left(self) -> int:
        """Return the bytes left to this process, less a margin. Reserved but unused memory counts as free."""
        free, _ = torch.cuda.mem_get_info(self._device)
        kept = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return int((free + kept) * (1 - MARGIN))

    def release_memory(self) -> None:
        torch.cuda.empty_cache()

    def memory_used(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def begin_peak(self) -> int:
        torch.cuda.reset_peak_memory_stats(self._device)
        return self.memory_used()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)
