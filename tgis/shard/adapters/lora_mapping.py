"""Maps a LoRA adapter's tensors to the model's layers on this rank. The adapter has the module names of the
transformers version that trained it; the model has the names of its family."""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tgis.prompts.errors import AdapterError, quote
from tgis.prompts.lora_files import split_name
from tgis.shard.checkpoint.provenance import ModuleRows
from tgis.shard.checkpoint.tensors import WeightsError
from tgis.shard.layers.lora import Adapter, Cut, LowRank
from tgis.shard.layers.ops import Parts

# Number of rows of the model's embeddings that are compared at a time.
COMPARED_ROWS = 8192
# Absolute tolerance: smaller differences disappear in rounding.
TINY = 1e-6

Trace = Sequence[ModuleRows]

# Module names since transformers 5, and the names that families use.
_RENAMED = (
    ("model.language_model.", "model."),
    ("model.", "backbone."),
    (".mlp.gate", ".block_sparse_moe.gate"),
    (".block_sparse_moe.router", ".block_sparse_moe.router.layer"),
    ("lm_head", "embed_out"),
)
# Since transformers 5, one parameter holds all experts. The table lists the modules whose rows it contains.
_EXPERTS = re.compile(
    r"(.+?)(?:\.(?:mlp|block_sparse_moe|mixer|feed_forward))?\.experts\.((?:gate_)?up_proj|down_proj)"
)
_EXPERT_MODULES = {
    "gate_up_proj": (
        ("block_sparse_moe.experts.{e}.w1", "block_sparse_moe.experts.{e}.w3"),
        ("mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj"),
        ("block_sparse_moe.input_linear.{e}",),
        ("block_sparse_moe.experts.gate_up_proj.{e}",),
        ("mlp.experts.gate_up_proj.{e}",),
        ("feed_forward.experts.gate_up_proj.{e}",),
        ("experts.gate_up_proj.{e}",),
    ),
    "up_proj": (("mixer.experts.{e}.up_proj",),),
    "down_proj": (
        ("mixer.experts.{e}.down_proj",),
        ("block_sparse_moe.experts.{e}.w2",),
        ("mlp.experts.{e}.down_proj",),
        ("block_sparse_moe.output_linear.{e}",),
        ("block_sparse_moe.experts.down_proj.{e}",),
        ("mlp.experts.down_proj.{e}",),
        ("feed_forward.experts.down_proj.{e}",),
        ("experts.down_proj.{e}",),
    ),
}
# Experts' parameters of Llama 4 are stored [in, out]. PEFT takes them for [out, in]; early releases did not.
_TURNED = re.compile(r".+\.feed_forward\.experts\.\w+\.\d+")
# Modules of multimodal models that text-only inference does not use.
_UNUSED = re.compile(
    r"(model\.)?(vision_tower|vision_model|visual|audio_tower|embed_vision|embed_audio|multi_modal_projector)\..+"
)


@dataclass(frozen=True, eq=False)
class Change:
    """Change of a module's weight: scale * b @ a."""

    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank]
    scale: float


def read_adapter(parts: Parts, tensors: Mapping[str, Tensor], scales: Mapping[str, float]) -> Adapter:
    """Return this rank's part of an adapter for the model built from `parts`. All data is copied. Raises
    AdapterError if a tensor fits no layer."""
    if parts.weights.has_scaled_matrices:
        raise AdapterError(
            "adapters of this model are not supported in GGUF files, because its matrices were multiplied by "
            "factors that the file does not have: use its safetensors checkpoint"
        )
    traces = {path: parts.weights.trace(path, cut.shape) for path, cut in parts.cuts.items()}
    _compare_tables(parts, traces, tensors)
    deltas: dict[str, tuple[LowRank, ...]] = {}
    for is_table, read in ((False, _read_matrix), (True, _read_table)):
        selected = {path: trace for path, trace in traces.items() if parts.cuts[path].is_table is is_table}
        known = {rows.module for trace in selected.values() for rows in trace}
        changes = _read_changes(tensors, scales, is_table, known, parts.weights.prefix)
        if is_table and changes and any(path.startswith("encoder.") for path in traces):
            # transformers has separate embedding modules for encoder and decoder, and never calls the module
            # whose weights they share.
            raise AdapterError("adapters of an encoder-decoder model's embeddings are not supported")
        deltas |= _read_all(parts, selected, changes, read)
    if not deltas:
        raise AdapterError("it is for another model: it changes no layer of this one")
    return Adapter({path: delta for path, delta in deltas.items() if delta})


