"""Adapter from transformers' models to `Model`: tokens are packed along one axis, keys and values are in this
service's cache. No other state of a sequence is kept."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from tgis.shard.attention.interface import Attention
from tgis.shard.layers.lora import TokenAdapters
from tgis.shard.models.hf_transformers.attention_hook import AttentionCall, AttentionHook, PagedStep
from tgis.shard.models.interface import ModelSpec, StepInputs
from tgis.shard.models.whole_model import NotServedError


class DecoderStub:
    """Stub of a decoder. It ignores its arguments and returns the states that were set."""

    def __init__(self, output_type: type) -> None:
        self._output_type = output_type
        self.states = torch.empty(0)

    def forward(self, *_: Any, **__: Any) -> Any:
        x = self.states[None]  # [1, n, hidden_size]
        return self._output_type(last_hidden_state=x) if issubclass(self._output_type, ModelOutput) else (x,)


class TransformersModel:
    """Model that runs transformers' code. `whole` is a causal language model; `decoder` is its part that
    computes hidden states and returns them in an `output_type`."""

    def __init__(
        self,
        spec: ModelSpec,
        whole: nn.Module,
        decoder: nn.Module,
        output_type: type,
        hook: AttentionHook,
        calls: list[AttentionCall],
    ) -> None:
        self.spec = spec
        self._decoder, self._hook, self._calls = decoder, hook, calls
        self._stub = DecoderStub(output_type)
        self._head = _replace_forward(whole, decoder, self._stub.forward)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, attention: Attention) -> Tensor:
        """Return hidden states, [num_tokens, hidden_size]."""
        step = PagedStep(self._calls, attention, inputs.metadata)
        x = self._hook.call(step, lambda: compute_states(self._decoder, inputs.token_ids, inputs.positions))
        step.check_complete()
        states: Tensor = x[0][0]
        return states

    @torch.inference_mode()
    def logits(self, x: Tensor, adapters: TokenAdapters | None = None) -> Tensor:
        """Return float32 logits, [n, vocab_size]. x: any rows of `forward`'s result, [n, hidden_size]."""
        self._stub.states = x
        output = self._head(input_ids=torch.zeros(1, len(x), dtype=torch.int64), use_cache=False)
        self._stub.states = torch.empty(0)
        return read_logits(output)


def compute_states(decoder: nn.Module, token_ids: Tensor, positions: Tensor, **more: Any) -> Any:
    """Return the decoder's output for tokens packed along one axis; its first element is the hidden states,
    [1, num_tokens, hidden_size].

    token_ids, positions: int64 [num_tokens]."""
    use_cache = "past_key_values" in more
    return decoder(input_ids=token_ids[None], position_ids=positions[None], use_cache=use_cache, **more)


def read_logits(output: Any) -> Tensor:
    """Return float32 [num_tokens, vocab_size] from a causal language model's output for one sequence."""
    logits: Tensor = output.logits if isinstance(output, ModelOutput) else output[0]
    return logits[0].float()


def _replace_forward(whole: nn.Module, part: nn.Module, forward: Any) -> nn.Module:
    """Return a copy of `whole` whose `part` has another forward. Weights are shared, `whole` is unchanged."""
    path = next((name for name, module in whole.named_modules() if module is part), "")
    if not path:
        raise NotServedError("its decoder is no part of it")
    top = parent = _copy(whole)
    for name in path.split("."):
        child = parent._modules[name]
        assert child is not None, "named_modules lists what is there"
        copied = _copy(child)
        parent._modules[name] = copied
        parent = copied
    parent.forward = forward
    return top


def _copy(module: nn.Module) -> nn.Module:
    copied = copy.copy(module)
    copied._modules = dict(module._modules)
    return copied
