"""Platforms of plain torch operators on any device, one of which fuses the layers of small steps."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tgis.shard.kernels.portable.attention import TorchAttention
from tgis.shard.kernels.portable.ops import ACTIVATIONS, TorchKernels
from tgis.shard.layers.lora import TokenAdapters
from tgis.shard.layers.ops import Activation, BiasedProduct, LinearLayer, NormLayer
from tgis.shard.memory.host_limits import HostMemory
from tgis.shard.startup.host_runner import HostRunners
from tgis.shard.startup.platform import Compiler, Platform

NOTHING_TO_COMPILE = Compiler(is_compiling=lambda: False, finish=lambda: None)
FEW_TOKENS = 8  # of a step whose layers are fused


def plain(device: torch.device) -> Platform:
    return Platform(
        device=device,
        kernels=TorchKernels(device),
        make_runner=HostRunners(TorchAttention),
        memory=HostMemory(),
        compiler=NOTHING_TO_COMPILE,
        is_memory_shared=True,
        cache_divisor=4,
    )


def fusing(device: torch.device) -> Platform:
    return replace(plain(device), kernels=FusingKernels(device))


class FusingKernels(TorchKernels):
    """What a GPU will do, by other means: one call a product, and products that are added where they belong.
    Layers are seen as numbers only, and large steps are left to the layers themselves."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.num_fused = {"norm_product": 0, "product_add": 0}

    def norm_product(
        self,
        x: Tensor,
        delta: Tensor | None,
        norm: NormLayer | None,
        linear: LinearLayer,
        then: Activation | None,
        adapters: TokenAdapters | None,
    ) -> Tensor:
        found = self._find(x, linear, adapters, "norm_product")
        if found is None:
            return super().norm_product(x, delta, norm, linear, then, adapters)
        if delta is not None:
            x += delta
        y = _multiply(found, x if norm is None else _normalise(x, norm))
        if then is None:
            return y
        gate, up = y.chunk(2, -1) if then.is_gated else (y, 1.0)
        return ACTIVATIONS[then.name](gate) * up

    def product_add(
        self, x: Tensor, y: Tensor, linear: LinearLayer, adapters: TokenAdapters | None
    ) -> Tensor | None:
        found = self._find(x, linear, adapters, "product_add")
        if found is None:
            return super().product_add(x, y, linear, adapters)
        x += _multiply(found, y)
        return None

    def _find(
        self, x: Tensor, linear: LinearLayer, adapters: TokenAdapters | None, call: str
    ) -> BiasedProduct | None:
        found = linear.as_product(adapters) if len(x) <= FEW_TOKENS else None
        self.num_fused[call] += found is not None
        return found


def _multiply(found: BiasedProduct, x: Tensor) -> Tensor:
    y = found.product(x)
    return y if found.bias is None else y + found.bias


def _normalise(x: Tensor, norm: NormLayer) -> Tensor:
    if norm.is_centred:
        return F.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, norm.eps)
    return x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight
