"""Accounts for generation calls: counts, times, traces and logs every call, refusal, failure and finished
input once, at the same moments and under the same labels as TGIS."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from tgis import failpoints
from tgis.router.engine.handle import SequenceSpec
from tgis.router.errors import (
    GenerationError,
    OverloadedError,
    QueueTimeoutError,
    RequestError,
    RouterError,
    SlowClientError,
    TenantLimitError,
    TimedOutError,
    internal_error,
)
from tgis.router.events import Failed, Failure, InputTokens, Output, TimedOut
from tgis.router.metrics.metrics import Metrics
from tgis.router.requests.api_rules import ApiRules
from tgis.router.requests.call import MISSING_REQUEST, GenerationCall
from tgis.router.requests.parameters import PARAMETERS
from tgis.router.requests.request_log import CallLog, InputLog, correlation_id
from tgis.router.requests.shutdown import Shutdown
from tgis.router.requests.tracing import CallSpan, Tracing
from tgis.router.sequence import StopReason

logger = logging.getLogger(__name__)

_NOT_FINISHED = StopReason.NOT_FINISHED  # cached, because every token needs it
Record = Callable[[InputTokens | Output | Failure], InputTokens | Output]


@dataclass(frozen=True)
class Accounting:
    """Metrics, traces and log settings of all calls."""

    metrics: Metrics
    tracing: Tracing
    log_text_chars: int
    shutdown: Shutdown = field(default_factory=Shutdown)

    @contextmanager
    def open(self, call: GenerationCall) -> "Iterator[CallAccount]":
        """Open the account of a call. Exceptions that end the call early pass through."""
        cause_of = self.shutdown.cause_of
        log = CallLog(call, correlation_id(call.metadata, call.api), self.log_text_chars, cause_of)
        with self.tracing.call(call.api, call.method, call.metadata, cause_of) as span, log:
            span.set_call(call, log.request_id, log.correlation_id)
            account = CallAccount(self.metrics, log, span, self.shutdown)
            with account.counting_failures():
                yield account

    @contextmanager
    def counting_refusals(self, method: str, api: ApiRules) -> Iterator[None]:
        """Count and log the refusal of a call that generates nothing. The exception passes through."""
        try:
            yield
        except (RequestError, OverloadedError) as error:
            kind = _overload_label(error) if isinstance(error, OverloadedError) else "validation"
            self.metrics.request_failure.add(kind)
            level = api.level_of(error.code)
            logger.log(level, "%s failed with %s: %s", method, error.code.name, error.log_text)
            error.is_logged = True
            raise


class CallAccount:
    def __init__(self, metrics: Metrics, log: CallLog, span: CallSpan, shutdown: Shutdown) -> None:
        self._metrics = metrics
        self._shutdown = shutdown
        self._is_cut = False  # True once a text has been cancelled before its end
        self._log = log
        self._span = span
        self._kind, num_inputs = log.call.kind, len(log.call.texts)
        self.request_id = log.request_id
        self._num_waiting = num_inputs * log.call.parameters.n  # texts that have not started
        self._aliased_call = None if metrics.aliases is None else metrics.aliases.call(log.call.parameters.n)
        metrics.request_count.add(self._kind)
        if num_inputs:
            metrics.request_input_count.add(amount=num_inputs)

    @contextmanager
    def counting_failures(self) -> Iterator[None]:
        """Count an early end of the call once, under the label of its cause; a client's cancellation once
        for each text that has not started. An unforeseen error is logged and becomes a GenerationError."""
        failure = self._metrics.request_failure
        try:
            yield
        except RequestError as error:
            if str(error) != MISSING_REQUEST:  # TGIS does not count this refusal
                failure.add("validation")
            raise
        except OverloadedError as error:
            failure.add(_overload_label(error))
            raise
        except SlowClientError:
            failure.add("slow_reader")
            raise
        except TimedOutError:
            failure.add("token_timeout")
            raise
        except RouterError:
            failure.add("generate")
            raise
        except Exception as error:
            failure.add("generate")
            logger.error("request %s failed: %r", self.request_id, error, exc_info=error)
            raise GenerationError(internal_error(self.request_id)) from error
        except (asyncio.CancelledError, GeneratorExit):
            if not self._shutdown.cancels_calls:
                failure.add("cancelled", amount=self._num_waiting)
            elif self._num_waiting or self._is_cut:
                failure.add("generate")
            raise

    def accept(self, max_new_tokens: int, specs: list[SequenceSpec]) -> None:
        """Record that all inputs have been validated."""
        failpoints.hit("router.before_accept")
        metrics = self._metrics
        metrics.request_validation_duration.observe(time.monotonic() - self._log.started_at)
        for spec in specs[:: self._log.call.parameters.n]:
            metrics.request_input_length.observe(len(spec.input_ids))
            metrics.request_max_new_tokens.observe(max_new_tokens)
        for name in _counted_parameters(self._log.call):
            metrics.request_parameter_count.add(name)
        self._log.accept()
        self._span.accept()

    @contextmanager
    def input(self, index: int, spec: SequenceSpec) -> Iterator[Record]:
        """Account for the text at `index`, counted from 0. Each input has `n` texts. Callers must pass each
        output of the text, and a failure that ends it, to the yielded function before they use it."""
        self._num_waiting -= 1
        with self._log.input(index, spec) as log:
            try:
                yield partial(self._record, index, spec, log)
            except (asyncio.CancelledError, GeneratorExit):
                self._is_cut |= not log.has_ended
                if not (log.has_ended or self._shutdown.cancels_calls):
                    self._metrics.request_failure.add("cancelled")
                raise

    def _record(
        self, index: int, spec: SequenceSpec, log: InputLog, event: InputTokens | Output | Failure
    ) -> InputTokens | Output:
        """Record the next event of a text, and return it. Raises GenerationError, TimedOutError or
        QueueTimeoutError for a failure."""
        if isinstance(event, Output):
            if event.reason is not _NOT_FINISHED:
                self._count(index, spec, event)
                self._span.finish(spec, event)
            log.add(event)
        elif isinstance(event, Failed):
            raise GenerationError(event.message, event.code)
        elif isinstance(event, TimedOut):
            if event.is_queued:
                raise QueueTimeoutError(event.limit_s)
            raise TimedOutError(event.limit_s, event.is_first)
        return event

    def _count(self, index: int, spec: SequenceSpec, last: Output) -> None:
        metrics = self._metrics
        timings = last.timings
        num_generated = last.num_generated
        assert timings is not None, "the last output has timings"
        metrics.request_success.add(last.reason.name, self._kind)
        metrics.request_duration.observe(time.monotonic() - self._log.started_at)
        metrics.request_generated_tokens.observe(num_generated)
        metrics.request_total_tokens.observe(len(spec.input_ids) + num_generated)
        metrics.request_cached_tokens.observe(last.num_cached)
        if num_generated:
            metrics.request_inference_duration.observe(timings.inference_s)
            metrics.request_mean_time_per_token_duration.observe(timings.inference_s / num_generated)
        if self._aliased_call is not None:
            self._aliased_call.finish(index, len(spec.input_ids), num_generated, timings)


def _overload_label(error: OverloadedError) -> str:
    """Return the label of a refusal in the metric of failures."""
    if isinstance(error, QueueTimeoutError):
        return "queue_timeout"
    return "tenant_limit" if isinstance(error, TenantLimitError) else "conc_limit"


def _counted_parameters(call: GenerationCall) -> Iterator[str]:
    for info in PARAMETERS:
        if info.is_counted and getattr(call.parameters, info.name) != info.unset:
            yield info.name
    if call.inputs_are_ids:
        yield "input_ids"
