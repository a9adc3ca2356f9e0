"""Facts about the end of a text in the terms that TGI introduced."""

from typing import Literal

from tgis.router.engine.handle import SequenceSpec
from tgis.router.events import Output
from tgis.router.sequence import StopReason

FinishReason = Literal["length", "eos_token", "stop_sequence"]

REASONS: dict[StopReason, FinishReason] = {
    StopReason.EOS_TOKEN: "eos_token",
    StopReason.STOP_SEQUENCE: "stop_sequence",
}
"""Reasons other than the length."""


def finish_reason(last: Output) -> FinishReason:
    return REASONS.get(last.reason, "length")


def shown_seed(spec: SequenceSpec) -> int | None:
    """Return the seed of a sampled text."""
    return None if spec.sampling.greedy else spec.sampling.seed
