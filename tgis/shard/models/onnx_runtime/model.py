"""Implementation of `Model` with ONNX Runtime. Keys and values are stored in this service's cache; a step
passes them to the graph together with the new tokens."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tgis.shard.attention.interface import Attention, StepLayout
from tgis.shard.layers.lora import TokenAdapters
from tgis.shard.models.interface import ModelSpec, StepInputs
from tgis.shard.models.onnx_runtime.graph import OnnxGraph

LOGITS = "logits"
TOKENS, MASK, POSITIONS, HAS_PAST = "input_ids", "attention_mask", "position_ids", "use_cache_branch"
Pair = tuple[Tensor, Tensor]


def past_names(layer: int) -> tuple[str, str]:
    return f"past_key_values.{layer}.key", f"past_key_values.{layer}.value"


def present_names(layer: int) -> tuple[str, str]:
    return f"present.{layer}.key", f"present.{layer}.value"


class GraphRunner:
    """Runs the graph for one sequence at a time. The session keeps no state between calls."""

    def __init__(self, graph: OnnxGraph, session: Any, num_layers: int) -> None:
        self._session = session
        self._dtypes = {name: value.dtype for name, value in graph.inputs.items()}
        self._past = [name for layer in range(num_layers) for name in past_names(layer)]
        self._outputs = [LOGITS, *(name for layer in range(num_layers) for name in present_names(layer))]

    def run(self, token_ids: Tensor, positions: Tensor, past: Sequence[Pair]) -> tuple[Tensor, list[Pair]]:
        """Return the logits, [n, vocab_size], and the keys and values of all tokens for each layer.

        token_ids, positions: int64 [n]. Keys and values, past and returned, are [num_kv_heads, num_tokens,
        head_dim]; the new tokens come last. Results have the graph's own type."""
        num_past = past[0][0].shape[1]
        num_new = len(token_ids)
        inputs = {
            TOKENS: token_ids,
            MASK: torch.ones(num_past + num_new, dtype=torch.int64),
            POSITIONS: positions,
            HAS_PAST: torch.tensor(num_past > 0),
            **dict(zip(self._past, (x for pair in past for x in pair), strict=True)),
        }
        # ONNX Runtime needs a batch axis, here of size one.
        feeds = {name: inputs[name].to(dtype)[None].numpy() for name, dtype in self._dtypes.items()}
        logits, *present = (torch.from_numpy(x)[0] for x in self._session.run(self._outputs, feeds))
        return logits, list(zip(present[::2], present[1::2], strict=True))


class OnnxModel:
    """Model in ONNX form. `num_kv_heads` is the graph's number of heads; each rank computes all of them."""

    def __init__(self, spec: ModelSpec, runner: GraphRunner, num_kv_heads: int) -> None:
        self.spec = spec
        self._runner = runner
        self._num_kv_heads = num_kv_heads

    def forward(self, inputs: StepInputs, attention: Attention) -> Tensor:
        """Return float32 logits, [num_tokens, vocab_size], because the graph returns no hidden states."""
        spec = self.spec
        num_tokens = len(inputs.token_ids)
        logits = torch.empty(num_tokens, spec.vocab_size)
        k, v = torch.empty(2, spec.num_cache_layers, num_tokens, self._num_kv_heads, spec.head_dim)
        for new, num_past, table in _sequences(inputs.layout):
            past = partial(attention.read, block_table=table, seq_len=num_past)
            logits[new], k[:, new], v[:, new] = self._score(
                inputs.token_ids[new], inputs.positions[new], past
            )
        for layer in range(spec.num_cache_layers):
            attention.keep(layer, k[layer], v[layer], inputs.plan)
        return logits

    def _score(
        self, token_ids: Tensor, positions: Tensor, past: Callable[[int], Pair]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits, [n, vocab_size], and new keys and values, [num_layers, n, num_kv_heads,
        head_dim]."""
        layers = [past(layer) for layer in range(self.spec.num_cache_layers)]
        logits, present = self._runner.run(token_ids, positions, layers)
        k, v = (torch.stack([x[:, -len(token_ids) :] for x in part]) for part in zip(*present, strict=True))
        return logits, k.transpose(1, 2), v.transpose(1, 2)

    def logits(self, x: Tensor, adapters: TokenAdapters | None = None) -> Tensor:
        return x  # `forward` returned logits


def _sequences(layout: StepLayout) -> Iterator[tuple[slice, int, Tensor]]:
    """Yield each sequence's new tokens in the step, the number of its earlier tokens, and its block table."""
    spans = pairwise(layout.cu_seqlens_q.tolist())
    for (first, last), seq_len, table in zip(
        spans, layout.seq_lens.tolist(), layout.block_tables, strict=True
    ):
        yield slice(first, last), seq_len - (last - first), table
