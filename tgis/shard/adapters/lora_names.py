"""Finds the modules of a model that a LoRA adapter names.

The adapter has the names that transformers used when it was trained; the model has those of its family."""

import itertools
import re
from collections.abc import Collection, Iterator, Sequence

from torch import Tensor

# Names of modules in memory since transformers 5, and the names that families use.
_RESPELLED = (
    ("model.language_model.", "model."),
    (".mlp.gate", ".block_sparse_moe.gate"),
    (".block_sparse_moe.router", ".block_sparse_moe.router.layer"),
    ("lm_head", "embed_out"),
)
# Since transformers 5 one parameter holds all experts. The table has the modules whose rows it contains.
_EXPERTS = re.compile(r"(.+)\.(?:mlp|block_sparse_moe)\.experts\.(gate_up_proj|down_proj)")
_OF_AN_EXPERT = {
    "gate_up_proj": (
        ("block_sparse_moe.experts.{e}.w1", "block_sparse_moe.experts.{e}.w3"),
        ("mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj"),
        ("block_sparse_moe.input_linear.{e}",),
    ),
    "down_proj": (
        ("block_sparse_moe.experts.{e}.w2",),
        ("mlp.experts.{e}.down_proj",),
        ("block_sparse_moe.output_linear.{e}",),
    ),
}
# Modules of multimodal models that text-only inference does not use.
_UNUSED = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\..+")


def is_unused(module: str) -> bool:
    return _UNUSED.fullmatch(module) is not None


def spell(module: str, known: Collection[str], prefix: str) -> str | None:
    """Return the name in `known` of an adapter's module, or None. Either name may lack the `prefix`."""
    respelled = (module.replace(theirs, ours) for theirs, ours in _RESPELLED if theirs in module)
    for name in (module, *respelled):
        for spelling in (name, name.removeprefix(prefix), prefix + name):
            if spelling in known:
                return spelling
    return None


def divide(
    module: str, a: Tensor, b: Tensor, known: Collection[str], prefix: str
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield each known module that an adapter's module stands for, with its a [rank, in] and b [out, rank].

    This is the module itself, the experts' modules if it is a parameter of all experts, or none."""
    if name := spell(module, known, prefix):
        yield name, a, b
    elif found := _EXPERTS.fullmatch(module):
        for layout in _OF_AN_EXPERT[found[2]]:
            experts = list(_list_experts(found[1], layout, known))
            if experts and len(a) % len(experts) == 0 and len(b) % len(layout) == 0:
                yield from _share_out(experts, a, b)


def _list_experts(block: str, layout: Sequence[str], known: Collection[str]) -> Iterator[list[str]]:
    """Yield the names of each expert's modules."""
    for e in itertools.count():
        names = [f"{block}.{part.format(e=e)}" for part in layout]
        if not all(name in known for name in names):
            return
        yield names


def _share_out(experts: Sequence[list[str]], a: Tensor, b: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Split a and b of all experts into those of each expert's modules.

    a is [num_experts * rank, in]. b is [out, rank * num_experts], where each expert has every
    num_experts-th column."""
    each_a, each_b = a.chunk(len(experts)), b.view(len(b), -1, len(experts)).unbind(-1)
    for names, own_a, own_b in zip(experts, each_a, each_b, strict=True):
        for name, part in zip(names, own_b.chunk(len(names)), strict=True):
            yield name, own_a, part
