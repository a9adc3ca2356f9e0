"""Files of trained speculators, the loss of their training, and its reports."""

import json
import sys
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor


def write(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor], file: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    save_file({name: x.contiguous() for name, x in tensors.items()}, directory / file)


def report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def cross_entropy(scores: Tensor, model_scores: Tensor) -> Tensor:
    """Return the mean cross-entropy of the probabilities, from scores [n, num_tokens], to the model's."""
    return F.cross_entropy(scores.float(), model_scores.float().softmax(-1))
