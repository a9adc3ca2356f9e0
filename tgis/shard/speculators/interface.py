"""Interface of speculators, and the error of those that do not fit the model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from tgis.errors import OperatorError
from tgis.shard.models.config_reader import Config


class SpeculatorError(OperatorError):
    """Error for a speculator that cannot be used; its text is one line that names it."""


@dataclass(frozen=True)
class Served:
    """Served model, as far as a speculator must fit it."""

    directory: Path
    config: Config
    tokenizer_directory: Path
    max_sequence_length: int


class StageRunner(Protocol):
    """Runs the stages of a speculator, which may be captured as kernel graphs."""

    def __call__(
        self, stage: int, compute: Callable[..., Sequence[Tensor]], *inputs: Tensor
    ) -> Sequence[Tensor]:
        """Return what `compute` returns for the inputs, whose first axis are rows. For a stage and a number
        of rows, it always launches the same kernels. The outputs are valid until the next call."""


def run_stage(stage: int, compute: Callable[..., Sequence[Tensor]], *inputs: Tensor) -> Sequence[Tensor]:
    """Implement `StageRunner` without capturing."""
    return compute(*inputs)


class Speculator(Protocol):
    """Model that proposes tokens. It keeps no state between steps, and all ranks propose the same."""

    @property
    def num_tokens(self) -> int:
        """Maximum number of tokens that it proposes for a row."""

    def propose(
        self, states: Tensor, token_ids: Tensor, num_tokens: int, run: StageRunner = run_stage
    ) -> Tensor:
        """Return the proposed next tokens of rows, int64 [n, num_tokens].

        states: float32 [n, width], the model's final states from which the last tokens were sampled.
        token_ids: int64 [n], the last tokens."""
