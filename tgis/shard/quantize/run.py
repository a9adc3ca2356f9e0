"""Quantizes a checkpoint layer by layer."""

import logging
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from tgis.hub import model_files
from tgis.shard.models.spec import DecoderSpec
from tgis.shard.quantize import gptq
from tgis.shard.quantize.calibration import Calibration, read_calibration
from tgis.shard.quantize.group_codes import GroupCodes, round_to_nearest
from tgis.shard.quantize.layer_steps import LayerSteps, Windows
from tgis.shard.quantize.output import Errors, OutputDirectory, read_rest
from tgis.shard.quantize.packing import Tensors, check_weight, pack_groups, pack_rows, unpack_groups
from tgis.shard.quantize.plan import LinearMatrix, QuantizationPlan, StoredModule, make_plan
from tgis.shard.quantize.report import Report, describe_loss, mean_errors
from tgis.shard.quantize.settings import QuantizeError, QuantizeSettings

logger = logging.getLogger(__name__)

FEW_INPUTS = 8  # GPTQ needs at least one input per this many columns


class Quantizer(Protocol):
    """Quantizes the layers of a model in order. All methods raise WeightsError and QuantizeError."""

    def make(self, layer: int) -> tuple[Tensors, Errors]:
        """Quantize a layer."""

    def skip(self, layer: int, tensors: Tensors) -> None:
        """Continue after a layer that an earlier run finished."""

    def further_tensors(self) -> Tensors: ...

    def summary(self) -> str: ...


@torch.inference_mode()
def quantize(
    directory: Path, output: Path, settings: QuantizeSettings, calibration: Path | None, cache: Path
) -> str:
    """Write the quantized checkpoint to `output` and return a message. `cache` is the hub's cache.

    Raises QuantizeError, UnsupportedModelError, WeightsError and ModelNotFoundError."""
    plan = make_plan(directory, settings)
    settings = plan.fit_settings(settings)
    facts = {**asdict(settings), "model": model_files.fingerprint(directory)}
    quantizer: Quantizer
    if settings.method == "gptq":
        if not isinstance(plan.spec, DecoderSpec):
            raise QuantizeError("GPTQ supports only decoder-only models; use --method int8 or fp8")
        if plan.spec.layer_shapes:
            raise QuantizeError("GPTQ does not support models whose layers differ; use --method int8 or fp8")
        windows = read_calibration(directory, calibration, cache, settings)
        facts["calibration"] = windows.digest
        target = OutputDirectory(output, facts, settings.method)
        quantizer = GptqQuantizer(plan, plan.spec, settings, windows)
    else:
        target = OutputDirectory(output, facts, settings.method)
        quantizer = RowQuantizer(plan, settings)
    report = _write_layers(target, plan, quantizer)
    further = iter(quantizer.further_tensors().items())
    rest = (one for part in (read_rest(directory, plan.replaced), further) for one in part)
    target.finish(directory, len(plan.layers), rest)
    target.write_configs(plan.config, settings.describe(plan.kept, plan.describe_sensitive()))
    lines = [report.table(), quantizer.summary(), f"Saved quantized model to {output}"]
    return "\n".join(line for line in lines if line)


def _write_layers(target: OutputDirectory, plan: QuantizationPlan, quantizer: Quantizer) -> Report:
    report = Report(len(plan.layers))
    for layer in range(len(plan.layers)):
        began = time.monotonic()
        finished = target.read_layer(layer)
        if finished is None:
            tensors, errors = quantizer.make(layer)
            target.write_layer(layer, tensors, errors)
        else:
            tensors, errors = finished
            quantizer.skip(layer, tensors)
        report.add(time.monotonic() - began, errors, finished is None)
    return report


class RowQuantizer:
    """Rounds weights to 8 bits with a scale per row."""

    def __init__(self, plan: QuantizationPlan, settings: QuantizeSettings):
        self._plan = plan
        self._method = settings.method
        self._weights = plan.open_weights()

    def make(self, layer: int) -> tuple[Tensors, Errors]:
        tensors = self._plan.store(self._round(layer))
        self._weights.release()
        return tensors, {}

    def skip(self, layer: int, tensors: Tensors) -> None:
        """Do nothing, because layers do not depend on each other."""

    def further_tensors(self) -> Tensors:
        return {}

    def summary(self) -> str:
        return ""

    def _round(self, layer: int) -> Iterator[tuple[StoredModule, Tensors]]:
        for path in self._plan.layers[layer]:
            stored = self._weights.find_matrix(path, self._plan.shapes[path])
            weight = stored.read().float()
            check_weight(weight, stored.label)
            for module in self._plan.modules[path]:
                yield module, pack_rows(weight[module.rows], self._method)


