"""Sensitivity of a model's weights to quantization, from its specification."""

from collections.abc import Iterator
from typing import NamedTuple

from tgis.shard.models.spec import DecoderSpec, LayerSpec, Spec
from tgis.shard.quant.sensitivity import Sensitivity


class _Matrix(NamedTuple):
    """Weight of a linear layer that is split over ranks."""

    path: str
    num_rows: int
    num_columns: int


def describe_sensitivity(spec: Spec) -> Sensitivity:
    stack = spec if isinstance(spec, DecoderSpec) else spec.decoder
    return Sensitivity(stack.num_layers, stack.num_kv_heads * stack.head_dim)


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
    size = spec.hidden_size
    width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    mamba, experts = (spec.mamba, spec.experts) if isinstance(spec, DecoderSpec) else (None, None)
    for layer in range(spec.num_layers):
        path = f"{prefix}.{layer}"
        if mamba is not None and layer in mamba.layers:
            yield _Matrix(f"{path}.mamba.in", 2 * (mamba.width + mamba.group_width) + mamba.num_heads, size)
            yield _Matrix(f"{path}.mamba.out", size, mamba.width)
        else:
            yield _Matrix(f"{path}.attention.qkv", width + 2 * kv_width, size)
            yield _Matrix(f"{path}.attention.out", size, width)
        if experts is None or layer in experts.dense_layers:
            yield from _list_mlp(f"{path}.mlp", size, spec.intermediate_size, spec.gated)
        else:
            if experts.shared_size:
                yield from _list_mlp(f"{path}.mlp.shared", size, experts.shared_size, spec.gated)
            for i in range(experts.num_experts):
                yield from _list_mlp(f"{path}.mlp.experts.{i}", size, experts.intermediate_size, spec.gated)
            if experts.shared_size:
                yield from _list_mlp(f"{path}.mlp.shared", size, experts.shared_size, spec.gated)


def _list_mlp(path: str, size: int, width: int, is_gated: bool) -> Iterator[_Matrix]:
    yield _Matrix(f"{path}.up", width * (1 + is_gated), size)
    yield _Matrix(f"{path}.down", size, width)
