"""Kernels between matrix products give a row the same bits wherever its operands are in memory."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import permutations

import pytest
import torch
from torch import Tensor

from tgis.shard.kernels.cpu.jit.compiler import as_bits
from tgis.shard.kernels.cpu.pointwise import activations, heads, norms
from tgis.shard.kernels.cpu.pointwise.activations import GATED_KINDS, KINDS

# Number of floats; small, so that neighbours are within one iteration of a vector loop, whose width depends
# on the machine.
WIDTHS = (16, 24, 32, 40)
GAPS = range(0, 66, 3)
EPS = as_bits(1e-6)

Run = Callable[[list[Tensor], Tensor], None]


def _rms(inputs: list[Tensor], out: Tensor) -> None:
    x, delta, weight = (given.data_ptr() for given in inputs)
    norms.RMS_NORM[torch.float32](1, len(out), 1, x, delta, weight, out.data_ptr(), EPS)


def _rms_without_delta(inputs: list[Tensor], out: Tensor) -> None:
    x, weight = (given.data_ptr() for given in inputs)
    norms.RMS_NORM[torch.float32](1, len(out), 1, x, 0, weight, out.data_ptr(), EPS)


def _layer_norm(inputs: list[Tensor], out: Tensor) -> None:
    x, delta, weight, bias = (given.data_ptr() for given in inputs)
    norms.LAYER_NORM[torch.float32](1, len(out), 1, x, delta, weight, bias, out.data_ptr(), EPS)


def _layer_norm_without_bias(inputs: list[Tensor], out: Tensor) -> None:
    x, weight = (given.data_ptr() for given in inputs)
    norms.LAYER_NORM[torch.float32](1, len(out), 1, x, 0, weight, 0, out.data_ptr(), EPS)


def _activate(name: str, inputs: list[Tensor], out: Tensor) -> None:
    activations.activate(1, len(out), 1, KINDS[name], inputs[0].data_ptr())
    out.copy_(inputs[0])


def _multiply(name: str, inputs: list[Tensor], out: Tensor) -> None:
    """The two inputs are the halves of one row."""
    addresses = (inputs[0].data_ptr(), out.data_ptr())
    activations.multiply_gated(1, len(out) // 2, 1, GATED_KINDS[name], *addresses)


def _split(inputs: list[Tensor], out: Tensor, unturned: int = 0) -> None:
    """Split two heads for q and one each for k and v. A third input holds the weights of norms."""
    qkv, angles, *weights = inputs
    dim = len(out) // 4
    q, k, v = (place.data_ptr() for place in (out[: 2 * dim], out[2 * dim : 3 * dim], out[3 * dim :]))
    norm = (weights[0].data_ptr(), weights[0][dim:].data_ptr(), 0, EPS) if weights else (0, 0, 0, 0)
    shape = (1, 2, 1, dim, dim // 2 - unturned, 1)
    addresses = (qkv.data_ptr(), len(qkv), angles.data_ptr(), q, k, v)
    heads.split_heads(*shape, *addresses, *norm)


# Function -> number of inputs.
KERNELS: dict[str, tuple[Run, int]] = {
    "rms_norm": (_rms, 3),
    "rms_norm without delta": (_rms_without_delta, 2),
    "layer_norm": (_layer_norm, 4),
    "layer_norm without bias": (_layer_norm_without_bias, 2),
    "split_heads": (_split, 2),
    "split_heads with norms": (_split, 3),
    "split_heads, few channels": (partial(_split, unturned=1), 3),
    **{f"activate {name}": (partial(_activate, name), 1) for name in KINDS},
    **{f"multiply_gated {name}": (partial(_multiply, name), 1) for name in GATED_KINDS},
}


def places(count: int, width: int) -> Iterator[list[int]]:
    """Return the offsets of operands in an arena: two of them close to each other, the others far away."""
    for one, other in permutations(range(count), 2):
        for gap in GAPS:
            place = [1000 * (i + 1) for i in range(count)]
            place[one], place[other] = 0, width + gap
            yield place


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_bits_do_not_depend_on_where_operands_lie(kernel: str, width: int) -> None:
    run, num_inputs = KERNELS[kernel]
    values = torch.randn(6, num_inputs, width, generator=torch.Generator().manual_seed(0))
    values *= torch.tensor([1.0, 1.0, 3.0, 3.0, 10.0, 100.0])[:, None, None]
    arena = torch.zeros(1000 * (num_inputs + 2))
    for row in values:
        actual = set()
        for place in places(num_inputs + 1, width):
            *inputs, out = (arena[at : at + width] for at in place)
            for target, source in zip(inputs, row, strict=True):
                target.copy_(source)
            run(inputs, out.zero_())
            actual.add(out.numpy().tobytes())
        assert len(actual) == 1
