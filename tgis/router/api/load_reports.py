"""Reports the service's load to load balancers in the formats of ORCA, Open Request Cost Aggregation."""

import base64
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from enum import Enum

from google.protobuf.json_format import MessageToDict

from tgis.pb.orca_pb2 import OrcaLoadReport
from tgis.router.metrics.engine_load import EngineLoad
from tgis.router.metrics.request_rates import RequestRates

REQUEST_KEY = "endpoint-load-metrics-format"
"""Key with which a client asks for the load: a header over HTTP, metadata over gRPC."""
KEY = "endpoint-load-metrics"
BINARY_KEY = "endpoint-load-metrics-bin"


class LoadFormat(Enum):
    TEXT = "TEXT"
    JSON = "JSON"
    BIN = "BIN"


class LoadReports:
    """Current reports of the whole service, with the names of vLLM's."""

    def __init__(
        self, read_load: Callable[[], Awaitable[EngineLoad]], rates: RequestRates, max_batch_size: int
    ) -> None:
        self._read_load = read_load
        self._rates = rates
        self._max_batch_size = max_batch_size

    async def read(self) -> OrcaLoadReport:
        load = await self._read_load()
        rates = await self._rates.read()
        num_requests = load.num_running + load.num_waiting
        return OrcaLoadReport(
            rps_fractional=rates.ended,
            eps=rates.errors,
            application_utilization=max(load.cache_usage, num_requests / self._max_batch_size),
            named_metrics={
                "kv_cache_usage_perc": load.cache_usage,
                "num_requests_running": load.num_running,
                "num_requests_waiting": load.num_waiting,
            },
        )


def requested_format(metadata: Iterable[tuple[str, str | bytes]]) -> LoadFormat | None:
    """Return the format in which a client asks for the load, or None if it does not ask for a known one."""
    value = next((value for key, value in metadata if key == REQUEST_KEY), "")
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    return LoadFormat.__members__.get(text.strip().upper())


def write_report(report: OrcaLoadReport, form: LoadFormat) -> str:
    """Return the value of KEY."""
    return f"{form.value} {_WRITERS[form](report)}"


def _write_text(report: OrcaLoadReport) -> str:
    fields = MessageToDict(report, preserving_proto_field_name=True)
    return ", ".join(f"{name}={value}" for name, value in _flatten(fields))


def _flatten(fields: Mapping[str, object]) -> Iterable[tuple[str, object]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{key}", each) for key, each in sorted(value.items()))
        else:
            yield name, value


def _write_json(report: OrcaLoadReport) -> str:
    return json.dumps(MessageToDict(report, preserving_proto_field_name=True))


def _write_binary(report: OrcaLoadReport) -> str:
    return base64.b64encode(report.SerializeToString()).decode()


_WRITERS: Mapping[LoadFormat, Callable[[OrcaLoadReport], str]] = {
    LoadFormat.TEXT: _write_text,
    LoadFormat.JSON: _write_json,
    LoadFormat.BIN: _write_binary,
}
