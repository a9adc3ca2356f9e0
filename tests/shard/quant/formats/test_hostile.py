"""Damaged and inconsistent checkpoints of packed integers: one line names the file and the tensor."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.shard import packers
from tests.support.shard.compressed import compress, draw_weight
from tests.support.shard.quantized_modules import open_module
from tgis.errors import OperatorError
from tgis.shard.checkpoint.tensors import WeightsError

Change = Callable[[dict[str, Tensor]], Any]


def make(name: str) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
    if name == "gptq":
        return packers.pack_gptq(packers.draw(64, 96)), {"quant_method": name, "bits": 4, "group_size": 32}
    if name == "awq":
        return packers.pack_awq_gemm(packers.draw(64, 96)), {"quant_method": name, "group_size": 32}
    if name == "gemv":
        settings = {"quant_method": "awq", "version": name, "group_size": 32}
        return packers.pack_awq_gemv(packers.draw(64, 96), 32), settings
    if name == "marlin":
        rounded = packers.draw(64, 96, is_symmetric=True)
        return packers.pack_marlin(rounded), {"quant_method": "marlin", "group_size": 32}
    arguments = {"strategy": "group", "group_size": 32, "symmetric": False}
    form, bits = ("pack-quantized", 4) if name == "packed" else ("int-quantized", 8)
    tensors, _, settings = compress(draw_weight(64, 96, torch.float32), form, num_bits=bits, **arguments)
    return tensors, settings


def narrow(end: str, axis: int) -> Change:
    return lambda tensors: tensors.update({end: tensors[end].narrow(axis, 1, tensors[end].shape[axis] - 1)})


def put(end: str, tensor: Tensor) -> Change:
    return lambda tensors: tensors.update({end: tensor})


def drop(end: str) -> Change:
    return lambda tensors: tensors.pop(end)


ORDER = torch.arange(96, dtype=torch.int32) // 32
CASES: dict[tuple[str, str], Change] = {
    ("gptq", "qweight needs m.scales, which is missing"): drop("scales"),
    ("gptq", "qweight needs m.qzeros, which is missing"): drop("qzeros"),
    ("gptq", "qweight is stored as float32, expected int32"): put("qweight", torch.ones(12, 64)),
    ("gptq", "qweight has shape [64], expected a matrix"): put("qweight", torch.ones(64).int()),
    ("gptq", "qweight has shape [0, 64], expected a matrix"): put("qweight", torch.ones(0, 64).int()),
    ("gptq", "scales has shape [3, 63], expected [3, 64]"): narrow("scales", 1),
    ("gptq", "scales has shape [64], expected 2 axes"): put("scales", torch.ones(64)),
    ("gptq", "scales is stored as int32, expected one of"): put("scales", torch.ones(3, 64).int()),
    ("gptq", "scales has 4 groups, but 96 columns are in groups of 32"): lambda tensors: tensors.update(
        scales=torch.ones(4, 64), qzeros=torch.ones(4, 8).int()
    ),
    ("gptq", "qzeros has shape [2, 8], expected [3, 8]"): narrow("qzeros", 0),
    ("gptq", "qzeros has shape [3, 7], but zeros of 64 rows are in 4 bits by the checkpoint's"): narrow(
        "qzeros", 1
    ),
    ("gptq", "qzeros has shape [3, 16], but zeros of 64 rows are in 4 bits by the checkpoint's"): put(
        "qzeros", torch.ones(3, 16).int()
    ),
    ("gptq", "g_idx has shape [95], expected [96]"): narrow("g_idx", 0),
    ("gptq", "g_idx is stored as float32, expected one of"): put("g_idx", torch.ones(96)),
    ("gptq", "g_idx refers to group 3 of 3"): put("g_idx", ORDER + 1),
    ("gptq", "g_idx refers to group -1 of 3"): put("g_idx", ORDER - 1),
    ("gptq", "g_idx refers to group 2147483647 of 3"): put("g_idx", ORDER + (2**31 - 3)),
    ("awq", "qweight needs m.qzeros, which is missing"): drop("qzeros"),
    ("awq", "scales has shape [3, 64], expected [3, 56]"): narrow("qweight", 1),
    ("awq", "scales has 3 groups, but 60 columns are in groups of 32"): lambda tensors: tensors.update(
        qweight=tensors["qweight"][:60]
    ),
    ("awq", "qzeros has shape [3, 7], expected [3, 8]"): narrow("qzeros", 1),
    ("gemv", "scales has shape [63, 32], expected [64, 32]"): narrow("scales", 0),
    ("gemv", "qzeros has shape [64, 3], expected [64, 4]"): narrow("qzeros", 1),
    ("gemv", "scales has room for 2 groups, but 96 columns are in groups of 32"): lambda tensors: (
        tensors.update(scales=torch.ones(64, 2), qzeros=torch.ones(64, 1).int())
    ),
    ("marlin", "B needs m.s, which is missing"): drop("s"),
    ("marlin", "B has shape [6, 127], expected a multiple of 128 columns"): narrow("B", 1),
    ("marlin", "s has shape [3, 63], expected [3, 64]"): narrow("s", 1),
    ("marlin", "s has 2 groups, but 96 columns are in groups of 32"): narrow("s", 0),
    ("packed", "weight_packed needs m.weight_scale, which is missing"): drop("weight_scale"),
    ("packed", "weight_packed needs m.weight_shape, which is missing"): drop("weight_shape"),
    ("packed", "weight_shape is [64, 0], but the words are [64, 12]"): put(
        "weight_shape", torch.tensor([64, 0])
    ),
    ("packed", "weight_shape is [65, 96], but the words are [64, 12]"): put(
        "weight_shape", torch.tensor([65, 96])
    ),
    ("packed", "weight_shape has shape [1, 2], expected 1 axes"): put(
        "weight_shape", torch.tensor([[64, 96]])
    ),
    ("packed", "weight_packed has shape [64, 12], which are not [64, 9000] values of 2, 3, 4"): put(
        "weight_shape", torch.tensor([64, 9000])
    ),
    ("packed", "weight_scale has shape [63, 3], expected [64, 3]"): narrow("weight_scale", 0),
    ("packed", "weight_zero_point has shape [7, 3], expected [8, 3]"): narrow("weight_zero_point", 0),
    ("packed", "weight_zero_point is stored as float32"): put("weight_zero_point", torch.ones(8, 3)),
    ("packed", "weight_g_idx refers to group 3 of 3"): put("weight_g_idx", ORDER + 1),
    ("plain", "weight needs m.weight_scale, which is missing"): drop("weight_scale"),
    ("plain", "weight_scale has 7 groups, but 96 columns are in groups of equal size"): put(
        "weight_scale", torch.ones(64, 7)
    ),
    ("plain", "weight_zero_point has shape [64, 2], expected [64, 3]"): narrow("weight_zero_point", 1),
    ("plain", "weight has shape [96], expected a matrix"): put("weight", torch.ones(96).to(torch.int8)),
}


@pytest.mark.parametrize(("name", "text"), CASES)
def test_one_line_states_the_error(name: str, text: str, tmp_path: Path) -> None:
    tensors, settings = make(name)
    open_module(tmp_path, tensors, settings).read()
    CASES[name, text](tensors)
    with pytest.raises(WeightsError) as refused:
        open_module(tmp_path, {end: each.contiguous() for end, each in tensors.items()}, settings)
    message = str(refused.value)
    assert message.startswith(f"{tmp_path / 'model.safetensors'}: tensor m.{text}"), message
    assert "\n" not in message


@pytest.mark.parametrize("size", [0, -2, -(10**12), 10**12])
@pytest.mark.parametrize("name", ["gptq", "awq", "gemv", "marlin"])
def test_invalid_group_sizes(name: str, size: int, tmp_path: Path) -> None:
    tensors, settings = make(name)
    with pytest.raises(OperatorError, match=f"group_size {size} is neither -1 nor a positive integer"):
        open_module(tmp_path, tensors, {**settings, "group_size": size})


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_bits_of_a_module_are_its_own_only_if_the_settings_say_so(bits: int, tmp_path: Path) -> None:
    rounded = packers.draw(64, 96, bits, 48)
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    tensors = packers.pack_gptq(rounded, has_order=False)
    with pytest.raises(WeightsError, match="are in 4 bits by the checkpoint's settings"):
        open_module(tmp_path, tensors, settings)
    overridden = {**settings, "dynamic": {r"+:.*\.m": {"bits": bits, "group_size": 48}}}
    assert torch.equal(open_module(tmp_path, tensors, overridden).read(), rounded.dequantize())
