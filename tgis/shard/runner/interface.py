"""The interface of model runners: steps are launched, and answered in the same order."""

from typing import Protocol

from tgis.pb import shard_pb2 as pb
from tgis.shard.adapters.registry import LoadedAdapters
from tgis.shard.models.interface import Model


class Pending(Protocol):
    """Step that was launched."""

    def answer(self) -> pb.StepResponse:
        """Wait until the step is computed. Answers are asked for once each, in the order of launches; where
        `max_pending` is more than one, on another thread than launches."""


class ModelRunner(Protocol):
    """Computes steps on one rank. After an exception of any method or answer, its state is undefined."""

    @property
    def max_pending(self) -> int:
        """Most steps that may be launched and not answered. If it is one, `launch` may take as long as the
        whole step."""

    @property
    def info(self) -> pb.InfoResponse: ...
    @property
    def model(self) -> Model: ...
    @property
    def adapters(self) -> LoadedAdapters: ...

    def launch(self, request: pb.StepRequest) -> Pending:
        """Begin a step. Its rows are what they are after the steps launched before it."""

    def reset(self) -> None:
        """Forget all rows. No step is pending."""
