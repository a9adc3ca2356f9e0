"""Runs the loop between requests and shards: it schedules and sends steps, applies answers and delivers
events. Every accepted sequence ends with exactly one final event, unless it is cancelled."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tgis import failpoints
from tgis.router.adapters.residency import AdapterResidency
from tgis.router.engine.aliased_state import follow_engine
from tgis.router.engine.live_request import LiveRequest
from tgis.router.engine.queue_timeout import QueueTimeout
from tgis.router.engine.step_metrics import StepMetrics
from tgis.router.engine.token_timeouts import TokenTimeouts
from tgis.router.errors import Code, internal_error
from tgis.router.events import Failed, Failure, InputTokens
from tgis.router.metrics.metrics import Metrics
from tgis.router.metrics.resource_counts import ResourceCount
from tgis.router.scheduling.cache_events import CacheRecorder
from tgis.router.scheduling.scheduler import Scheduler
from tgis.router.scheduling.token_budget import TokenBudget
from tgis.router.sequence import AdapterKind, Sequence, StopReason, TokenDetail
from tgis.router.shards.client import LOST, ShardsLostError
from tgis.router.shards.codec import InputDetails, RowFailure, SampledToken, StepAnswer

logger = logging.getLogger(__name__)

WORKERS_LOST = Failed(Code.UNAVAILABLE, LOST)
_NOT_FINISHED = StopReason.NOT_FINISHED  # cached, because every token needs it


@dataclass(frozen=True, kw_only=True)
class TimeLimits:
    """Times in seconds after which the engine fails requests. None means no limit."""

    recovery_s: float
    """Time for lost shards to return."""
    first_token_s: float | None = None
    next_token_s: float | None = None
    queue_s: float | None = None
    """Time until the first step."""


class Engine:
    """Owner of the live requests, the scheduler and the sent steps. `run` is its only task."""

    def __init__(
        self,
        residency: AdapterResidency,
        scheduler: Scheduler,
        metrics: Metrics,
        *,
        budget: TokenBudget,
        steps_in_flight: int,
        time_limits: TimeLimits,
        on_ready: Callable[[bool], None],
    ) -> None:
        """`residency` must be connected. `on_ready` is called when the shards are lost and when they
        return."""
        self.scheduler = scheduler
        self._residency = residency
        self._shards = residency.shards
        self._metrics = metrics
        self._budget = budget
        self._proposer = scheduler.proposer
        self._steps_in_flight = steps_in_flight
        self._recovery_timeout = time_limits.recovery_s
        self._on_ready = on_ready
        self._step_metrics = StepMetrics(scheduler, metrics)
        self._token_timeouts = TokenTimeouts(time_limits.first_token_s, time_limits.next_token_s, self._fail)
        queue_s = time_limits.queue_s
        self._queue_timeout = None if queue_s is None else QueueTimeout(queue_s, self._refuse_late)
        self._live: dict[Sequence, LiveRequest] = {}
        self.cache_recorder = CacheRecorder(lambda: self.scheduler.pool)
        self._is_connected = False
        self._has_given_up = False
        self._fill_is_due = False
        self._requests = ResourceCount()
        metrics.requests_live.follow(lambda: len(self._live))
        metrics.follow_resource("request", self._requests)
        if metrics.aliases is not None:
            loras = residency.caches[AdapterKind.LORA]
            follow_engine(metrics.aliases, scheduler, loras)

    @property
    def num_live(self) -> int:
        return len(self._live)

    def open(self, live: LiveRequest) -> None:
        """Accept a sequence, which may already have generated tokens."""
        sequence = live.sequence
        if self._has_given_up:
            live.events.deliver(WORKERS_LOST)
        elif not self._has_adapters(sequence):
            live.events.deliver(lost_adapter(sequence.request_id))
        elif (reason := live.reason_of_last(time.monotonic())) is not _NOT_FINISHED:
            live.deliver_end(None, sequence.num_generated, reason, time.monotonic())
        else:
            self._accept(live)

    def cancel(self, live: LiveRequest) -> None:
        """End a generation without a final event. Do nothing if it has ended."""
        if live.sequence in self._live:
            self._release(live)

    async def run(self) -> None:
        """Run until cancelled. The engine survives the loss of the shards."""
        while True:
            self._is_connected = True
            self._on_ready(True)
            self._fill()
            try:
                while True:
                    self._apply(await self._shards.receive())
                    self._fill()
            except ShardsLostError as error:
                logger.warning("%s; requests to resume: %d", error, len(self._live))
            self._is_connected = False
            self._token_timeouts.pause()
            self._on_ready(False)
            self._metrics.shard_restarts.add()
            self._step_metrics.lose_all()
            self._suspend()
            await self._reconnect()

    def give_up(self) -> None:
        """Fail all requests and refuse new ones, because the shards are lost."""
        self._has_given_up = True
        for live in list(self._live.values()):
            self._fail(live, WORKERS_LOST)
        self._residency.give_up()

    def _accept(self, live: LiveRequest) -> None:
        sequence = live.sequence
        deadline = live.sequence.stopping.deadline
        self._live[sequence] = live
        self._requests.created += 1
        self.scheduler.add(sequence)
        if deadline is not None:
            delay = deadline - time.monotonic()
            live.expiry = asyncio.get_running_loop().call_later(max(delay, 0.0), self._expire, live)
        if self._queue_timeout is not None:
            self._queue_timeout.watch(live)
        self._token_timeouts.watch(live)  # last, because it ends a request whose time is over
        self._fill_soon()

    def _fill_soon(self) -> None:
        """Schedule one `_fill` per turn of the loop, so that requests that arrive together start together."""
        if not self._fill_is_due:
            self._fill_is_due = True
            asyncio.get_running_loop().call_soon(self._fill)

    def _fill(self) -> None:
        self._fill_is_due = False
        scheduler = self.scheduler
        while self._is_connected and scheduler.num_in_flight < self._steps_in_flight:
            num_decoding = scheduler.num_decoding
            num_prompts = len(scheduler.waiting) + len(scheduler.running) - num_decoding
            step = scheduler.next_step(self._budget.prompt_tokens(num_decoding, num_prompts))
            if step is None:
                break
            failpoints.hit("router.before_step")
            self._shards.send(step, self._budget.timeout(step.num_tokens))
            self._step_metrics.send(step)
            for sequence in step.opened:
                self._start(self._live[sequence])

    def _start(self, live: LiveRequest) -> None:
        times = live.times
        if times.started_at is None:  # Otherwise, it resumes after a preemption or a loss of the shards.
            times.started_at = time.monotonic()
            live.call_start.is_done = True
            times.num_cached = live.sequence.num_computed_inputs
            self._metrics.request_queue_duration.observe(times.started_at - times.accepted_at)
            if live.queue_timer is not None:
                live.queue_timer.cancel()
            live.events.begin(times)

    def _apply(self, answer: StepAnswer) -> None:
        self._step_metrics.answer(answer)
        # Failures come first, because other sequences must not find blocks that were not computed.
        for failure in answer.failed:
            if failure.sequence in self._live:
                self._fail(self._live[failure.sequence], _failed_row(failure))
        self.scheduler.apply_answer(answer.step, answer.num_proposed)
        if not answer.step.max_proposed:  # a step with the shards' drafts also computes their speculator
            self._budget.observe(answer.num_tokens, answer.forward_s)
        if self._proposer is not None:
            self._proposer.observe(answer.step, answer.drafts, answer.forward_s, answer.follow_s)
        for details in answer.input_details:
            self._take_input_details(details)
        self._take_tokens(answer.sampled)
        self._step_metrics.apply()

    def _take_input_details(self, details: InputDetails) -> None:
        sequence = details.sequence
        live = self._live.get(sequence)
        if live is None:
            return
        if details.start != sequence.num_inputs_reported:
            raise ShardsLostError("the details of a prompt arrived out of order")
        live.inputs += details.tokens
        sequence.num_inputs_reported += len(details.tokens)
        if sequence.inputs_reported:
            live.events.deliver(InputTokens(tuple(live.inputs)))
            live.inputs.clear()

    def _take_tokens(self, sampled: Iterable[SampledToken]) -> None:
        now = time.monotonic()
        live_requests = self._live
        # This has few keys, because most tokens of a step follow tokens of one earlier step.
        times_before: dict[float, int] = {}
        for sequence, token, ended in sampled:
            live = live_requests.get(sequence)
            if live is None:  # The sequence ended while the step was in flight.
                continue
            if live.awaits_first:
                self._take_first(live, now)
            else:
                before = live.times.last_token_at
                times_before[before] = times_before.get(before, 0) + 1
            live.times.last_token_at = now
            self.scheduler.append_token(sequence, token.token_id)
            self._deliver(live, token, ended, now)
        for before, num_tokens in times_before.items():
            self._metrics.inter_token_duration.observe(now - before, times=num_tokens)

    def _deliver(self, live: LiveRequest, token: TokenDetail, ended: bool, now: float) -> None:
        sequence = live.sequence
        token_id = token.token_id
        num_generated = len(sequence.token_ids) - sequence.prompt_len
        reason = sequence.stopping.reason_at(num_generated, token_id, now)
        if live.sink is not None and live.sink.push(token_id, reason):
            reason = StopReason.STOP_SEQUENCE
        if reason is not _NOT_FINISHED:
            live.deliver_end(token, num_generated, reason, now)
            self._release(live)
            return
        live.events.deliver(token)
        if ended:
            self._fail(live, _internal_error(sequence.request_id, "the shards ended the sequence too early"))

    def _take_first(self, live: LiveRequest, now: float) -> None:
        """Record the first token of a sequence, or its first token after a loss of the shards."""
        times = live.times
        if times.first_token_at is None:
            times.first_token_at = now
            self._metrics.first_token_duration.observe(now - times.accepted_at)
            if self._metrics.aliases is not None:
                self._metrics.aliases.begin(live.sequence.num_input_tokens)
            live.deliver_encoder_inputs()
        else:
            self._metrics.inter_token_duration.observe(now - times.last_token_at)
        times.last_token_at = now
        live.awaits_first = False
        self._token_timeouts.watch(live)

    def _release(self, live: LiveRequest) -> None:
        """Remove a request after its final event or its cancellation."""
        del self._live[live.sequence]
        self._requests.released += 1
        if live.expiry is not None:
            live.expiry.cancel()
        self._token_timeouts.forget(live)
        if live.queue_timer is not None:
            live.queue_timer.cancel()
        self.scheduler.finish(live.sequence)
        self._fill_soon()

    def _fail(self, live: LiveRequest, failure: Failure) -> None:
        live.events.deliver(failure)
        self._release(live)

    def _refuse_late(self, live: LiveRequest, failure: Failure) -> None:
        """Fail a request that has waited too long. A step is sent first: after a late turn of the event loop,
        timers run before the step that would start the request."""
        self._fill()
        if not live.call_start.is_done:
            self._fail(live, failure)

    def _expire(self, live: LiveRequest) -> None:
        """End a waiting request whose deadline has passed. A running request ends with its next token. A step
        is sent first, because an idle service returns at least one token after any deadline, as TGIS does."""
        sequence = live.sequence
        if sequence in self._live and sequence.row is None:
            self._fill()
        if sequence in self._live and sequence.row is None:
            if live.times.started_at is None:
                self._metrics.request_failure.add("timeout")
            live.deliver_end(None, sequence.num_generated, StopReason.TIME_LIMIT, time.monotonic())
            self._release(live)

    def _suspend(self) -> None:
        """Return all sequences to the waiting queue after a loss of the shards, and fail a crash suspect."""
        pool = self.scheduler.pool
        suspect = self.scheduler.reset(pool.renew(pool.num_blocks, pool.block_size))
        if suspect is not None:
            cause = "the shards crash whenever they compute it"
            self._fail(self._live[suspect], _internal_error(suspect.request_id, cause))
        now = time.monotonic()
        for live in list(self._live.values()):
            deadline = live.sequence.stopping.deadline
            if deadline is not None and deadline <= now:
                self._expire(live)

    async def _reconnect(self) -> None:
        try:
            async with asyncio.timeout(self._recovery_timeout):
                info = await self._residency.connect()
        except TimeoutError:
            logger.error("the shards did not come back within %s s", self._recovery_timeout)
            self.give_up()
            info = await self._residency.connect()
            self._has_given_up = False
        for live in list(self._live.values()):
            if not self._has_adapters(live.sequence):
                self._fail(live, lost_adapter(live.sequence.request_id))
        self.scheduler.pool = self.scheduler.pool.renew(info.num_blocks, info.block_size, info.num_states)
        self._token_timeouts.resume(self._live.values())
        logger.info("the shards are back; requests resumed: %d", len(self._live))

    def _has_adapters(self, sequence: Sequence) -> bool:
        return all(map(self._residency.has, sequence.adapters.present))


def lost_adapter(request_id: str) -> Failed:
    return _internal_error(request_id, "its soft prompt or adapter could not be loaded again")


def _internal_error(request_id: str, cause: str) -> Failed:
    """Log the cause with the request's id, and return an event that shows the client only the id."""
    logger.error("request %s failed: %s", request_id, cause)
    return Failed(Code.INTERNAL, internal_error(request_id))


def _failed_row(failure: RowFailure) -> Failed:
    if not failure.by_grammar:
        cause = f"the shards cannot compute it: {failure.cause}"
        return _internal_error(failure.sequence.request_id, cause)
    grammar = failure.sequence.grammar
    assert grammar is not None, "only guided sequences have a grammar that can fail"
    text = f"{grammar.field} cannot be followed: it is too complex, or no token of this model fits it"
    return Failed(Code.INVALID_ARGUMENT, text)
