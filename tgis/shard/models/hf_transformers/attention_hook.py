"""Attention and mask functions registered with transformers. They pass each call to a handler: `CallRecorder`
records once which attention the model needs, `PagedStep` computes it with this service's cache."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from tgis.shard.attention.interface import Attention, AttentionPlan, Scoring
from tgis.shard.memory.kv_cache import CPU
from tgis.shard.models.whole_model import NotServedError

# (sequence, head, query position, key position) -> True if the query attends to the key. Arguments broadcast.
MaskRule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# Arguments of attention functions that do not change what they compute.
_IGNORED_ARGUMENTS = {
    *("position_ids", "cache_position", "past_key_values", "past_key_value", "use_cache"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
    "sliding_window",  # contained in the mask, the only one that transformers' eager attention reads
}
# Number of queries, the last ones, whose masks are examined. They cover every offset in a block of up to 64
# tokens. Larger blocks are noticed too, because the number of keys then differs between queries.
_PROBED_ROWS = 64

_numbers = itertools.count()


@dataclass(frozen=True)
class AttentionCall:
    module: nn.Module
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scoring: Scoring


class AttentionHandler(Protocol):
    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, more: Any) -> Tensor:
        """Return the attention's output, [1, num_tokens, num_heads, value_dim].

        q: [1, num_heads, num_tokens, key_dim]; k, v: [1, num_kv_heads, num_tokens, any]. `more` holds the
        other arguments by name."""

    def make_mask(self, rule: MaskRule) -> Tensor:
        """Return a placeholder for a mask. transformers' code only passes it to `attend`."""


class AttentionHook:
    """Functions registered with transformers under `name` for the lifetime of the process."""

    def __init__(self) -> None:
        self.name = f"tgis_paged_{next(_numbers)}"
        self._handler: AttentionHandler | None = None
        AttentionInterface.register(self.name, self._attend)
        AttentionMaskInterface.register(self.name, self._make_mask)

    def call(self, handler: AttentionHandler, forward: Callable[[], Any]) -> Any:
        """Return the result of `forward`. The handler computes its attention."""
        self._handler = handler
        try:
            return forward()
        finally:
            self._handler = None

    def _attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any = None, **more: Any
    ) -> tuple[Tensor, None]:
        if self._handler is None:
            raise NotServedError("its head computes attention")
        return self._handler.attend(module, q, k, v, attention_mask, more), None

    def _make_mask(self, *_: Any, mask_function: MaskRule, **__: Any) -> Tensor | None:
        return self._handler.make_mask(mask_function) if self._handler else None


class CallRecorder:
    """Handler that records and computes the attention calls of a forward pass over one short sequence. Call n
    will use layer n of the cache. Masks are examined at positions below `max_length`. Raises
    NotServedError."""

    def __init__(self, max_length: int, device: torch.device = CPU) -> None:
        self.calls: list[AttentionCall] = []
        self._max_length = max_length
        self._device = device
        self._masks: list[tuple[Tensor, MaskRule]] = []
        self._windows: dict[int, int | None] = {}

    def make_mask(self, rule: MaskRule) -> Tensor:
        mask = torch.zeros(1, 1, 1, 1, device=self._device)
        self._masks.append((mask, rule))
        return mask

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, more: Any) -> Tensor:
        _check_arguments(more)
        if len({len(q), len(k), len(v), 1}) > 1 or not q.shape[2] == k.shape[2] == v.shape[2]:
            raise NotServedError("its queries, keys and values belong to different tokens")
        if k.shape[1] != v.shape[1] or q.shape[1] % k.shape[1] or q.shape[3] != k.shape[3]:
            raise NotServedError("the shapes of its queries, keys and values do not match")
        scale, soft_cap = more.get("scaling"), more.get("softcap")
        scale = q.shape[3] ** -0.5 if scale is None else float(scale)
        scoring = Scoring(scale=scale, window=self._find_window(module, mask, more), soft_cap=soft_cap)
        self.calls.append(AttentionCall(module, q.shape[1], k.shape[1], q.shape[3], v.shape[3], scoring))
        return _attend_causally(q, k, v, scale)

    def _find_window(self, module: nn.Module, mask: Any, more: Any) -> int | None:
        if mask is None:
            if getattr(module, "is_causal", True) is False:
                raise NotServedError("its attention is not causal")
            window: int | None = more.get("sliding_window")
            return window
        place = mask.data_ptr() if isinstance(mask, Tensor) else 0  # the model may pass on a view of the mask
        rule = next((rule for made, rule in self._masks if made.data_ptr() == place), None)
        if rule is None:
            raise NotServedError("it makes its own attention masks")
        if place not in self._windows:
            self._windows[place] = find_window(rule, self._max_length)
        return self._windows[place]


