"""Writes a Llama checkpoint as a GGUF file, in an environment that has llama.cpp. Arguments: the checkpoint's
directory, the type of weights, the file. llama.cpp's own quantizer decides which tensors keep more bits."""

import ctypes
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

KINDS = {"f16": llama_cpp.LLAMA_FTYPE_MOSTLY_F16, "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0} | {
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def read_tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Read the tensors of a safetensors file of bfloat16 as float32."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    bits = np.memmap(path, np.uint8, "r")
    begin = 8 + int.from_bytes(bits[:8].tobytes(), "little")
    for name, tensor in header.items():
        if name != "__metadata__":
            assert tensor["dtype"] == "BF16"
            first, end = (begin + offset for offset in tensor["data_offsets"])
            halves = np.frombuffer(bits[first:end].tobytes(), "<u2").astype(np.uint32)
            yield name, (halves << 16).view(np.float32).reshape(tensor["shape"])


def rename(name: str) -> str:
    """Return GGUF's name of a tensor, such as blk.3.attn_q.weight."""
    module = name.removesuffix(".weight")
    if not module.startswith("model.layers."):
        return f"{NAMES[module]}.weight"
    layer, rest = module.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{NAMES[rest]}.weight"


def interleave(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder rows of queries or keys so that channels that are rotated together are adjacent."""
    halves = weight.reshape(num_heads, 2, -1, weight.shape[1])  # [heads, 2, head_dim / 2, in]
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write(directory: Path, path: Path) -> None:
    """Write the checkpoint with float16 matrices and without a vocabulary."""
    config = json.loads((directory / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    _add_settings(writer, config)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, weight in read_tensors(directory / "model.safetensors"):
        kind = name.split(".")[-2]
        rows = interleave(weight, heads[kind]) if kind in heads else weight
        writer.add_tensor(rename(name), rows.astype(np.float16) if rows.ndim == 2 else rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_settings(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_tokenizer_model("no_vocab")


def quantize(source: Path, kind: str, path: Path) -> None:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = KINDS[kind]
    status = llama_cpp.llama_model_quantize(bytes(source), bytes(path), ctypes.byref(params))
    if status:
        raise SystemExit(f"llama_model_quantize gave {status}")


def main() -> None:
    directory, kind, path = sys.argv[1:]
    with tempfile.TemporaryDirectory(dir=Path(path).parent) as folder:
        whole = Path(folder) / "f16.gguf"
        write(Path(directory), whole)
        if kind == "f16":
            whole.rename(path)
        else:
            quantize(whole, kind, Path(path))


if __name__ == "__main__":
    main()
