"""Creates a store of random soft prompts and LoRA adapters for a shape, in PEFT's layout, written once."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.shapes import Shape, list_tensors

STD = 0.02


def ensure_store(
    shape: Shape, root: Path, num_prompts: int, num_tokens: int, num_adapters: int, rank: int
) -> tuple[list[str], list[str]]:
    """Ids of the prompts and of the adapters, all of them different."""
    generator = torch.Generator().manual_seed(0)
    prompts = [f"prompts/{index}" for index in range(num_prompts)]
    adapters = [f"adapters/{index}" for index in range(num_adapters)]
    for name in prompts:
        if not (root / name / "adapter_model.safetensors").is_file():
            write_prompt(root / name, num_tokens, shape.hidden_size, generator)
    for name in adapters:
        if not (root / name / "adapter_model.safetensors").is_file():
            write_adapter(root / name, shape, rank, generator)
    return prompts, adapters


def write_prompt(directory: Path, num_tokens: int, width: int, generator: torch.Generator) -> None:
    rows = torch.randn(num_tokens, width, generator=generator).mul_(STD)  # [num_tokens, width]
    settings = {"peft_type": "PROMPT_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": num_tokens}
    _write(directory, {"prompt_embeddings": rows}, settings)


def write_adapter(directory: Path, shape: Shape, rank: int, generator: torch.Generator) -> None:
    """Return an adapter of all linear layers of the blocks, in float16."""
    tensors = {}
    for name, (rows, *columns) in list_tensors(shape):
        if "_proj" in name:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            sizes = {"lora_A": (rank, *columns), "lora_B": (rows, rank)}
            for part, size in sizes.items():
                values = torch.randn(size, generator=generator).mul_(STD)
                tensors[f"{module}.{part}.weight"] = values.half()
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank}
    targets = sorted({name.split(".")[-3] for name in tensors})
    _write(directory, tensors, {**settings, "target_modules": targets, "bias": "none"})


def _write(directory: Path, tensors: dict[str, torch.Tensor], settings: dict[str, object]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    save_file(tensors, directory / "adapter_model.safetensors")
