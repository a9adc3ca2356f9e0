"""Messages between a router worker and the engine process, which are of one release. The worker numbers
claims and sequences, so that it can release what it asked for before it has the answer.

A step's tokens of all sequences of a worker cross in one message of columns, because they are on the path of
every token."""

import msgspec

from tgis.router.engine.handle import (
    ClaimId,
    EngineInfo,
    LimitedWork,
    Progress,
    RequestTimes,
    SequenceId,
    SequenceSpec,
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
    """Ids by which a call names its adapters; None is an absent field."""

    prefix_id: str | None = None
    adapter_id: str | None = None
    request_id: str = ""


class WorkerClaim(msgspec.Struct, frozen=True, array_like=True):
    """A worker's record of a claim, from which the next engine process takes it again after a loss."""

    claim_id: ClaimId
    work: LimitedWork
    count: int
    ids: AdapterIds = AdapterIds()
    adapters: CallAdapters = CallAdapters()


# A worker's messages.


class Hello(_Message, frozen=True):
    """First message of a connection."""

    worker: int
    claims: list[WorkerClaim]
    names_version: int = 0
    """Version of the worker's copy of adapters' names; 0 if it has none."""
    names: dict[str, str] = {}


class Acquire(_Message, frozen=True):
    claim_id: ClaimId
    work: LimitedWork
    count: int


class TakeLease(_Message, frozen=True):
    claim_id: ClaimId
    ids: AdapterIds


class Open(_Message, frozen=True):
    claim_id: ClaimId
    sequence_id: SequenceId
    spec: SequenceSpec
    progress: Progress


class Cancel(_Message, frozen=True):
    sequence_id: SequenceId


class Release(_Message, frozen=True):
    claim_id: ClaimId


class ChangeName(_Message, frozen=True):
    claim_id: ClaimId
    name: str
    adapter_id: str | None
    """None takes the name away."""
    is_replacing: bool = False
    is_again: bool = False
    """True if an engine process that was lost may have made the change."""


class NamesKnown(_Message, frozen=True):
    """Answer to Names and NameChanged."""

    version: int


class AskGauges(_Message, frozen=True):
    """Question for the gauges of all other processes."""

    number: int


class OwnGauges(_Message, frozen=True):
    """Answer to TellGauges."""

    number: int
    values: GaugeValues


# The engine's messages.


class State(_Message, frozen=True):
    """Sent first, and again whenever the shards are lost or return."""

    info: EngineInfo
    is_ready: bool


class Acquired(_Message, frozen=True):
    claim_id: ClaimId


class Leased(_Message, frozen=True):
    claim_id: ClaimId
    adapters: CallAdapters


class Refused(_Message, frozen=True):
    """Answer to Acquire, TakeLease or ChangeName."""

    claim_id: ClaimId
    kind: str
    text: str
    parameter: str = ""
    code: Code = Code.INTERNAL


class Names(_Message, frozen=True):
    """All names of adapters, sent before the first State and after they were restored."""

    version: int
    ids: dict[str, str]


class NameChanged(_Message, frozen=True):
    version: int
    name: str
    adapter_id: str | None


class Named(_Message, frozen=True):
    """Answer to ChangeName, once all workers know the change."""

    claim_id: ClaimId


class Begun(_Message, frozen=True):
    """Times of a sequence, once its first step is sent, and again before its first token."""

    sequence_id: SequenceId
    times: RequestTimes


class Inputs(_Message, frozen=True):
    sequence_id: SequenceId
    tokens: list[TokenDetail]


class Tokens(_Message, frozen=True):
    """Tokens that are not the last of their sequences, in order, in columns of equal length. Columns of
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


class TellGauges(_Message, frozen=True):
    """Question for the gauges of the worker that gets it."""

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
    | TellGauges
    | OtherGauges
)

_ERRORS: dict[str, type[RouterError]] = {
    "request": RequestError,
    "not_found": NotFoundError,
    "overloaded": OverloadedError,
    "unavailable": UnavailableError,
}


def refused(claim_id: ClaimId, error: RouterError) -> Refused:
    parameter = error.parameter if isinstance(error, RequestError) else ""
    kind = next((kind for kind, of_kind in reversed(_ERRORS.items()) if isinstance(error, of_kind)), "")
    return Refused(claim_id, kind, str(error), parameter, error.code)


def error_of(refusal: Refused) -> RouterError:
    of_kind = _ERRORS.get(refusal.kind)
    if of_kind is None:
        return GenerationError(refusal.text, refusal.code)
    if issubclass(of_kind, RequestError):
        return of_kind(refusal.text, refusal.parameter)
    return of_kind(refusal.text)


_ENCODER = msgspec.msgpack.Encoder()
encode = _ENCODER.encode
decode_worker_message = msgspec.msgpack.Decoder(WorkerMessage).decode
decode_engine_message = msgspec.msgpack.Decoder(EngineMessage).decode
DecodeError = msgspec.DecodeError
