"""Maps a LoRA adapter's tensors, which have PEFT's names of modules, to the model's layers on this rank."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tgis.prompts.errors import AdapterError, quote
from tgis.prompts.lora_files import split_name
from tgis.shard.adapters.lora_names import divide, is_unused, spell
from tgis.shard.checkpoint.provenance import Rows
from tgis.shard.checkpoint.tensors import WeightsError
from tgis.shard.layers.lora import Adapter, Cut, LowRank
from tgis.shard.layers.ops import Parts

# Rows of the model's embeddings that are compared at a time.
COMPARED_ROWS = 8192
# Absolute tolerance: rounding hides any difference of numbers as small as this.
TINY = 1e-6

Trace = Sequence[Rows]


@dataclass(frozen=True, eq=False)
class Change:
    """Change of a module's weight: scale * b a."""

    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank]
    scale: float


def read_adapter(parts: Parts, tensors: Mapping[str, Tensor], scales: Mapping[str, float]) -> Adapter:
    """Return this rank's part of an adapter for the model made from `parts`.

    All data is copied; nothing of `tensors` is kept. Raises AdapterError if a tensor fits no layer."""
    traces = {path: parts.weights.trace(f"{path}.weight", cut.shape) for path, cut in parts.cuts.items()}
    _compare_tables(parts, traces, tensors)
    deltas: dict[str, tuple[LowRank, ...]] = {}
    for kind, read in ((False, _read_matrix), (True, _read_table)):
        mine = {path: trace for path, trace in traces.items() if parts.cuts[path].is_table is kind}
        known = {rows.module for trace in mine.values() for rows in trace}
        changes = _sort(tensors, scales, kind, known, parts.weights.prefix)
        if kind and changes and any(path.startswith("encoder.") for path in traces):
            # transformers has separate modules for the embeddings of encoder and decoder, and never calls the
            # module that they share.
            raise AdapterError("adapters of an encoder-decoder model's embeddings are not supported")
        deltas |= _read_all(parts, mine, changes, read)
    if not deltas:
        raise AdapterError("it is for another model: it changes no layer of this one")
    return Adapter({path: delta for path, delta in deltas.items() if delta})


def _sort(
    tensors: Mapping[str, Tensor],
    scales: Mapping[str, float],
    is_table: bool,
    known: set[str],
    prefix: str,
) -> dict[str, Change]:
    """Return the changes by the names of the known modules. Raises AdapterError if one fits no module."""
    kinds = ("lora_embedding_A", "lora_embedding_B") if is_table else ("lora_A.weight", "lora_B.weight")
    changes: dict[str, Change] = {}
    for module, scale in scales.items():
        a, b = (tensors.get(f"{module}.{kind}") for kind in kinds)
        if a is None or b is None or is_unused(module):
            continue
        found = {
            name: Change(own_a, own_b, scale) for name, own_a, own_b in divide(module, a, b, known, prefix)
        }
        if not found:
            what = "table of tokens" if is_table else "linear layer"
            raise AdapterError(f"it is for another model: {quote(module)} is no {what} of this one")
        if not changes.keys().isdisjoint(found):
            raise AdapterError(f"it changes {quote(module)} under another name too")
        changes |= found
    return changes


def _read_all(
    parts: Parts,
    traces: Mapping[str, Trace],
    changes: Mapping[str, Change],
    read: Callable[[Cut, Trace, Mapping[str, Change]], Iterator[LowRank]],
) -> dict[str, tuple[LowRank, ...]]:
    deltas, device = {}, parts.kernels.device
    for path, trace in traces.items():
        if any(rows.module in changes for rows in trace):
            _check_fit(parts.cuts[path], trace, changes)
            found = read(parts.cuts[path], trace, changes)
            deltas[path] = tuple(LowRank(one.a.to(device), one.b.to(device), one.first) for one in found)
    return deltas


