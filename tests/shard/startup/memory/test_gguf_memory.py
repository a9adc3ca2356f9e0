"""Check the memory of GGUF files whose codes are kept: the count before loading and the reported total."""

import logging
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from tests.support.shard.checkpoints import write_llama
from tests.support.shard.driver import configure
from tests.support.shard.gguf_writer import write_gguf
from tgis.convert.gguf.model_directory import write_model_directory
from tgis.shard.checkpoint.gguf_memory import measure_gguf
from tgis.shard.checkpoint.opening import list_gguf
from tgis.shard.checkpoint.tensors import ALL
from tgis.shard.checkpoint.weights import Weights, first_of
from tgis.shard.collectives import ProcessGroup
from tgis.shard.kernels.cpu.codes.product import CodeProduct
from tgis.shard.kernels.cpu.ops import CPU_KERNELS
from tgis.shard.kernels.portable.ops import TorchKernels
from tgis.shard.layers.ops import DenseTable, Parts
from tgis.shard.models import registry
from tgis.shard.startup.load import load
from tgis.shard.startup.platforms.cpu import ON_CPU
from tgis.shard.startup.prepare import prepare

KINDS = {"model.embed_tokens.weight": Type.Q8_0, "model.layers.1.mlp.up_proj.weight": Type.IQ2_XS}
EMBEDDING, LAYERS, WIDENED = 99 * 256, 2 * (4 * 256 * 256 + 3 * 256 * 512), 256 * 512


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with tensors of Q4_0, Q8_0 and a type whose codes are not kept."""
    written = tmp_path_factory.mktemp("written")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 99,
        "tie_word_embeddings": True,
    }
    write_llama(written, **sizes, **heads)
    modules = [f"self_attn.{part}_proj" for part in "qkvo"] + [
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    ]
    kinds = {f"model.layers.{i}.{module}.weight": Type.Q4_0 for i in range(2) for module in modules}
    write_gguf(written, written / "model.gguf", "llama", kinds=kinds | KINDS)
    made = tmp_path_factory.mktemp("made")
    write_model_directory([written / "model.gguf"], made)
    return made


def test_types_and_memory_are_reported(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        runner = load(configure(directory))
    assert runner.info.weight_dtype == "Q4_0"
    [line] = [
        each for each in caplog.messages if each.startswith("the weights are stored as the GGUF file's")
    ]
    assert line.endswith(" and take 1 MiB without the tokenizer: 88 % Q4_0, 10 % IQ2_XS, 2 % Q8_0")
    assert (
        "weights of type IQ2_XS are stored as float32, because this platform has no matrix products for "
        "their codes: they take 0.5 MiB instead of 0.0 MiB"
    ) in caplog.messages
    measured = measure_gguf(directory)
    assert measured is not None
    assert measured.elements == {"Q8_0": EMBEDDING, "Q4_0": LAYERS - WIDENED, "IQ2_XS": WIDENED}
    expected = EMBEDDING * 34 / 32 + (LAYERS - WIDENED) * 18 / 32 + WIDENED * 2
    assert measured.count_bytes(lambda _: True, 2, attrgetter("bytes_per_weight")) == int(expected)


def test_matrices_that_ranks_cut_inside_groups_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Check two ranks whose 48 columns of the down projections are one and a half groups.

    The output projections are cut between groups."""
    config = write_llama(
        tmp_path,
        hidden_size=512,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=128,
    )
    write_gguf(tmp_path, tmp_path / "model.gguf", "llama", plain=Type.Q4_0)
    made = tmp_path / "made"
    made.mkdir()
    write_model_directory([tmp_path / "model.gguf"], made)
    settings = config.to_dict()
    for rank in range(2):
        registry.load(made, settings, ProcessGroup(rank, 2), torch.float32)
    extra = 2 * 512 * 48 * (4 - 4.5 / 8) / 2**20
    line = (
        "2 matrices are kept as float32 on this rank, because 2 ranks cut them inside groups of codes that "
        f"share a scale: they take {extra:.1f} MiB more than as codes"
    )
    assert [each for each in caplog.messages if "inside groups" in each] == [line, line]
    caplog.clear()
    registry.load(made, settings, ProcessGroup(0, 1), torch.float32)
    assert not [each for each in caplog.messages if "inside groups" in each]


def test_other_devices_widen_all(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    elsewhere = replace(ON_CPU, kernels=TorchKernels(torch.device("cpu")))
    with caplog.at_level(logging.INFO):
        assert prepare(configure(directory), on=elsewhere).weight_type == "float32"
    assert any(
        "are stored as float32, with the memory and speed of --dtype" in each for each in caplog.messages
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_tied_head_multiplies_with_the_codes_of_the_table(directory: Path, rank: int) -> None:
    sources = {"embed": "model.embed_tokens", "head": first_of("lm_head", "model.embed_tokens")}
    rows = (slice(0, 50), slice(50, 99))[rank]
    with Weights(directory, sources) as weights:
        parts = Parts(ProcessGroup(0, 1), weights, torch.float32, CPU_KERNELS)
        table = parts.open_table("embed", (99, 256), rows)
        assert isinstance(table, CodeProduct)
        assert parts.pack("head", "head", (99, 256), (rows,)) is table
        assert parts.pack("head", "head", (99, 256), (ALL,)) is not table
        wide = replace(parts, kernels=TorchKernels(torch.device("cpu"))).open_table("embed", (99, 256), rows)
    assert isinstance(wide, DenseTable)
    ids = torch.tensor([3, 48, 0, 31, 32])
    assert torch.equal(table.look_up(ids), wide.look_up(ids))
    assert (table.num_rows, table.width) == (wide.num_rows, wide.width) == (len(range(99)[rows]), 256)


def test_a_file_is_read_once_until_it_is_replaced(directory: Path, tmp_path: Path) -> None:
    source = list_gguf(directory)[0].parent
    replaced = tmp_path / "model.gguf"
    write_gguf(source, replaced, "llama", kinds={"model.embed_tokens.weight": Type.Q8_0})
    first = measure_gguf(tmp_path)
    assert measure_gguf(tmp_path) is first
    write_gguf(source, replaced, "llama", kinds={"model.embed_tokens.weight": Type.Q4_0})
    again = measure_gguf(tmp_path)
    assert first is not None
    assert again is not None
    assert first.elements["Q8_0"] - again.elements["Q8_0"] == EMBEDDING
    assert again.elements["Q4_0"] - first.elements["Q4_0"] == EMBEDDING
