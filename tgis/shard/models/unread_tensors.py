"""Check of the tensors that a checkpoint has and a model does not read. Known kinds are ignored: no output
depends on them. Any other tensor is an error, because the model would differ from the trained one."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tgis.shard.checkpoint.tensors import WeightsError

_ANYWHERE = r"(?:.+\.)?"
_PREFIX = re.compile(r"^(?:model|transformer)\.")

# Kind of tensor -> pattern that matches the full name without a leading `model.` or `transformer.`.
IGNORED = {
    "rotary frequencies and angles, which are computed from config.json": _ANYWHERE + r"\w*rotary\w*\.\w+",
    "causal masks of GPT-2 and GPT-NeoX": _ANYWHERE + r"(?:attn|attention)\.(?:masked_bias|bias)",
    "causal masks of BLOOM, Falcon and CodeGen": _ANYWHERE + r"causal_mask",
    "position ids, which old releases of transformers stored": _ANYWHERE + r"position_ids",
    "tables of sinusoidal positions, which are computed": (
        r"(?:(?:en|de)coder\.)?embed_positions\.(?:weights|_float_tensor)"
    ),
    "copies of T5's and BART's table of tokens": r"(?:shared|(?:en|de)coder\.embed_tokens)\.weight",
    "fairseq's version number in BART and OPT checkpoints": r"(?:en|de)coder\.version",
    "the relative bias of T5's cross-attention, which is never added": (
        r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"
    ),
    "the last norm of an OPT whose config.json says that it was removed": (
        r"decoder\.final_layer_norm\.(?:weight|bias)"
    ),
    "heads that score or classify texts": (
        r"(?:score|classifier|classification_head|regression_head|reward_head|rm_head|value_head|v_head|"
        r"qa_outputs|multiple_choice_head|(?:\w+\.)?pooler|cls\.seq_relationship)\..+"
    ),
    "speculators and heads that predict further tokens": (r"(?:speculators?|medusa_heads?|mtp(?:_\w+)?)\..+"),
    "the vision, audio and speech parts of multimodal checkpoints": (
        r"(?:vision|visual|image|audio|speech|multi_?modal|mm_projector|embed_vision|embed_audio|talker|"
        r"token2wav|code2wav)\w*(?:\..+)?"
    ),
    "scales for quantized activations, keys and values, which this service does not use": (
        _ANYWHERE + r"(?:input_scale_ub|activation_scale|(?:input|output|kv|[qkv])_(?:scale|zero_point))"
    ),
    "the bits and the group size of a GPTQ checkpoint, as tensors": r"gptq_(?:bits|groupsize)",
    "the scales that Transformer Engine keeps for 8-bit training": _ANYWHERE + r"_extra_state",
}
_KNOWN = re.compile("|".join(f"(?:{pattern})" for pattern in IGNORED.values()))
_KEYS_AND_VALUES = re.compile(r"\.self_attn\.[kv]_(?:proj|norm)\.")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.")


def refuse_unread(directory: Path, names: Iterable[str], config: Mapping[str, Any]) -> None:
    """Raise WeightsError if `names`, the tensors that were not read, contain one that must not be ignored."""
    predicting = _prediction_layers(config)
    sharing = _sharing_layers(config)
    unknown = [
        name
        for name in names
        if not (_is_known(name) or _layer_of(name) in predicting)
        and not (_layer_of(name) in sharing and _KEYS_AND_VALUES.search(name))
    ]
    if unknown:
        first = min(unknown, key=_layer_order)
        raise WeightsError(
            f"{directory}: config.json describes a model without {len(unknown)} of the checkpoint's tensors, "
            f"the first of which is {first}. It names too few layers or experts, leaves biases out or "
            "belongs to another model. Use the config.json that was published with the weights, or remove "
            "these tensors if they are not part of the language model"
        )


def _is_known(name: str) -> bool:
    return _KNOWN.fullmatch(_PREFIX.sub("", name)) is not None


def _prediction_layers(config: Mapping[str, Any]) -> range:
    """Return the indices of the layers for multi-token prediction, which follow the model's layers."""
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    first, count = (text.get(key) for key in ("num_hidden_layers", "num_nextn_predict_layers"))
    return range(first, first + count) if type(first) is int and type(count) is int else range(0)


def _sharing_layers(config: Mapping[str, Any]) -> range:
    """Return the indices of the last layers if they read the keys and values of earlier ones. Checkpoints may
    have projections that these layers do not use."""
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    end, count = (text.get(key) for key in ("num_hidden_layers", "num_kv_shared_layers"))
    return range(end - count, end) if type(end) is int and type(count) is int else range(0)


def _layer_of(name: str) -> int | None:
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def _layer_order(name: str) -> str:
    """Return a sort key that compares numbers by value: layer 2 precedes layer 10."""
    return re.sub(r"\d+", lambda number: number[0].zfill(9), name)
