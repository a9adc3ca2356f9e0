"""Interface of model runners: steps are launched, and answered in the same order. A runner is made of its
parts and a platform."""

from dataclasses import dataclass
from typing import Protocol

from tgis.pb import shard_pb2 as pb
from tgis.shard.adapters.registry import LoadedAdapters
from tgis.shard.collectives import ProcessGroup
from tgis.shard.memory.layered_cache import AnyCache
from tgis.shard.memory.state_cache import StateCache
from tgis.shard.models.interface import Model
from tgis.shard.runner.row_table import RowLimits
from tgis.shard.sampling.grammar import Guides
from tgis.shard.speculators.draft_head import DraftHead
from tgis.shard.speculators.draft_model import DraftModel
from tgis.shard.speculators.interface import Speculator


class Pending(Protocol):
    """Launched step."""

    def answer(self) -> pb.StepResponse:
        """Wait until the step is computed. Callers call this once per step, in the order of launches. If
        `max_pending` is more than one, they do so on a different thread than the launches."""


class ModelRunner(Protocol):
    """Computes steps on one rank. Its state is undefined after a method or an answer has raised an
    exception."""

    @property
    def max_pending(self) -> int:
        """Maximum number of launched, unanswered steps. If it is one, `launch` may take as long as the whole
        step."""

    @property
    def info(self) -> pb.InfoResponse: ...
    @property
    def model(self) -> Model: ...
    @property
    def adapters(self) -> LoadedAdapters: ...

    def launch(self, request: pb.StepRequest) -> Pending:
        """Begin a step on the rows as they are after all steps launched before it."""

    def reset(self) -> None:
        """Forget all rows. No step may be pending."""


@dataclass(frozen=True)
class DraftParts:
    """Draft model or head with its cache, which has the served model's blocks."""

    draft: DraftModel | DraftHead
    cache: AnyCache
    max_step_tokens: int


@dataclass(frozen=True)
class RunnerParts:
    """Parts of a model runner other than its platform."""

    model: Model
    cache: AnyCache
    states: StateCache | None  # of a model with recurrent layers
    guides: Guides
    adapters: LoadedAdapters
    info: pb.InfoResponse
    limits: RowLimits
    max_rows: int
    can_capture: bool  # the model's steps can be captured
    group: ProcessGroup
    has_drafts: bool  # the router may propose drafts
    speculator: Speculator | DraftParts | None = None
    has_adapters: bool = False  # LoRA adapters may be loaded
