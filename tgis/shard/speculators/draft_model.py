"""Draft models: small decoders of any family that propose tokens, with the same tokenizer as the served
model."""

from dataclasses import dataclass
from pathlib import Path

import torch

from tgis.hub import model_files
from tgis.shard.collectives import ProcessGroup
from tgis.shard.models import registry
from tgis.shard.models.config_reader import Config
from tgis.shard.models.decoder import Decoder
from tgis.shard.models.interface import SpeculativeModel, UnsupportedModelError
from tgis.shard.models.parts.states import find_state_shape
from tgis.shard.models.spec import DecoderSpec
from tgis.shard.quant.formats.settings import read_settings
from tgis.shard.quant.registry import find_scheme, find_scheme_name
from tgis.shard.quant.rounding import Rounding
from tgis.shard.speculators.finite_weights import FiniteWeights
from tgis.shard.speculators.interface import Served

NAME = "a causal language model"
NUM_TOKENS = 8
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class DraftModel:
    """Decoder that is whole on every rank. It keeps a cache, and reads no states of the served model."""

    model: Decoder
    num_token_ids: int  # token ids that both models have
    num_tokens: int = NUM_TOKENS  # drafts of a row, unless the operator sets another maximum


def load_draft_model(
    directory: Path, config: Config, model: SpeculativeModel, served: Served, dtype: torch.dtype
) -> DraftModel:
    """Load the model in a directory, whose weights may be quantized. Raises UnsupportedModelError,
    ModelNotFoundError and WeightsError."""
    spec = _make_spec(config, served.max_sequence_length)
    vocab_size = model.spec.vocab_size
    if not _have_same_tokenizer(directory, served.tokenizer_directory) and spec.vocab_size != vocab_size:
        raise UnsupportedModelError(f"vocab_size {spec.vocab_size} differs from the model's {vocab_size}")
    kernels = model.parts.kernels
    group = ProcessGroup(0, 1, device=kernels.device)
    scheme = find_scheme(find_scheme_name(None, read_settings(config, directory)))
    with registry.open_weights(directory, config, spec, FiniteWeights) as weights:
        parts = registry.make_parts(spec, group, weights, dtype, kernels, Rounding(scheme))
        draft = registry.read_model(directory, config, spec, parts)
    assert isinstance(draft, Decoder), "its specification was checked"
    # No request waits for the compilation of the head's kernel. The warm-up steps compile the others.
    draft.logits(torch.zeros(1, spec.hidden_size, device=kernels.device))
    return DraftModel(draft, min(spec.vocab_size, vocab_size))


def _make_spec(config: Config, length: int) -> DecoderSpec:
    """Return the model's specification. Raises UnsupportedModelError if it cannot draft sequences of that
    length."""
    spec = registry.make_spec(config)
    if not isinstance(spec, DecoderSpec):
        raise UnsupportedModelError("a draft model must be a decoder")
    if find_state_shape(spec, 1) is not None:
        raise UnsupportedModelError("the draft model keeps a state, which drafts cannot roll back")
    if spec.max_positions and length > spec.max_positions:
        raise UnsupportedModelError(
            f"--max-sequence-length {length} exceeds the draft model's {spec.max_positions} positions"
        )
    return spec


def _have_same_tokenizer(directory: Path, other: Path) -> bool:
    """Return True if both directories have tokenizers with the same tokens, and False if one has no fast
    tokenizer. Raises UnsupportedModelError if the tokens differ."""
    if not all((each / TOKENIZER).is_file() for each in (directory, other)):
        return False
    models = [model_files.read_json(each, TOKENIZER).get("model") for each in (directory, other)]
    first, second = (model.get("vocab") if isinstance(model, dict) else None for model in models)
    if first != second:
        raise UnsupportedModelError("the draft model's tokenizer has other tokens than the model's")
    return True
