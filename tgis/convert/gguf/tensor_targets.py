"""Lists the tensors of a GGUF file to write, with their sources in a checkpoint."""

from collections.abc import Container, Iterator
from dataclasses import dataclass

from tgis.convert.gguf.tensor_names import GgufSource, TensorNames, make_source

ENDS = ("weight", "bias")
OF_ONE_EXPERT = ".{e}"  # suffix of modules of old files, which have one tensor per expert


@dataclass(frozen=True)
class GgufTarget:
    """Tensor of a file. Several sources are experts, which the tensor stacks.

    If several of the file's tensors are joined in the source, this one has part `number` of `count` equal
    parts of its rows."""

    name: str
    sources: tuple[str, ...]
    storage: GgufSource
    number: int = 0
    count: int = 1


@dataclass(frozen=True)
class TensorCounts:
    """Numbers of layers, experts, query heads and key heads."""

    layers: int
    experts: int
    heads: int
    groups: int


def list_targets(names: TensorNames, counts: TensorCounts, existing: Container[str]) -> Iterator[GgufTarget]:
    """Yield the tensors whose sources are among the checkpoint's existing tensors."""
    keys = [key for key in names.modules if not key.endswith(OF_ONE_EXPERT)]
    for key in keys:
        module = names.modules[key]
        joined = [other for other in keys if names.modules[other] == module]
        for layer in range(counts.layers if "{i}" in key else 1):
            for end in ENDS:
                experts = range(counts.experts if "{e}" in module else 1)
                sources = tuple(f"{module.format(i=layer, e=e)}.{end}" for e in experts)
                name = f"{key.format(i=layer)}.{end}"
                storage = make_source(names, key, name, counts.heads, counts.groups)
                if sources and sources[0] in existing:
                    yield GgufTarget(name, sources, storage, joined.index(key), len(joined))
