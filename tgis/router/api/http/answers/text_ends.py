"""Describes the end of a text in TGI's terms."""

from typing import Literal

from tgis.router.engine.handle import SequenceSpec
from tgis.router.events import Output
from tgis.router.sequence import StopReason

FinishReason = Literal["length", "eos_token", "stop_sequence"]

REASONS: dict[StopReason, FinishReason] = {
    StopReason.EOS_TOKEN: "eos_token",
    StopReason.STOP_SEQUENCE: "stop_sequence",
}
"""Finish reasons other than `length`."""


def finish_reason(last: Output) -> FinishReason:
    return REASONS.get(last.reason, "length")


def shown_seed(spec: SequenceSpec) -> int | None:
    """Return the seed of a sampled text, or None for a greedy one."""
    return None if spec.sampling.greedy else spec.sampling.seed
