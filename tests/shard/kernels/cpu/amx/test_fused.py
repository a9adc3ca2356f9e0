"""Layers whose products on AMX tiles read inputs that the operations before them have rounded: they have the
bits of layers that round themselves, with and without adapters and bias."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.shard.emulated_tiles import compile_each_emulated
from tgis.shard.checkpoint.weights import Weights
from tgis.shard.collectives import ProcessGroup
from tgis.shard.kernels.cpu.bf16 import tile_product
from tgis.shard.kernels.cpu.bf16.ops import BfloatKernels
from tgis.shard.kernels.cpu.bf16.tiles import TileProductKernels
from tgis.shard.kernels.cpu.gemm import panels
from tgis.shard.kernels.cpu.ops import CpuKernels
from tgis.shard.layers.linear import ColumnParallel, RowParallel
from tgis.shard.layers.lora import Adapter, AdapterSet, LowRank, TokenAdapters
from tgis.shard.layers.norm import Norm, NormKind
from tgis.shard.layers.ops import Activation, Parts, Product

pytestmark = pytest.mark.skipif(panels.PANEL != 32, reason="processors with AMX have AVX-512")

NUM_TOKENS, SIZE, INNER = 35, 64, 96


class SeparateKernels(BfloatKernels):
    """Kernels whose products round their inputs themselves."""

    norm_product = CpuKernels.norm_product


@pytest.fixture(scope="module")
def pack_tiles() -> Callable[..., Product]:
    names = ("amx.inner_loop", "bf16.tiles")
    kernels = TileProductKernels(*compile_each_emulated(names, lambda module: module.TILE_KERNELS))
    return partial(tile_product.pack, kernels=kernels)


def adapt(path: str, in_features: int, width: int) -> TokenAdapters:
    """Return the adapters of tokens of which every second one has one."""
    low = LowRank(torch.randn(in_features, 2), torch.randn(2, width), 0)
    index = torch.arange(NUM_TOKENS, dtype=torch.int32) % 2 - 1
    return TokenAdapters(AdapterSet([Adapter({path: (low,)})]), index)


class Branch:
    """Feed-forward layers with a norm before them."""

    def __init__(
        self, kernels: CpuKernels, directory: Path, kind: NormKind, activation: Activation, bias: bool
    ):
        weights = Weights(directory, {name: name for name in ("norm", "up", "down")})
        part = Parts(ProcessGroup(0, 1), weights, torch.float32, kernels)
        self.kernels = kernels
        self.norm = Norm(part, "norm", SIZE, 1e-5, kind)
        self.activation = activation
        self.up = ColumnParallel(part, "up", SIZE, [INNER] * (1 + activation.is_gated), bias)
        self.down = RowParallel(part, "down", INNER, SIZE, False)

    def __call__(self, x: Tensor, delta: Tensor | None, adapters: TokenAdapters | None) -> Tensor:
        layers = (self.norm, self.up, self.activation, adapters, self.down)
        y = self.kernels.norm_product(x, delta, *layers)
        return self.down(y, adapters)


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("activation", [Activation("silu", True), Activation("gelu", False)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("tuned", [None, ("up", SIZE, INNER), ("down", INNER, SIZE)], ids=str)
def test_bits_are_those_of_separate_operations(
    pack_tiles: Callable[..., Product],
    kind: NormKind,
    activation: Activation,
    has_bias: bool,
    tuned: tuple[str, int, int] | None,
    tmp_path: Path,
) -> None:
    num_inner = INNER * (1 + activation.is_gated)
    content = {"norm.weight": torch.randn(SIZE), "norm.bias": torch.randn(SIZE)}
    content |= {"up.weight": torch.randn(num_inner, SIZE), "up.bias": torch.randn(num_inner)}
    content |= {"down.weight": torch.randn(SIZE, INNER)}
    save_file(content, tmp_path / "model.safetensors")
    fused, separate = (
        Branch(kind_of(pack_tiles), tmp_path, kind, activation, has_bias)
        for kind_of in (BfloatKernels, SeparateKernels)
    )
    adapters = None if tuned is None else adapt(*tuned)
    for delta in (None, torch.randn(NUM_TOKENS, SIZE)):
        x = torch.randn(NUM_TOKENS, SIZE)
        changed, expected_x = x.clone(), x.clone()
        assert torch.equal(fused(changed, delta, adapters), separate(expected_x, delta, adapters))
        assert torch.equal(changed, expected_x), "the residual stream is the same"


def test_only_the_reader_gets_rounded_results(pack_tiles: Callable[..., Product], tmp_path: Path) -> None:
    content = {"norm.weight": torch.ones(SIZE), "up.weight": torch.randn(2 * INNER, SIZE)}
    save_file(content | {"down.weight": torch.randn(SIZE, INNER)}, tmp_path / "model.safetensors")
    branch = Branch(BfloatKernels(pack_tiles), tmp_path, "rms", Activation("silu", True), False)
    x, layers = torch.randn(3, SIZE), (branch.norm, branch.up, branch.activation, None)
    assert branch.kernels.norm_product(x.clone(), None, *layers).dtype == torch.float32
    assert branch.kernels.norm_product(x.clone(), None, *layers, branch.down).dtype == torch.bfloat16
