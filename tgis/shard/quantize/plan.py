"""Plan of a run: the matrices of each layer to quantize, and the modules of the checkpoint that they consist
of. Made before any weights are read."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tgis.hub import model_files
from tgis.shard.checkpoint.files import Checkpoint
from tgis.shard.checkpoint.provenance import ModuleRows
from tgis.shard.checkpoint.tensors import ALL
from tgis.shard.checkpoint.weights import Weights, spell_module
from tgis.shard.collectives import ProcessGroup
from tgis.shard.kernels.portable.ops import TorchKernels
from tgis.shard.layers.ops import Parts, Product
from tgis.shard.models import registry
from tgis.shard.models.sensitive_weights import describe_sensitivity
from tgis.shard.models.skeleton import META, MetaWeights
from tgis.shard.models.spec import Spec
from tgis.shard.models.unread_tensors import refuse_unread
from tgis.shard.quant.formats.settings import read_settings
from tgis.shard.quant.interface import MatrixRole
from tgis.shard.quantize.packing import Tensors, check_size
from tgis.shard.quantize.settings import QuantizeError, QuantizeSettings

ALONE = ProcessGroup(0, 1)
_LAYER = re.compile(r"((?:\w+\.)?blocks\.\d+)\.")
_LAYER_NUMBER = re.compile(r"\\\.\d+\\\.")  # in an escaped name
_QUERIES, _MERGED = r"\.q_proj", r"\.(q|qkv)_proj"  # of queries alone, and also of keys and values


class LinearMatrix:
    """Weight of a linear layer, float32 [num_rows, num_columns], that can record its inputs."""

    def __init__(self, weight: Tensor):
        self.weight = weight
        self.squares: Tensor | None = None
        """Sum of x x^T over recorded inputs x, float32 [num_columns, num_columns]; None: recording is off."""
        self.num_inputs = 0

    def multiply(self, x: Tensor) -> Tensor:
        if self.squares is not None:
            self.squares.addmm_(x.T, x)
            self.num_inputs += len(x)
        return F.linear(x, self.weight)


@dataclass(frozen=True)
class LinearParts(Parts):
    """Parts that keep the weights of linear layers as float32, by path."""

    matrices: dict[str, LinearMatrix] = field(default_factory=dict)
    others: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Shapes of other multiplied matrices, such as the head, by path."""

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
    """Module of the checkpoint, or an expert's entry in it, and the rows that it provides of a matrix of the
    model."""

    name: str
    entry: int | None  # index of an expert in a tensor that holds all experts
    rows: Tensor  # int64 [num_rows], in the module's order


@dataclass(frozen=True)
class QuantizationPlan:
    """Matrices to quantize. Paths are the model's, such as `blocks.0.attention.qkv`."""

    directory: Path
    config: Mapping[str, Any]
    spec: Spec
    shapes: Mapping[str, tuple[int, int]]
    modules: Mapping[str, tuple[StoredModule, ...]]
    kept: list[str]  # linear modules that are not quantized
    sensitive: frozenset[str]  # paths of the matrices that lose most

    @property
    def layers(self) -> list[list[str]]:
        """Paths of the matrices of each layer."""
        paths_of: dict[str, list[str]] = {}
        for path in self.shapes:
            layer = _LAYER.match(path)
            assert layer is not None, "linear layers are in blocks"
            paths_of.setdefault(layer[1], []).append(path)
        return list(paths_of.values())

    @property
    def num_weights(self) -> int:
        """Number of weights to quantize."""
        return sum(num_rows * num_columns for num_rows, num_columns in self.shapes.values())

    def fit_settings(self, settings: QuantizeSettings) -> QuantizeSettings:
        """Return the settings with what depends on the model."""
        return settings.for_model(self.num_weights, [self.shapes[path][1] for path in self.sensitive])

    def check_sizes(self, settings: QuantizeSettings) -> None:
        """Raise QuantizeError unless GPTQ's format can hold every module."""
        fitted = self.fit_settings(settings)
        for path, modules in self.modules.items():
            bits = fitted.for_matrix(path in self.sensitive).bits
            for module in modules:
                check_size(module.name, len(module.rows), self.shapes[path][1], bits)

    def describe_sensitive(self) -> list[str]:
        """Return regular expressions for the beginnings of the names of sensitive modules, also of the names
        that servers give to modules that they merge."""
        patterns = dict[str, None]()
        for paths in self.layers:
            names = sorted({one.name for path in paths for one in self.modules[path]})
            own = {one.name for path in self.sensitive.intersection(paths) for one in self.modules[path]}
            if len(own) == len(names) > 1:
                parts = zip(*(name.split(".") for name in names), strict=False)
                common = takewhile(lambda each: len(set(each)) == 1, parts)
                patterns[re.escape("".join(f"{each[0]}." for each in common))] = None
                continue
            for name in sorted(own):
                spelled = _LAYER_NUMBER.sub(r"\\.\\d+\\.", re.escape(name), count=1)
                patterns[f"{spelled.replace(_QUERIES, _MERGED)}$"] = None
        return list(patterns)

    def open_weights(self) -> Weights:
        return registry.open_weights(self.directory, self.config, self.spec)

    def store(self, modules: Iterator[tuple[StoredModule, Tensors]]) -> Tensors:
        """Return tensors by their names in the checkpoint. Experts that share a tensor are stacked."""
        stacks: dict[str, dict[int, Tensor]] = {}
        stored: Tensors = {}
        for module, tensors in modules:
            for end, tensor in tensors.items():
                name = f"{module.name}.{end}"
                if module.entry is None:
                    stored[name] = tensor
                else:
                    stacks.setdefault(name, {})[module.entry] = tensor
        return stored | {
            name: torch.stack([entries[i] for i in sorted(entries)]) for name, entries in stacks.items()
        }

    @property
    def replaced(self) -> frozenset[str]:
        """Names of the tensors that the quantized checkpoint replaces."""
        return frozenset(f"{module.name}.weight" for modules in self.modules.values() for module in modules)


