"""Rules of calls that differ between the doors, the APIs that clients speak."""

from dataclasses import dataclass

from tgis.sampling_parameters import ABOVE_ZERO, RANGES, Range

MAX_STOP_SEQUENCES = 6
MAX_N = 128  # texts for one input
MAX_INPUTS = 128  # of a request to an API over HTTP
ALMOST_GREEDY = 1e-5  # temperature below which a door that allows it decodes greedily: logits would overflow


@dataclass(frozen=True)
class Door:
    name: str
    """Name in logs, metrics and traces."""
    temperature: Range = RANGES["temperature"]
    default_max_new_tokens: int | None = 20
    """None: a text may fill the model's length."""
    max_new_tokens: int | None = 1024
    """Bound of `max_new_tokens` if the operator sets none. None: the model's length."""
    max_top_n_tokens: int | None = None
    """None: the operator's bound."""
    max_stop_sequences: int = MAX_STOP_SEQUENCES
    """Bound of the number of stop sequences if the operator sets none."""
    keeps_its_stop_bound: bool = True
    """True if the operator's bound counts only where it is larger."""
    max_best_of: int = MAX_N
    """Bound of the texts of which a request gets the best, if the operator sets none."""
    shortens_texts: bool = True
    """False if a call is refused whose `max_new_tokens` do not fit after its input."""
    begins_streams_at_once: bool = False
    """True if a stream's answer begins before the call is checked, so that a refusal is an event of it."""


FMAAS = Door("fmaas")
OPENAI = Door(
    "openai",
    temperature=Range(0, 2, refusal="temperature must be >= 0.0 and <= 2.0"),
    default_max_new_tokens=None,
    max_new_tokens=None,
    max_top_n_tokens=20,
    max_stop_sequences=16,
)
TGI = Door(
    "tgi",
    temperature=RANGES["temperature"]._replace(low=ABOVE_ZERO),
    default_max_new_tokens=None,
    max_new_tokens=None,
    max_stop_sequences=4,
    keeps_its_stop_bound=False,
    max_best_of=2,
    shortens_texts=False,
    begins_streams_at_once=True,
)
LMI = Door(
    "lmi",
    temperature=RANGES["temperature"]._replace(low=0),
    default_max_new_tokens=30,
    max_new_tokens=None,
    max_top_n_tokens=20,
    max_stop_sequences=16,
)