class PagedStep:
    """Handler for one forward pass over a step's new tokens. The calls must match the recorded ones. The
    attention receives queries, keys and values of type `dtype`."""

    def __init__(
        self,
        calls: list[AttentionCall],
        attention: Attention,
        plan: AttentionPlan,
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
    ) -> None:
        self._calls = calls
        self._attention = attention
        self._plan = plan
        self._dtype = dtype
        self._device = device
        self._layer = 0

    def make_mask(self, rule: MaskRule) -> Tensor:
        return torch.zeros(1, 1, 1, 1, device=self._device)

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, more: Any) -> Tensor:
        layer = self._layer
        self._layer += 1
        call = self._calls[layer] if layer < len(self._calls) else None
        if call is None or call.module is not module:
            raise NotServedError("the order of its layers changes from step to step")
        heads, width = cache_shape(self._calls)
        keys, values = (_pad(x[0].transpose(0, 1), heads, width, self._dtype) for x in (k, v))
        self._attention.keep(layer, keys, values, self._plan)
        num_heads = heads * (call.num_heads // call.num_kv_heads)
        queries = _pad(q[0].transpose(0, 1), num_heads, width, self._dtype)
        y = self._attention.attend(layer, queries, self._plan, call.scoring)
        return y[None, :, : call.num_heads, : call.value_dim].to(q.dtype)

    def check_complete(self) -> None:
        """Raise NotServedError unless the forward pass made all recorded calls."""
        if self._layer != len(self._calls):
            raise NotServedError("the number of its layers changes from step to step")


def cache_shape(calls: list[AttentionCall]) -> tuple[int, int]:
    """Return the maximum numbers of key/value heads and channels of a layer. Smaller layers are
    zero-padded."""
    return max(c.num_kv_heads for c in calls), max(max(c.key_dim, c.value_dim) for c in calls)


def largest_group(calls: list[AttentionCall]) -> int:
    """Return the maximum number of query heads per key/value head of a layer."""
    return max(call.num_heads // call.num_kv_heads for call in calls)


def find_window(rule: MaskRule, length: int) -> int | None:
    """Return the window of a mask, None for full causal attention. Raises NotServedError for other masks."""
    q = torch.arange(max(0, length - _PROBED_ROWS), length)[:, None]  # [rows, 1]
    k = torch.arange(length)[None]  # [1, length]
    zero = torch.zeros((), dtype=torch.int64)
    try:
        is_visible = rule(zero, zero, q, k).expand(len(q), length)
    except (RuntimeError, IndexError, TypeError, AttributeError) as error:
        raise NotServedError("its attention masks are not functions of positions") from error
    window = int(is_visible.sum(1).max())
    if not torch.equal(is_visible, (k <= q) & (k > q - window)):
        raise NotServedError("its attention masks are neither causal nor a sliding window")
    return None if window == length else window


def _check_arguments(more: dict[str, Any]) -> None:
    for name, value in more.items():
        harmless = name in _IGNORED_ARGUMENTS or name in ("scaling", "softcap") or value is None
        harmless |= (name == "dropout" and value == 0) or (name == "is_causal" and value is True)
        if not harmless:
            raise NotServedError(f"its attention needs {name}, which this service does not support")


def _attend_causally(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return y.transpose(1, 2)


def _pad(x: Tensor, heads: int, width: int, dtype: torch.dtype) -> Tensor:
    """Pad x, [num_tokens, at most heads, at most width], to contiguous [num_tokens, heads, width]."""
    missing = (0, width - x.shape[2], 0, heads - x.shape[1])
    return (F.pad(x, missing) if any(missing) else x).to(dtype).contiguous()
