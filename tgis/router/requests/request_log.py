"""Writes one log line per finished input, in TGIS's words, and one for a call that ends before its inputs
begin. The lines contain no text of a prompt, an answer or a grammar beyond the number of characters that the
operator set."""

import asyncio
import logging
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType

from google.protobuf.message import Message

from tgis.logs import FIELDS, Scalar
from tgis.pb import generation_pb2 as pb
from tgis.router.errors import Code, RouterError
from tgis.router.events import InputTokens, Output, Timings
from tgis.router.sequence import Sequence, StopReason

logger = logging.getLogger(__name__)

MAX_ID_CHARS = 128
MAX_ERROR_CHARS = 500
NO_ID, UNREADABLE_ID = "<none>", "<non-ascii>"
LEVELS = {
    StopReason.CANCELLED: logging.WARNING,
    StopReason.TOKEN_LIMIT: logging.WARNING,
    StopReason.ERROR: logging.ERROR,
}

GenerationCall = pb.BatchedGenerationRequest | pb.SingleGenerationRequest
Metadata = Iterable[tuple[str, str | bytes]]


@dataclass
class CallLog:
    """Log of one call. As a context manager it logs an error or a cancellation that ends the call before
    `accept`; afterwards each input has its own log."""

    request: GenerationCall
    correlation_id: str = NO_ID
    text_chars: int = 0
    """Number of characters of an input's text and of an output's text that a line may show."""
    request_id: str = field(default_factory=lambda: secrets.token_hex(8))
    started_at: float = field(default_factory=time.monotonic)
    validation_s: float | None = None

    def accept(self) -> None:
        """Record that all inputs have been validated."""
        self.validation_s = time.monotonic() - self.started_at

    def input(self, index: int, sequence: Sequence) -> "InputLog":
        """Return the log of the input at `index`, counted from 0."""
        return InputLog(self, index, sequence)

    def __enter__(self) -> "CallLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or self.validation_s is not None:
            return
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            _log_end(self, self._kind, self.texts, _Ending(StopReason.CANCELLED))
        else:
            _log_error(self, self._kind, self.texts, error)

    @cached_property
    def texts(self) -> list[str]:
        """Texts of the inputs, in order."""
        if isinstance(self.request, pb.SingleGenerationRequest):
            return [self.request.request.text]
        return [item.text for item in self.request.requests]

    @cached_property
    def params_text(self) -> str:
        """Decoding method and every parameter that is set: numbers as they are, texts by their length and
        lists by their count."""
        params = self.request.params
        default = () if params.method else ("method=GREEDY",)
        return ", ".join((*default, *_shown(params)))

    @property
    def _kind(self) -> str:
        if isinstance(self.request, pb.SingleGenerationRequest):
            return "Streaming response"
        return "Request" if len(self.texts) == 1 else f"Batch of {len(self.texts)}"

    def kind_of_input(self, index: int) -> str:
        """Return TGIS's name for the input at `index`."""
        is_part = isinstance(self.request, pb.BatchedGenerationRequest) and len(self.texts) > 1
        return f"Sub-request {index + 1} from batch of {len(self.texts)}" if is_part else self._kind


@dataclass
class InputLog:
    """Log of one input. It follows the events and logs once how the input ended. As a context manager it also
    logs a cancellation, or an exception that passes through, which ends the input early."""

    call: CallLog
    index: int
    sequence: Sequence
    num_generated: int = 0
    num_bytes: int = 0
    text: str = ""
    has_ended: bool = False

    def add(self, event: InputTokens | Output) -> None:
        """Record the next event; a final one is logged."""
        if isinstance(event, InputTokens):
            return
        self.num_generated = event.num_generated
        self.num_bytes += len(event.text.encode())
        if len(self.text) < self.call.text_chars:
            self.text += event.text
        if event.reason is not StopReason.NOT_FINISHED:
            self._end(event.reason, event.timings)

    def __enter__(self) -> "InputLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or self.has_ended:
            return
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            self._end(StopReason.CANCELLED, None)
        else:
            self.has_ended = True
            _log_error(self.call, self._kind, self._texts, error, self.sequence)

    def _end(self, reason: StopReason, timings: Timings | None) -> None:
        self.has_ended = True
        ending = _Ending(reason, self.num_generated, self.num_bytes, self.text, timings)
        _log_end(self.call, self._kind, self._texts, ending, self.sequence)

    @property
    def _kind(self) -> str:
        return self.call.kind_of_input(self.index)

    @property
    def _texts(self) -> list[str]:
        return [self.call.texts[self.index]]


