"""Implements `xds.service.orca.v3.OpenRcaService`: streams reports of the load, outside of other calls."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import grpc

from tgis.pb import orca_pb2 as pb
from tgis.pb.orca_pb2_grpc import OpenRcaServiceServicer
from tgis.router.api.load_reports import LoadReports

NAME = "xds.service.orca.v3.OpenRcaService"
MIN_INTERVAL_S, MAX_INTERVAL_S = 1.0, 86400.0

Context = grpc.aio.ServicerContext[Any, Any]


class LoadService(OpenRcaServiceServicer):
    def __init__(self, reports: LoadReports) -> None:
        self._reports = reports

    async def StreamCoreMetrics(
        self, request: pb.OrcaLoadReportRequest, context: Context
    ) -> AsyncGenerator[pb.OrcaLoadReport, None]:
        interval = request.report_interval
        interval_s = interval.seconds + interval.nanos / 1e9
        while True:
            yield await self._reports.read()
            await asyncio.sleep(min(max(interval_s, MIN_INTERVAL_S), MAX_INTERVAL_S))
