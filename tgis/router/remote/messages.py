"""Messages between a router worker, which serves the APIs, and the engine process. Both run the same release.
The worker numbers tickets and sequences, so that it can release a ticket before the answer has arrived.

One message with columns carries a step's tokens of all sequences of a worker, because every token takes this
path."""

import msgspec

from tgis.router.engine.handle import (
    EngineInfo,
    Lease,
    LimitedWork,
    RequestTimes,
    Resume,
    SequenceId,
    SequenceSpec,
    Ticket,
)
from tgis.router.errors import (
    Code,
    GenerationError,
    NotFoundError,
    OverloadedError,
    RequestError,
    RouterError,
    UnavailableError,
)
from tgis.router.events import Ended, Failed, TimedOut
from tgis.router.metrics.gauges import GaugeValues
from tgis.router.sequence import CallAdapters, TokenDetail


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class AdapterIds(msgspec.Struct, frozen=True, array_like=True):
    """Adapter ids of a call; None is an absent field."""

    prefix_id: str | None = None
    adapter_id: str | None = None
    request_id: str = ""


class HeldTicket(msgspec.Struct, frozen=True, array_like=True):
    """Ticket that a worker still has when the engine is lost."""

    ticket: Ticket
    work: LimitedWork
    count: int
    ids: AdapterIds
    adapters: CallAdapters


# Messages from a worker.


class Hello(_Message, frozen=True):
    """First message of a connection."""

    worker: int
    tickets: list[HeldTicket]
    names_version: int = 0
    """Version of the worker's copy of adapter names; 0 if it has none."""
    names: dict[str, str] = {}


class Acquire(_Message, frozen=True):
    ticket: Ticket
    work: LimitedWork
    count: int


class TakeLease(_Message, frozen=True):
    ticket: Ticket
    ids: AdapterIds


class Open(_Message, frozen=True):
    ticket: Ticket
    sequence_id: SequenceId
    spec: SequenceSpec
    resume: Resume | None


class Cancel(_Message, frozen=True):
    sequence_id: SequenceId


class Release(_Message, frozen=True):
    ticket: Ticket


class ChangeName(_Message, frozen=True):
    ticket: Ticket
    name: str
    adapter_id: str | None
    """None removes the name."""
    is_replacing: bool = False
    is_again: bool = False
    """True if a lost engine process may already have made the change."""


class NamesKnown(_Message, frozen=True):
    """Answer to Names and NameChanged."""

    version: int


class AskGauges(_Message, frozen=True):
    """Request for the gauges of all other processes."""

    number: int


class OwnGauges(_Message, frozen=True):
    """Answer to RequestGauges."""

    number: int
    values: GaugeValues


# Messages from the engine.


class State(_Message, frozen=True):
    """State of the engine, sent first and whenever the shards are lost or return."""

    info: EngineInfo
    is_ready: bool


class Acquired(_Message, frozen=True):
    ticket: Ticket


class Leased(_Message, frozen=True):
    ticket: Ticket
    lease: Lease
    adapters: CallAdapters


class Refused(_Message, frozen=True):
    """Answer to Acquire, TakeLease or ChangeName."""

    ticket: Ticket
    kind: str
    text: str
    parameter: str = ""
    code: Code = Code.INTERNAL


class Names(_Message, frozen=True):
    """All adapter names, sent before the first State and after they have been restored."""

    version: int
    ids: dict[str, str]


class NameChanged(_Message, frozen=True):
    version: int
    name: str
    adapter_id: str | None


class Named(_Message, frozen=True):
    """Answer to ChangeName, when all workers know the change."""

    ticket: Ticket


class Begun(_Message, frozen=True):
    """Times of a sequence, sent with its first step and again before its first token."""

    sequence_id: SequenceId
    times: RequestTimes


class Inputs(_Message, frozen=True):
    sequence_id: SequenceId
    tokens: list[TokenDetail]


class Tokens(_Message, frozen=True):
    """Tokens in order, except the last tokens of sequences, in columns of equal length. The columns of token
    details are empty if no token has any."""

    sequence_ids: list[SequenceId]
    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]
    top_tokens: list[tuple[tuple[int, float], ...]]


class Finished(_Message, frozen=True):
    """Final event of a sequence."""

    sequence_id: SequenceId
    ended: Ended | None = None
    failed: Failed | None = None
    timed_out: TimedOut | None = None


class RequestGauges(_Message, frozen=True):
    """Request for the gauges of the receiving worker."""

    number: int


class OtherGauges(_Message, frozen=True):
    """Answer to AskGauges."""

    number: int
    values: list[GaugeValues]


WorkerMessage = (
    Hello | Acquire | TakeLease | Open | Cancel | Release | ChangeName | NamesKnown | AskGauges | OwnGauges
)
EngineMessage = (
    State
    | Acquired
    | Leased
    | Refused
    | Names
    | NameChanged
    | Named
    | Begun
    | Inputs
    | Tokens
    | Finished
    | RequestGauges
    | OtherGauges
)

_ERRORS: dict[str, type[RouterError]] = {
    "request": RequestError,
    "not_found": NotFoundError,
    "overloaded": OverloadedError,
    "unavailable": UnavailableError,
}


def refused(ticket: Ticket, error: RouterError) -> Refused:
    parameter = error.parameter if isinstance(error, RequestError) else ""
    kind = next((kind for kind, type_ in reversed(_ERRORS.items()) if isinstance(error, type_)), "")
    return Refused(ticket, kind, str(error), parameter, error.code)


def error_of(refusal: Refused) -> RouterError:
    error_type = _ERRORS.get(refusal.kind)
    if error_type is None:
        return GenerationError(refusal.text, refusal.code)
    if issubclass(error_type, RequestError):
        return error_type(refusal.text, refusal.parameter)
    return error_type(refusal.text)


_ENCODER = msgspec.msgpack.Encoder()
encode = _ENCODER.encode
decode_worker_message = msgspec.msgpack.Decoder(WorkerMessage).decode
decode_engine_message = msgspec.msgpack.Decoder(EngineMessage).decode
DecodeError = msgspec.DecodeError
