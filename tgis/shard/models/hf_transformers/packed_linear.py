"""Replaces linear layers of a model with this service's kernels, whose rows do not affect each other."""

import re
from collections.abc import Set

import torch
from torch import Tensor, nn

from tgis.shard.checkpoint.tensors import TensorInMemory
from tgis.shard.kernels.cpu.gemm.product import PackedProduct, pack
from tgis.shard.torch_internals import has_forward_hooks

_NUMBER = re.compile(r"\b\d+\b")


class PackedLinear(nn.Module):
    """Linear layer in float32 with any leading axes. Reading `weight` raises AttributeError and sets
    `was_read`."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype, label: str):
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.was_read = False
        self._multiply: PackedProduct = pack(TensorInMemory(linear.weight.detach(), label), dtype)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.float(), requires_grad=False)

    @property
    def weight(self) -> Tensor:
        self.was_read = True
        raise AttributeError("the weight is packed")

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features).float().contiguous()
        y = self._multiply(rows)
        if self.bias is not None:
            y += self.bias
        return y.view(*x.shape[:-1], self.out_features)


def pack_linears(model: nn.Module, dtype: torch.dtype, unpacked: Set[str] = frozenset()) -> None:
    """Pack plain linear layers as `dtype`. Convert everything else, and layers in `unpacked`, to float32."""
    packed: dict[nn.Module, PackedLinear] = {}
    paths = {module: path for path, module in model.named_modules()}
    for path, child in list(model.named_modules(remove_duplicate=False)):
        if type(child) is not nn.Linear or has_forward_hooks(child):
            continue
        parent_path, _, name = path.rpartition(".")
        parent = model.get_submodule(parent_path)
        full = f"{paths[parent]}.{name}"
        if _block_name(full) not in unpacked:
            if child not in packed:
                packed[child] = PackedLinear(child, dtype, f"{full}.weight")
                _free_weights(child)  # so that the model is never in memory twice
            setattr(parent, name, packed[child])
    model.float()


def _free_weights(module: nn.Module) -> None:
    for name in [name for name, _ in module.named_parameters(recurse=False)]:
        delattr(module, name)


def find_read_weights(model: nn.Module) -> set[str]:
    """Return the packed layers whose weight was read, as names for `unpacked`. A name covers all blocks."""
    modules = model.named_modules()
    return {
        _block_name(path) for path, module in modules if isinstance(module, PackedLinear) and module.was_read
    }


def _block_name(path: str) -> str:
    return _NUMBER.sub("*", path.removeprefix("."))
