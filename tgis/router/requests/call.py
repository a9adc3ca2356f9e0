"""A generation call in plain values, as an API reads it from its protocol. Nothing of it is checked yet."""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

from tgis.router.requests.api_rules import ApiRules
from tgis.router.requests.parameters import Parameters
from tgis.router.text.stop_sequences import StopScope

MISSING_REQUEST = "missing request"
"""Refusal of a message that lacks the input that it must have; then the only text is empty."""

Metadata = Iterable[tuple[str, str | bytes]]
"""Headers of a call, their names in lower case."""


@dataclass(frozen=True)
class GenerationCall:
    method: str
    """The API's name of the method, for example `Generate`."""
    kind: str
    """Label of the call in metrics: single, batch or stream."""
    texts: list[str]
    parameters: Parameters
    describe_parameters: Callable[[], str]
    """Return the parameters for the log, under the API's names, without any text of the client's."""
    metadata: Metadata
    connection: Hashable
    """Where the call comes from; calls of one connection take turns."""
    prefix_id: str | None = None
    adapter_id: str | None = None
    model_id: str = ""
    refusal: str = ""
    """Why the API cannot read the call; empty if it can. What it cannot read is left out."""
    inputs_are_ids: bool = False
    """True if each text is token ids, as decimal numbers with a space between each two."""
    adds_special_tokens: bool = True
    """False if a text has all its special tokens already, as a chat template writes them."""
    tenant: str = ""
    """Name that the caller's certificate or token has; empty if it has none."""
    api: ApiRules = field(kw_only=True)
    shown_special_ids: frozenset[int] = frozenset()
    """Special tokens that the texts show, although others are left out."""
    make_stop_scope: Callable[[], StopScope] | None = None
    """Makes the scope of the stop sequences of one text; None if they end it wherever they are."""
