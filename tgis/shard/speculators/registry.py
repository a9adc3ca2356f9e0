"""Registry of the kinds of speculators. Loads the one in a directory."""

import logging
import re
from pathlib import Path
from typing import NamedTuple, NoReturn, Protocol

import torch

from tgis.hub.model_files import ModelNotFoundError, read_json
from tgis.hub.speculators import CONFIG, MTP
from tgis.shard.checkpoint.codes import CodeLayout
from tgis.shard.checkpoint.files import Checkpoint
from tgis.shard.checkpoint.opening import count_elements, open_checkpoint
from tgis.shard.checkpoint.tensors import WeightsError
from tgis.shard.checkpoint.weights import Source
from tgis.shard.collectives import ProcessGroup
from tgis.shard.layers.ops import Parts
from tgis.shard.memory.kv_cache import bytes_per_block
from tgis.shard.models import registry as models
from tgis.shard.models.config_reader import Config
from tgis.shard.models.interface import Model, ModelSpec, SpeculativeModel, UnsupportedModelError
from tgis.shard.models.spec import DecoderSpec
from tgis.shard.quant.interface import Scheme
from tgis.shard.quant.registry import find_format
from tgis.shard.quant.schemes.none import UNQUANTIZED
from tgis.shard.speculators import draft_model, eagle, eagle3, medusa, mlp, mtp
from tgis.shard.speculators.draft_head import DraftHead
from tgis.shard.speculators.draft_model import DraftModel
from tgis.shard.speculators.finite_weights import FiniteWeights
from tgis.shard.speculators.interface import Served, Speculator, SpeculatorError

logger = logging.getLogger(__name__)


class SpeculatorKind(Protocol):
    """Module that reads one kind of speculator."""

    @property
    def NAME(self) -> str: ...
    @property
    def FILES(self) -> tuple[tuple[str, str], ...]:
        """Names of the file of weights, and of the index of several files, for each format."""

    @property
    def PREFIX(self) -> str:
        """Leading part of names of tensors that some checkpoints lack."""

    @property
    def UNROUNDED(self) -> re.Pattern[str]:
        """Pattern in the names of matrices that are never stored as codes."""

    def reads(self, config: Config) -> bool: ...
    def sources(self, config: Config) -> dict[str, Source]: ...
    def make_spec(self, config: Config) -> DecoderSpec | None:
        """Return the specification of a head's layers, or None for a speculator without a cache."""

    def build(self, config: Config, parts: Parts, model: SpeculativeModel) -> Speculator | DraftHead: ...


KINDS: tuple[SpeculatorKind, ...] = (mlp, medusa, eagle3, eagle)
AnySpeculator = Speculator | DraftHead | DraftModel


def load_speculator(
    name: str, model: Model, served: Served, dtype: torch.dtype, scheme: Scheme = UNQUANTIZED
) -> AnySpeculator:
    """Load the speculator in the directory of that name, or the one in the model's checkpoint, whole on every
    rank, with weights in `dtype`. `scheme` applies to heads with a checkpoint of their own. Raises
    SpeculatorError if it cannot be used with the model."""
    try:
        if name == MTP:
            return _load_mtp(model, served, dtype)
        directory = Path(name)
        config = _read_config(directory)
        kind = _find_kind(directory, config)
        decoder = _check_model(model, draft_model.NAME if kind is None else kind.NAME)
        if kind is None:
            return draft_model.load_draft_model(directory, config, decoder, served, dtype)
        return _load(directory, config, kind, decoder, dtype, scheme)
    except (ModelNotFoundError, UnsupportedModelError, WeightsError) as error:
        raise SpeculatorError(f"--speculator {name}: {error}") from error


def check_served(name: str, spec: ModelSpec) -> None:
    """Raise SpeculatorError if speculators cannot be used with a model of this specification. Only
    configurations are read, no weights."""
    if isinstance(spec, DecoderSpec):
        return
    try:
        _refuse_model(_name_kind(name))
    except (ModelNotFoundError, UnsupportedModelError, WeightsError) as error:
        raise SpeculatorError(f"--speculator {name}: {error}") from error


