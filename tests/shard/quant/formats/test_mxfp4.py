"""MXFP4 experts of gpt-oss: transformers' numbers for the same codes, and its answers with these numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.support.shard.checkpoints import write_model
from tests.support.shard.driver import Request
from tests.support.shard.family_cases.llamas import experts
from tests.support.shard.family_oracle import NEW_TOKENS, Oracle, check, draw_inputs
from tests.support.shard.ranks import ALONE, Ranks
from tests.support.shard.relay import serve
from tests.support.shard.stepping import read_config
from tgis.shard.checkpoint.files import Checkpoint
from tgis.shard.checkpoint.opening import count_elements
from tgis.shard.checkpoint.tensors import WeightsError
from tgis.shard.checkpoint.weights import Weights
from tgis.shard.kernels.cpu.codes.product import find_packer
from tgis.shard.models import registry
from tgis.shard.quant.formats.mxfp4 import Mxfp4
from tgis.shard.quant.formats.settings import QuantizationSettings
from tgis.shard.quant.registry import find_format

PROJECTIONS = ("gate_up_proj", "down_proj")
HIDDEN, WIDTH = 64, 128  # two ranks cut the width between groups


def make_config() -> transformers.PretrainedConfig:
    return transformers.GptOssConfig(
        **experts(hidden_size=HIDDEN, intermediate_size=WIDTH, head_dim=16, sliding_window=5, pad_token_id=0)
    )


def draw(shape: tuple[int, ...], generator: torch.Generator) -> dict[str, Tensor]:
    """Return random blocks and scales of experts that are stored [num_experts, in, out]."""
    num_experts, columns, rows = shape
    blocks = torch.randint(256, (num_experts, rows, columns // 32, 16), generator=generator)
    scales = torch.randint(121, 125, blocks.shape[:-1], generator=generator)
    return {"blocks": blocks.to(torch.uint8), "scales": scales.to(torch.uint8)}


def write(plain: Path, packed: Path) -> None:
    """Write a checkpoint with random codes, and one with the numbers that transformers makes of them."""
    config = make_config()
    write_model(plain, config)
    file = plain / "model.safetensors"
    floats, generator = load_file(file), torch.Generator().manual_seed(0)
    codes: dict[str, Tensor] = {}
    for name, tensor in floats.items():
        if name.endswith(PROJECTIONS):
            parts = draw(tuple(tensor.shape), generator)
            codes |= {f"{name}_{end}": part for end, part in parts.items()}
            floats[name] = convert_moe_packed_tensors(**parts, dtype=torch.float32).contiguous()
        else:
            codes[name] = tensor
    save_file(floats, file, metadata={"format": "pt"})
    packed.mkdir()
    save_file(codes, packed / "model.safetensors", metadata={"format": "pt"})
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (packed / "config.json").write_text(json.dumps({**read_config(plain), "quantization_config": settings}))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("mxfp4")
    write(root / "plain", root / "packed")
    return root / "plain", root / "packed"


def open_weights(directory: Path) -> Weights:
    config = read_config(directory)
    return registry.open_weights(directory, config, registry.make_spec(config))


MATRICES = {"up": (2 * WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}


@pytest.mark.parametrize("name", MATRICES)
def test_codes_are_transformers_numbers(name: str, checkpoints: tuple[Path, Path]) -> None:
    plain, packed = map(open_weights, checkpoints)
    for entry in range(4):
        path, shape = f"blocks.1.mlp.experts.{entry}.{name}", MATRICES[name]
        floats, stored = (weights.find_matrix(path, shape) for weights in (plain, packed))
        assert torch.equal(stored.read(), floats.read())
        for rows, columns in ((slice(3, 50), slice(0, 32)), (slice(0, 64), slice(32, 64))):
            assert torch.equal(stored.read(rows, columns), floats.read(rows, columns))
            assert torch.equal(stored.codes(rows, columns).dequantize(), floats.read(rows, columns))
        layout = stored.layout()
        assert layout is not None
        assert find_packer(layout, rounds_activations=True) is not None
        assert stored.layout(slice(0, 16)) is None


def test_every_scale(tmp_path: Path) -> None:
    """Except for 255, which is no number in the format."""
    parts = draw((1, 32, 255), torch.Generator().manual_seed(1))
    parts["scales"] = torch.arange(255).to(torch.uint8).view(1, 255, 1)
    file = tmp_path / "model.safetensors"
    save_file({f"m_{end}": part[0].contiguous() for end, part in parts.items()}, file)
    stored = Mxfp4(QuantizationSettings({}, "")).open(Checkpoint(tmp_path), "m")
    assert stored is not None
    assert torch.equal(stored.read(), convert_moe_packed_tensors(**parts, dtype=torch.float32)[0].T)


@pytest.mark.parametrize("size", [1, 2])
def test_answers_equal_transformers(size: int, checkpoints: tuple[Path, Path], ranks: Ranks) -> None:
    plain, packed = checkpoints
    oracle = Oracle(plain, make_config())
    answers = [oracle.answer(ids) for ids in draw_inputs()]
    requests = [Request(answer.input_ids, NEW_TOKENS, details={"logprobs": True}) for answer in answers]
    [crowd], _ = ranks.run(size, serve, packed, 1, [requests], 16)[0]
    for request, answer in zip(crowd, answers, strict=True):
        check(request, answer)


def test_weights_are_counted(checkpoints: tuple[Path, Path]) -> None:
    plain, packed = checkpoints
    assert count_elements(packed, find_format(read_config(packed), packed)) == count_elements(plain)


def change(tensors: dict[str, Tensor], end: str, tensor: Tensor) -> None:
    tensors[f"model.layers.0.mlp.experts.down_proj_{end}"] = tensor


DAMAGED: dict[str, tuple[str, Tensor]] = {
    "down_proj_blocks is stored as int8, expected uint8": (
        "blocks",
        torch.zeros(4, 64, 4, 16, dtype=torch.int8),
    ),
    "down_proj_blocks has shape [4, 64, 4, 8], expected matrices of groups of 16 bytes": (
        "blocks",
        torch.zeros(4, 64, 4, 8, dtype=torch.uint8),
    ),
    "down_proj_blocks has shape [4, 16], expected matrices of groups of 16 bytes": (
        "blocks",
        torch.zeros(4, 16, dtype=torch.uint8),
    ),
    "down_proj_scales has shape [4, 64, 3], expected [4, 64, 4]": (
        "scales",
        torch.zeros(4, 64, 3, dtype=torch.uint8),
    ),
    "down_proj_scales is stored as float32, expected uint8": ("scales", torch.zeros(4, 64, 4)),
}


@pytest.mark.parametrize("text", DAMAGED)
def test_damaged_checkpoints_are_named(text: str, checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    _, packed = checkpoints
    tensors: dict[str, Any] = load_file(packed / "model.safetensors")
    change(tensors, *DAMAGED[text])
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((packed / "config.json").read_text())
    with pytest.raises(WeightsError) as caught:
        registry.load(tmp_path, read_config(tmp_path), ALONE, torch.float32)
    assert text in str(caught.value)
