"""Writes one log line per finished input, in TGIS's words, and one for a call that ends before its inputs
start. The operator limits the characters of a prompt, an answer or a grammar that a line shows."""

import asyncio
import logging
import secrets
import time
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType

from tgis.logs import FIELDS, Scalar
from tgis.router.engine.handle import SequenceSpec
from tgis.router.errors import Code, NotFoundError, RequestError, RouterError
from tgis.router.events import InputTokens, Output, Timings
from tgis.router.requests.api_rules import ApiRules
from tgis.router.requests.call import GenerationCall, Metadata
from tgis.router.requests.shutdown import CauseOf
from tgis.router.sequence import StopReason

logger = logging.getLogger(__name__)

MAX_ID_CHARS = 128
MAX_ERROR_CHARS = 500
_NOT_FINISHED = StopReason.NOT_FINISHED  # cached, because every token needs it
NO_ID, UNREADABLE_ID = "<none>", "<non-ascii>"
LEVELS = {
    StopReason.CANCELLED: logging.WARNING,
    StopReason.TOKEN_LIMIT: logging.WARNING,
    StopReason.ERROR: logging.ERROR,
}


@dataclass
class CallLog:
    """Log of one call. As a context manager, it logs an error or a cancellation that ends the call before
    `accept`. Afterwards, each input has its own log."""

    call: GenerationCall
    correlation_id: str = NO_ID
    text_chars: int = 0
    """Maximum number of characters of the input and of the output that a line shows."""
    cause_of: CauseOf = lambda error: error
    request_id: str = field(default_factory=lambda: secrets.token_hex(8))
    started_at: float = field(default_factory=time.monotonic)
    validation_s: float | None = None

    def accept(self) -> None:
        """Record that all inputs have been validated."""
        self.validation_s = time.monotonic() - self.started_at

    def input(self, index: int, spec: SequenceSpec) -> "InputLog":
        """Return the log of the text at `index`, counted from 0. Each input has `n` texts."""
        texts = self.call.texts
        n = self.call.parameters.n
        size = len(texts) * n
        kind = f"Sub-request {index + 1} from batch of {size}" if size > 1 else self._kind
        return InputLog(self, kind, [texts[index // n]], spec)

    def __enter__(self) -> "CallLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and self.validation_s is None:
            InputLog(self, self._kind, self.call.texts).end_early(error)

    @cached_property
    def params_text(self) -> str:
        return self.call.describe_parameters()

    @property
    def _kind(self) -> str:
        """TGIS's name for the call."""
        if self.call.kind == "stream":
            return "Streaming response"
        num_inputs = len(self.call.texts)
        return "Request" if num_inputs == 1 else f"Batch of {num_inputs}"


@dataclass
class InputLog:
    """Log of one input, or of all inputs of a call that ends before they start. It logs the end of the input
    once. As a context manager, it also logs a cancellation or an exception."""

    call_log: CallLog
    kind: str
    """TGIS's name for the subject of the line."""
    texts: list[str]
    spec: SequenceSpec | None = None
    num_generated: int = 0
    num_bytes: int = 0
    text: str = ""
    has_ended: bool = False

    def add(self, event: InputTokens | Output) -> None:
        """Record the next event, and log a final one."""
        if isinstance(event, InputTokens):
            return
        self.num_generated = event.num_generated
        text = event.text
        self.num_bytes += len(text.encode())
        if len(self.text) < self.call_log.text_chars:
            self.text += text
        if event.reason is not _NOT_FINISHED:
            self._end(event.reason, event)

    def __enter__(self) -> "InputLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and not self.has_ended:
            self.end_early(error)

    def end_early(self, error: BaseException) -> None:
        """Log a cancellation or an error. The cause of an unforeseen error is logged elsewhere."""
        error = self.call_log.cause_of(error) or error
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            self._end(StopReason.CANCELLED, None)
            return
        self.has_ended = True
        call = self.call_log.call
        code = Code.INTERNAL
        reason = ""
        if isinstance(error, RouterError):
            error.is_logged = True
            text = call.describe_refusal(error) if isinstance(error, RequestError) else error.log_text
            code = error.code
            reason = f": {text[:MAX_ERROR_CHARS]}"
        level = call.api.level_of(code)
        name = _name_of(code, error, call.api)
        if logger.isEnabledFor(level):
            fields = self._fields() | {"code": name} | self._durations(None)
            logger.log(level, "%s failed with %s%s", self.kind, name, reason, extra={FIELDS: fields})

    def _end(self, reason: StopReason, last: Output | None) -> None:
        self.has_ended = True
        level = LEVELS.get(reason, logging.INFO)
        if not logger.isEnabledFor(level):
            return
        shown = f": {self.text[: self.call_log.text_chars]}" if self.call_log.text_chars else ""
        fields = self._fields()
        if last is not None:
            fields["cached_tokens"] = last.num_cached
        fields |= {"output_tokens": self.num_generated, "stop_reason": reason.name}
        fields |= self._durations(None if last is None else last.timings)
        logger.log(
            level,
            "%s generated %d tokens before %s, output %d bytes%s",
            self.kind,
            self.num_generated,
            reason.name,
            self.num_bytes,
            shown,
            extra={FIELDS: fields},
        )

    def _fields(self) -> dict[str, Scalar]:
        log = self.call_log
        call = log.call
        spec = self.spec
        fields: dict[str, Scalar] = {"request_id": log.request_id, "correlation_id": log.correlation_id}
        if call.api.is_logged:
            fields |= {"api": call.api.name, "method": call.method}
            if call.model_id:
                fields["model"] = call.model_id[:MAX_ID_CHARS]
        if call.tenant:
            fields["tenant"] = call.tenant[:MAX_ID_CHARS]
        if call.prefix_id is not None:
            fields["prefix_id"] = call.prefix_id[:MAX_ID_CHARS]
        # Before the call is accepted, a name of a model may not be an adapter's id.
        if call.adapter_id is not None and (spec is not None or call.adapter_id != call.model_id):
            fields["adapter_id"] = call.adapter_id[:MAX_ID_CHARS]
        if log.text_chars and len(self.texts) == 1:
            fields["input"] = self.texts[0][: log.text_chars]
        fields["input_bytes"] = sum(len(text.encode()) for text in self.texts)
        fields["params"] = log.params_text
        if spec is not None:
            fields["input_tokens"] = len(spec.input_ids)
            if spec.adapters.num_virtual_tokens:
                fields["virtual_tokens"] = spec.adapters.num_virtual_tokens
            if not spec.sampling.greedy:
                fields["seed"] = spec.sampling.seed
        return fields

    def _durations(self, timings: Timings | None) -> dict[str, Scalar]:
        seconds: dict[str, float] = {}
        if self.call_log.validation_s is not None:
            seconds["validation_time"] = self.call_log.validation_s
        if timings is not None:
            seconds["queue_time"] = timings.queue_s
            seconds["inference_time"] = timings.inference_s
            if self.num_generated:
                seconds["time_per_token"] = timings.inference_s / self.num_generated
        seconds["total_time"] = time.monotonic() - self.call_log.started_at
        return {f"{name}_ms": round(1000 * value, 3) for name, value in seconds.items()}


def _name_of(code: Code, error: BaseException, api: ApiRules) -> str:
    """Return the name of an error's code. A missing model or adapter has its own in APIs that answer 404."""
    is_missing = isinstance(error, NotFoundError) and api.statuses.get(NotFoundError) == 404
    return "NOT_FOUND" if is_missing else code.name


def correlation_id(metadata: Metadata, api: ApiRules) -> str:
    """Return the client's correlation id, shortened, or a fixed word if it is missing or unreadable. Over
    HTTP, `x-request-id` replaces a missing `x-correlation-id`."""
    ids: dict[str, str | bytes] = {}
    for key, value in metadata:
        if key in ("x-correlation-id", "x-request-id"):
            ids.setdefault(key, value)
    given = ids.get("x-correlation-id", NO_ID if api.rpc_service else ids.get("x-request-id", NO_ID))
    if isinstance(given, bytes) or not (given.isascii() and given.isprintable()):
        return UNREADABLE_ID
    return given[:MAX_ID_CHARS]
