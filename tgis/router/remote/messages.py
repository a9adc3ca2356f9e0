"""Messages between a router worker, which serves the APIs, and the engine process. Both run the same release.
The worker numbers claims and sequences, so that it can release a claim before the answer has arrived.

One message with columns carries a step's tokens of all sequences of a worker, because every token takes this
path."""

import msgspec

from tgis.router.engine.handle import (
    CallName,
    ClaimId,
    EngineInfo,
    LimitedWork,
    Progress,
    SequenceId,
    SequenceSpec,
    TenantLimits,
)
from tgis.router.errors import (
    Code,
    GenerationError,
    NotFoundError,
    OverloadedError,
    RequestError,
    RouterError,
    TenantLimitError,
    UnavailableError,
)
from tgis.router.events import Ended, Failed, RequestTimes, TimedOut
from tgis.router.metrics.gauges import GaugeValues
from tgis.router.scheduling.cache_events import CacheChanges
from tgis.router.sequence import CallAdapters, TokenDetail


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class AdapterIds(msgspec.Struct, frozen=True, array_like=True):
    """Adapter ids of a call; None is an absent field."""

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
    name: CallName | None = None


# Messages from a worker.


class Hello(_Message, frozen=True):
    """First message of a connection."""

    worker: int
    claims: list[WorkerClaim]
    names_version: int = 0
    """Version of the worker's copy of adapter names; 0 if it has none."""
    names: dict[str, str] = {}


class Acquire(_Message, frozen=True):
    claim_id: ClaimId
    work: LimitedWork
    count: int
    name: CallName | None = None
    limits: TenantLimits = TenantLimits()


class AskAbort(_Message, frozen=True):
    """Question whether other workers have calls with a name, which shall be aborted."""

    claim_id: ClaimId
    name: CallName


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


class WatchCache(_Message, frozen=True):
    is_on: bool
    """True to send CacheChanged from now on, beginning with all blocks."""


class FlushCache(_Message, frozen=True):
    pass


class ChangeName(_Message, frozen=True):
    claim_id: ClaimId
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
    claim_id: ClaimId


class Abort(_Message, frozen=True):
    """Request to abort the receiving worker's calls with a name."""

    name: CallName


class AbortAsked(_Message, frozen=True):
    """Answer to AskAbort."""

    claim_id: ClaimId
    is_found: bool


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
    retry_s: int = OverloadedError.retry_s


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

    claim_id: ClaimId


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


class CacheChanged(_Message, frozen=True):
    changes: CacheChanges


class RequestGauges(_Message, frozen=True):
    """Request for the gauges of the receiving worker."""

    number: int


class OtherGauges(_Message, frozen=True):
    """Answer to AskGauges."""

    number: int
    values: list[GaugeValues]


WorkerMessage = (
    Hello
    | Acquire
    | TakeLease
    | Open
    | Cancel
    | Release
    | WatchCache
    | FlushCache
    | ChangeName
    | NamesKnown
    | AskAbort
    | AskGauges
    | OwnGauges
)
EngineMessage = (
    State
    | Acquired
    | Abort
    | AbortAsked
    | Leased
    | Refused
    | Names
    | NameChanged
    | Named
    | Begun
    | Inputs
    | CacheChanged
    | Tokens
    | Finished
    | RequestGauges
    | OtherGauges
)

_ERRORS: dict[str, type[RouterError]] = {
    "request": RequestError,
    "not_found": NotFoundError,
    "overloaded": OverloadedError,
    "tenant_limit": TenantLimitError,
    "unavailable": UnavailableError,
}


def refused(claim_id: ClaimId, error: RouterError) -> Refused:
    parameter = error.parameter if isinstance(error, RequestError) else ""
    kind = next((kind for kind, type_ in reversed(_ERRORS.items()) if isinstance(error, type_)), "")
    retry_s = error.retry_s if isinstance(error, OverloadedError) else OverloadedError.retry_s
    return Refused(claim_id, kind, str(error), parameter, error.code, retry_s)


def error_of(refusal: Refused) -> RouterError:
    error_type = _ERRORS.get(refusal.kind)
    if error_type is None:
        return GenerationError(refusal.text, refusal.code)
    if issubclass(error_type, RequestError):
        return error_type(refusal.text, refusal.parameter)
    if issubclass(error_type, TenantLimitError):
        return error_type(refusal.text, refusal.retry_s)
    return error_type(refusal.text)


PEERS = "engine and router worker"  # for the log
encode = msgspec.msgpack.Encoder().encode
decode_worker_message = msgspec.msgpack.Decoder(WorkerMessage).decode
decode_engine_message = msgspec.msgpack.Decoder(EngineMessage).decode
