"""Lists the predictions made before anything ran on a GPU, and the gates. Shares are relative to the
machine's limits, measured in the same run."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Prediction:
    low: float
    high: float
    gate: float | None = None
    goal: float | None = None
    at_most: bool = False
    """True if the figure must stay below the gate instead of above."""

    def is_met(self, value: float) -> bool | None:
        if self.gate is None:
            return None
        return value <= self.gate if self.at_most else value >= self.gate


_OF_BOTH = {
    "gemm bf16": Prediction(700, 800),
    "launch in a graph": Prediction(1.0, 2.0),
    "upload latency": Prediction(4, 12),
    "8b prefill 8192: share of gemm": Prediction(0.60, 0.75, gate=0.55, goal=0.70),
    "8b decode 64 with 8 adapters: relative to none": Prediction(
        1.12, 1.35, gate=1.5, goal=1.2, at_most=True
    ),
    "experts of 64 tokens: share": Prediction(0.45, 0.75, gate=0.4, goal=0.7),
    "experts of 4096 tokens: share": Prediction(0.2, 0.4),
    "idle between steps": Prediction(0.0, 0.02, gate=0.05, goal=0.02, at_most=True),
    "start of 1b": Prediction(8, 25, gate=30, at_most=True),
    "1b stream 64: router's share of a core": Prediction(0.9, 1.1),
    "transformers 64: ratio": Prediction(3, 6, gate=3),
}
PREDICTIONS: dict[str, Mapping[str, Prediction]] = {
    # 4.3 TB/s.
    "H200": {
        "copy bandwidth": Prediction(4.1, 4.4),
        "read bandwidth": Prediction(4.2, 4.6),
        "8b decode 1: share of bandwidth": Prediction(0.72, 0.80, gate=0.75, goal=0.85),
        "8b decode 1 with multiply_few, early: share of bandwidth": Prediction(0.77, 0.84, goal=0.8),
        "8b decode 256: share of roofline": Prediction(0.65, 0.78, gate=0.60, goal=0.70),
        "0.6b decode 1": Prediction(0.9, 1.4, gate=1.5, goal=1.1, at_most=True),
        **_OF_BOTH,
    },
    # 3.0 TB/s: the time that does not depend on the bandwidth is a smaller share of a step
    "H100": {
        "copy bandwidth": Prediction(2.8, 3.1),
        "read bandwidth": Prediction(2.9, 3.3),
        "8b decode 1: share of bandwidth": Prediction(0.76, 0.84, gate=0.75, goal=0.85),
        "8b decode 1 with multiply_few, early: share of bandwidth": Prediction(0.80, 0.87, goal=0.8),
        "8b decode 256: share of roofline": Prediction(0.68, 0.80, gate=0.60, goal=0.70),
        "0.6b decode 1": Prediction(1.0, 1.5, gate=1.5, goal=1.2, at_most=True),
        **_OF_BOTH,
    },
}


def predict(gpu: str) -> Mapping[str, Prediction]:
    """Return the predictions for a GPU by its name; none for other GPUs."""
    return next((figures for name, figures in PREDICTIONS.items() if name in gpu), {})
