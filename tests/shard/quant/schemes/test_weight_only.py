"""Weights rounded while loading, against the libraries after which the schemes are named, torch's conversion,
and numpy."""

import math

import numpy as np
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_quant, quantize_4bit
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor

from tests.support.shard.stored_tensors import check_parts, refuse
from tgis.shard.checkpoint.tensors import Stored, TensorInMemory
from tgis.shard.quant.interface import MatrixRole
from tgis.shard.quant.registry import find_scheme
from tgis.shard.quant.schemes.weight_only import WEIGHT_ONLY

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = [(1, 1), (40, 127), (70, 128), (33, 1000)]
GROUPS = {"int4": 64, "bitsandbytes-nf4": 64, "bitsandbytes-fp4": 64}


def draw(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(0)
    return (torch.randn(shape) * torch.randn(shape[0], 1).exp()).to(dtype)


def encode(name: str, weights: Tensor, role: MatrixRole = "linear") -> Stored:
    return find_scheme(name).encode(role, TensorInMemory(weights, "a weight"))


@pytest.mark.parametrize("name", ["bitsandbytes", "eetq"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_of_rows(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    weights = draw(shape, dtype)
    codes = encode(name, weights).codes()
    numbers = weights.float().numpy()
    largest = np.abs(numbers).max(1, keepdims=True)
    assert np.array_equal(codes.values.numpy(), np.rint(numbers * (np.float32(127) / largest)))
    assert np.array_equal(codes.scales.numpy(), largest / np.float32(127))
    theirs, scales, _ = int8_vectorwise_quant(weights.to(torch.float16))
    ours = encode(name, weights.to(torch.float16)).codes()
    assert (theirs.int() - ours.values.int()).abs().max() <= 1, "the library multiplies in float16"
    assert torch.equal(scales / 127, ours.scales[:, 0])


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tables_are_those_of_the_library(kind: str, dtype: torch.dtype) -> None:
    weights = draw((30, 640), dtype)
    weights[3, :64], weights[4, 64:128], weights[5, ::2] = 0, weights[4, 64:128].sign(), 0
    packed, state = quantize_4bit(weights, quant_type=kind, blocksize=64)
    codes = encode(f"bitsandbytes-{kind}", weights).codes()
    assert torch.equal(codes.values, torch.cat((packed >> 4, packed & 15), 1).view(30, 640))
    assert torch.equal(codes.scales.flatten(), state.absmax)
    assert torch.equal(codes.dequantize().to(dtype), dequantize_4bit(packed, state))


def test_blocks_begin_with_rows() -> None:
    weights = draw((5, 100))
    part = encode("bitsandbytes-nf4", weights)
    for row in range(5):
        for columns in (slice(0, 64), slice(64, 100)):
            alone = encode("bitsandbytes-nf4", weights[row : row + 1, columns])
            assert torch.equal(part.read(slice(row, row + 1), columns), alone.read())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_floats_are_those_of_torch_and_compressed_tensors(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weights = draw(shape, dtype)
    codes = encode("fp8", weights).codes()
    wide = weights.float()
    scales = wide.abs().amax(1, keepdim=True) / 448
    assert torch.equal(codes.scales, scales)
    assert torch.equal(
        codes.values.view(torch.uint8), (wide / scales).to(torch.float8_e4m3fn).view(torch.uint8)
    )
    args = QuantizationArgs(num_bits=8, type="float", strategy="channel")
    theirs, _ = calculate_qparams(wide.amin(1, keepdim=True), wide.amax(1, keepdim=True), args)
    assert torch.equal(theirs, scales)
    rounded = quantize(wide, scales, torch.zeros_like(scales), args=args, dtype=torch.float8_e4m3fn)
    assert torch.equal(encode("fp8", weights).read(), dequantize(rounded, scales, args=args))


BOUNDS = {  # maximum error relative to the largest magnitude of a group
    "bitsandbytes": 0.5 / 127,
    "eetq": 0.5 / 127,
    "int4": 0.15 + 0.5 / 7.5,  # few values are outside the narrowest range
    "bitsandbytes-nf4": (1 - 0.6961928) / 2,
    "bitsandbytes-fp4": 1 / 6,
    "fp8": 16 / 448,
}


@pytest.mark.parametrize("name", BOUNDS)
def test_errors_are_bounded(name: str) -> None:
    weights = draw((50, 1000))
    errors = (encode(name, weights).read() - weights).abs()
    width = GROUPS.get(name, 1000)
    for begin in range(0, 1000, width):
        group = slice(begin, begin + width)
        share = errors[:, group].amax(1) / weights[:, group].abs().amax(1)
        assert share.max() <= BOUNDS[name] * (1 + 1e-5)
    assert errors.max() > 0


@pytest.mark.parametrize("name", WEIGHT_ONLY)
@pytest.mark.parametrize("width", [200, 256])
def test_parts_are_those_of_the_whole(name: str, width: int) -> None:
    """Groups are those of the whole matrix, wherever it is split."""
    stored = encode(name, draw((23, width), torch.bfloat16))
    check_parts(stored, stored.codes().dequantize())
    assert torch.equal(
        stored.codes(slice(3, 9), slice(0, 128)).dequantize(), stored.read(slice(3, 9), slice(0, 128))
    )
    if name in GROUPS:
        text = refuse(lambda: stored.codes(slice(3, 9), slice(32, 128)))
        assert text == f"a weight: columns 32 to 128 cannot be cut out of groups of {GROUPS[name]}"


@pytest.mark.parametrize("name", WEIGHT_ONLY)
def test_groups_of_zeros_infinity_and_nan(name: str) -> None:
    width = 2 * GROUPS.get(name, 128)
    weights = torch.ones(4, width)
    weights[0], weights[1], weights[2, 3], weights[3, 5] = 0, 1e-31, math.inf, math.nan
    stored = encode(name, weights)
    assert not stored.read(slice(0, 2)).any()
    assert stored.codes().scales[2:, 0].isnan().all()
    assert stored.read(slice(2, 4))[:, : width // 2].isnan().all()
    if name in GROUPS:
        assert (stored.read(slice(2, 4))[:, width // 2 :] - 1).abs().max() <= BOUNDS[name] * (1 + 1e-5)


@pytest.mark.parametrize("name", WEIGHT_ONLY)
def test_linear_layers_alone_are_rounded(name: str) -> None:
    weights = draw((4, 4))
    for role in ("head", "table"):
        stored = encode(name, weights, role)
        assert torch.equal(stored.read(), weights) == (name != "int4")
        assert (stored.read() - weights).abs().max() <= weights.abs().max() / 254 * (1 + 1e-5)
    assert torch.equal(encode(name, weights, "replicated").read(), weights)
    assert not torch.equal(encode(name, weights).read(), weights)
