"""Rules of calls that differ between the APIs that clients speak."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tgis.router.errors import Code, RouterError
from tgis.sampling_parameters import RANGES, Range

MAX_STOP_SEQUENCES = 6
MAX_N = 128  # texts for one input
MAX_INPUTS = 128  # of a request to an API over HTTP
ALMOST_GREEDY = 1e-5  # lower temperatures decode greedily where an API allows them: logits would overflow

ErrorKind = Code | type[RouterError] | Callable[[Exception], bool]
"""Kind of errors, by code, by class, or by a predicate."""


@dataclass(frozen=True, eq=False)
class ApiRules:
    name: str
    """Name in logs, metrics and traces."""
    temperature: Range = RANGES["temperature"]
    default_max_new_tokens: int | None = 20
    """None: a text may fill the model's length."""
    max_new_tokens: int | None = 1024
    """Limit of `max_new_tokens` without an operator's limit. None: the model's length."""
    max_top_n_tokens: int | None = None
    """None: the operator's limit."""
    max_stop_sequences: int = MAX_STOP_SEQUENCES
    """Limit of the number of stop sequences without an operator's limit."""
    keeps_its_stop_bound: bool = True
    """True if an operator's limit counts only where it is larger."""
    max_best_of: int = MAX_N
    """Limit of `best_of` without an operator's limit."""
    shortens_texts: bool = True
    """False if a call is refused whose `max_new_tokens` do not fit after its input."""
    begins_streams_at_once: bool = False
    """True if a stream's answer begins before the call is checked, so that a refusal is one of its events."""
    rpc_service: str | None = None
    """Full name of the gRPC service; None for an API over HTTP."""
    paths: Mapping[str, str] = field(default_factory=dict)
    """HTTP paths of the methods that spans name."""
    statuses: Mapping[ErrorKind, int] = field(default_factory=dict)
    """HTTP statuses of errors. Classes and predicates come before codes, in this order."""
    chat_methods: frozenset[str] = frozenset()
    """Methods whose spans are chats."""
    is_logged: bool = True
    """True if the log lines of a call name the API, the method and the model. TGIS's do not."""
