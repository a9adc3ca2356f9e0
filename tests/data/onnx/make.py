"""Writes the tiny models of this directory; see README.md. Runs where optimum-onnx is installed."""

from pathlib import Path

import torch
import transformers
from optimum.exporters.onnx import export, main_export
from optimum.exporters.tasks import TasksManager
from optimum.onnx import merge_decoders

HERE = Path(__file__).parent
COMMON = {"vocab_size": 99, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {
    **COMMON,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
CONFIGS = {
    "llama": transformers.LlamaConfig(**LLAMA, num_hidden_layers=2),
    "gpt2": transformers.GPT2Config(**COMMON, n_embd=16, n_layer=2, n_head=4, n_positions=256),
    "half": transformers.LlamaConfig(**LLAMA, num_hidden_layers=1, dtype="float16"),
    "merged": transformers.BloomConfig(**COMMON, hidden_size=16, n_layer=1, n_head=4),
}


def write_weights(directory: Path, config: transformers.PretrainedConfig) -> torch.nn.Module:
    """So spread that scores have clear gaps."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = name.endswith("weight") and ("norm" in name or "ln_" in name)
            parameter.copy_(torch.randn_like(parameter) * 0.2 + is_norm)
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink()
    return model


def export_merged(directory: Path, model: torch.nn.Module) -> None:
    """As exporters before 2024 did: a graph for the beginning and one for what follows, in one file."""
    make = TasksManager.get_exporter_config_constructor(model=model, exporter="onnx", task="text-generation")
    parts = [directory / "decoder_model.onnx", directory / "decoder_with_past_model.onnx"]
    for part, with_past in zip(parts, (False, True), strict=True):
        export(model, make(model.config, use_past=True, use_past_in_inputs=with_past), part, opset=18)
    merge_decoders(*parts, save_path=directory / "decoder_model_merged.onnx", strict=False)
    for part in parts:
        part.unlink()


for name, config in CONFIGS.items():
    directory = HERE / name
    model = write_weights(directory, config)
    if name == "merged":
        export_merged(directory, model)
    else:
        dtype = "fp16" if name == "half" else "fp32"
        main_export(str(directory), str(directory), task="text-generation-with-past", dtype=dtype)
        (directory / "generation_config.json").unlink(missing_ok=True)
    for file in directory.iterdir():
        file.chmod(0o644)