def _check_fit(cut: Cut, trace: Trace, changes: Mapping[str, Change]) -> None:
    heights: Counter[str] = Counter()
    for rows in trace:
        heights[rows.module] += rows.count
    for module, height in heights.items():
        if change := changes.get(module):
            found, wanted = (len(change.b), change.a.shape[1]), (height, cut.shape[1])
            found = found[::-1] if cut.is_table else found
            if found != wanted:
                raise AdapterError(
                    f"it is for another model: {quote(module)} changes {found[0]} by {found[1]}, not "
                    f"{wanted[0]} by {wanted[1]}"
                )


def _read_matrix(cut: Cut, trace: Trace, changes: Mapping[str, Change]) -> Iterator[LowRank]:
    """Yield the parts for a linear layer.

    Neighbouring output columns that share one `a` become one part, so that a packed layer that was trained
    as one module stays one part."""
    first = 0
    columns = cut.columns or slice(None)

    def key(rows: Rows) -> int | None:
        return id(changes[rows.module].a) if rows.module in changes else None

    for _, group in itertools.groupby(_list_own(cut, trace), key):
        run = list(group)
        if change := changes.get(run[0].module):
            b = torch.cat([changes[rows.module].b[rows.first : rows.first + rows.count] for rows in run])
            yield _pack(change.a[:, columns], b, change.scale, first)
        first += sum(rows.count for rows in run)


def _read_table(cut: Cut, trace: Trace, changes: Mapping[str, Change]) -> Iterator[LowRank]:
    [rows] = trace
    change = changes[rows.module]
    yield _pack(change.a, change.b, change.scale, 0)


def _pack(a: Tensor, b: Tensor, scale: float, first: int) -> LowRank:
    """Copy a and b, transposed and with the scale in b."""
    copied = a.T.to(torch.float32).clone(memory_format=torch.contiguous_format)  # [in, rank]
    scaled = b.T.to(torch.float32).mul(scale).contiguous()  # [rank, width]
    return LowRank(copied, scaled, first)


def _list_own(cut: Cut, trace: Trace) -> Iterator[Rows]:
    """Yield the rank's own rows in its order."""
    for part in cut.rows:
        start = 0
        for rows in trace:
            low, high = max(part.start, start), min(part.stop, start + rows.count)
            if low < high:
                yield Rows(rows.module, rows.first + low - start, high - low)
            start += rows.count


def _compare_tables(parts: Parts, traces: Mapping[str, Trace], tensors: Mapping[str, Tensor]) -> None:
    """Check that the adapter was trained with the model's own embeddings.

    PEFT saves a copy of them if an adapter changes them or if the vocabulary has grown. Raises AdapterError
    if that copy differs from the model's embeddings."""
    paths = {traces[path][0].module: path for path in ("embed", "head")}
    copies = {module: name for name in tensors for module, kind in [split_name(name)] if kind == "base"}
    try:
        for module, name in copies.items():
            path = paths.get(spell(module, paths, parts.weights.prefix) or "")
            if path is None or not _is_same(parts, path, tensors[name]):
                raise AdapterError(f"it was trained with other weights of {quote(module)} than the model's")
    except WeightsError as error:
        raise AdapterError("the model's embeddings, to be compared to its, cannot be read") from error
    finally:
        if copies:
            parts.weights.release()


def _is_same(parts: Parts, path: str, copy: Tensor) -> bool:
    shape = parts.cuts[path].shape
    if copy.shape != shape:
        return False
    stored = parts.weights.find(f"{path}.weight", shape)
    for start in range(0, len(copy), COMPARED_ROWS):
        rows = slice(start, start + COMPARED_ROWS)
        ours, theirs = stored.read(rows), copy[rows]
        error = max(torch.finfo(dtype).eps for dtype in (ours.dtype, theirs.dtype, parts.dtype))
        if not torch.allclose(theirs.float(), ours.float(), rtol=error, atol=TINY):
            return False
    return True
