"""Makes the checkpoints that are measured, each once: dequantized, with noise, quantized by the service's
command, and by llama.cpp."""

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.accuracy.texts import read_calibration
from bench.accuracy.variants import Variant
from bench.peers import environments
from bench.real_model import MODELS, convert_real_model
from bench.service import BenchError

Weights = Literal["original", "noised"]

CACHE = Path(".cache/bench")
FILES = {
    "SmolLM2-135M-Instruct": MODELS / "SmolLM2-135M-Instruct.gguf",
    "gemma-3-270m": MODELS / "gemma-3-270m-q4_k_m.gguf",
}
GROUP = 16  # columns with one step in every type of GGUF's


@dataclass(frozen=True)
class Subject:
    """A model with its weights as they are, or moved off the grid on which its file stored them."""

    model: str
    weights: Weights

    @property
    def directory(self) -> Path:
        """Directory of the checkpoints and scores."""
        return CACHE / "accuracy" / f"{self.model}-{self.weights}"

    def make_wide(self) -> Path:
        """Return the float32 checkpoint, which is made if it is missing. Raises BenchError."""
        if not FILES[self.model].is_file():
            raise BenchError(f"{FILES[self.model]} is missing: `make` downloads it, or `make gemma`")
        wide = convert_real_model(FILES[self.model])
        return wide if self.weights == "original" else _add_noise(wide, self.directory / "wide")

    def make(self, variant: Variant) -> Path:
        """Return the checkpoint that a variant serves. Raises BenchError."""
        wide = self.make_wide()
        if variant.command is None:
            return wide
        made = self._quantize(wide, variant.command)
        return self._requantize(made, variant.llama_cpp) if variant.llama_cpp else made

    def _quantize(self, wide: Path, command: Sequence[str]) -> Path:
        is_file = "gguf" in command
        name = "-".join(each.strip("-") for each in command)
        output = self.directory / (f"{name}.gguf" if is_file else name)
        if output.is_file() or (output / "config.json").is_file():
            return output
        self.directory.mkdir(parents=True, exist_ok=True)
        options = [*command]
        if "gptq" in command:
            text = self.directory / "calibration.txt"
            text.write_text(read_calibration())
            options += ["--calibration", str(text)]
        quantize = [sys.executable, "-m", "tgis", "quantize", str(wide), str(output), *options]
        environments.run(quantize, self.directory / f"{name}.log")
        return output

    def _requantize(self, source: Path, kind: str) -> Path:
        output = self.directory / f"llama-cpp-{kind}.gguf"
        if not output.is_file():
            python = environments.ensure(environments.LLAMA_CPP, CACHE.parent / "peers")
            script = Path(__file__).with_name("llama_cpp_quantizer.py")
            command = [str(python), str(script), str(source), kind, str(output)]
            environments.run(command, output.with_suffix(".log"))
        return output


def noise_of(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Return noise of at most half a quantization step. A step is the smallest difference between weights
    of a group."""
    rows = weight.reshape(-1, GROUP)  # [num_groups, GROUP]
    gaps = rows.sort(1).values.diff(dim=1)
    steps = torch.where(gaps > 0, gaps, torch.inf).amin(1, keepdim=True)
    steps[~steps.isfinite()] = 0  # all weights of the group are equal
    draws = torch.rand(rows.shape, generator=generator) - 0.5
    return (draws * steps).reshape(weight.shape)


def _add_noise(wide: Path, output: Path) -> Path:
    """Write a copy of the checkpoint whose linear layers have noise. config.json comes last."""
    if (output / "config.json").is_file():
        return output
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    for path in sorted(wide.glob("*.safetensors")):
        tensors = load_file(path)
        for name, tensor in sorted(tensors.items()):
            if name.endswith("_proj.weight"):
                tensor += noise_of(tensor, generator)
        save_file(tensors, output / path.name, metadata={"format": "pt"})
    for path in sorted(wide.glob("*.json"), key=lambda path: path.name == "config.json"):
        shutil.copy(path, output)
    return output
