"""What memory of its GPU this process may use, and how much it has used: what `host_limits` tells of the
CPU's."""

import torch

# Of what is free, held back for what no warm-up sees: other processes, pieces too small to use.
MARGIN = 0.2


class CudaMemory:
    def __init__(self, device: torch.device):
        self._device = device

    def memory_left(self) -> int:
        """Bytes this process may still take, less a margin; what its allocator keeps unused is among them."""
        free, _ = torch.cuda.mem_get_info(self._device)
        kept = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return int((free + kept) * (1 - MARGIN))

    def release_memory(self) -> None:
        """Gives back what the allocator keeps of memory that was freed."""
        torch.cuda.empty_cache()

    def memory_used(self) -> int:
        """Bytes of this process's tensors."""
        return torch.cuda.memory_allocated(self._device)

    def begin_peak(self) -> int:
        """Bytes of this process's tensors; `peak` is counted from here on."""
        torch.cuda.reset_peak_memory_stats(self._device)
        return self.memory_used()

    def peak(self) -> int:
        """The most bytes that this process's tensors have had since `begin_peak`."""
        return torch.cuda.max_memory_allocated(self._device)