class GptqQuantizer:
    """Rounds layers by GPTQ. The inputs of a layer are the outputs of the quantized layers before it for the
    samples. Held-out windows run through both the quantized and the original layers."""

    def __init__(
        self, plan: QuantizationPlan, spec: DecoderSpec, settings: QuantizeSettings, calibration: Calibration
    ):
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._plan = plan
        self._settings = settings
        self._steps = LayerSteps(spec, plan.open_weights(), device)
        self._samples = Windows(calibration.samples)
        self._held_out = Windows(calibration.held_out)
        self._unrounded = Windows(calibration.held_out)
        self._steps.embed(self._samples, self._held_out, self._unrounded)

    def make(self, layer: int) -> tuple[Tensors, Errors]:
        block, matrices = self._steps.read_block(layer)
        self._steps.advance(block, self._unrounded)
        for path, matrix in matrices.items():
            check_weight(matrix.weight, path)
            width = matrix.weight.shape[1]
            matrix.squares = matrix.weight.new_zeros(width, width)
        for _ in self._steps.run(block, self._samples):
            pass  # only records inputs
        errors: dict[str, tuple[float, float]] = {}
        codes = {path: self._round(path, matrix, errors) for path, matrix in matrices.items()}
        tensors = self._plan.store(self._pack(codes))
        self._steps.advance(block, self._samples)
        self._steps.advance(block, self._held_out)
        return tensors, mean_errors(errors)

    def skip(self, layer: int, tensors: Tensors) -> None:
        block, matrices = self._steps.read_block(layer)
        self._steps.advance(block, self._unrounded)
        for path, matrix in matrices.items():
            for module in self._plan.modules[path]:
                own = {
                    end: _take(tensors[f"{module.name}.{end}"], module.entry).to(matrix.weight.device)
                    for end in ("qweight", "qzeros", "scales", "g_idx")
                }
                matrix.weight[module.rows] = unpack_groups(own, self._settings_of(path).bits).dequantize()
        self._steps.advance(block, self._samples)
        self._steps.advance(block, self._held_out)

    def further_tensors(self) -> Tensors:
        """Return the tensors from which TGIS reads the settings."""
        settings = {"gptq_bits": self._settings.bits, "gptq_groupsize": self._settings.group_size}
        return {name: torch.tensor([value]) for name, value in settings.items()}

    def summary(self) -> str:
        before, after = self._steps.losses(self._unrounded, self._held_out)
        return describe_loss(before, after, self._settings)

    def _round(self, path: str, matrix: LinearMatrix, errors: dict[str, tuple[float, float]]) -> GroupCodes:
        """Round a matrix, replace its weight by the rounded one, and add its errors to `errors`."""
        weight, squares, count = matrix.weight, matrix.squares, matrix.num_inputs
        assert squares is not None
        matrix.squares = None
        settings = self._settings_of(path)
        nearest = round_to_nearest(weight, settings)
        chosen = nearest
        if count * FEW_INPUTS < weight.shape[1]:
            logger.warning("%s is rounded to nearest: only %d tokens of the text reach it", path, count)
        else:
            try:
                chosen = gptq.solve(weight, squares * (2 / count), settings)
            except QuantizeError as error:
                raise QuantizeError(f"{path}: {error}") from error
        matrix.weight = chosen.dequantize()
        if count:
            size = max(_measure(weight, squares), 1e-30)
            plain = _measure(weight - nearest.dequantize(), squares)
            errors[path] = _measure(weight - matrix.weight, squares) / size, plain / size
        return chosen

    def _pack(self, codes: dict[str, GroupCodes]) -> Iterator[tuple[StoredModule, Tensors]]:
        for path, rounded in codes.items():
            for module in self._plan.modules[path]:
                yield module, pack_groups(rounded, module.rows, self._settings_of(path).bits)

    def _settings_of(self, path: str) -> QuantizeSettings:
        return self._settings.for_matrix(path in self._plan.sensitive)


def _measure(matrix: Tensor, squares: Tensor) -> float:
    """Return the norm of the outputs of a matrix over all recorded inputs."""
    return float(((matrix @ squares) * matrix).sum().clamp(min=0).sqrt())


def _take(tensor: Tensor, entry: int | None) -> Tensor:
    return tensor if entry is None else tensor[entry]
