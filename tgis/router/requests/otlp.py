"""Sends spans to an OpenTelemetry collector from a bounded queue. A slow, dead or silent collector delays no
call, delays the shutdown by at most `CLOSE_S`, and causes at most one log line per minute."""

import logging
import threading
import time
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from tgis import __version__
from tgis.router.errors import StartupError

logger = logging.getLogger(__name__)

DEFAULT_PORT = 4317
MAX_QUEUED_SPANS = 2048
MAX_BATCH_SPANS = 128  # small, because encoding a batch blocks the event loop
MAX_ATTRIBUTE_CHARS = 256
EXPORT_DELAY_S = 1.0
EXPORT_TIMEOUT_S = 5.0
CLOSE_S = 2.0
WARNING_INTERVAL_S = 60.0


class SpanExport:
    """Exporter of spans to a collector, with a thread that sends them."""

    def __init__(self, endpoint: str, service_name: str, worker: int | None) -> None:
        """Create the exporter. The collector may start later. Raises StartupError for an invalid endpoint."""
        url = _url(endpoint)
        resource = {"service.name": service_name, "service.version": __version__}
        if worker is not None:
            resource["service.instance.id"] = f"router-worker-{worker}"
        self._warnings = _ExportWarnings(url)
        try:
            self._exporter = OTLPSpanExporter(
                url, insecure=url.startswith("http://"), timeout=EXPORT_TIMEOUT_S
            )
            provider = TracerProvider(
                resource=Resource.create(resource),
                span_limits=SpanLimits(max_span_attribute_length=MAX_ATTRIBUTE_CHARS),
                shutdown_on_exit=False,
            )
        # One of OpenTelemetry's own environment variables is invalid.
        except (ValueError, RuntimeError) as error:
            self._warnings.close()
            raise StartupError(f"traces cannot be set up: {error}") from error
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=MAX_QUEUED_SPANS,
            max_export_batch_size=MAX_BATCH_SPANS,
            schedule_delay_millis=EXPORT_DELAY_S * 1000,
        )
        provider.add_span_processor(self._processor)
        self.tracer = provider.get_tracer("tgis", __version__)

    def close(self) -> None:
        """Send queued spans for at most CLOSE_S, and drop the rest."""
        flushing = threading.Thread(target=self._processor.shutdown, name="traces", daemon=True)
        flushing.start()
        flushing.join(CLOSE_S * 0.75)
        if flushing.is_alive():
            self._exporter.shutdown()  # ends the export or the pause that blocks the processor
            flushing.join(CLOSE_S * 0.25)
        if not flushing.is_alive():
            self._warnings.close()


class _ExportWarnings(logging.Handler):
    """Log handler that reduces OpenTelemetry's failure records to one line per WARNING_INTERVAL_S."""

    def __init__(self, url: str) -> None:
        super().__init__(logging.WARNING)
        self._url = url
        self._next_at = 0.0
        self._logger = logging.getLogger("opentelemetry")
        self._logger.addHandler(self)
        self._logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith(("opentelemetry.exporter", "opentelemetry.sdk")):
            return  # other records are about malformed headers of clients
        if (now := time.monotonic()) >= self._next_at:
            self._next_at = now + WARNING_INTERVAL_S
            logger.warning(
                "some traces do not reach %s: %s", self._url, record.getMessage()[:MAX_ATTRIBUTE_CHARS]
            )

    def close(self) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate = True
        super().close()


def _url(endpoint: str) -> str:
    """Return the endpoint as a URL with scheme, host and port only. Raises StartupError."""
    try:
        parts = urlsplit(endpoint if "://" in endpoint else f"http://{endpoint}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or parts.scheme not in ("http", "https") or parts.username is not None:
        raise StartupError("the OTLP endpoint must be host:port, http://host:port or https://host:port")
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port or DEFAULT_PORT}"
