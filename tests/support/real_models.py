"""GGUF files of real models, which `make test` and `make gemma` download."""

from pathlib import Path

_DIRECTORY = Path(__file__).parents[2] / ".cache" / "models"
SMOLLM2 = _DIRECTORY / "SmolLM2-135M-Instruct.gguf"
GEMMA = _DIRECTORY / "gemma-3-270m-q4_k_m.gguf"
