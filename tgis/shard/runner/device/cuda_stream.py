"""A GPU's stream of work, and captures of it as CUDA graphs."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from weakref import WeakSet

import torch
from torch import Tensor


class CudaEvent:
    def __init__(self) -> None:
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> None:
        """Wait asleep, and without the interpreter's lock."""
        self._event.synchronize()


class CudaStream:
    """`DeviceStream` of a GPU, which is torch's current one in every thread that calls it."""

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

    def capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        if not self._graphs:  # torch frees a pool with its last graph, and takes it for no other
            self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize(self.device)
        with torch.cuda.stream(self._capturing_stream):
            with _refuse_waits():
                work()
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()  # graphs cannot use what torch keeps
            graph = self._capture(work)
        self._graphs.add(graph)
        return graph

    def _capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Other threads may wait for events meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            work()
        except BaseException:
            with suppress(RuntimeError):  # it fails because of what the work did
                graph.capture_end()
            self._release_pool()
            raise
        try:
            graph.capture_end()
        except RuntimeError:
            self._release_pool()
            raise
        return graph

    def _release_pool(self) -> None:
        """End the use of the pool by a failed capture. Torch does not, and would release no memory later."""
        index = torch.cuda.current_device()
        with suppress(RuntimeError):  # it has ended
            torch._C._cuda_endAllocateToPool(index, self._pool)
            torch._C._cuda_releasePool(index, self._pool)


@contextmanager
def _refuse_waits() -> Iterator[None]:
    """Raise RuntimeError where torch waits for the device. After a capture that failed, torch might not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that not every wait raises
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
