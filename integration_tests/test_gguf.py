"""The command that refusals of GGUF files name, with transformers and the published package `gguf`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from integration_tests.support.service import launch
from tests.support.shard.checkpoints import write_llama
from tests.support.tokenizers.trained import write_byte_level
from tgis.hub.gguf import refuse_gguf
from tgis.hub.model_files import ModelNotFoundError

VOCAB_SIZE = 400
WRITE = """
import json, sys
from pathlib import Path
import gguf, numpy as np
from safetensors.numpy import load_file

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}
source, target = map(Path, sys.argv[1:])
config = json.loads((source / "config.json").read_text())
tokenizer = json.loads((source / "tokenizer.json").read_text())["model"]
heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
writer = gguf.GGUFWriter(target, "llama")
writer.add_context_length(config["max_position_embeddings"])
writer.add_embedding_length(config["hidden_size"])
writer.add_block_count(config["num_hidden_layers"])
writer.add_feed_forward_length(config["intermediate_size"])
writer.add_head_count(heads["q_proj"])
writer.add_head_count_kv(heads["k_proj"])
writer.add_rope_dimension_count(config["head_dim"])
writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
writer.add_vocab_size(config["vocab_size"])
tokens = sorted(tokenizer["vocab"], key=tokenizer["vocab"].get)
tokens += [f"<unused{number}>" for number in range(config["vocab_size"] - len(tokens))]
writer.add_tokenizer_model("gpt2")
writer.add_tokenizer_pre("default")
writer.add_token_list(tokens)
writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
writer.add_token_merges([" ".join(merge) for merge in tokenizer["merges"]])
writer.add_bos_token_id(0)
writer.add_eos_token_id(1)
for name, weight in load_file(source / "model.safetensors").items():
    module, layer = name.removesuffix(".weight"), ""
    if module.startswith("model.layers."):
        _, _, number, module = module.split(".", 3)
        layer = f"blk.{number}."
    if (kind := module.split(".")[-1]) in heads:  # channels that are rotated together are adjacent
        halves = weight.reshape(heads[kind], 2, -1, weight.shape[1])
        weight = halves.swapaxes(1, 2).reshape(weight.shape)
    writer.add_tensor(f"{layer}{NAMES[module]}.weight", weight.astype(np.float32))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
"""


@pytest.mark.slow
def test_the_command_converts_a_file_that_is_served_then(tmp_path: Path) -> None:
    source, packages = tmp_path / "source", tmp_path / "packages"
    write_llama(source, vocab_size=VOCAB_SIZE, max_position_embeddings=256, eos_token_id=1)
    write_byte_level(source, VOCAB_SIZE)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(packages), "gguf"]
    subprocess.run(pip, check=True)
    env = {
        **os.environ,
        "PYTHONPATH": str(packages),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    file = tmp_path / "small.gguf"
    subprocess.run([sys.executable, "-c", WRITE, str(source), str(file)], check=True, env=env)
    with pytest.raises(ModelNotFoundError) as caught:
        refuse_gguf(file)
    install, _, command = str(caught.value).partition(" && ")
    assert install.endswith(": pip install gguf")
    subprocess.run(["sh", "-c", command], check=True, env=env, cwd=tmp_path)
    expected, converted = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "small"))
    assert converted.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(converted[name].float(), weight.float()), name
    service = launch(tmp_path / "small").wait_until_serving()
    assert service.end() == 0, service.output
