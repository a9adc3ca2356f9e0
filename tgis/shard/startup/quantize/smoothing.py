"""Norms whose output only linear layers read, so that factors can be moved from the norm to these layers."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from tgis.shard.models.spec import DecoderSpec
from tgis.shard.quant.smoothing import ChannelRange, Factors, choose_factors


def list_readers(spec: DecoderSpec) -> dict[str, list[str]]:
    """Return the paths of the linear layers that read a norm's output, by the norm's path. Norms whose output
    is also the residual stream, or is read by no product that rounds it, are left out."""
    readers: dict[str, list[str]] = {}
    if spec.residual != "sequential" or spec.norm_place in ("before", "both"):
        for layer in range(spec.num_layers):
            path = f"blocks.{layer}"
            readers |= _list_mixer(spec, path, layer)
            if not spec.feeds_forward(layer):
                continue
            feed_forward = _list_feed_forward(spec, f"{path}.mlp", layer)
            second = "norm_1" if spec.residual == "parallel_shared_norm" else "norm_2"
            if spec.experts is not None and spec.experts.beside_dense:
                readers[f"{path}.mlp.sparse_norm"] = list(feed_forward)
                feed_forward = iter([f"{path}.mlp.up"])
            readers.setdefault(f"{path}.{second}", []).extend(feed_forward)
    if spec.final_norm and spec.embedding_width == spec.hidden_size:
        readers["norm"] = ["head"]
    return readers


def _list_mixer(spec: DecoderSpec, path: str, layer: int) -> Iterator[tuple[str, list[str]]]:
    """Yield norms before attention and recurrent layers with the paths of the matrices that read them."""
    if layer in spec.attention_layers:
        yield f"{path}.norm_1", [f"{path}.attention.{'latents' if spec.latent else 'qkv'}"]
    if spec.mamba is not None and layer in spec.mamba.layers:
        yield f"{path}.{'mamba_norm' if spec.side_by_side else 'norm_1'}", [f"{path}.mamba.in"]
    if spec.delta_net is not None and layer in spec.delta_net.layers:
        yield f"{path}.norm_1", [f"{path}.delta_net.in", f"{path}.delta_net.gates"]


def _list_feed_forward(spec: DecoderSpec, path: str, layer: int) -> Iterator[str]:
    if spec.experts is None or layer in spec.experts.dense_layers:
        yield f"{path}.up"
        return
    if not spec.experts.has_router_norm:
        yield f"{path}.router"
    if not spec.experts.latent_size:
        yield from (f"{path}.experts.{i}.up" for i in range(spec.experts.num_experts))
    if spec.experts.shared_size:
        yield f"{path}.shared.up"
    if spec.experts.latent_size:
        yield f"{path}.narrow"
    if spec.experts.has_shared_gate:
        yield f"{path}.shared_gate"


def find_factors(readers: Mapping[str, Sequence[str]], ranges: Mapping[str, ChannelRange]) -> Factors:
    """Return the factors of norms and of their readers, whose ranges are given by path."""
    factors: dict[str, Tensor] = {}
    for norm, paths in readers.items():
        inputs, weights = (
            torch.stack(each).amax(0) for each in zip(*(ranges[path] for path in paths), strict=True)
        )
        factors |= dict.fromkeys((norm, *paths), choose_factors(ChannelRange(inputs, weights)))
    return factors
