"""Engine's half of one router worker's handle: executes the worker's messages and sends the results. All
claims of a worker are released when its connection ends."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

from tgis.router.engine.claims import Claim, Claims
from tgis.router.engine.handle import CallName, ClaimId, SequenceId
from tgis.router.engine.live_request import LiveRequest
from tgis.router.errors import Code, GenerationError, RouterError, internal_error
from tgis.router.events import Ended, Event, Failed, InputTokens, RequestTimes, TimedOut
from tgis.router.remote import messages as wire
from tgis.router.scheduling.cache_events import CacheChanges
from tgis.router.sequence import TokenDetail
from tgis.router.shards.client import AdapterCallError

logger = logging.getLogger(__name__)


class _Receiver:
    """Receiver of one sequence's events."""

    __slots__ = ("_has_begun", "_session", "live", "sequence_id")

    def __init__(self, session: "WorkerSession", sequence_id: SequenceId) -> None:
        self._session = session
        self.sequence_id = sequence_id
        self._has_begun = False
        self.live: LiveRequest | None = None

    def begin(self, times: RequestTimes) -> None:
        self._session.send_soon(wire.Begun(self.sequence_id, times))

    def deliver(self, event: Event) -> None:
        session = self._session
        if isinstance(event, TokenDetail):
            if not self._has_begun:
                assert self.live is not None, "a token arrived before its sequence was opened"
                self._has_begun = True
                self.begin(self.live.times)
            session.send_token(self.sequence_id, event)
        elif isinstance(event, InputTokens):
            session.send_soon(wire.Inputs(self.sequence_id, list(event.tokens)))
        else:
            session.finish(_final(self.sequence_id, event))


