"""8-bit floats with scales, against compressed-tensors' reader, and inconsistent files."""

import contextlib
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.shard.quantized_files import E4M3, float8
from tests.support.shard.stored_tensors import check_parts, refuse
from tgis.shard.checkpoint.codes import CodeLayout
from tgis.shard.checkpoint.files import Checkpoint
from tgis.shard.checkpoint.tensors import StoredTensor, WeightsError
from tgis.shard.quant.formats.fp8 import Fp8
from tgis.shard.quant.formats.settings import QuantizationSettings

BLOCK = (16, 24)


def open_module(directory: Path, tensors: dict[str, Tensor], **settings: object) -> StoredTensor | None:
    save_file({f"up.{end}": each for end, each in tensors.items()}, directory / "model.safetensors")
    return Fp8(QuantizationSettings(settings, "config.json")).open(Checkpoint(directory), "up")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(32, 48), (37, 53), (1, 1), (16, 200)])
@pytest.mark.parametrize("strategy", ["matrix", "row", "block"])
def test_equals_compressed_tensors(
    strategy: str, shape: tuple[int, int], dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    block = BLOCK if strategy == "block" else None
    quantized = float8(torch.randn(shape), block, strategy == "row", dtype)
    stored = open_module(tmp_path, quantized.tensors, weight_block_size=block and list(block))
    assert stored is not None
    assert stored.shape == shape
    assert quantized.weight.dtype == dtype
    assert torch.equal(stored.read().to(dtype), quantized.weight)
    check_parts(stored, stored.read())
    group = BLOCK[1] if block and shape[1] > BLOCK[1] else None
    assert stored.layout() == CodeLayout(E4M3, 8, group)
    assert torch.equal(stored.codes().dequantize(), stored.read())


def test_every_code_is_converted_as_in_torch(tmp_path: Path) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3).view(16, 16)
    stored = open_module(tmp_path, {"weight": codes, "weight_scale": torch.tensor([0.25])})
    assert stored is not None
    torch.testing.assert_close(stored.read(), codes.float() / 4, rtol=0, atol=0, equal_nan=True)
    assert stored.read().isnan().sum() == 2


def test_codes_are_split_only_between_blocks(tmp_path: Path) -> None:
    quantized = float8(torch.randn(32, 60), BLOCK)
    stored = open_module(tmp_path, quantized.tensors, weight_block_size=list(BLOCK))
    assert stored is not None
    part = stored.codes(slice(5, 30), slice(24, 60))
    assert part.values.dtype == E4M3
    assert torch.equal(part.dequantize(), stored.read(slice(5, 30), slice(24, 60)))
    with pytest.raises(WeightsError) as refused:
        stored.codes(slice(5, 30), slice(20, 48))
    label = f"{tmp_path}/model.safetensors: tensor up.weight"
    assert str(refused.value) == f"{label}: columns 20 to 48 cannot be cut out of groups of 24"


def test_other_tensors_are_ignored(tmp_path: Path) -> None:
    assert open_module(tmp_path, {"weight": torch.randn(4, 4)}) is None
    assert open_module(tmp_path, {"bias": torch.randn(4)}) is None


WEIGHT = torch.randn(32, 48).to(E4M3)
LIES = {
    "up.weight has no scales: there is neither up.weight_scale nor up.weight_scale_inv": {},
    "up.weight_scale is stored as int32, expected one of float32, float16, bfloat16": {
        "weight_scale": torch.ones(1, dtype=torch.int32)
    },
    "up.weight_scale has shape [48], expected [] or [1] or [1, 1] or [32] or [32, 1] or [2, 2]": {
        "weight_scale": torch.ones(48)
    },
    "up.weight_scale_inv has shape [2, 3], expected [] or [1] or [1, 1] or [32] or [32, 1] or [2, 2]": {
        "weight_scale_inv": torch.ones(2, 3)
    },
}


@pytest.mark.parametrize("problem", LIES)
def test_inconsistent_files(problem: str, tmp_path: Path) -> None:
    tensors = {"weight": WEIGHT, **LIES[problem]}
    text = refuse(lambda: open_module(tmp_path, tensors, weight_block_size=list(BLOCK)))
    assert text == f"{tmp_path}/model.safetensors: tensor {problem}"


@pytest.mark.parametrize("sizes", ["128", [128], [128, 0], [128, -1], [128, 1.5], [True, 128], {"a": 1}])
def test_invalid_block_sizes(sizes: object) -> None:
    settings = QuantizationSettings({"weight_block_size": sizes}, "config.json")
    assert "config.json: weight_block_size" in refuse(lambda: Fp8(settings))


def test_random_scales_never_crash(tmp_path: Path) -> None:
    """Every combination of shapes gives a matrix or a WeightsError."""
    rng, num_read = random.Random(0), 0
    for _ in range(40):
        shape = [rng.choice((1, 2, 3, 32, 48)) for _ in range(rng.randint(0, 3))]
        tensors = {"weight": WEIGHT, "weight_scale": torch.ones(shape)}
        with contextlib.suppress(WeightsError):
            stored = open_module(tmp_path, tensors, weight_block_size=list(BLOCK))
            assert stored is not None
            assert torch.equal(stored.read(), WEIGHT.float())
            num_read += 1
    assert 0 < num_read < 40
