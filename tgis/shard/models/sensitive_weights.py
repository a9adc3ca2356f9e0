"""Sensitivity of a model's weights to quantization, from its specification."""

from collections.abc import Iterator
from typing import NamedTuple

from tgis.shard.models.spec import DecoderSpec, Latent, LayerSpec, Spec
from tgis.shard.quant.sensitivity import Sensitivity


class _Matrix(NamedTuple):
    """Weight of a linear layer that is split over ranks."""

    path: str
    num_rows: int
    num_columns: int


def describe_sensitivity(spec: Spec) -> Sensitivity:
    stack = spec if isinstance(spec, DecoderSpec) else spec.decoder
    width = stack.num_kv_heads * stack.head_dim
    if not isinstance(stack, DecoderSpec) or not stack.layer_shapes:
        return Sensitivity(stack.num_layers, width)
    shapes = stack.layer_shapes
    rows = (0 if each.kv_projections == "none" else each.num_kv_heads * each.head_dim for each in shapes)
    return Sensitivity(stack.num_layers, width, tuple(rows))


def measure_sensitive_share(spec: Spec) -> float:
    """Return the share of sensitive weights among those of linear layers."""
    rule = describe_sensitivity(spec)
    total, sensitive = 0, 0
    for path, num_rows, num_columns in _list_matrices(spec):
        total += num_rows * num_columns
        sensitive += len(range(num_rows)[rule.find_rows(path, num_rows)]) * num_columns
    return sensitive / total


def _list_matrices(spec: Spec) -> Iterator[_Matrix]:
    if isinstance(spec, DecoderSpec):
        yield from _list_blocks(spec, "blocks")
        return
    yield from _list_blocks(spec.encoder, "encoder.blocks")
    yield from _list_blocks(spec.decoder, "decoder.blocks")
    stack = spec.decoder
    width, kv_width = stack.num_heads * stack.head_dim, stack.num_kv_heads * stack.head_dim
    for layer in range(stack.num_layers):
        path = f"decoder.blocks.{layer}.cross"
        yield _Matrix(f"{path}.q", width, stack.hidden_size)
        yield _Matrix(f"{path}.kv", 2 * kv_width, stack.hidden_size)
        yield _Matrix(f"{path}.out", stack.hidden_size, width)


def _list_blocks(spec: LayerSpec, prefix: str) -> Iterator[_Matrix]:
    for layer in range(spec.num_layers):
        own = spec.at(layer) if isinstance(spec, DecoderSpec) else spec
        yield from _list_block(own, f"{prefix}.{layer}", layer)


def _list_block(spec: LayerSpec, path: str, layer: int) -> Iterator[_Matrix]:
    size = spec.hidden_size
    if not isinstance(spec, DecoderSpec):
        yield from _list_attention(spec, f"{path}.attention")
        yield from _list_mlp(f"{path}.mlp", size, spec.intermediate_size, spec.gated)
        return
    mamba, delta, inputs = spec.mamba, spec.delta_net, spec.layer_inputs
    if layer in spec.attention_layers:
        yield from _list_attention(spec, f"{path}.attention")
    if mamba is not None and layer in mamba.layers:
        yield _Matrix(f"{path}.mamba.in", 2 * (mamba.width + mamba.group_width) + mamba.num_heads, size)
        yield _Matrix(f"{path}.mamba.out", size, mamba.width)
    if delta is not None and layer in delta.layers:
        yield _Matrix(f"{path}.delta_net.in", 2 * (delta.width + delta.key_width), size)
        yield _Matrix(f"{path}.delta_net.out", size, delta.width)
    if spec.feeds_forward(layer):
        yield from _list_feed_forward(spec, f"{path}.mlp", layer)
    if inputs is not None:
        yield _Matrix(f"{path}.input_gate", inputs.width, size)
        yield _Matrix(f"{path}.input_project", size, inputs.width)


def _list_attention(spec: LayerSpec, path: str) -> Iterator[_Matrix]:
    size = spec.hidden_size
    if isinstance(spec, DecoderSpec) and spec.latent is not None:
        yield from _list_latent(path, size, spec.num_heads, spec.latent)
        return
    width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    num_projections = {"both": 2, "keys": 1, "none": 0}[spec.kv_projections]
    height = width * (1 + spec.has_output_gate) + num_projections * kv_width
    yield _Matrix(f"{path}.qkv", height, size)
    yield _Matrix(f"{path}.out", size, width)


def _list_feed_forward(spec: DecoderSpec, path: str, layer: int) -> Iterator[_Matrix]:
    size, experts = spec.hidden_size, spec.experts
    is_sparse = experts is not None and layer not in experts.dense_layers
    if experts is None or not is_sparse or experts.beside_dense:
        yield from _list_mlp(path, size, spec.intermediate_size, spec.gated)
    if experts is None or not is_sparse:
        return
    own = experts.latent_size or size
    for i in range(experts.num_experts):
        yield from _list_mlp(f"{path}.experts.{i}", own, experts.intermediate_size, spec.gated)
    if experts.shared_size:
        yield from _list_mlp(f"{path}.shared", size, experts.shared_size, spec.gated)
    if experts.latent_size:
        yield _Matrix(f"{path}.narrow", own, size)
        yield _Matrix(f"{path}.widen", size, own)


def _list_latent(path: str, size: int, num_heads: int, latent: Latent) -> Iterator[_Matrix]:
    """Yield the matrices of latent attention that are quantized."""
    queries = num_heads * latent.query_dim
    rank = latent.query_rank
    yield _Matrix(f"{path}.latents", (rank or queries) + latent.page_dim, size)
    if rank is not None:
        yield _Matrix(f"{path}.q", queries, rank)
    yield _Matrix(f"{path}.out", size, num_heads * latent.value_dim)


def _list_mlp(path: str, size: int, width: int, is_gated: bool) -> Iterator[_Matrix]:
    yield _Matrix(f"{path}.up", width * (1 + is_gated), size)
    yield _Matrix(f"{path}.down", size, width)
