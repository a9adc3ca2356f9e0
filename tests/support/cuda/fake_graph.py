"""CUDA graphs on the CPU. A capture records torch operators and launches of interpreted kernels, with their
scalar arguments and memory. A replay runs them without the Python code between them.

Work that a GPU cannot capture fails: reads of values by the host, and memory that changes between runs.
Memory shared by graphs is poisoned before each replay, except for what the graph writes."""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock
from weakref import WeakSet

import torch
import torch.distributed as dist
import triton.runtime.interpreter as interpreter
from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.support.cuda.late_device import LateTimer

aten = torch.ops.aten

# Tags of operators whose result or its shape depends on values, or on the state of an RNG.
REFUSED_TAGS = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
}
# Operators that wait for the device without such a tag, or that replace a tensor's memory.
REFUSED = {
    aten.equal.default: "values of tensors",
    aten._pin_memory.default: "memory of the host",
    aten.resize_.default: "memory that changes",
    aten.set_.source_Storage: "memory that changes",
    aten.set_.source_Storage_storage_offset: "memory that changes",
    aten.set_.source_Tensor: "memory that changes",
}
# Functions that read or create tensors without an operator, or with an operator that is also used for
# constants.
REFUSED_FUNCTIONS = {
    **dict.fromkeys((Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__array__), "values on the host"),
    **dict.fromkeys((torch.tensor, torch.as_tensor, torch.asarray), "memory of the host"),
}
# Operators to which a number of the host is uploaded; other operators get it as a parameter.
UPLOADING = {aten.copy_.default: 1, aten.index_put_.default: 2, aten.index_put.default: 2}
# Operators whose second argument is a list of indices or masks, whose number the host must know.
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}

# Collectives of gloo, for which the host waits, and which are no operators.
HOST_COLLECTIVES = ("allreduce", "allgather", "_allgather_base", "alltoall_base", "broadcast", "barrier")

_RECORDING = threading.RLock()
"""Held by the thread that records, because it replaces functions of all threads. Of two that did, the second
would leave those of the first in place."""

Leaf = TypeVar("Leaf")
Run = Callable[[], None]


class FakeGraph:
    def __init__(self, pool: "FakeGraphs", runs: list[Run], private: list[Tensor]):
        self._pool, self._runs, self._private = pool, runs, private

    @property
    def num_nodes(self) -> int:
        return len(self._runs)

    def replay(self) -> None:
        self._pool.poison()
        with torch.inference_mode():
            for run in self._runs:
                run()

    @torch.inference_mode()
    def poison(self) -> None:
        for x in self._private:
            poison(x)


class FakeGraphs:
    """Graphs that share memory."""

    def __init__(self) -> None:
        self._graphs = WeakSet[FakeGraph]()

    def capture(self, work: Callable[[], None]) -> FakeGraph:
        """Run the work, then capture it."""
        first = Recorder(None)
        with first.recording():
            work()
        # Memory that the first run returned to its owners is kept, too.
        second = Recorder(first.fixed | {key: x.untyped_storage() for key, x in first.private.items()})
        try:
            with second.recording():
                work()
        finally:
            second.restore()
        graph = FakeGraph(self, second.runs, list(second.private.values()))
        graph.poison()
        self._graphs.add(graph)
        return graph

    def poison(self) -> None:
        for graph in self._graphs:
            graph.poison()


