"""GPTQ, AWQ, Marlin: weights packed value by value are read back, whole and in parts."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.support.shard import packers
from tests.support.shard.packers import Rounded, Tensors, draw
from tests.support.shard.quantized_modules import check_cuts, open_module
from tgis.shard.checkpoint.tensors import WeightsError


class Case(NamedTuple):
    rounded: Rounded
    pack: Callable[[Rounded], Tensors]
    settings: Mapping[str, Any]


def gptq(bits: int, group: int = 32, *shape: int, **more: Any) -> Case:
    is_v2, has_order = more.pop("is_v2", False), more.pop("has_order", True)
    settings = {"quant_method": "gptq", "bits": bits, "group_size": group}
    settings |= {"checkpoint_format": "gptq_v2"} if is_v2 else {}
    rounded = draw(*(shape or (64, 96)), bits, 96 if group < 0 else group, **more)
    return Case(rounded, lambda each: packers.pack_gptq(each, is_v2, has_order), settings)


def awq(version: str, group: int, pack: Callable[[Rounded], Tensors], num_columns: int = 320) -> Case:
    settings = {"quant_method": "awq", "version": version, "bits": 4, "group_size": group}
    return Case(draw(48, num_columns, 4, group), pack, settings)


def marlin(group: int) -> Case:
    settings = {"quant_method": "gptq", "bits": 4, "group_size": group, "is_marlin_format": True}
    rounded = draw(192, 256, 4, 256 if group < 0 else group, is_symmetric=True)
    return Case(rounded, packers.pack_marlin, settings)


CASES = {
    **{f"gptq, {bits} bits": gptq(bits) for bits in (2, 3, 4, 8)},
    **{f"gptq_v2, {bits} bits": gptq(bits, is_v2=True) for bits in (3, 4)},
    **{f"gptq, {bits} bits, desc_act": gptq(bits, is_reordered=True) for bits in (2, 3, 4, 8)},
    "gptq, whole rows": gptq(4, -1),
    "gptq, a partial group": gptq(4, 64),
    "gptq, a partial group, desc_act": gptq(4, 64, is_reordered=True),
    "gptq, 3 bits, a partial group": gptq(3, 128, 32, 160),
    "gptq without g_idx": gptq(4, has_order=False),
    "awq gemm": awq("GEMM", 64, packers.pack_awq_gemm),
    "awq gemm, a partial group": awq("gemm", 128, packers.pack_awq_gemm),
    "awq gemv": awq("gemv", 32, lambda each: packers.pack_awq_gemv(each, 32)),
    "awq gemv, a partial group": awq("gemv", 128, lambda each: packers.pack_awq_gemv(each, 128)),
    "marlin": marlin(128),
    "marlin, whole rows": marlin(-1),
}


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_that_were_packed(name: str, tmp_path: Path) -> None:
    rounded, pack, settings = CASES[name]
    actual, expected = open_module(tmp_path, pack(rounded), settings), rounded.dequantize()
    assert actual.shape == expected.shape
    whole = actual.read()
    assert torch.equal(whole, expected)
    assert torch.equal(actual.codes().dequantize(), expected)
    # The packers' own kernels subtract and multiply in float16.
    assert torch.equal(whole.half(), to_half(rounded))
    check_cuts(actual, expected)


def to_half(rounded: Rounded) -> Tensor:
    difference = torch.from_numpy(rounded.codes - rounded.zeros[:, rounded.group_of]).half()
    return difference * torch.from_numpy(rounded.scales[:, rounded.group_of])


@pytest.mark.parametrize("name", CASES)
def test_codes_are_split_at_bounds_of_groups(name: str, tmp_path: Path) -> None:
    rounded, pack, settings = CASES[name]
    actual, (_, width) = open_module(tmp_path, pack(rounded), settings), rounded.codes.shape
    layout = actual.layout()
    assert layout is not None
    assert layout.is_reordered == ("desc_act" in name)
    assert (layout.group is None) == ("whole rows" in name or "desc_act" in name)
    group = layout.group or 8
    start, rows = width // 2 // group * group, slice(3, 30)
    part = actual.codes(rows, slice(start, width))
    assert torch.equal(part.values, torch.from_numpy(rounded.codes[3:30, start:]).to(torch.uint8))
    assert torch.equal(part.dequantize(), rounded.dequantize()[rows, start:])
    assert part.layout == layout
    if layout.group is None:
        assert torch.equal(actual.codes(rows, slice(1, 3)).dequantize(), rounded.dequantize()[rows, 1:3])
        return
    with pytest.raises(WeightsError) as refused:
        actual.codes(rows, slice(1, 3))
    text = f"columns 1 to 3 cannot be cut out of groups of {layout.group}"
    assert str(refused.value) == f"{actual.label}: {text}"


@pytest.mark.parametrize("name", ["gptq, 3 bits", "awq gemm", "marlin"])
def test_entries_of_stacks(name: str, tmp_path: Path) -> None:
    rounded, pack, settings = CASES[name]
    others = (
        [
            draw(
                *rounded.codes.shape,
                rounded.bits,
                128 if name == "marlin" else 64,
                seed=seed,
                is_symmetric=name == "marlin",
            )
            for seed in (1, 2)
        ]
        if name != "gptq, 3 bits"
        else [draw(*rounded.codes.shape, 3, seed=seed) for seed in (1, 2)]
    )
    packed = [pack(each) for each in others]
    stacked = {end: torch.stack([each[end] for each in packed]) for end in packed[0]}
    actual = open_module(tmp_path, stacked, settings)
    assert actual.shape == (2, *rounded.codes.shape)
    for index, each in enumerate(others):
        entry = actual.entry(index)
        assert torch.equal(entry.read(slice(1, 9), slice(2, 40)), each.dequantize()[1:9, 2:40])
    with pytest.raises(WeightsError, match="no entry 2"):
        actual.entry(2)
