"""Loads models whose modelling code is transformers', with this service's attention and cache.

Nothing is downloaded. The checkpoint's code runs only if it is trusted."""

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.utils import ModelOutput
from transformers.utils import logging as transformers_logging

from tgis.errors import OperatorError
from tgis.hub import model_files
from tgis.shard.checkpoint.files import Checkpoint
from tgis.shard.checkpoint.tensors import WeightsError
from tgis.shard.collectives import ProcessGroup
from tgis.shard.models.hf_transformers.arithmetic import Arithmetic, HostArithmetic
from tgis.shard.models.hf_transformers.attention_hook import (
    AttentionHook,
    CallRecorder,
    cache_shape,
    largest_group,
)
from tgis.shard.models.hf_transformers.model import TransformersModel, compute_states
from tgis.shard.models.hf_transformers.packed_linear import find_read_weights
from tgis.shard.models.hf_transformers.self_check import (
    check_positions,
    check_scores,
    choose_sequences,
    find_max_positions,
    score_alone,
)
from tgis.shard.models.hf_transformers.transformers_internals import keeps_state
from tgis.shard.models.interface import Model, UnsupportedModelError
from tgis.shard.models.rope_option import RopeOption, RopeOptionError
from tgis.shard.models.unread_tensors import refuse_unread
from tgis.shard.models.whole_model import NotServedError, WholeModelSpec, choose_tokens, warn_of_copies
from tgis.shard.quant.formats.settings import read_settings

CAUSAL = "AutoModelForCausalLM"
NOT_QUANTIZED = (
    "only the native engine serves quantized checkpoints, and it does not support this model: serve the "
    "checkpoint from which it was quantized"
)
# Rotary embeddings whose frequencies depend on the longest sequence of a step.
STEP_WIDE_ROPES = ("dynamic", "longrope")
# Number of positions at which masks are examined if the configuration has none, and its maximum.
DEFAULT_LENGTH = 2048
MAX_LENGTH = 1 << 20


