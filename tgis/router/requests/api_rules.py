"""Declares the rules for calls that differ between APIs."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tgis.router.errors import Code, RouterError
from tgis.sampling_parameters import RANGES, Range

MAX_STOP_SEQUENCES = 6
MAX_N = 128  # texts per input
MAX_INPUTS = 128  # inputs per HTTP request
ALMOST_GREEDY = 1e-5  # temperatures below this decode greedily, because their logits would overflow

ErrorKind = Code | type[RouterError] | Callable[[Exception], bool]
"""Kind of error: a code, a class, or a predicate."""


@dataclass(frozen=True, eq=False)
class ApiRules:
    name: str
    """Name in logs, metrics and traces."""
    temperature: Range = RANGES["temperature"]
    default_max_new_tokens: int | None = 20
    """None: the limit of `max_new_tokens`."""
    max_new_tokens: int | None = 1024
    """Limit of `max_new_tokens` if the operator sets none. None: the model's length."""
    max_top_n_tokens: int | None = None
    """None: the operator's limit."""
    max_stop_sequences: int = MAX_STOP_SEQUENCES
    """Maximum number of stop sequences if the operator sets none."""
    keeps_its_stop_bound: bool = True
    """True if the operator can raise `max_stop_sequences` but not lower it."""
    max_best_of: int = MAX_N
    """Limit of `best_of` if the operator sets none."""
    shortens_texts: bool = True
    """False if the API refuses calls whose `max_new_tokens` do not fit after the input."""
    begins_streams_at_once: bool = False
    """True if streams begin before their calls are checked, so that refusals are events of the stream."""
    returns_texts: bool = True
    """False if answers have only token ids, so that texts serve only stop sequences and logs."""
    rpc_service: str | None = None
    """Full name of the gRPC service; None for an API over HTTP."""
    paths: Mapping[str, str] = field(default_factory=dict)
    """HTTP path of each method, for spans."""
    statuses: Mapping[ErrorKind, int] = field(default_factory=dict)
    """HTTP statuses of errors. Classes and predicates are tried in this order, before codes."""
    chat_methods: frozenset[str] = frozenset()
    """Methods whose spans have the operation `chat`."""
    is_logged: bool = True
    """True if log lines name the API, the method and the model. TGIS's log lines do not."""

    def level_of(self, code: Code) -> int:
        """Return the log level of an error. Clients' mistakes are warnings, except in TGIS's log lines."""
        return logging.WARNING if self.is_logged and code is Code.INVALID_ARGUMENT else logging.ERROR
