"""Defines a generation call in plain values, as an API reads it from its protocol, before any check."""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from operator import attrgetter

import msgspec

from tgis.router.errors import RequestError
from tgis.router.requests.api_rules import ApiRules
from tgis.router.requests.parameters import Parameters
from tgis.router.text.stop_sequences import StopScope

MISSING_REQUEST = "missing request"
"""Refusal of a message without its required input. Such a call has one empty text."""

Metadata = Iterable[tuple[str, str | bytes]]
"""Headers of a call, with names in lower case."""


@dataclass(frozen=True)
class GenerationCall:
    method: str
    """The API's name of the method, for example `Generate`."""
    kind: str
    """Label of the call in metrics: single, batch or stream."""
    texts: list[str]
    parameters: Parameters
    describe_parameters: Callable[[], str]
    """Function that returns the parameters for the log, under the API's names and without client texts."""
    metadata: Metadata
    connection: Hashable
    """Client connection of the call. Calls of one connection take turns."""
    prefix_id: str | None = None
    adapter_id: str | None = None
    model_id: str = ""
    refusal: str = ""
    """Reason why the API cannot read the call, or empty. Unreadable fields are left out."""
    inputs_are_ids: bool = False
    """True if each text is a list of token ids, as `write_ids` writes it."""
    adds_special_tokens: bool = True
    """False if the texts already contain their special tokens, as chat templates write them."""
    client_id: str = ""
    """The client's name for the call, by which it can abort the call; empty if the API has no aborts."""
    tenant: str = ""
    """Name from the caller's certificate or token; empty if there is none."""
    api: ApiRules = field(kw_only=True)
    time_left_s: float | None = None
    """Time for which the client will wait, if the API's protocol says so."""
    shown_special_ids: frozenset[int] = frozenset()
    """Special tokens that answers show although they omit other special tokens."""
    describe_refusal: Callable[[RequestError], str] = attrgetter("log_text")
    """Function that returns a refusal's text for the log, in the API's words and without client texts."""
    make_stop_scope: Callable[[], StopScope] | None = None
    """Factory of the stop scope of one text. None: a stop sequence ends the text wherever it occurs."""


def write_ids(token_ids: Iterable[int]) -> str:
    """Return token ids as decimal numbers with spaces between them. The loop runs in C, because millions of
    ids fit into a request and other calls wait meanwhile."""
    return msgspec.json.encode(list(token_ids))[1:-1].decode().replace(",", " ")
