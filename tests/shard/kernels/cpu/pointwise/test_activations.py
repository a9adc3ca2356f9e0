"""Activations against transformers', with the same bits in every batch."""

import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig
from transformers.activations import ACT2FN
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from tgis.shard.kernels.cpu.ops import CPU_KERNELS
from tgis.shard.layers.activation import CLAMPED_SWIGLU, NAMES

SIZE = 1009  # not a multiple of a vector


def values() -> Tensor:
    """Return values [300, SIZE] around zero, beyond the range of float32's exponential, and evenly spaced
    between."""
    torch.manual_seed(0)
    x = torch.randn(300, SIZE) * 20
    x[5, :8] = torch.tensor([1000.0, -1000.0, 88.5, -88.5, 0.0, 1e10, -1e10, 13.0])
    x[6] = torch.linspace(-14, 14, SIZE)
    return x


@pytest.mark.parametrize("name", NAMES)
def test_activations_are_those_of_transformers(name: str) -> None:
    x = values()
    expected = ACT2FN[name](x.double())
    actual = x.clone()
    assert CPU_KERNELS.activate(actual, NAMES[name]) is actual
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=5e-7)


@pytest.mark.parametrize("name", NAMES)
def test_gates_come_before_values(name: str) -> None:
    x, up = values(), torch.randn(300, SIZE)
    both = torch.cat((x, up), -1)
    kept = both.clone()
    actual = CPU_KERNELS.multiply_gated(both, NAMES[name])
    torch.testing.assert_close(actual.double(), ACT2FN[name](x.double()) * up.double(), rtol=1e-6, atol=2e-6)
    assert torch.equal(both, kept)


def test_clamped_gates_are_those_of_gpt_oss() -> None:
    config = GptOssConfig(hidden_size=8, intermediate_size=8, num_local_experts=1)
    experts = GptOssExperts(config)
    gate, up = values(), values().flip(0)
    expected = experts._apply_gate(torch.stack((gate, up), -1).flatten(1).double())
    actual = CPU_KERNELS.multiply_gated(torch.cat((gate, up), -1), CLAMPED_SWIGLU)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=4e-6)
    for i in (0, 5, 299):
        alone = torch.cat((gate[i : i + 1], up[i : i + 1]), -1)
        assert torch.equal(CPU_KERNELS.multiply_gated(alone, CLAMPED_SWIGLU), actual[i : i + 1])
    for none in (gate, up):
        kept = none[0, 0].item()
        none[0, 0] = torch.nan
        assert CPU_KERNELS.multiply_gated(torch.cat((gate, up), -1), CLAMPED_SWIGLU)[0, 0].isnan()
        none[0, 0] = kept


@pytest.mark.parametrize("name", sorted(set(NAMES.values())))
def test_bits_do_not_depend_on_the_batch(name: str) -> None:
    x = values()
    whole = CPU_KERNELS.activate(x.clone(), name)
    multiplied = CPU_KERNELS.multiply_gated(x[:, 1:].contiguous(), name)
    for i in (0, 5, 6, 299):
        alone = x[i : i + 1].clone()
        assert torch.equal(CPU_KERNELS.multiply_gated(alone[:, 1:].contiguous(), name), multiplied[i : i + 1])
        assert torch.equal(CPU_KERNELS.activate(alone, name), whole[i : i + 1])
    assert CPU_KERNELS.activate(torch.full((1, 40), torch.nan), name).isnan().all()
    assert CPU_KERNELS.multiply_gated(torch.full((1, 40), torch.nan), name).isnan().all()


@pytest.mark.parametrize(("name", "rtol"), [("gelu", 1e-6), ("gelu_tanh", 4e-6)])
def test_small_results_are_as_good_as_large_ones(name: str, rtol: float) -> None:
    """Far on the negative side, 1 + tanh would lose all digits."""
    x = torch.linspace(-5, 5, 2001)[None]
    expected = torch.nn.functional.gelu(x.double(), approximate="tanh" if name == "gelu_tanh" else "none")
    torch.testing.assert_close(CPU_KERNELS.activate(x, name).double(), expected, rtol=rtol, atol=0.0)
