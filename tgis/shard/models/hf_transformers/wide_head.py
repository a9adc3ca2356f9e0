"""Replaces the head of a model with 16-bit weights by one that returns float32, like this service's own."""

from typing import Any

from torch import Tensor, nn

from tgis.shard.kernels.cuda.products.wide import multiply_wide
from tgis.shard.torch_internals import has_forward_hooks


class WideHead(nn.Module):
    """Linear layer with any leading axes that rounds x to the type of its weights, and returns float32."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = linear.weight  # the same as the embedding's, if they are tied
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features).to(self.weight.dtype)
        y = multiply_wide(rows, self.weight)
        if self.bias is not None:
            y += self.bias
        return y.view(*x.shape[:-1], self.out_features)


def widen_head(whole: Any) -> None:
    """Replace the head, if it is a plain linear layer."""
    head = whole.get_output_embeddings()
    if type(head) is nn.Linear and not has_forward_hooks(head):
        whole.set_output_embeddings(WideHead(head))
