"""Finds the matrices of a model that are quantized, by layers, and the modules of the checkpoint that they
are made of, before any weights are read."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tgis.hub import model_files
from tgis.shard.checkpoint.files import Checkpoint
from tgis.shard.checkpoint.provenance import ModuleRows
from tgis.shard.checkpoint.tensors import ALL
from tgis.shard.checkpoint.weights import Weights
from tgis.shard.collectives import ProcessGroup
from tgis.shard.kernels.portable.ops import TorchKernels
from tgis.shard.layers.ops import Parts, Product
from tgis.shard.models import registry
from tgis.shard.models.skeleton import META, MetaWeights
from tgis.shard.models.unread_tensors import refuse_unread
from tgis.shard.quant.formats.settings import read_settings
from tgis.shard.quant.interface import MatrixRole
from tgis.shard.quantize.packing import Tensors, check_size
from tgis.shard.quantize.settings import QuantizeError, QuantizeSettings

ALONE = ProcessGroup(0, 1)
_LAYER = re.compile(r"((?:\w+\.)?blocks\.\d+)\.")


class LinearMatrix:
    """Weight of a linear layer, float32 [num_rows, num_columns], that can record its inputs."""

    def __init__(self, weight: Tensor):
        self.weight = weight
        self.squares: Tensor | None = None
        """Sum of x x^T over recorded inputs x, float32 [num_columns, num_columns]; None: do not record."""
        self.num_inputs = 0

    def multiply(self, x: Tensor) -> Tensor:
        if self.squares is not None:
            self.squares.addmm_(x.T, x)
            self.num_inputs += len(x)
        return F.linear(x, self.weight)


@dataclass(frozen=True)
class LinearParts(Parts):
    """Parts that keep the weights of linear layers as float32, by the path of the layer."""

    matrices: dict[str, LinearMatrix] = field(default_factory=dict)
    others: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Shapes of further matrices that are multiplied with, such as the head, by the path."""

    def pack(
        self,
        role: MatrixRole,
        path: str,
        shape: tuple[int, int],
        rows: Sequence[slice] = (ALL,),
        columns: slice = ALL,
    ) -> Product:
        if role != "linear":
            self.others[path] = shape
            return super().pack(role, path, shape, rows, columns)
        weight = self.weights.find_matrix(path, shape).read()
        matrix = self.matrices[path] = LinearMatrix(weight.to(self.kernels.device, torch.float32))
        return matrix.multiply


@dataclass(frozen=True)
class StoredModule:
    """Module of the checkpoint, or the matrix of an expert in it, and its rows of a matrix of the model."""

    name: str
    entry: int | None  # number of an expert, if a tensor holds all of them
    rows: Tensor  # int64 [num_rows], in the module's order


@dataclass(frozen=True)
class Plan:
    """Matrices that are quantized. Paths are the model's, such as `blocks.0.attention.qkv`."""

    directory: Path
    config: Mapping[str, Any]
    spec: registry.Spec
    shapes: Mapping[str, tuple[int, int]]
    modules: Mapping[str, tuple[StoredModule, ...]]
    kept: list[str]  # linear modules that are not quantized

    @property
    def layers(self) -> list[list[str]]:
        """Paths of each layer."""
        found: dict[str, list[str]] = {}
        for path in self.shapes:
            layer = _LAYER.match(path)
            assert layer is not None, "linear layers are in blocks"
            found.setdefault(layer[1], []).append(path)
        return list(found.values())

    def open_weights(self) -> Weights:
        return registry.open_weights(self.directory, self.config, self.spec)

    def store(self, of_modules: Iterator[tuple[StoredModule, Tensors]]) -> Tensors:
        """Return tensors by their names in the checkpoint; those of experts that share a tensor, stacked."""
        stacks: dict[str, dict[int, Tensor]] = {}
        found: Tensors = {}
        for module, tensors in of_modules:
            for end, tensor in tensors.items():
                name = f"{module.name}.{end}"
                if module.entry is None:
                    found[name] = tensor
                else:
                    stacks.setdefault(name, {})[module.entry] = tensor
        return found | {
            name: torch.stack([entries[i] for i in sorted(entries)]) for name, entries in stacks.items()
        }

    @property
    def replaced(self) -> frozenset[str]:
        """Names of the tensors that the quantized checkpoint does not have, or has in another form."""
        return frozenset(f"{module.name}.weight" for found in self.modules.values() for module in found)


def make_plan(directory: Path, settings: QuantizeSettings) -> Plan:
    """Check that the model can be quantized. Raises UnsupportedModelError, WeightsError, QuantizeError."""
    config = model_files.read_config(directory)
    if (found := read_settings(config, directory)) is not None:
        raise QuantizeError(
            f"{found.place}: this model is quantized already; give the one that it was made of"
        )
    spec = registry.make_spec(config)
    weights = registry.open_weights(directory, config, spec, MetaWeights)
    parts = LinearParts(ALONE, weights, torch.float32, TorchKernels(META))
    registry.build(spec, parts)
    refuse_unread(directory, weights.list_unread(), config)
    names = frozenset(Checkpoint(directory).list_unread())
    shapes = {path: (len(one.weight), one.weight.shape[1]) for path, one in parts.matrices.items()}
    modules = {}
    for path, shape in shapes.items():
        modules[path] = tuple(_list_modules(weights.trace(path, shape), names, weights.prefix))
        if settings.method == "gptq":
            for module in modules[path]:
                check_size(module.name, len(module.rows), shape[1], settings.bits)
    traced = (weights.trace(path, shape) for path, shape in parts.others.items())
    kept = sorted({one.module for rows in traced for one in rows})
    return Plan(directory, config, spec, shapes, modules, kept)


def _list_modules(traced: Sequence[ModuleRows], names: frozenset[str], prefix: str) -> Iterator[StoredModule]:
    """Yield the modules of a matrix whose rows come from these rows of modules."""
    rows_of: dict[str, dict[int, int]] = {}  # rows of the matrix by rows of the module
    begin = 0
    for part in traced:
        rows = rows_of.setdefault(part.module, {})
        rows |= {part.first + i: begin + i for i in range(part.count)}
        begin += part.count
    for module, rows in rows_of.items():
        name, entry = _find_stored(module, names, prefix)
        assert sorted(rows) == list(range(len(rows))), f"{module} is not whole in a matrix"
        yield StoredModule(name, entry, torch.tensor([rows[i] for i in range(len(rows))]))


def _find_stored(module: str, names: frozenset[str], prefix: str) -> tuple[str, int | None]:
    """Return the checkpoint's name of a module, and the entry of its tensor."""
    for spelled in (module, module.removeprefix(prefix), prefix + module):
        if f"{spelled}.weight" in names:
            return spelled, None
        base, _, entry = spelled.rpartition(".")
        if entry.isdigit() and f"{base}.weight" in names:
            return base, int(entry)
    raise AssertionError(f"{module} was read from the checkpoint")
