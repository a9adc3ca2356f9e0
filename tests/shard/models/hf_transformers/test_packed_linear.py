"""Replacement of linear layers that modules share, compared with torch's forward pass."""

import copy

import torch
from torch import Tensor, nn

from tgis.shard.models.hf_transformers.packed_linear import PackedLinear, find_read_weights, pack_linears


class Shared(nn.Module):
    """Model with one layer under two names, and one block at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = self.first
        block = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU())
        self.blocks = nn.ModuleList([block, block, nn.Sequential(nn.Linear(64, 64), nn.ReLU())])

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x))
        for block in self.blocks:
            x = block(x)
        return x


def test_shared_layers_are_packed_once() -> None:
    torch.manual_seed(0)
    plain = Shared()
    model = copy.deepcopy(plain)
    pack_linears(model, torch.float32)
    assert isinstance(model.first, PackedLinear)
    assert model.first is model.second
    assert sum(isinstance(each, PackedLinear) for each in model.modules()) == 3
    assert not any(type(each) is nn.Linear for each in model.modules())
    x = torch.randn(5, 64)
    with torch.inference_mode():
        torch.testing.assert_close(model(x), plain(x))


def test_hooked_and_named_layers_stay() -> None:
    model = Shared()
    model.first.register_forward_hook(lambda *args: None)
    pack_linears(model, torch.float32, {"blocks.*.*"})
    assert all(type(each) is not PackedLinear for each in model.modules())
    assert find_read_weights(model) == set()
