"""CUDA stream of a GPU, and its captures as CUDA graphs."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from weakref import WeakSet

import torch
from torch import Tensor

from tgis.shard.torch_internals import end_pool_use


class CudaEvent:
    def __init__(self) -> None:
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> None:
        """Wait without using the CPU or holding the interpreter lock."""
        self._event.synchronize()


class CudaTimer:
    def __init__(self) -> None:
        self._start, self._stop = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        self._start.record()

    def stop(self) -> None:
        self._stop.record()

    def read_ns(self) -> int:
        return int(1e6 * self._start.elapsed_time(self._stop))


class CudaStream:
    """`DeviceStream` of a GPU: torch's current stream in the calling thread."""

    def __init__(self, device: torch.device):
        self.device = device
        self._capturing_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graphs = WeakSet[torch.cuda.CUDAGraph]()
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, work: Callable[[], None]) -> None:
        work()

    def pinned(self, num_words: int) -> Tensor:
        return torch.zeros(num_words, dtype=torch.int32, pin_memory=True)

    def record(self) -> CudaEvent:
        return CudaEvent()

    def start_timer(self) -> CudaTimer:
        return CudaTimer()

    def capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        if not self._graphs:  # torch frees a pool with its last graph, and cannot use it again
            self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize(self.device)
        with torch.cuda.stream(self._capturing_stream):
            with _forbid_waits():
                work()
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()  # graphs cannot use memory in torch's cache
            graph = self._capture(work)
        self._graphs.add(graph)
        return graph

    def _capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # "thread_local" allows other threads to wait for events during the capture.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            work()
        except BaseException:
            with suppress(RuntimeError):  # fails because the work has failed
                graph.capture_end()
            end_pool_use(self._pool)
            raise
        try:
            graph.capture_end()
        except RuntimeError:
            end_pool_use(self._pool)
            raise
        return graph


@contextmanager
def _forbid_waits() -> Iterator[None]:
    """Make torch raise RuntimeError if it waits for the device, before a capture fails for that reason: torch
    may not recover from a failed capture."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it does not detect every wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
