"""Interface of model runners: steps are launched, and answered in the same order."""

from typing import Protocol

from tgis.pb import shard_pb2 as pb
from tgis.shard.adapters.registry import LoadedAdapters
from tgis.shard.models.interface import Model


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
