"""CUDA graphs on the CPU. Work is captured as its torch operators and launches of interpreted kernels, with
the numbers and the memory that they were called with, and replayed without the Python between them.

What a GPU would not allow fails: values that the host looks at, and memory that is not the same in each run.
The memory that graphs share holds nothing that the graph did not write since its replay began."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock
from weakref import WeakSet

import torch
import triton.runtime.interpreter as interpreter
from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only

aten = torch.ops.aten

# Tags of operators whose result's shape or whose result depends on values, or on the state of an RNG.
REFUSED_TAGS = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
}
# Operators that wait for the device, although no tag says so, or that give a tensor other memory.
REFUSED = {
    aten.equal.default: "values of tensors",
    aten._pin_memory.default: "memory of the host",
    aten.resize_.default: "memory that changes",
    aten.set_.source_Storage: "memory that changes",
    aten.set_.source_Storage_storage_offset: "memory that changes",
    aten.set_.source_Tensor: "memory that changes",
}
# Functions that read or make tensors without an operator, or with the same one as a stored number.
REFUSED_FUNCTIONS = {
    **dict.fromkeys((Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__array__), "values on the host"),
    **dict.fromkeys((torch.tensor, torch.as_tensor, torch.asarray), "memory of the host"),
}
# Operators to which a number of the host is uploaded; others take it as a parameter.
UPLOADING = {aten.copy_.default: 1, aten.index_put_.default: 2, aten.index_put.default: 2}
# Operators whose second argument is a list of indices, or of masks, whose places the host must know.
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}

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
        """Run the work, and capture it."""
        first = Recorder(None)
        with first.recording():
            work()
        # What the first run left to its owners stays, too.
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
    """`DeviceStream` that has done its work when it returns."""

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
        """Wait for nothing."""

    def capture(self, work: Callable[[], None]) -> FakeGraph:
        return self.graphs.capture(work)


class Recorder(TorchDispatchMode):
    """Records what runs. `known` is the fixed memory that the run before used; None: there was none, and
    kernels are launched too. Operators run in any case: nothing else tells the shapes of their results."""

    def __init__(self, known: dict[int, torch.UntypedStorage] | None) -> None:
        super().__init__()
        self._known = known
        self.runs: list[Run] = []
        self.private: dict[int, Tensor] = {}  # memory taken since
        self.fixed: dict[int, torch.UntypedStorage] = {}  # other memory that is used
        self._before: dict[int, Tensor] = {}  # copies of fixed memory that was written

    @contextmanager
    def recording(self) -> Iterator[None]:
        run = interpreter.InterpretedFunction.run

        def launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
            self._launch(lambda *a, **k: run(kernel, *a, **k), args, kwargs)

        with mock.patch.object(interpreter.InterpretedFunction, "run", launch), RefuseFunctions(), self:
            yield

    @torch.inference_mode()
    def restore(self) -> None:
        """Undo what operators wrote to fixed memory: captured work does not run."""
        for key, copy in self._before.items():
            as_bytes(self.fixed[key]).copy_(copy)

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with self:  # operators made of others, which inference mode leaves whole
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
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
                x.zero_()  # no index is out of range
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
        """Return the memory of all tensors, and note which of it is fixed."""
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
        return x.dim() == 0 and self._known is not None and key not in self._known | self.private

    def _keep(self, given: set[int]) -> None:
        with _disable_current_modes():
            for key in given & self.fixed.keys() - self._before.keys():
                self._before[key] = as_bytes(self.fixed[key]).clone()

    def _freeze(self, tree: Any) -> Callable[[], Any]:
        """Return a function that returns the tree with the same memory. Fixed memory must still be its
        owner's then, so it is not kept."""
        frozen = tree_map_only(Tensor, self._freeze_tensor, tree)
        return lambda: tree_map_only(Frozen, lambda x: x.thaw(), frozen)

    def _freeze_tensor(self, x: Tensor) -> "Tensor | Frozen":
        if key_of(x) in self.fixed:
            return Frozen(x)
        return x if key_of(x) in self.private else x.clone()


class Frozen:
    """Tensor in memory that somebody else keeps."""

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
    return [x for x in tree_flatten(tree)[0] if isinstance(x, Tensor)]


def key_of(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def whole(x: Tensor) -> Tensor:
    """Return all of a tensor's memory as its type, [n]."""
    storage = x.untyped_storage()
    return torch.empty(0, dtype=x.dtype).set_(storage, 0, (storage.nbytes() // x.itemsize,))


def poison(x: Tensor) -> None:
    """Fill a tensor with NaN, or with integers that are no index."""
    if x.is_floating_point():
        x.fill_(torch.nan)
    else:
        x.fill_(True if x.dtype == torch.bool else torch.iinfo(x.dtype).max)
