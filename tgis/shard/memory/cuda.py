"""Measures the GPU memory that this process may use, and the memory that its steps need."""

import torch

# Fraction of the GPU's memory that stays free when the cache is sized. It covers what the warm-up cannot
# measure: fragmentation, and kernels that are loaded later.
MARGIN = 0.02


class CudaMemory:
    """Memory as the driver counts it, including graphs, collectives and code. The process may use `fraction`
    of the GPU's memory, minus what other processes use."""

    def __init__(self, device: torch.device, fraction: float = 1.0):
        self._device = device
        self._fraction = fraction
        self._free_at_start, self._total = torch.cuda.mem_get_info(device)
        if fraction < 1.0:
            torch.cuda.set_per_process_memory_fraction(fraction, device)

    def memory_left(self) -> int:
        """Return the bytes left to this process. Memory in torch's caching allocator counts as used."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return count_left(self._total, self._free_at_start, free, self._fraction)

    def margin(self) -> int:
        return int(self._total * MARGIN)

    def release_memory(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def memory_used(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def begin_peak(self) -> int:
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_reserved(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_reserved(self._device)


def count_left(total: int, free_at_start: int, free: int, fraction: float) -> int:
    """Return the bytes that a process may still allocate if its limit is `fraction` of a GPU's memory. The
    decrease of free memory since its start counts as its use."""
    used = max(0, free_at_start - free)
    return max(0, min(free, int(total * fraction) - used))
