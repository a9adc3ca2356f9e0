"""Check GGUF tensors bit for bit against the gguf package, in any slice, and converted models."""

import json
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors.torch import load_file

from tests.support.shard.checkpoints import write_llama
from tests.support.shard.gguf_writer import add_tokens, write_gguf
from tgis.cli.models import convert_to_safetensors
from tgis.shard.checkpoint.gguf.checkpoint import GgufCheckpoint
from tgis.shard.checkpoint.tensors import WeightsError
from tgis.tensor_files.gguf_types import TYPES

ROWS, COLUMNS = 6, 512
PARTS = [
    (slice(None), slice(None)),
    (slice(2, 5), slice(None)),
    (slice(0, 0), slice(None)),
    (slice(None), slice(256, 512)),
    (slice(1, 4), slice(7, 300)),
]


def write_tensor(path: Path, number: int, rng: np.random.Generator) -> np.ndarray:
    """Write a matrix of random codes with finite scales and return its values by the gguf package."""
    type = GGMLQuantizationType(number)
    size, num_bytes = GGML_QUANT_SIZES[type]
    codes = np.empty((ROWS, 0), np.uint8)
    while not codes.size or not np.isfinite(gguf.dequantize(codes, type)).all():
        codes = rng.integers(0, 120, (ROWS, COLUMNS // size * num_bytes), np.uint8)
    writer = gguf.GGUFWriter(path, "llama")
    for add in (writer.add_block_count, writer.add_head_count):
        add(1)
    writer.add_embedding_length(COLUMNS)
    add_tokens(writer, 4)
    writer.add_tensor("token_embd.weight", codes, raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return gguf.dequantize(codes, type)


@pytest.mark.parametrize("number", TYPES)
def test_every_type_has_the_package_s_numbers(number: int, tmp_path: Path) -> None:
    expected = torch.from_numpy(write_tensor(tmp_path / "a.gguf", number, np.random.default_rng(number)))
    tensor = GgufCheckpoint([tmp_path / "a.gguf"]).fetch("model.embed_tokens.weight")
    for rows, columns in PARTS:
        actual = tensor.read(rows, columns)
        assert actual.is_contiguous()
        assert torch.equal(actual.float(), expected[rows, columns])


@pytest.fixture
def model(tmp_path: Path) -> tuple[Path, Path]:
    """Return a checkpoint and a GGUF file of it, both rounded."""
    write_llama(tmp_path / "written", tie_word_embeddings=True)
    write_gguf(tmp_path / "written", tmp_path / "model.gguf", "llama")
    return tmp_path / "written", tmp_path / "model.gguf"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_converted_model_has_the_package_s_numbers(
    model: tuple[Path, Path], dtype: str, tmp_path: Path
) -> None:
    written, file = model
    out = tmp_path / "out"
    result = CliRunner().invoke(convert_to_safetensors, [str(file), str(out), "--dtype", dtype])
    assert result.exit_code == 0, result.output
    assert result.stdout == f"Converted model.gguf to {out}\n"
    expected, actual = load_file(written / "model.safetensors"), load_file(out / "model-00001.safetensors")
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert tensor.dtype == getattr(torch, dtype)
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == dict.fromkeys(expected, "model-00001.safetensors")
    assert json.loads((out / "config.json").read_text())["dtype"] == dtype
    assert (out / "tokenizer.json").is_file()
    again = CliRunner().invoke(convert_to_safetensors, [str(file), str(out)])
    assert again.exit_code == 1
    assert again.stderr == f"error: {out} is not empty\n"


def test_arguments_that_do_not_fit_a_model(model: tuple[Path, Path]) -> None:
    written, file = model
    for arguments, text in (
        ([str(file)], "Missing argument 'OUTPUT_DIR'"),
        ([str(written), "out"], "OUTPUT_DIR and --dtype are for GGUF files only."),
        ([str(written), "--dtype", "float16"], "OUTPUT_DIR and --dtype are for GGUF files only."),
    ):
        result = CliRunner().invoke(convert_to_safetensors, arguments)
        assert result.exit_code == 2
        assert text in result.stderr


JOINED: dict[str, tuple[str, dict[str, tuple[int, ...]], str, str]] = {
    "values are missing": (
        "deepseek2",
        {"attn_k_b": (2, 8, 4)},
        "self_attn.kv_b_proj",
        "attn_k_b.weight are not the keys and the values of the same heads",
    ),
    "other heads": (
        "deepseek2",
        {"attn_k_b": (2, 8, 4), "attn_v_b": (3, 4, 8)},
        "self_attn.kv_b_proj",
        "attn_k_b.weight + blk.0.attn_v_b.weight are not the keys and the values of the same heads",
    ),
    "gates are missing": (
        "qwen3next",
        {"attn_qkv": (24, 8)},
        "linear_attn.in_proj_qkvz",
        "attn_qkv.weight are not the rows of 2 key heads",
    ),
    "other rows": (
        "qwen3next",
        {"attn_qkv": (26, 8), "attn_gate": (8, 8)},
        "linear_attn.in_proj_qkvz",
        "attn_qkv.weight + blk.0.attn_gate.weight are not the rows of 2 key heads",
    ),
}


@pytest.mark.parametrize("case", JOINED)
def test_tensors_that_do_not_join(case: str, tmp_path: Path) -> None:
    architecture, shapes, module, text = JOINED[case]
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", architecture)
    writer.add_ssm_group_count(2)
    for name, shape in shapes.items():
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(WeightsError, match=re.escape(text)):
        GgufCheckpoint([tmp_path / "a.gguf"]).fetch(f"model.layers.0.{module}.weight")


def test_rows_that_heads_do_not_divide(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_head_count(3)
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((8, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = GgufCheckpoint([tmp_path / "a.gguf"])
    with pytest.raises(
        WeightsError, match=r"attn_q\.weight has 8 rows, which is no multiple of the number of heads"
    ):
        checkpoint.fetch("model.layers.0.self_attn.q_proj.weight")
    with pytest.raises(WeightsError, match=r"tensor lm_head\.weight is missing"):
        checkpoint.fetch("lm_head.weight")
