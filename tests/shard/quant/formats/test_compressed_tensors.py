"""compressed-tensors: packed weights are read with the library's bits."""

from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

from tests.support.shard.compressed import compress, draw_weight
from tests.support.shard.quantized_modules import check_cuts, open_module
from tgis.shard.checkpoint.tensors import WeightsError
from tgis.shard.quant.formats.compressed_tensors import CompressedTensors
from tgis.shard.quant.formats.settings import QuantizationSettings

PACKED = {
    "groups": {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True},
    "groups with zeros": {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
    "rows": {"num_bits": 4, "strategy": "channel", "symmetric": True},
    "rows with zeros": {"num_bits": 4, "strategy": "channel", "symmetric": False},
    "a matrix": {"num_bits": 4, "strategy": "tensor", "symmetric": True},
    "2 bits": {"num_bits": 2, "strategy": "group", "group_size": 16, "symmetric": False},
    "3 bits": {"num_bits": 3, "strategy": "group", "group_size": 32, "symmetric": False},
    "8 bits": {"num_bits": 8, "strategy": "group", "group_size": 64, "symmetric": False},
}
INTEGERS = {
    "rows": {"num_bits": 8, "strategy": "channel", "symmetric": True},
    "rows with zeros": {"num_bits": 8, "strategy": "channel", "symmetric": False},
    "groups with zeros": {"num_bits": 8, "strategy": "group", "group_size": 32, "symmetric": False},
    "a matrix": {"num_bits": 8, "strategy": "tensor", "symmetric": True},
    "a matrix with a zero": {"num_bits": 8, "strategy": "tensor", "symmetric": False},
    "4 bits": {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True},
}
FLOATS = {
    "rows": {"strategy": "channel"},
    "a matrix": {"strategy": "tensor"},
    "blocks": {"strategy": "block", "block_structure": [16, 32]},
    "groups": {"strategy": "group", "group_size": 32},
}
CASES = {
    **{f"pack-quantized, {name}": ("pack-quantized", more) for name, more in PACKED.items()},
    **{f"int-quantized, {name}": ("int-quantized", more) for name, more in INTEGERS.items()},
    "naive, int8": ("naive-quantized", INTEGERS["rows with zeros"]),
    **{
        f"float-quantized, {name}": ("float-quantized", {"num_bits": 8, "type": "float", **more})
        for name, more in FLOATS.items()
    },
    "naive, fp8": ("naive-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
}
WIDTH = 192


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_the_library(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    form, more = CASES[name]
    # 4-bit zeros of 48 rows fill words, those of 44 rows do not.
    weight = draw_weight(44 if "zeros" in name else 48, WIDTH, dtype)
    tensors, expected, settings = compress(weight, form, **more)
    assert expected.dtype == dtype
    assert 0 < (expected - weight).abs().mean() < 0.2, "the library quantized them"
    actual = open_module(tmp_path, tensors, settings)
    assert actual.shape == weight.shape
    whole = actual.read()
    assert torch.equal(whole.to(dtype), expected)
    check_cuts(actual, whole)


def test_widths_that_fill_no_words(tmp_path: Path) -> None:
    for bits in (3, 4, 8):
        tensors, expected, settings = compress(
            draw_weight(24, 77, torch.float32), "pack-quantized", num_bits=bits, strategy="channel"
        )
        actual = open_module(tmp_path, tensors, settings)
        assert torch.equal(actual.read(), expected)
        check_cuts(actual, expected)


def test_columns_in_another_order(tmp_path: Path) -> None:
    """The library no longer writes `weight_g_idx`, but checkpoints of its older releases have it."""
    weight, order = draw_weight(32, WIDTH, torch.float32), torch.randperm(WIDTH)
    tensors, expected, settings = compress(weight, "pack-quantized", **PACKED["groups with zeros"])
    codes = unpack_from_int32(tensors["weight_packed"], 4, weight.shape)
    tensors["weight_packed"] = pack_to_int32(codes[:, order].contiguous(), 4)
    tensors["weight_g_idx"] = (order // 32).int()
    actual = open_module(tmp_path, tensors, settings)
    layout = actual.layout()
    assert layout is not None
    assert layout.is_reordered
    assert torch.equal(actual.read(), expected[:, order])
    check_cuts(actual, expected[:, order])


@pytest.mark.parametrize("idle", [-1, 0])
def test_an_order_that_was_never_set(idle: int, tmp_path: Path) -> None:
    weight = draw_weight(32, WIDTH, torch.float32)
    tensors, expected, settings = compress(weight, "pack-quantized", **PACKED["groups"])
    tensors["weight_g_idx"] = torch.full((WIDTH,), idle, dtype=torch.int32)
    assert torch.equal(open_module(tmp_path, tensors, settings).read(), expected)


@pytest.mark.parametrize("name", CASES)
def test_the_format_has_the_kind_of_codes(name: str, tmp_path: Path) -> None:
    """Platforms have products for integer codes, and memory planning depends on the kind."""
    form, more = CASES[name]
    tensors, _, settings = compress(draw_weight(48, WIDTH, torch.float16), form, **more)
    actual = open_module(tmp_path, tensors, settings).layout()
    layout = CompressedTensors(QuantizationSettings(settings, "config.json")).layout
    assert actual is not None
    assert layout.dtype.is_floating_point == actual.dtype.is_floating_point == (more.get("type") == "float")
    assert layout.bits == actual.bits == more.get("num_bits", 8)


def test_bytes_of_groups_of_several_widths_have_the_widest(tmp_path: Path) -> None:
    tensors, expected, settings = compress(
        draw_weight(48, WIDTH, torch.float32), "int-quantized", **INTEGERS["rows"]
    )
    [group] = settings["config_groups"].values()
    narrow = {**group, "weights": {**group["weights"], "num_bits": 4}}
    settings["config_groups"] = {"first": narrow, "second": group, "third": narrow}
    assert torch.equal(open_module(tmp_path, tensors, settings).read(), expected)


def test_bytes_that_are_no_integers_of_so_many_bits(tmp_path: Path) -> None:
    tensors, _, settings = compress(
        draw_weight(48, WIDTH, torch.float32), "int-quantized", **INTEGERS["4 bits"]
    )
    [name] = [name for name in tensors if name.endswith("weight")]
    tensors[name][3, 5] = 8
    result = open_module(tmp_path, tensors, settings)
    with pytest.raises(WeightsError, match=r"weight has 8, which is not a signed integer of 4 bits$"):
        result.read()