def _name_kind(name: str) -> str:
    """Return the name of a speculator's kind. Raises UnsupportedModelError, ModelNotFoundError and
    WeightsError."""
    if name == MTP:
        return mtp.NAME
    kind = _find_kind(Path(name), _read_config(Path(name)))
    return draft_model.NAME if kind is None else kind.NAME


def _check_model(model: Model, name: str) -> SpeculativeModel:
    """Raise UnsupportedModelError if speculators of that name cannot be used with a model."""
    if not isinstance(model, SpeculativeModel):
        _refuse_model(name)
    return model


def _refuse_model(name: str) -> NoReturn:
    raise UnsupportedModelError(f"{name} needs a decoder that the service's own engine runs")


def _load_mtp(model: Model, served: Served, dtype: torch.dtype) -> DraftHead:
    decoder = _check_model(model, mtp.NAME)
    head = mtp.load_mtp(served.directory, served.config, decoder, dtype)
    _try_once(head, decoder, decoder.parts.kernels.device)
    return head


def count_bytes(name: str, itemsize: int, scheme: Scheme = UNQUANTIZED) -> int:
    """Return the size of a speculator's weights on a rank, `itemsize` bytes each unless they are stored as
    codes; 0 if they are part of the model's checkpoint. `scheme` is that of heads. Raises
    SpeculatorError."""
    if name == MTP:
        return 0
    directory = Path(name)
    try:
        config = _read_config(directory)
        kind = _find_kind(directory, config)
        if kind is not None:
            return _count_head_bytes(Checkpoint(directory, kind.FILES), kind.UNROUNDED, itemsize, scheme)
        format = find_format(config, directory)
        return int(
            count_elements(directory, format) * (format.layout.bytes_per_weight if format else itemsize)
        )
    except (ModelNotFoundError, UnsupportedModelError, WeightsError) as error:
        raise SpeculatorError(f"--speculator {name}: {error}") from error


def _count_head_bytes(
    checkpoint: Checkpoint, unrounded: re.Pattern[str], itemsize: int, scheme: Scheme
) -> int:
    total = checkpoint.count_elements(None)
    if scheme.layout is None:
        return total * itemsize
    plain = checkpoint.count_elements(None, lambda name: unrounded.search(name) is not None)
    return plain * itemsize + int((total - plain) * scheme.layout.bytes_per_weight)


def describe(speculator: AnySpeculator) -> str:
    """Return the name of a speculator's kind."""
    if isinstance(speculator, DraftModel):
        return draft_model.NAME
    kinds = {mlp.MLPSpeculator: mlp.NAME, medusa.Medusa: medusa.NAME, mtp.MTPHead: mtp.NAME}
    kinds |= {eagle.Eagle: eagle.NAME, eagle3.Eagle3: eagle3.NAME}
    return kinds[type(speculator)]