@dataclass(frozen=True)
class _Ending:
    reason: StopReason
    num_generated: int = 0
    num_bytes: int = 0
    text: str = ""
    timings: Timings | None = None


def correlation_id(metadata: Metadata) -> str:
    """Return the client's id of its request, shortened, or a fixed word if it is missing or unreadable."""
    for key, value in metadata:
        if key == "x-correlation-id":
            if isinstance(value, bytes) or not (value.isascii() and value.isprintable()):
                return UNREADABLE_ID
            return value[:MAX_ID_CHARS]
    return NO_ID


def _log_end(
    call: CallLog, kind: str, texts: list[str], ending: _Ending, sequence: Sequence | None = None
) -> None:
    level = LEVELS.get(ending.reason, logging.INFO)
    if not logger.isEnabledFor(level):
        return
    shown = f": {ending.text[: call.text_chars]}" if call.text_chars else ""
    fields = _fields(call, texts, sequence)
    fields |= {"output_tokens": ending.num_generated, "stop_reason": ending.reason.name}
    fields |= _durations(call, ending)
    logger.log(
        level,
        "%s generated %d tokens before %s, output %d bytes%s",
        *(kind, ending.num_generated, ending.reason.name, ending.num_bytes, shown),
        extra={FIELDS: fields},
    )


def _log_error(
    call: CallLog, kind: str, texts: list[str], error: BaseException, sequence: Sequence | None = None
) -> None:
    """Log what the client is told, except the part that may quote the request. The cause of an unforeseen
    error is logged where the error becomes a status."""
    if not logger.isEnabledFor(logging.ERROR):
        return
    code, told = Code.INTERNAL, ""
    if isinstance(error, RouterError):
        code, told = error.code, f": {error.log_text[:MAX_ERROR_CHARS]}"
    fields = _fields(call, texts, sequence) | {"code": code.name} | _durations(call, None)
    logger.error("%s failed with %s%s", kind, code.name, told, extra={FIELDS: fields})


def _fields(call: CallLog, texts: list[str], sequence: Sequence | None) -> dict[str, Scalar]:
    """Return the fields that describe the request and its ids. `texts` are the inputs that the line is
    about."""
    request = call.request
    fields: dict[str, Scalar] = {"request_id": call.request_id, "correlation_id": call.correlation_id}
    if request.HasField("prefix_id"):
        fields["prefix_id"] = request.prefix_id[:MAX_ID_CHARS]
    if request.HasField("adapter_id"):
        fields["adapter_id"] = request.adapter_id[:MAX_ID_CHARS]
    if call.text_chars and len(texts) == 1:
        fields["input"] = texts[0][: call.text_chars]
    fields["input_bytes"] = sum(len(text.encode()) for text in texts)
    fields["params"] = call.params_text
    if sequence is not None:
        fields["input_tokens"] = sequence.num_input_tokens
        if sequence.num_virtual_tokens:
            fields["virtual_tokens"] = sequence.num_virtual_tokens
        if not sequence.sampling.greedy:
            fields["seed"] = sequence.sampling.seed
    return fields


def _durations(call: CallLog, ending: _Ending | None) -> dict[str, Scalar]:
    """Return the known durations in milliseconds."""
    seconds: dict[str, float] = {}
    if call.validation_s is not None:
        seconds["validation_time"] = call.validation_s
    if ending is not None and ending.timings is not None:
        seconds["queue_time"] = ending.timings.queue_s
        seconds["inference_time"] = ending.timings.inference_s
        if ending.num_generated:
            seconds["time_per_token"] = ending.timings.inference_s / ending.num_generated
    seconds["total_time"] = time.monotonic() - call.started_at
    return {f"{name}_ms": round(1000 * value, 3) for name, value in seconds.items()}


def _shown(message: Message) -> Iterator[str]:
    """Yield the fields that are set. Only numbers and names are shown, even of fields that the message may
    get later."""
    for descriptor, value in message.ListFields():
        if isinstance(value, Message):
            yield from _shown(value)
        elif isinstance(value, str):
            yield f"{descriptor.name}={len(value.encode())} bytes"
        elif descriptor.enum_type is not None:
            known = descriptor.enum_type.values_by_number.get(value)
            yield f"{descriptor.name}={known.name if known else value}"
        elif isinstance(value, float):
            yield f"{descriptor.name}={value:.6g}"
        elif isinstance(value, bool | int):
            yield f"{descriptor.name}={str(value).lower()}"
        else:
            yield f"{descriptor.name}={len(value)}"