def make_plan(directory: Path, settings: QuantizeSettings) -> QuantizationPlan:
    """Return the plan of a run. Raises UnsupportedModelError, WeightsError, QuantizeError."""
    config = model_files.read_config(directory)
    if (existing := read_settings(config, directory)) is not None:
        raise QuantizeError(f"{existing.place}: this model is already quantized; use the original model")
    spec = registry.make_spec(config)
    weights = registry.open_weights(directory, config, spec, MetaWeights)
    parts = LinearParts(ALONE, weights, torch.float32, TorchKernels(META))
    registry.build(spec, parts)
    refuse_unread(directory, weights.list_unread(), config)
    names = frozenset(Checkpoint(directory).list_unread())
    shapes = {path: (len(one.weight), one.weight.shape[1]) for path, one in parts.matrices.items()}
    rule = describe_sensitivity(spec)
    sensitive = frozenset(path for path, shape in shapes.items() if rule.has_values_or_ends(path, shape[0]))
    modules = {
        path: tuple(_list_modules(weights.trace(path, shape), names, weights.prefix))
        for path, shape in shapes.items()
    }
    traced = (weights.trace(path, shape) for path, shape in parts.others.items())
    kept = sorted({one.module for rows in traced for one in rows})
    plan = QuantizationPlan(directory, config, spec, shapes, modules, kept, sensitive)
    if settings.method == "gptq":
        plan.check_sizes(settings)
    return plan


def _list_modules(traced: Sequence[ModuleRows], names: frozenset[str], prefix: str) -> Iterator[StoredModule]:
    """Yield the modules that provide the rows of a matrix. `traced` lists the origin of its rows in order."""
    rows_of: dict[str, dict[int, int]] = {}  # per module: row of the module -> row of the matrix
    begin = 0
    for part in traced:
        rows = rows_of.setdefault(part.module, {})
        rows |= {part.first + i * part.step: begin + i for i in range(part.count)}
        begin += part.count
    for module, rows in rows_of.items():
        name, entry = _find_stored(module, names, prefix)
        assert sorted(rows) == list(range(len(rows))), f"{module} is not whole in a matrix"
        yield StoredModule(name, entry, torch.tensor([rows[i] for i in range(len(rows))]))


def _find_stored(module: str, names: frozenset[str], prefix: str) -> tuple[str, int | None]:
    """Return the name of a module in the checkpoint and, for a stack of experts, the entry. Raises
    QuantizeError."""
    for spelled in spell_module(module, prefix):
        if f"{spelled}.weight" in names:
            return spelled, None
        base, _, entry = spelled.rpartition(".")
        if entry.isdigit() and f"{base}.weight" in names:
            return base, int(entry)
    raise QuantizeError(
        f"{module} is a parameter and not a layer, so no format of quantized checkpoints has a name for it: "
        "serve the model with --quantize"
    )