class DraftCache(NamedTuple):
    """Cache of a speculator, which has the blocks of the served model's."""

    spec: DecoderSpec
    state_size: int  # of the state that each block keeps; 0 for draft models

    @classmethod
    def of(cls, speculator: AnySpeculator | None) -> "DraftCache | None":
        if isinstance(speculator, DraftModel):
            return cls(speculator.model.spec, 0)
        return cls(speculator.spec, speculator.state_size) if isinstance(speculator, DraftHead) else None

    def count_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Return the bytes of a block, which are the same on every rank."""
        num_bytes = bytes_per_block(self.spec, ProcessGroup(0, 1), block_size, dtype)
        return num_bytes + self.state_size * torch.float32.itemsize


def find_cache(name: str, spec: ModelSpec) -> DraftCache | None:
    """Return the cache of the speculator of that name for a model, or None if it has none. Only
    configurations are read, no weights. Raises SpeculatorError."""
    try:
        if name == MTP:
            if not isinstance(spec, DecoderSpec):
                return None
            return DraftCache(mtp.make_spec(spec), spec.hidden_size)
        directory = Path(name)
        config = _read_config(directory)
        if (kind := _find_kind(directory, config)) is not None:
            head = kind.make_spec(config)
            return None if head is None else DraftCache(head, head.hidden_size)
        draft = models.make_spec(config)
        return DraftCache(draft, 0) if isinstance(draft, DecoderSpec) else None
    except (ModelNotFoundError, UnsupportedModelError, WeightsError) as error:
        raise SpeculatorError(f"--speculator {name}: {error}") from error


class DraftShape(NamedTuple):
    """Sizes of a speculator, which are known before its weights are read."""

    spec: DecoderSpec | None  # of its layers; None: it has none
    width: int  # of the states that it computes
    layout: CodeLayout | None  # of its weights, if they are kept as codes


def find_shape(
    name: str, directory: Path, config: Config, spec: DecoderSpec, layout: CodeLayout | None
) -> DraftShape:
    """Return the shape of the speculator of that name for the model in `directory` with this config.json and
    specification. `layout` is that of the codes of heads with a checkpoint of their own. Raises
    SpeculatorError."""
    try:
        if name == MTP:
            return DraftShape(mtp.make_spec(spec), spec.hidden_size, _find_layout(config, directory))
        own = _read_config(Path(name))
        kind = _find_kind(Path(name), own)
        if kind is None:
            draft = models.make_spec(own)
            if isinstance(draft, DecoderSpec):
                return DraftShape(draft, draft.hidden_size, _find_layout(own, Path(name)))
            return DraftShape(None, spec.hidden_size, None)  # it is refused when it is loaded
        head = kind.make_spec(own)
        if head is not None:
            return DraftShape(head, head.hidden_size, layout)
        width = mlp.find_inner_dim(own, spec.hidden_size) if kind is mlp else spec.hidden_size
        return DraftShape(None, width, layout)
    except (ModelNotFoundError, UnsupportedModelError, WeightsError) as error:
        raise SpeculatorError(f"--speculator {name}: {error}") from error


def _find_layout(config: Config, directory: Path) -> CodeLayout | None:
    format = find_format(config, directory)
    return None if format is None else format.layout


def _read_config(directory: Path) -> Config:
    """Read the config.json of a speculator. Raises ModelNotFoundError."""
    if not (directory / CONFIG).is_file():
        raise ModelNotFoundError(f"the directory has no {CONFIG}")
    return read_json(directory, CONFIG)


def _find_kind(directory: Path, config: Config) -> SpeculatorKind | None:
    """Return the kind of a speculator that reads states, or None for a draft model. Raises
    UnsupportedModelError for another config.json, and WeightsError."""
    if (kind := next((kind for kind in KINDS if kind.reads(config)), None)) is not None:
        return kind
    if not models.is_known(config):
        known = ", ".join(kind.NAME for kind in KINDS)
        raise UnsupportedModelError(
            f"its config.json describes none of these kinds: {known}, {draft_model.NAME}"
        )
    return eagle if eagle.has_tensors(open_checkpoint(directory)) else None


def _load(
    directory: Path,
    config: Config,
    kind: SpeculatorKind,
    model: SpeculativeModel,
    dtype: torch.dtype,
    scheme: Scheme,
) -> Speculator | DraftHead:
    if scheme.layout is not None:
        logger.info("the weights of the speculator's layers are stored as %d-bit codes", scheme.layout.bits)
    checkpoint = Checkpoint(directory, kind.FILES)
    device = model.parts.kernels.device
    with FiniteWeights(directory, kind.sources(config), kind.PREFIX, checkpoint=checkpoint) as weights:
        group = ProcessGroup(0, 1, device=device)
        parts = Parts(group, weights, dtype, model.parts.kernels, scheme=scheme)
        speculator = kind.build(config, parts, model)
        if unread := min(weights.list_unread(), default=None):
            raise WeightsError(f"tensor {unread} is not read: its config.json belongs to another speculator")
    _try_once(speculator, model, device)
    return speculator


@torch.inference_mode()
def _try_once(speculator: Speculator | DraftHead, model: SpeculativeModel, device: torch.device) -> None:
    """Propose once, so that no request waits for the compilation of kernels. The warm-up steps compile those
    of layers."""
    if isinstance(speculator, DraftHead):
        speculator.choose(speculator.score(torch.zeros(1, speculator.state_size, device=device)))
        return
    states = torch.zeros(1, model.prompt_width, device=device)
    token_ids = torch.zeros(1, dtype=torch.int64, device=device)
    speculator.propose(states, token_ids, speculator.num_tokens)
