"""Norms against torch in double precision, with the same bits in every batch, and read from a checkpoint."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from tests.support.shard.layer_parts import parts
from tgis.shard.checkpoint.weights import Weights
from tgis.shard.collectives import ProcessGroup
from tgis.shard.kernels.cpu.ops import CPU_KERNELS, layer_norm, rms_norm
from tgis.shard.layers.norm import Norm, NormKind, read_head_norm
from tgis.shard.layers.ops import Parts

EPS = 1e-5

Function = Callable[[Tensor, Tensor | None], Tensor]


def _functions(kind: str, weight: Tensor, bias: Tensor) -> tuple[Function, Function]:
    """Return the kernel, and torch's function in double precision."""
    size, wide = weight.shape, weight.double()
    if kind == "rms":
        ours = partial(CPU_KERNELS.rms_norm, weight=weight, eps=EPS)
        return ours, lambda x, delta: F.rms_norm(x.double(), size, wide, EPS)
    given = bias if kind == "layer" else None
    ours = partial(CPU_KERNELS.layer_norm, weight=weight, bias=given, eps=EPS)
    wide_bias = None if given is None else given.double()
    return ours, lambda x, delta: F.layer_norm(x.double(), size, wide, wide_bias, EPS)


@pytest.mark.parametrize("kind", ["rms", "layer", "layer_no_bias"])
@pytest.mark.parametrize("size", [1, 31, 576])
def test_norms(kind: str, size: int) -> None:
    torch.manual_seed(0)
    x, delta = torch.randn(300, size) * 10 + 5, torch.randn(300, size)
    ours, oracle = _functions(kind, torch.randn(size), torch.randn(size))
    total, changed = x + delta, x.clone()
    normed = ours(changed, delta)
    torch.testing.assert_close(normed.double(), oracle(total, None), rtol=1e-5, atol=2e-6)
    assert torch.equal(changed, total)
    assert torch.equal(ours(total.clone(), None), normed)
    for i in (0, 7, 299):
        assert torch.equal(ours(x[i : i + 1].clone(), delta[i : i + 1]), normed[i : i + 1])


@pytest.mark.parametrize("has_bias", [False, True])
def test_rounded_norms_are_norms_that_are_rounded(has_bias: bool) -> None:
    x, delta, weight, bias = torch.randn(9, 70), torch.randn(9, 70), torch.randn(70), torch.randn(70)
    given = bias if has_bias else None
    for norm in (partial(layer_norm, bias=given), rms_norm):
        exact, rounded = (
            norm(x.clone(), delta, weight, eps=EPS, out=torch.empty(9, 70, dtype=dtype))
            for dtype in (torch.float32, torch.bfloat16)
        )
        assert torch.equal(rounded, exact.bfloat16())


@pytest.mark.parametrize("offset", [0.0, 5.0, 300.0])
def test_layer_norm_is_as_accurate_as_torch(offset: float) -> None:
    """Also if the mean is large relative to the spread, where a difference of sums would lose digits."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(50, 1024) + offset, torch.randn(1024), torch.randn(1024)
    exact = F.layer_norm(x.double(), (1024,), weight.double(), bias.double(), EPS)
    expected = F.layer_norm(x, (1024,), weight, bias, EPS)
    actual = CPU_KERNELS.layer_norm(x, None, weight, bias, EPS)
    assert (actual - exact).abs().mean() <= 1.2 * (expected - exact).abs().mean()


def test_nan_gives_nan() -> None:
    x = torch.tensor([[1.0, torch.nan, 2.0]])
    assert CPU_KERNELS.layer_norm(x.clone(), None, torch.ones(3), None, EPS).isnan().all()
    assert CPU_KERNELS.rms_norm(x.clone(), None, torch.ones(3), EPS).isnan().all()


@pytest.mark.parametrize("kind", ["rms", "rms_plus_one", "layer", "layer_no_bias"])
def test_norms_of_checkpoints(kind: NormKind, tmp_path: Path) -> None:
    """Weights are rounded to the weights' type before one is added."""
    torch.manual_seed(0)
    weight, bias, x, delta = torch.randn(4, 12).unbind()
    save_file({"layer.weight": weight, "layer.bias": bias}, tmp_path / "model.safetensors")
    norm = Norm(parts(tmp_path, ProcessGroup(0, 1), torch.bfloat16), "layer", 12, EPS, kind)
    weight, bias, total = weight.bfloat16().double(), bias.bfloat16().double(), (x + delta).double()
    expected = {
        "rms": F.rms_norm(total, (12,), weight, EPS),
        "rms_plus_one": F.rms_norm(total, (12,), weight + 1, EPS),
        "layer": F.layer_norm(total, (12,), weight, bias, EPS),
        "layer_no_bias": F.layer_norm(total, (12,), weight, None, EPS),
    }
    changed = x[None].clone()
    torch.testing.assert_close(norm(changed, delta[None])[0].double(), expected[kind], rtol=1e-5, atol=1e-6)
    assert torch.equal(changed[0], x + delta)


def test_head_norms_of_checkpoints(tmp_path: Path) -> None:
    vectors = {"q_norm": torch.randn(6), "k_norm": torch.randn(6)}
    save_file({f"{name}.weight": vector for name, vector in vectors.items()}, tmp_path / "model.safetensors")
    weights = Weights(tmp_path, {f"layer.{name}": name for name in vectors})
    given = Parts(ProcessGroup(0, 1), weights, torch.float32, CPU_KERNELS)
    for kind, more in (("rms", 0), ("rms_plus_one", 1)):
        norm = read_head_norm(given, "layer", 6, 1e-6, kind)
        assert torch.equal(norm.q_weight, vectors["q_norm"] + more)
        assert torch.equal(norm.k_weight, vectors["k_norm"] + more)
        assert norm.eps == 1e-6
