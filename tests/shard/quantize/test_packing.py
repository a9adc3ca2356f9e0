"""Tensors of quantized modules, read by numpy and by compressed-tensors."""

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme

from tests.support.shard import gptq_oracle
from tgis.shard.quantize.group_codes import GroupCodes
from tgis.shard.quantize.packing import check_size, pack_groups, pack_rows, pack_words, unpack_groups
from tgis.shard.quantize.settings import Method, QuantizeError, QuantizeSettings

BITS = (2, 3, 4, 8)


def draw(bits: int) -> GroupCodes:
    return GroupCodes(
        torch.randint(2**bits, (96, 64)).to(torch.uint8),
        torch.rand(3, 64).half(),
        torch.randint(1, 2**bits, (3, 64)).to(torch.uint8),
        torch.arange(96) // 40,
    )


@pytest.mark.parametrize("bits", BITS)
def test_equals_the_table_of_formats(bits: int) -> None:
    codes, rows = draw(bits), torch.randperm(64)[:32]
    packed = pack_groups(codes, rows, bits)
    shapes = {name: (tensor.dtype, list(tensor.shape)) for name, tensor in packed.items()}
    assert shapes == {
        "qweight": (torch.int32, [96 * bits // 32, 32]),
        "qzeros": (torch.int32, [3, bits]),
        "scales": (torch.float16, [3, 32]),
        "g_idx": (torch.int32, [96]),
    }
    assert torch.equal(gptq_oracle.read_module(packed), codes.dequantize()[rows])
    again = unpack_groups(packed, bits)
    assert torch.equal(again.dequantize(), codes.dequantize()[rows])


@pytest.mark.parametrize("bits", BITS)
def test_words_are_filled_from_the_lowest_bit(bits: int) -> None:
    values = torch.randint(2**bits, (64, 3)).to(torch.uint8)
    expected = [sum(int(value) << bits * i for i, value in enumerate(column)) for column in values.T]
    words = pack_words(values, bits).numpy().astype(np.uint32)
    actual = [sum(int(word) << 32 * i for i, word in enumerate(column)) for column in words.T]
    assert actual == expected


@pytest.mark.parametrize(("bits", "size"), [(4, 12), (3, 48), (2, 24), (8, 3)])
def test_sizes_that_do_not_fill_words_are_refused(bits: int, size: int) -> None:
    for rows, columns, kind in ((size, 32, "rows"), (32, size, "columns")):
        with pytest.raises(QuantizeError, match=rf"^model.q has {size} {kind}, whose codes of {bits} bits"):
            check_size("model.q", rows, columns, bits)
    check_size("model.q", 32, 64, bits)


@pytest.mark.parametrize(("method", "format"), [("int8", "int-quantized"), ("fp8", "float-quantized")])
def test_compressed_tensors_rounds_and_reads_the_same(method: Method, format: str) -> None:
    weight = torch.randn(24, 40) * torch.logspace(-6, 2, 24).unsqueeze(1)
    weight[3] = 0
    packed = pack_rows(weight, method)
    config = QuantizeSettings(method=method).describe(["lm_head"], [])
    assert config["format"] == format
    scheme = QuantizationScheme(**config["config_groups"]["group_0"])
    compressor = BaseCompressor.get_value_from_registry(format)
    theirs = compressor.compress({"weight": weight, "weight_scale": packed["weight_scale"]}, scheme)
    assert theirs["weight"].dtype == packed["weight"].dtype
    assert torch.equal(theirs["weight"].float(), packed["weight"].float())
    read = compressor.decompress(packed, scheme)["weight"]
    assert torch.equal(read, packed["weight"].float() * packed["weight_scale"])
    step = packed["weight_scale"] / 2 if method == "int8" else read.abs() / 16 + packed["weight_scale"] / 512
    assert ((read - weight).abs() <= step * 1.0001).all()
    largest = read.abs().amax(1)
    assert torch.allclose(largest, weight.abs().amax(1), rtol=1e-5), "the range is not used"