class FakeStream:
    """`DeviceStream` that computes work immediately."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.graphs = FakeGraphs()

    def run(self, work: Callable[[], None]) -> None:
        work()

    def pinned(self, num_words: int) -> Tensor:
        return torch.full((num_words,), -1, dtype=torch.int32)

    def record(self) -> "FakeStream":
        return self

    def wait(self) -> None:
        """Return immediately, because all work is done."""

    def start_timer(self) -> LateTimer:
        return LateTimer()

    def capture(self, work: Callable[[], None]) -> FakeGraph:
        return self.graphs.capture(work)


class _Recording:
    """Recorder of operators and kernels. `known` is the fixed memory of the previous run; None: there was
    none, and kernels are launched too. Operators always run, because only that gives the shapes of their
    results."""

    def __init__(self, known: dict[int, torch.UntypedStorage] | None) -> None:
        super().__init__()
        self._known = known
        self.runs: list[Run] = []
        self.private: dict[int, Tensor] = {}  # memory allocated since the start
        self.fixed: dict[int, torch.UntypedStorage] = {}  # other used memory
        self._before: dict[int, Tensor] = {}  # copies of fixed memory before it was written

    @contextmanager
    def recording(self) -> Iterator[None]:
        with _RECORDING, self._replacing_launches(), refuse_host_collectives(), RefuseFunctions(), self:
            yield

    @contextmanager
    def _replacing_launches(self) -> Iterator[None]:
        run = interpreter.InterpretedFunction.run

        def launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
            self._launch(lambda *a, **k: run(kernel, *a, **k), args, kwargs)

        with mock.patch.object(interpreter.InterpretedFunction, "run", launch):
            yield

    @torch.inference_mode()
    def restore(self) -> None:
        """Undo writes of operators to fixed memory, because captured work does not run."""
        for key, copy in self._before.items():
            as_bytes(self.fixed[key]).copy_(copy)

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_composite(func):  # inference mode leaves such operators whole
            with self:
                return func.decompose(*args, **kwargs)
        refuse(func, args)
        given = self._use((args, kwargs))
        if func in UPLOADING and self._is_number(args[UPLOADING[func]]):
            raise RuntimeError(f"captured work uploads a number: {func}")
        if func._schema.is_mutable:
            self._keep(given)
        result = func(*args, **kwargs)
        made = [x for x in tensors((result,)) if key_of(x) not in given]
        for x in made:
            self.private[key_of(x)] = whole(x)
        if "empty" in func.name():
            for x in made:
                x.zero_()  # so that no index is out of range
        elif made or func._schema.is_mutable:
            self._record(func, args, kwargs, result, made)
        return result

    def _launch(self, run: Callable[..., None], args: Any, kwargs: Any) -> None:
        self._use((args, kwargs))
        if self._known is None:
            with _disable_current_modes():
                run(*args, **kwargs)
        again = self._freeze((args, kwargs))

        def launch() -> None:
            args, kwargs = again()
            run(*args, **kwargs)

        self.runs.append(launch)

    def _record(self, func: OpOverload, args: Any, kwargs: Any, result: Any, made: list[Tensor]) -> None:
        again = self._freeze((args, kwargs))
        places = [i for i, x in enumerate(tensors((result,))) if any(x is each for each in made)]

        def run() -> None:
            args, kwargs = again()
            results = tensors((func(*args, **kwargs),))
            for place, x in zip(places, made, strict=True):
                assert x.shape == results[place].shape
                x.copy_(results[place])

        self.runs.append(run)

    def _use(self, tree: Any) -> set[int]:
        """Return the memory of all tensors, and record which of it is fixed."""
        given = {key_of(x): x for x in tensors(tree)}
        for key, x in given.items():
            if key in self.private or self._is_number(x):
                continue
            if self._known is not None and key not in self._known and x.untyped_storage().nbytes():
                raise RuntimeError("captured work uses memory that is not the same in each run")
            self.fixed[key] = x.untyped_storage()
        return set(given)

    def _is_number(self, x: Tensor) -> bool:
        """Return True for numbers that torch wraps as tensors, which a capture freezes."""
        key = key_of(x)
        return x.dim() == 0 and self._known is not None and key not in self._known and key not in self.private

    def _keep(self, given: set[int]) -> None:
        with _disable_current_modes():
            for key in given & self.fixed.keys() - self._before.keys():
                self._before[key] = as_bytes(self.fixed[key]).clone()

    def _freeze(self, tree: Any) -> Callable[[], Any]:
        """Return a function that returns the tree with the same memory. Fixed memory must still have its
        owner then, so it is not kept alive here."""
        frozen = map_leaves(Tensor, self._freeze_tensor, tree)
        return lambda: map_leaves(Frozen, Frozen.thaw, frozen)

    def _freeze_tensor(self, x: Tensor) -> "Tensor | Frozen":
        if key_of(x) in self.fixed:
            return Frozen(x)
        return x if key_of(x) in self.private else x.clone()


class Recorder(_Recording, TorchDispatchMode):
    """Dispatch mode of a recording. The handler is inherited: around one that a mode defines itself, torch
    imports its compiler, and calls it for each operator."""


@functools.cache
def _is_composite(func: OpOverload) -> bool:
    return func._can_decompose()


class Frozen:
    """Tensor in memory that another object keeps alive."""

    def __init__(self, x: Tensor):
        storage = x.untyped_storage()
        self._weak, self._address = StorageWeakRef(storage), storage.data_ptr()
        self._view = x.storage_offset(), x.shape, x.stride()
        self._dtype = x.dtype

    def thaw(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._weak.cdata)
        assert storage is not None, "a graph uses memory that was freed after the capture"
        assert storage.data_ptr() == self._address, "a graph uses memory that has moved since the capture"
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._view)


class RefuseFunctions(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in REFUSED_FUNCTIONS:
            raise RuntimeError(f"captured work uses {REFUSED_FUNCTIONS[func]}: {func.__name__}")
        return func(*args, **(kwargs or {}))


@contextmanager
def refuse_host_collectives() -> Iterator[None]:
    def fail(*_: Any) -> None:
        raise RuntimeError("captured work waits for other ranks on the host")

    with mock.patch.multiple(dist.ProcessGroupGloo, **dict.fromkeys(HOST_COLLECTIVES, fail)):
        yield


def refuse(func: OpOverload, args: tuple[Any, ...]) -> None:
    """Raise RuntimeError if the operator cannot be captured."""
    if func in INDEXING:
        if any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]):
            raise RuntimeError(f"captured work looks for the places of a mask: {func}")
        return
    if func == aten.lift_fresh.default and args[0].dim():
        raise RuntimeError("captured work uses memory of the host")
    if func in REFUSED:
        raise RuntimeError(f"captured work uses {REFUSED[func]}: {func}")
    if REFUSED_TAGS & set(func.tags) or not all("Tensor" in str(each.type) for each in func._schema.returns):
        raise RuntimeError(f"captured work uses values on the host: {func}")


def tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, tuple | list):
        return []
    return [x for branch in tree for x in tensors(branch)]


def map_leaves(kind: type[Leaf], change: Callable[[Leaf], Any], tree: Any) -> Any:
    """Return the tree of tuples, lists and dictionaries with its leaves of one kind changed."""
    if isinstance(tree, kind):
        return change(tree)
    if type(tree) in (tuple, list):
        return type(tree)([map_leaves(kind, change, branch) for branch in tree])
    if type(tree) is dict:
        return {key: map_leaves(kind, change, branch) for key, branch in tree.items()}
    return tree


def key_of(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def whole(x: Tensor) -> Tensor:
    """Return all of a tensor's memory as [n] in its type."""
    storage = x.untyped_storage()
    return torch.empty(0, dtype=x.dtype).set_(storage, 0, (storage.nbytes() // x.itemsize,))


def poison(x: Tensor) -> None:
    """Fill a tensor with NaN, or with integers that are invalid indices."""
    if x.is_floating_point():
        x.fill_(torch.nan)
    else:
        x.fill_(True if x.dtype == torch.bool else torch.iinfo(x.dtype).max)