class WorkerSession:
    def __init__(
        self, claims: Claims, send: Callable[[Any], None], send_now: Callable[[Iterable[Any]], None]
    ) -> None:
        """Create a session. `send_now` sends all messages of a turn of the event loop immediately."""
        self._claims = claims
        self._send = send
        self._send_now = send_now
        self._open_claims: dict[ClaimId, Claim] = {}
        self._names: dict[ClaimId, CallName] = {}
        """Names of calls that have one."""
        self._live: dict[SequenceId, LiveRequest | None] = {}
        """Sequences that may still have events; None for a sequence that waits for its adapters."""
        self._first: list[Any] = []
        self._sequence_ids: list[SequenceId] = []
        self._tokens: list[TokenDetail] = []
        self._last: list[Any] = []
        self._is_due = self._is_watching = False
        self._take: dict[type, Callable[[Any], None]] = {
            wire.Acquire: self._acquire,
            wire.TakeLease: self._lease,
            wire.Open: self._open,
            wire.Cancel: self._cancel,
            wire.Release: self._release,
            wire.WatchCache: self._watch_cache,
            wire.FlushCache: lambda _: self._claims.flush_cache(),
        }

    def greet(self, message: wire.Hello) -> None:
        """Restore the claims and adapters that the worker had from an earlier engine process, regardless of
        limits."""
        for again in message.claims:
            claim = self._open_claims[again.claim_id] = self._claims.acquire(
                again.count, again.work, is_again=True
            )
            if again.name is not None:
                self._names[again.claim_id] = again.name
            if again.adapters.present:
                claim.leasing = asyncio.create_task(self._lease_again(claim, again), name="lease")

    def take(self, message: Any) -> None:
        """Handle a message from the worker other than its first."""
        self._take[type(message)](message)

    def abort(self, name: CallName) -> bool:
        """Let the worker abort its calls with a name. Return False if it has none."""
        is_found = name in self._names.values()
        if is_found:
            self._send(wire.Abort(name))
        return is_found

    def close(self) -> None:
        """Release all claims of the worker, because it has disconnected."""
        for claim_id in list(self._open_claims):
            self._release(wire.Release(claim_id))
        if self._is_watching:
            self._claims.cache_recorder.discard(self._report_cache)

    def send_soon(self, message: Any) -> None:
        """Send a message before the tokens of this turn of the event loop."""
        self._first.append(message)
        self._flush_soon()

    def send_token(self, sequence_id: SequenceId, token: TokenDetail) -> None:
        self._sequence_ids.append(sequence_id)
        self._tokens.append(token)
        if not self._is_due:
            self._flush_soon()

    def finish(self, message: wire.Finished) -> None:
        """Send a final event after the tokens of this turn of the event loop."""
        self._live.pop(message.sequence_id, None)
        self._last.append(message)
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_due = False
        tokens = [_columns(self._sequence_ids, self._tokens)] if self._tokens else []
        messages = [*self._first, *tokens, *self._last]
        self._first = []
        self._sequence_ids = []
        self._tokens = []
        self._last = []
        self._send_now(messages)

    def _acquire(self, message: wire.Acquire) -> None:
        try:
            claim = self._claims.acquire(message.count, message.work, message.limits)
        except RouterError as error:
            self._send(wire.refused(message.claim_id, error))
        else:
            self._open_claims[message.claim_id] = claim
            if message.name is not None:
                self._names[message.claim_id] = message.name
            self._send(wire.Acquired(message.claim_id))

    def _lease(self, message: wire.TakeLease) -> None:
        if (claim := self._open_claims.get(message.claim_id)) is not None:
            claim.leasing = asyncio.create_task(self._take_lease(claim, message), name="lease")

    async def _take_lease(self, claim: Claim, message: wire.TakeLease) -> None:
        ids = message.ids
        try:
            adapters = await self._claims.lease(claim, ids.prefix_id, ids.adapter_id, ids.request_id)
        except RouterError as error:
            self._send(wire.refused(message.claim_id, error))
        except Exception:
            failed = _unforeseen(ids.request_id)
            self._send(wire.refused(message.claim_id, GenerationError(failed.message, failed.code)))
        else:
            self._send(wire.Leased(message.claim_id, adapters))

    async def _lease_again(self, claim: Claim, again: wire.WorkerClaim) -> None:
        """Lease adapters again. If that fails, the claim's sequences fail when they are opened."""
        ids = again.ids
        try:
            await self._claims.lease_again(claim, ids.prefix_id, ids.adapter_id, again.adapters)
        except (RouterError, AdapterCallError) as error:
            logger.error("the adapters of request %s could not be loaded again: %s", ids.request_id, error)

    def _watch_cache(self, message: wire.WatchCache) -> None:
        self._is_watching = message.is_on
        recorder = self._claims.cache_recorder
        (recorder.add if message.is_on else recorder.discard)(self._report_cache)

    def _report_cache(self, changes: CacheChanges) -> None:
        self._send(wire.CacheChanged(changes))

    def _open(self, message: wire.Open) -> None:
        claim = self._open_claims.get(message.claim_id)
        if claim is None:
            return
        self._live[message.sequence_id] = None
        if claim.leasing is None or claim.leasing.done():
            self._begin(claim, message)
        else:
            claim.leasing.add_done_callback(lambda _: self._begin(claim, message))

    def _begin(self, claim: Claim, message: wire.Open) -> None:
        sequence_id = message.sequence_id
        if sequence_id not in self._live:  # cancelled while its adapters were being loaded
            return
        if message.claim_id not in self._open_claims:  # released while its adapters were being loaded
            del self._live[sequence_id]
            return
        receiver = _Receiver(self, sequence_id)
        try:
            live = self._claims.open(claim, sequence_id, message.spec, None, message.progress, receiver)
        except Exception:  # only this one may fail: the worker would send it again with all others
            self.finish(wire.Finished(sequence_id, failed=_unforeseen(message.spec.request_id)))
            return
        receiver.live = live
        if sequence_id in self._live:  # otherwise it has already ended
            self._live[sequence_id] = live

    def _cancel(self, message: wire.Cancel) -> None:
        if (live := self._live.pop(message.sequence_id, None)) is not None:
            self._claims.cancel(live)

    def _release(self, message: wire.Release) -> None:
        self._names.pop(message.claim_id, None)
        claim = self._open_claims.pop(message.claim_id, None)
        if claim is None:
            return
        for sequence_id in claim.live:
            self._live.pop(sequence_id, None)
        if claim.leasing is None or claim.leasing.done():
            self._claims.release(claim)
        else:  # wait for the task, which may have leased adapters by then
            claim.leasing.cancel()
            claim.leasing.add_done_callback(lambda _: self._claims.release(claim))


def _unforeseen(request_id: str) -> Failed:
    """Log the current exception, and return the final event of the request that caused it."""
    logger.exception("request %s failed", request_id)
    return Failed(Code.INTERNAL, internal_error(request_id))


def _final(sequence_id: SequenceId, event: Ended | Failed | TimedOut) -> wire.Finished:
    if isinstance(event, Ended):
        return wire.Finished(sequence_id, ended=event)
    if isinstance(event, Failed):
        return wire.Finished(sequence_id, failed=event)
    return wire.Finished(sequence_id, timed_out=event)


def _columns(sequence_ids: list[SequenceId], tokens: list[TokenDetail]) -> wire.Tokens:
    token_ids, logprobs, ranks, top_tokens = zip(*tokens, strict=True)
    if any(logprobs) or any(ranks) or any(top_tokens):
        return wire.Tokens(sequence_ids, [*token_ids], [*logprobs], [*ranks], [*top_tokens])
    return wire.Tokens(sequence_ids, [*token_ids], [], [], [])
