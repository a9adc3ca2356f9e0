"""Check that KV cache scales are found under the names that quantization tools give them."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tgis.shard.checkpoint.cache_scales import read_cache_scales
from tgis.shard.checkpoint.tensors import WeightsError
from tgis.shard.memory.kv_cache import CacheScale

LAYER = "model.layers.{}.self_attn."
NAMES = {
    "compressed-tensors": ("k_scale", "v_scale"),
    "as vLLM keeps them": ("attn.k_scale", "attn.v_scale"),
    "of the layers' outputs": ("k_proj.output_scale", "v_proj.output_scale"),
    "of the layers": ("k_proj.k_scale", "v_proj.v_scale"),
}
OTHERS = {
    "model.layers.0.self_attn.q_scale": torch.tensor(9.0),
    "model.layers.0.self_attn.o_proj.output_scale": torch.tensor(9.0),
    "model.layers.7.self_attn.k_scale": torch.tensor(9.0),
    "vision_tower.encoder.layers.0.self_attn.k_scale": torch.tensor(9.0),
    "model.layers.0.self_attn.k_proj.weight": torch.ones(2, 2),
}


def read(directory: Path, tensors: dict[str, torch.Tensor], num_layers: int = 2) -> list[CacheScale | None]:
    save_file(tensors, directory / "model.safetensors")
    return read_cache_scales(directory, num_layers)


@pytest.mark.parametrize("ends", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("prefix", ["", "model.", "model.language_model.", "language_model.model."])
def test_every_name(ends: tuple[str, str], prefix: str, tmp_path: Path) -> None:
    tensors = dict(OTHERS)
    for layer, numbers in enumerate(((0.5, 0.25), (3.0, 4.0))):
        for end, number in zip(ends, numbers, strict=True):
            tensors[f"{prefix}layers.{layer}.self_attn.{end}"] = torch.tensor(number)
    assert read(tmp_path, tensors) == [CacheScale(0.5, 0.25), CacheScale(3.0, 4.0)]


def test_one_scale_for_both_and_layers_without_any(tmp_path: Path) -> None:
    tensors = {
        LAYER.format(0) + "kv_scale": torch.tensor([0.5], dtype=torch.bfloat16),
        LAYER.format(2) + "v_scale": torch.tensor([[0.125]], dtype=torch.float16),
        LAYER.format(10) + "k_scale": torch.tensor(2.0),
        LAYER.format(10) + "kv_scale": torch.tensor(3.0),
    }
    result = read(tmp_path, tensors, 11)
    assert (result[0], result[2]) == (CacheScale(0.5, 0.5), CacheScale(1.0, 0.125))
    assert result[10] == CacheScale(2.0, 3.0)
    assert [i for i, scale in enumerate(result) if scale is None] == [1, *range(3, 10)]


REFUSED = [
    ([0.5, 0.25], r"has shape \[2\], expected one number: only per-layer scales are supported; .+"),
    ([0.0], r"is 0\.0, which is not a valid scale"),
    ([-1.0], r"is -1\.0, which is not a valid scale"),
    ([torch.nan], "is nan, which is not a valid scale"),
    ([torch.inf], "is inf, which is not a valid scale"),
]


@pytest.mark.parametrize(("numbers", "text"), REFUSED)
def test_an_invalid_scale_is_refused(numbers: list[float], text: str, tmp_path: Path) -> None:
    name = LAYER.format(1) + "k_scale"
    label = re.escape(f"{tmp_path / 'model.safetensors'}: tensor {name} ")
    with pytest.raises(WeightsError, match=f"^{label}{text}$"):
        read(tmp_path, {name: torch.tensor(numbers)})