def make_spec(
    directory: Path, config: Mapping[str, Any], trust_remote_code: bool, rope: RopeOption | None = None
) -> WholeModelSpec:
    """Return the shape that the configuration implies. `load` determines the actual one.

    Runs the checkpoint's configuration code if it is trusted. Raises UnsupportedModelError."""
    if read_settings(config, directory) is not None:
        raise UnsupportedModelError(NOT_QUANTIZED)
    with _as_unsupported(config.get("model_type")):
        parsed = _read_config(directory, config, trust_remote_code)
        if rope is not None:
            rope.scale_parsed(parsed)
        text = parsed.get_text_config(decoder=True)
        heads = _largest(text, "num_attention_heads") or 1
        kv_heads = _largest(text, "num_key_value_heads") or heads
        return WholeModelSpec(
            num_layers=_largest(text, "num_hidden_layers") or 1,
            num_heads=-(-heads // kv_heads) * kv_heads,
            num_kv_heads=kv_heads,
            head_dim=_largest_head(text) or (_largest(text, "hidden_size") or heads) // heads,
            vocab_size=text.vocab_size,
        )


def load(
    directory: Path,
    spec: WholeModelSpec,
    group: ProcessGroup,
    dtype: torch.dtype,
    trust_remote_code: bool,
    rope: RopeOption | None = None,
    arithmetic: Arithmetic | None = None,
) -> Model:
    """Load the model with weights in `dtype`, and check that its logits equal those of its unmodified code.
    `rope` scales its positions. `arithmetic` is the CPU's unless it is given.

    Raises UnsupportedModelError and WeightsError."""
    warn_of_copies(group)
    config = model_files.read_json(directory, "config.json")
    with _as_unsupported(config.get("model_type")):
        parsed = None
        if rope is not None:
            parsed = _read_config(directory, config, trust_remote_code)
            rope.scale_parsed(parsed)
        read = partial(_read_checkpoint, directory, dtype, trust_remote_code, parsed)
        return _load_checked(read, spec.vocab_size, group, arithmetic or HostArithmetic(dtype), rope)


@contextmanager
def _as_unsupported(model_type: Any) -> Iterator[None]:
    """Convert errors of transformers' code to UnsupportedModelError, and suppress its output."""
    refused = f"model type {model_type!r} cannot be served through transformers"
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (OperatorError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except NotServedError as error:
        raise UnsupportedModelError(f"{refused}: {error}") from error
    except Exception as error:  # foreign code may raise any type
        lines = (line.strip() for line in str(error).splitlines())
        text = next(filter(None, lines), "no reason given")
        raise UnsupportedModelError(
            f"{refused}: its code failed with {type(error).__name__}: {text}"
        ) from error


def _read_config(directory: Path, config: Mapping[str, Any], trust_remote_code: bool) -> Any:
    own = config.get("auto_map") or {}
    known = config.get("model_type") in CONFIG_MAPPING
    if not known and not own:
        raise NotServedError(
            "transformers does not know this type; docs/models.md lists the families that are served"
        )
    if not known and not trust_remote_code:
        raise NotServedError(
            "its code is part of the checkpoint and runs only with TRUST_REMOTE_CODE=true (or "
            "--trust-remote-code)"
        )
    parsed = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=trust_remote_code)
    if getattr(parsed, "is_encoder_decoder", False):
        raise NotServedError("it is an encoder-decoder")
    brings_code = trust_remote_code and CAUSAL in own
    if not brings_code and type(parsed) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise NotServedError("transformers has no causal language model of this type")
    return parsed


def _load_checked(
    read_checkpoint: Callable[[], Any],
    vocab_size: int,
    group: ProcessGroup,
    arithmetic: Arithmetic,
    rope: RopeOption | None,
) -> TransformersModel:
    unpacked: set[str] = set()
    while True:
        whole = read_checkpoint()
        _check_state(whole)
        if rope is not None and rope.kind not in _rope_kinds(whole):
            raise RopeOptionError("transformers' code of this model scales no rotary positions")
        arithmetic.pack(whole, unpacked)
        try:
            return _replace_attention(whole, vocab_size, group, arithmetic)
        except AttributeError:
            read = find_read_weights(whole) - unpacked
            if not read:
                raise
        del whole
        unpacked |= read


def _replace_attention(
    whole: Any, vocab_size: int, group: ProcessGroup, arithmetic: Arithmetic
) -> TransformersModel:
    decoder = _find_decoder(whole)
    length = _find_length(whole.config)
    with torch.inference_mode():
        max_positions = find_max_positions(decoder, choose_tokens(vocab_size, 1), length)
    whole.to(arithmetic.device)
    with torch.inference_mode():
        return _replace_placed(whole, vocab_size, group, arithmetic, decoder, length, max_positions)


def _replace_placed(
    whole: Any,
    vocab_size: int,
    group: ProcessGroup,
    arithmetic: Arithmetic,
    decoder: nn.Module,
    length: int,
    max_positions: int,
) -> TransformersModel:
    """Replace the attention of a model on its device."""
    device = arithmetic.device
    sequences = choose_sequences(vocab_size, device)
    expected = _score(whole, sequences, vocab_size)
    hook = AttentionHook()
    whole.set_attn_implementation(hook.name)
    arithmetic.widen(whole)
    recorder = CallRecorder(length, device)
    token_ids = sequences[0]
    positions = torch.arange(len(token_ids), device=device)
    output = hook.call(recorder, lambda: compute_states(decoder, token_ids, positions))
    calls = recorder.calls
    if not calls:
        raise NotServedError("its code does not use the attention interface")
    check_positions(hook, decoder, token_ids, length, arithmetic.tolerance)
    num_kv_heads, head_dim = cache_shape(calls)
    spec = WholeModelSpec(
        num_layers=len(calls),
        num_heads=largest_group(calls) * num_kv_heads * group.size,
        num_kv_heads=num_kv_heads * group.size,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_positions=max_positions,
    )
    output_type = type(output) if isinstance(output, ModelOutput) else tuple
    dtype = arithmetic.attention_dtype
    model = TransformersModel(spec, whole, decoder, output_type, hook, calls, dtype)
    check_scores(model, calls, arithmetic, sequences, expected)
    return model


def _score(whole: Any, sequences: list[Tensor], vocab_size: int) -> list[Tensor]:
    """Return the scores of the model's unmodified code."""
    expected = [score_alone(whole, token_ids) for token_ids in sequences]
    if not all(scores.isfinite().all() for scores in expected):
        raise NotServedError("its scores are not finite numbers; its weights may be damaged")
    if (width := expected[0].shape[1]) != vocab_size:
        raise NotServedError(f"it returns scores of {width} tokens, but its configuration says {vocab_size}")
    return expected


def _read_checkpoint(directory: Path, dtype: torch.dtype, trust_remote_code: bool, parsed: Any) -> Any:
    """Read the model with the configuration `parsed`, or with the checkpoint's own if that is None."""
    try:
        whole, loading_info = AutoModelForCausalLM.from_pretrained(
            directory,
            config=parsed,
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # returns the mismatches instead of printing a table
        )
    except Exception:
        Checkpoint(directory).check_files()  # raises clearer errors than transformers
        raise
    for name, stored, expected in sorted(loading_info["mismatched_keys"]):
        raise WeightsError(f"{directory}: tensor {name} has shape {[*stored]}, expected {[*expected]}")
    for name in sorted(loading_info["missing_keys"]):
        raise WeightsError(f"{directory}: tensor {name} is missing")
    refuse_unread(directory, loading_info["unexpected_keys"], model_files.read_json(directory, "config.json"))
    return whole.eval()


def _check_state(whole: Any) -> None:
    kinds = getattr(whole.config.get_text_config(decoder=True), "layer_types", None) or ()
    stateful = [kind for kind in kinds if kind == "linear_attention" or not str(kind).endswith("attention")]
    if stateful or keeps_state(whole):
        kind = f" of kind {stateful[0]}" if stateful else ""
        raise NotServedError(f"its layers{kind} keep a state other than keys and values")
    for kind in _rope_kinds(whole):
        if kind in STEP_WIDE_ROPES:
            raise NotServedError(
                f"its rotary embedding, {kind}, lets sequences of one step affect each other"
            )


def _rope_kinds(whole: Any) -> set[Any]:
    """Return the kinds of rotary scaling of all modules."""
    kinds_in_use: set[Any] = set()
    for module in whole.modules():
        kinds = getattr(module, "rope_type", None)
        kinds_in_use.update(kinds.values() if isinstance(kinds, Mapping) else [kinds])
    return kinds_in_use


def _find_decoder(whole: Any) -> nn.Module:
    """Return the module that computes hidden states from text alone."""
    named = (whole.base_model, *(getattr(whole, name, None) for name in ("model", "transformer")))
    for part in (whole.get_decoder(), *named):
        if isinstance(part, nn.Module) and part is not whole:
            parameters = inspect.signature(part.forward).parameters
            if "input_ids" in parameters and "position_ids" in parameters:
                return part
    raise NotServedError("its code does not accept position_ids")


def _find_length(config: Any) -> int:
    length = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return min(length, MAX_LENGTH) if isinstance(length, int) and length > 1 else DEFAULT_LENGTH


def _largest_head(config: Any) -> int:
    """Return the number of channels of the widest head, 0 if the configuration does not name it."""
    latent = _largest(config, "qk_nope_head_dim") + _largest(config, "qk_rope_head_dim")
    return max(_largest(config, "head_dim"), latent)


def _largest(config: Any, name: str) -> int:
    """Return a number of the configuration: the maximum over all layers, 0 if it is missing."""
    settings = config.to_dict()
    value = settings.get(config.attribute_map.get(name, name))
    values = value if isinstance(value, list | tuple) else [value or 0]
    overrides = settings.get("per_layer_config") or {}
    return max([*values, *(layer.get(name) or 0 for layer in overrides.values())], default=0)
