"""Describes the load of the engine: when asked, and in the streams of cache events."""

import time

from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from tgis.router.api.http.service_parts import ServiceParts
from tgis.router.metrics.engine_load import INTERVAL_S, EngineLoad

SILENCE_S = 1.0  # time after which an unchanged load is sent again
USAGE_STEP = 0.005  # change of the cache's usage that is worth a record


def scheduler_load(load: EngineLoad, parts: ServiceParts) -> pb.SchedulerLoad:
    capacity = parts.service.engine_info.num_cache_tokens
    return pb.SchedulerLoad(
        num_running_reqs=load.num_running,
        num_waiting_reqs=load.num_waiting,
        num_total_reqs=load.num_running + load.num_waiting,
        num_used_tokens=round(load.cache_usage * capacity),
        max_total_num_tokens=capacity,
        token_usage=load.cache_usage,
        gen_throughput=load.throughput,
        cache_hit_rate=load.hit_rate,
        utilization=load.cache_usage,
        max_running_requests=parts.config.max_batch_size,
        num_waiting_uncached_tokens=load.num_uncached_tokens,
    )


class LoadRecords:
    """Records of one stream of cache events. They repeat the number of the last batch, so that the stream has
    none before its first batch."""

    interval_s = INTERVAL_S

    def __init__(self, parts: ServiceParts) -> None:
        self._parts = parts
        self._sequence: int | None = None
        self._sent: EngineLoad | None = None
        self._looked_at = self._sent_at = 0.0
        self._num_sent = 0

    def follow(self, batch: common_pb2.KvEventBatch) -> None:
        """Repeat the number of this batch from now on."""
        self._sequence = batch.sequence_number

    async def take(self) -> common_pb2.KvEventBatch | None:
        """Return a record if the load has changed or no record was sent for a while."""
        now = time.monotonic()
        if self._sequence is None or now < self._looked_at + INTERVAL_S:
            return None
        self._looked_at = now
        load = await self._parts.load()
        if not self._is_news(load) and now < self._sent_at + SILENCE_S:
            return None
        self._sent, self._sent_at = load, now
        self._num_sent += 1
        return common_pb2.KvEventBatch(
            sequence_number=self._sequence, timestamp=time.time(), load=self._describe(load)
        )

    def _is_news(self, load: EngineLoad) -> bool:
        sent = self._sent
        return sent is None or load[:2] != sent[:2] or abs(load.cache_usage - sent.cache_usage) > USAGE_STEP

    def _describe(self, load: EngineLoad) -> common_pb2.EngineLoad:
        described = scheduler_load(load, self._parts)
        return common_pb2.EngineLoad(
            running_requests=load.num_running,
            waiting_requests=load.num_waiting,
            waiting_uncached_tokens=load.num_uncached_tokens,
            token_usage=load.cache_usage,
            active_token_usage=load.cache_usage,
            gen_throughput=load.throughput,
            cache_hit_rate=load.hit_rate,
            max_running_requests=described.max_running_requests,
            num_used_tokens=described.num_used_tokens,
            max_total_num_tokens=described.max_total_num_tokens,
            sample=self._num_sent,
            load_only=True,
        )
