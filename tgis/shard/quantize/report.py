"""Progress lines of a run, and the table of its errors."""

import logging
import math
import re
import time
from collections.abc import Mapping
from statistics import fmean

from tgis.shard.quantize.output import Errors
from tgis.shard.quantize.settings import SMALL_GROUP, QuantizeSettings

logger = logging.getLogger(__name__)

TINY = 1e-12
USUAL_RATIOS = {4: 1.1, 8: 1.01}
"""Ratio of perplexity to the original's that usual runs stay below, by bits; not known for 2 and 3 bits."""
_EXPERT = re.compile(r"\.\d+\.")


class Report:
    """Logs a line for each layer and collects errors for a table."""

    def __init__(self, num_layers: int):
        self._num_layers = num_layers
        self._errors = list[Errors]()
        self._began = time.monotonic()
        self._num_timed = 0

    def add(self, seconds: float, errors: Errors, is_new: bool) -> None:
        """Add a layer. `is_new` is False if an earlier run had finished it."""
        self._errors.append(errors)
        self._num_timed += is_new
        number = len(self._errors)
        left = (time.monotonic() - self._began) / max(1, self._num_timed) * (self._num_layers - number)
        parts = [f"{kind} {ours:.4f} ({nearest:.4f})" for kind, (ours, nearest) in errors.items()]
        what = f"{seconds:.1f} s" if is_new else "finished by an earlier run"
        logger.info(
            "layer %d of %d: %s, about %.1f min left%s",
            number,
            self._num_layers,
            what,
            left / 60,
            f"; output errors (rounding to nearest): {', '.join(parts)}" if parts else "",
        )

    def table(self) -> str:
        """Return a table of the errors of all layers, or an empty string if there are none."""
        rows = [
            f"{number:>5}  {kind:<24}{ours:>10.4f}{nearest:>10.4f}{ours / max(nearest, TINY):>8.2f}"
            for number, errors in enumerate(self._errors)
            for kind, (ours, nearest) in errors.items()
        ]
        head = f"{'layer':>5}  {'relative output error':<24}{'gptq':>10}{'nearest':>10}{'ratio':>8}"
        return "\n".join([head, *rows]) if rows else ""


def mean_errors(errors: Mapping[str, tuple[float, float]]) -> Errors:
    """Convert errors by path to errors by kind of matrix, averaged over experts."""
    by_kind: dict[str, list[tuple[float, float]]] = {}
    for path, pair in errors.items():
        kind = _EXPERT.sub(".", path.partition("blocks.")[2].partition(".")[2])
        by_kind.setdefault(kind, []).append(pair)
    return {kind: (fmean(a for a, _ in pairs), fmean(b for _, b in pairs)) for kind, pairs in by_kind.items()}


def describe_loss(before: float, after: float, settings: QuantizeSettings) -> str:
    """Return lines about the mean losses on held-out text, in nats per token, with advice if it is high."""
    ratio = math.exp(after - before)
    usual = USUAL_RATIOS.get(settings.bits)
    meaning = f"This is {ratio:.2f} x the perplexity of the original"
    lines = [
        f"loss on held-out text, in nats per token: {before:.4f} before, {after:.4f} after",
        meaning if usual is None else f"{meaning}; below {usual:g} is usual for {settings.bits} bits",
    ]
    if not ratio < (usual or USUAL_RATIOS[4]):
        lines.append(f"To lose less, try {_advise(settings)}.")
    return "\n".join(lines)


def _advise(settings: QuantizeSettings) -> str:
    group_size = settings.group_size or SMALL_GROUP
    options = [
        ("--no-sym", settings.sym),
        (f"--groupsize {SMALL_GROUP}", not 0 < group_size <= SMALL_GROUP),
        ("more bits (--bits 8 or --method int8)", settings.bits < 8),
        ("a longer --calibration text that resembles what the model will serve, with more --samples", True),
    ]
    return ", or ".join(option for option, helps in options if helps)
