"""Creates Llama checkpoints with random weights, written one tensor at a time: real shapes without a
download."""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

MAX_TRAINED_TOKENS = 4096
INIT_STD = 0.02
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama. Its tokenizer has as many tokens as its embedding has rows."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tie_embeddings: bool = True
    max_length: int = 2048


# 15, 116, 490 and 1,100 million parameters; 135m would have 135 million with a vocabulary of 49,152.
SHAPES = {
    "15m": Shape(6, 288, 6, 6, 48, 768, 32000),
    "135m": Shape(30, 576, 9, 3, 64, 1536, 16384),
    "500m": Shape(24, 1280, 20, 4, 64, 3840, 32768),
    "1b": Shape(22, 2048, 32, 4, 64, 5632, 32000, tie_embeddings=False),
}


def list_tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of each tensor of the checkpoint."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", (shape.vocab_size, hidden)
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "self_attn.q_proj.weight", (q_size, hidden)
        yield prefix + "self_attn.k_proj.weight", (kv_size, hidden)
        yield prefix + "self_attn.v_proj.weight", (kv_size, hidden)
        yield prefix + "self_attn.o_proj.weight", (hidden, q_size)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        yield prefix + "mlp.gate_proj.weight", (inner, hidden)
        yield prefix + "mlp.up_proj.weight", (inner, hidden)
        yield prefix + "mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not shape.tie_embeddings:
        yield "lm_head.weight", (shape.vocab_size, hidden)


def count_parameters(shape: Shape) -> int:
    return sum(math.prod(size) for _, size in list_tensors(shape))


def describe(name: str) -> dict[str, Any]:
    return asdict(SHAPES[name]) | {"num_parameters": count_parameters(SHAPES[name])}


def ensure_checkpoint(name: str, cache: Path) -> Path:
    """Return the directory of the checkpoint, complete or absent; write it if it is not cached."""
    shape = SHAPES[name]
    directory = cache / name
    written = directory / "shape.json"
    if written.is_file() and json.loads(written.read_text()) == asdict(shape):
        return directory
    cache.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache))
    try:
        write_checkpoint(shape, fresh)
        shutil.rmtree(directory, ignore_errors=True)
        os.rename(fresh, directory)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return directory


def write_checkpoint(shape: Shape, directory: Path, device: torch.device = CPU) -> None:
    """Write the checkpoint to an existing directory, in Hugging Face's layout. `device` generates the
    weights."""
    _write_json(directory / "config.json", model_config(shape))
    _write_json(directory / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1})
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": shape.max_length,
    }
    _write_json(directory / "tokenizer_config.json", tokenizer_config)
    _build_tokenizer(shape.vocab_size).save(str(directory / "tokenizer.json"))
    _write_weights(shape, directory / "model.safetensors", device)
    _write_json(directory / "shape.json", asdict(shape))


def model_config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tie_embeddings,
        "max_position_embeddings": shape.max_length,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _write_weights(shape: Shape, path: Path, device: torch.device) -> None:
    """Write the safetensors layout: length of the header, header, data; in bfloat16, as in checkpoints."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, size in list_tensors(shape):
        end = offset + 2 * math.prod(size)
        header[name] = {"dtype": "BF16", "shape": size, "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    generator = torch.Generator(device).manual_seed(0)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for _, size in list_tensors(shape):
            weight = _draw(size, generator)
            file.write(weight.view(torch.uint8).cpu().numpy().tobytes())


def _draw(size: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return random weights: norms are one, matrices small and normally distributed, so that activations stay
    in an ordinary range."""
    if len(size) == 1:
        return torch.ones(size, dtype=torch.bfloat16)
    weight = torch.randn(size, generator=generator, device=generator.device)
    return weight.mul_(INIT_STD).to(torch.bfloat16)


def _build_tokenizer(vocab_size: int) -> Tokenizer:
    """Return a byte-level BPE tokenizer with English words, filled up to `vocab_size` with words that no text
    contains."""
    from pydoc_data.topics import topics

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocab_size, MAX_TRAINED_TOKENS),
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((topics[name] for name in sorted(topics)), trainer)
    learnt = json.loads(tokenizer.to_str())
    vocab = learnt["model"]["vocab"]
    vocab.update({f"Ġfill{index}": index for index in range(len(vocab), vocab_size)})
    padded = Tokenizer.from_str(json.dumps(learnt))
    padded.decoder = decoders.ByteLevel()
    padded.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
    )
    return padded
