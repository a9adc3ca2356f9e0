"""Writes soft prompts and LoRA adapters: random, but strong enough to change generations. PEFT writes the
formats that it has."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

WIDTH = 32  # of all models that are served here
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
NOTHING = torch.empty(0, WIDTH)


@dataclass(frozen=True, eq=False)
class SoftPrompt:
    """Embeddings [num_tokens, WIDTH] before the decoder's and the encoder's tokens."""

    decoder: Tensor = field(default_factory=lambda: NOTHING)
    encoder: Tensor = field(default_factory=lambda: NOTHING)


def embeddings(num_tokens: int, seed: int, width: int = WIDTH) -> Tensor:
    """[num_tokens, width]"""
    return torch.randn(num_tokens, width, generator=torch.Generator().manual_seed(seed)) * 0.4


def write_prompt(directory: Path, prompt: SoftPrompt, dtype: torch.dtype = torch.float32) -> SoftPrompt:
    """Write it in TGIS's format, and return the expected content."""
    directory.mkdir(parents=True)
    for name, tensor in (("decoder", prompt.decoder), ("encoder", prompt.encoder)):
        if len(tensor):
            torch.save(tensor.to(dtype), directory / f"{name}.pt")
    return SoftPrompt(prompt.decoder.to(dtype).float(), prompt.encoder.to(dtype).float())


def write_peft_prompt(
    directory: Path, model: Path, num_tokens: int, seed: int, *, safe: bool = True
) -> SoftPrompt:
    """Write it as PEFT saves a tuned prompt, in either of its formats."""
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=num_tokens)
    wanted = embeddings(num_tokens, seed)  # [num_tokens, WIDTH]
    tuned = peft.get_peft_model(_read(model), config)
    [table] = tuned.prompt_encoder.parameters()
    table.data.copy_(wanted)
    tuned.save_pretrained(str(directory), safe_serialization=safe)
    return SoftPrompt(wanted)


def write_adapter(directory: Path, model: Path, seed: int, targets: list[str], **more: Any) -> None:
    """Write a LoRA adapter of rank 4 for modules that end in `targets`; `more` are fields of PEFT's
    LoraConfig."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": targets, "init_lora_weights": False, **more}
    torch.manual_seed(seed)
    tuned = peft.get_peft_model(_read(model), peft.LoraConfig(**settings))
    for name, parameter in tuned.named_parameters():
        if "lora_embedding" in name:
            parameter.data.mul_(0.2)
    tuned.save_pretrained(str(directory), save_embedding_layers=False)


def write_misfit(directory: Path, model: Path) -> None:
    """Write an adapter for another model: one of its matrices has another width."""
    write_adapter(directory, model, 0, ["q_proj", "q"])
    path = directory / "adapter_model.safetensors"
    name = next(name for name in load_file(path) if name.endswith("lora_A.weight"))
    save_file({**load_file(path), name: torch.ones(4, WIDTH + 8)}, path, {"format": "pt"})


def edit_adapter(directory: Path, **changes: Any) -> None:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def read_model(model: Path, adapter: Path | None) -> PreTrainedModel:
    """Return the model with PEFT's adapter."""
    if adapter is None:
        return _read(model).eval()
    changed = peft.PeftModel.from_pretrained(_read(model), str(adapter))
    base: PreTrainedModel = changed.base_model.model.eval()
    return base


def _read(model: Path) -> PreTrainedModel:
    is_encoder_decoder = json.loads((model / "config.json").read_text()).get("is_encoder_decoder")
    kind = AutoModelForSeq2SeqLM if is_encoder_decoder else AutoModelForCausalLM
    return kind.from_pretrained(model, dtype=torch.float32)