def _read_changes(
    tensors: Mapping[str, Tensor],
    scales: Mapping[str, float],
    is_table: bool,
    known: set[str],
    prefix: str,
) -> dict[str, Change]:
    """Return the changes by name of known module. Raises AdapterError if a change fits no module."""
    kinds = ("lora_embedding_A", "lora_embedding_B") if is_table else ("lora_A.weight", "lora_B.weight")
    changes: dict[str, Change] = {}
    for module, scale in scales.items():
        a, b = (tensors.get(f"{module}.{kind}") for kind in kinds)
        if a is None or b is None or _UNUSED.fullmatch(module):
            continue
        matches = {
            name: Change(own_a, own_b, scale) for name, own_a, own_b in _divide(module, a, b, known, prefix)
        }
        if not matches:
            what = "table of tokens" if is_table else "linear layer"
            raise AdapterError(f"it is for another model: {quote(module)} is no {what} of this one")
        if not changes.keys().isdisjoint(matches):
            raise AdapterError(f"it changes {quote(module)} under two names")
        changes |= matches
    return changes


def _read_all(
    parts: Parts,
    traces: Mapping[str, Trace],
    changes: Mapping[str, Change],
    read: Callable[[Cut, Trace, Mapping[str, Change]], Iterator[LowRank]],
) -> dict[str, tuple[LowRank, ...]]:
    deltas = {}
    for path, trace in traces.items():
        if any(rows.module in changes for rows in trace):
            own = _turn(parts.cuts[path], trace, changes)
            _check_fit(parts.cuts[path], trace, own)
            terms = read(parts.cuts[path], trace, own)
            factors = parts.factors.get(path)
            deltas[path] = tuple(
                parts.kernels.place_low_rank(
                    LowRank(_scale_inputs(term.a, factors), term.b, term.first), parts.cuts[path].is_table
                )
                for term in terms
            )
    return deltas


def _scale_inputs(a: Tensor, factors: Tensor | None) -> Tensor:
    """Return a, [in, rank], for a layer whose inputs were divided by the factors."""
    return a if factors is None else a * factors.unsqueeze(1)


def _turn(cut: Cut, trace: Trace, changes: Mapping[str, Change]) -> Mapping[str, Change]:
    """Return the changes of a layer's modules, with those transposed that PEFT has transposed."""
    own = {rows.module: changes[rows.module] for rows in trace if rows.module in changes}
    return {
        module: Change(change.b.T, change.a.T, change.scale)
        if _TURNED.fullmatch(module) and len(change.b) == cut.shape[1]
        else change
        for module, change in own.items()
    }


def _check_fit(cut: Cut, trace: Trace, changes: Mapping[str, Change]) -> None:
    heights: Counter[str] = Counter()
    for rows in trace:
        heights[rows.module] += rows.count
    for module, height in heights.items():
        if change := changes.get(module):
            shape = (len(change.b), change.a.shape[1])
            shape = shape[::-1] if cut.is_table else shape
            expected = (cut.module_height or height, cut.shape[1])
            if shape != expected:
                raise AdapterError(
                    f"it is for another model: {quote(module)} changes {shape[0]} by {shape[1]}, not "
                    f"{expected[0]} by {expected[1]}"
                )


def _read_matrix(cut: Cut, trace: Trace, changes: Mapping[str, Change]) -> Iterator[LowRank]:
    """Yield the terms for a linear layer. Adjacent output columns with the same `a` become one term, so that
    a packed layer that was trained as one module needs only one."""
    if cut.is_transposed:
        yield _read_transposed(trace, changes)
        return
    first = 0
    columns = cut.columns or slice(None)

    def key(rows: ModuleRows) -> int | None:
        return id(changes[rows.module].a) if rows.module in changes else None

    for _, group in itertools.groupby(_list_own(cut, trace), key):
        run = list(group)
        if change := changes.get(run[0].module):
            b = torch.cat([changes[rows.module].b[rows.rows] for rows in run])
            yield _pack(change.a[:, columns], b, change.scale, first)
        first += sum(rows.count for rows in run)


def list_widths(parts: Parts, path: str) -> list[int]:
    """Return the widths of the terms that an adapter may have at a layer. Adjacent terms may be one."""
    cut = parts.cuts[path]
    trace = parts.weights.trace(path, cut.shape)
    if cut.is_table or cut.is_transposed:
        return [cut.shape[1]]
    groups = itertools.groupby(_list_own(cut, trace), lambda rows: rows.module)
    return [sum(rows.count for rows in group) for _, group in groups]


def _read_transposed(trace: Trace, changes: Mapping[str, Change]) -> LowRank:
    [rows] = trace
    change = changes[rows.module]
    return _pack(change.b[rows.rows].T, change.a.T, change.scale, 0)


def _read_table(cut: Cut, trace: Trace, changes: Mapping[str, Change]) -> Iterator[LowRank]:
    [rows] = trace
    change = changes[rows.module]
    yield _pack(change.a, change.b, change.scale, 0)


