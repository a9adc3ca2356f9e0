"""Implementation of `Model` with transformers' code. A sequence's only state is its keys and values."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from tgis.shard.attention.interface import Attention
from tgis.shard.layers.lora import TokenAdapters
from tgis.shard.models.hf_transformers.attention_hook import AttentionCall, AttentionHook, PagedStep
from tgis.shard.models.interface import ModelSpec, StepInputs


class TransformersModel:
    """Model that runs transformers' code. `whole` is a causal language model; its part `decoder` computes
    hidden states and returns them as `output_type`. Its attention computes in `dtype`."""

    def __init__(
        self,
        spec: ModelSpec,
        whole: nn.Module,
        decoder: nn.Module,
        output_type: type,
        hook: AttentionHook,
        calls: list[AttentionCall],
        dtype: torch.dtype,
    ) -> None:
        self.spec = spec
        self._whole = whole
        self._decoder = decoder
        self._output_type = output_type
        self._hook = hook
        self._calls = calls
        self._dtype = dtype

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, attention: Attention) -> Tensor:
        device = inputs.token_ids.device
        step = PagedStep(self._calls, attention, inputs.plan, self._dtype, device)
        x = self._hook.call(step, lambda: compute_states(self._decoder, inputs.token_ids, inputs.positions))
        step.check_complete()
        states: Tensor = x[0][0]  # [num_tokens, hidden_size]
        return states

    @torch.inference_mode()
    def logits(self, x: Tensor, adapters: TokenAdapters | None = None) -> Tensor:
        # Only the whole model has the head's code, so it runs with a decoder that returns x.
        unread = torch.zeros(1, len(x), dtype=torch.int64, device=x.device)
        with self._returning(x[None]):
            return read_logits(self._whole(input_ids=unread, use_cache=False))

    @contextmanager
    def _returning(self, states: Tensor) -> Iterator[None]:
        """Replace the decoder's forward by one that returns `states`, [1, n, hidden_size]."""
        is_record = issubclass(self._output_type, ModelOutput)
        output = self._output_type(last_hidden_state=states) if is_record else (states,)
        forward = self._decoder.forward
        self._decoder.forward = lambda *_, **__: output
        try:
            yield
        finally:
            self._decoder.forward = forward


def compute_states(decoder: nn.Module, token_ids: Tensor, positions: Tensor, **more: Any) -> Any:
    """Return the decoder's output. Its first element is the hidden states, [1, num_tokens, hidden_size].

    token_ids, positions: int64 [num_tokens]."""
    use_cache = "past_key_values" in more
    return decoder(input_ids=token_ids[None], position_ids=positions[None], use_cache=use_cache, **more)


def read_logits(output: Any) -> Tensor:
    """Return float32 [num_tokens, vocab_size] from a causal language model's output for one sequence."""
    logits: Tensor = output.logits if isinstance(output, ModelOutput) else output[0]
    return logits[0].float()