def _pack(a: Tensor, b: Tensor, scale: float, first: int) -> LowRank:
    """Copy a and b, both transposed and b multiplied by the scale."""
    copied = a.T.to(torch.float32).clone(memory_format=torch.contiguous_format)  # [in, rank]
    scaled = b.T.to(torch.float32).mul(scale).contiguous()  # [rank, width]
    return LowRank(copied, scaled, first)


def _list_own(cut: Cut, trace: Trace) -> Iterator[ModuleRows]:
    """Yield this rank's rows in the order of its tensor."""
    for part in cut.rows:
        start = 0
        for rows in trace:
            low, high = max(part.start, start), min(part.stop, start + rows.count)
            if low < high:
                yield rows.take(low - start, high - low)
            start += rows.count


def _compare_tables(parts: Parts, traces: Mapping[str, Trace], tensors: Mapping[str, Tensor]) -> None:
    """Raise AdapterError if the adapter's copy of the embeddings differs from the model's. PEFT saves a copy
    if the adapter changes the embeddings or the vocabulary has grown."""
    paths = {traces[path][0].module: path for path in ("embed", "head")}
    copies = {module: name for name in tensors for module, kind in [split_name(name)] if kind == "base"}
    try:
        for module, name in copies.items():
            path = paths.get(_find_name(module, paths, parts.weights.prefix) or "")
            if path is None or not _is_same(parts, path, tensors[name]):
                raise AdapterError(f"it was trained with other weights of {quote(module)} than the model's")
    except WeightsError as error:
        raise AdapterError(
            "the model's embeddings cannot be read for comparison with the adapter's copy"
        ) from error
    finally:
        if copies:
            parts.weights.release()


def _is_same(parts: Parts, path: str, copy: Tensor) -> bool:
    shape = parts.cuts[path].shape
    if copy.shape != shape:
        return False
    stored = parts.weights.find_matrix(path, shape)
    for start in range(0, len(copy), COMPARED_ROWS):
        rows = slice(start, start + COMPARED_ROWS)
        ours = stored.read(rows)
        theirs = copy[rows]
        error = max(torch.finfo(dtype).eps for dtype in (ours.dtype, theirs.dtype, parts.dtype))
        if not torch.allclose(theirs.float(), ours.float(), rtol=error, atol=TINY):
            return False
    return True


def _find_name(module: str, known: Collection[str], prefix: str) -> str | None:
    """Return the name in `known` that an adapter's module has, or None. Either name may lack the `prefix`."""
    return next((name for name in _list_spellings(module, prefix) if name in known), None)


def _list_spellings(module: str, prefix: str) -> Iterator[str]:
    """Yield the names that a family may have for an adapter's module."""
    renamed = (module.replace(theirs, ours) for theirs, ours in _RENAMED if theirs in module)
    for name in (module, *renamed):
        yield from (name, name.removeprefix(prefix), prefix + name)


def _divide(
    module: str, a: Tensor, b: Tensor, known: Collection[str], prefix: str
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the known modules that an adapter's module maps to, each with its a [rank, in] and b [out, rank].
    A parameter that holds all experts maps to the experts' modules; any other to one module or none."""
    if name := _find_name(module, known, prefix):
        yield name, a, b
    elif match := _EXPERTS.fullmatch(module):
        for layout in _EXPERT_MODULES[match[2]]:
            experts = list(_list_experts(_rename_block(match[1], known, prefix), layout, known))
            if experts and len(a) % len(experts) == 0 and len(b) % len(layout) == 0:
                yield from _split_experts(experts, a, b)


def _rename_block(block: str, known: Collection[str], prefix: str) -> str:
    """Return the name that the family uses for a block."""
    for spelling in _list_spellings(block, prefix):
        if any(name.startswith(f"{spelling}.") for name in known):
            return spelling
    return block


def _list_experts(block: str, layout: Sequence[str], known: Collection[str]) -> Iterator[list[str]]:
    for e in itertools.count():
        names = [f"{block}.{part.format(e=e)}" for part in layout]
        if not all(name in known for name in names):
            return
        yield names


def _split_experts(
    experts: Sequence[list[str]], a: Tensor, b: Tensor
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Split a [num_experts * rank, in] and b [out, rank * num_experts] by expert module. Each expert owns
    every num_experts-th column of b."""
    each_a = a.chunk(len(experts))
    each_b = b.view(len(b), -1, len(experts)).unbind(-1)
    for names, own_a, own_b in zip(experts, each_a, each_b, strict=True):
        for name, part in zip(names, own_b.chunk(len(names)), strict=True):
            yield name, own_a, part
