"""Builds and runs the engine in this process, from the link to the shards up to the claims."""

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from tgis.config.processes import RouterConfig
from tgis.pb import shard_pb2
from tgis.router.adapters.registry import AdapterRegistry
from tgis.router.adapters.residency import AdapterResidency
from tgis.router.engine.claims import Claims, ConcurrencyLimit, LocalHandle, is_encoder_decoder
from tgis.router.engine.engine import Engine, TimeLimits
from tgis.router.engine.handle import EngineHandle, LimitedWork
from tgis.router.errors import StartupError
from tgis.router.metrics.gauges import GaugeValues
from tgis.router.metrics.metrics import Metrics
from tgis.router.scheduling.block_pool import BlockPool
from tgis.router.scheduling.proposers.interface import Proposer
from tgis.router.scheduling.proposers.prompt_lookup import PromptLookup
from tgis.router.scheduling.proposers.shard_drafts import ShardDrafts
from tgis.router.scheduling.scheduler import Scheduler
from tgis.router.scheduling.state_pool import StatePool, choose_interval
from tgis.router.scheduling.token_budget import TokenBudget
from tgis.router.shards.client import ShardClient
from tgis.router.shards.link import open_link

if TYPE_CHECKING:
    from tgis.router.engine.kv_events import KvEvents

logger = logging.getLogger(__name__)

SPECULATION = "speculation is on: at most %d draft tokens per sequence and step, %s"


class LocalEngine:
    """EngineHost of an engine in this process."""

    def __init__(self, config: RouterConfig, metrics: Metrics, on_ready: Callable[[bool], None]) -> None:
        """`on_ready` is called when the shards connect, when they are lost and when they return."""
        self._config = config
        self._metrics = metrics
        self._on_ready = on_ready
        self._concurrency = {work: ConcurrencyLimit(config.max_concurrent_requests) for work in LimitedWork}
        metrics.permits_limit.follow(lambda: config.max_concurrent_requests)
        self._link = open_link(config)
        self._shards = ShardClient(self._link)
        metrics.replaced_kernels.follow(lambda: {(name,): 1 for name in self._shards.replaced_kernels})
        self._adapters = AdapterRegistry(AdapterResidency(self._shards, metrics), metrics)
        self.claims = Claims(self._concurrency, self._adapters)
        self.handle: EngineHandle = LocalHandle(self.claims)
        self._engine: Engine | None = None
        self._kv_events = _open_kv_events(config)

    @property
    def num_live(self) -> int:
        return 0 if self._engine is None else self._engine.num_live

    async def start(self) -> None:
        config = self._config
        metrics = self._metrics
        info = await self._adapters.start()
        _check_capacity(config, info)
        budget = TokenBudget(config.max_step_tokens, config.decode_step_ms / 1000)
        proposer = _open_proposer(config, info, budget)
        if isinstance(proposer, ShardDrafts):
            metrics.speculator_active.follow(lambda: proposer.is_active)
        pool = _open_pool(config, info)
        scheduler = Scheduler(
            pool, config.max_batch_size, info.rope_switch_len, proposer, config.reserve_output
        )
        self._engine = Engine(
            self._adapters.residency,
            scheduler,
            metrics,
            budget=budget,
            steps_in_flight=config.steps_in_flight,
            time_limits=_time_limits(config),
            on_ready=self._on_ready,
        )
        if self._kv_events is not None:
            self._kv_events.follow(self._engine.cache_recorder)
        self.claims.attach(self._engine, info)
        generation = self._concurrency[LimitedWork.GENERATION]
        metrics.permits_used.follow(lambda: generation.num_used)
        metrics.follow_resource("permit", generation.resource_count)
        tokenization = self._concurrency[LimitedWork.TOKENIZATION]
        metrics.resource_counts["tokenize permit"] = tokenization.resource_count

    async def run(self) -> None:
        assert self._engine is not None, "it has been started"
        watching = asyncio.create_task(self._link.watch())
        try:
            await self._engine.run()
        finally:
            watching.cancel()
            self._engine.scheduler.abandon_steps()

    async def gauges(self) -> list[GaugeValues]:
        return []

    def give_up(self) -> None:
        if self._engine is not None:
            logger.error(
                "the shards will not be restarted; requests ended with an error: %d", self._engine.num_live
            )
            self._engine.give_up()

    async def close(self) -> None:
        if self._kv_events is not None:
            self._kv_events.close()
        await self._shards.close()


def _time_limits(config: RouterConfig) -> TimeLimits:
    return TimeLimits(
        recovery_s=config.recovery_timeout,
        first_token_s=config.first_token_timeout,
        next_token_s=config.next_token_timeout,
        queue_s=config.max_queue_time,
    )


def _open_pool(config: RouterConfig, info: shard_pb2.InfoResponse) -> BlockPool:
    states = None
    if info.num_states:
        assert config.max_sequence_length is not None, "the launcher says how long a sequence may be"
        interval = choose_interval(info.num_states, config.max_sequence_length, info.block_size)
        states = StatePool(info.num_states, interval)
        logger.info(
            "%d slots for states of sequences, with snapshots every %d tokens", info.num_states, interval
        )
    return BlockPool(info.num_blocks, info.block_size, states=states)


def _open_proposer(
    config: RouterConfig, info: shard_pb2.InfoResponse, budget: TokenBudget
) -> Proposer | None:
    max_drafts = info.max_drafts if config.speculate is None else config.speculate
    if not max_drafts:
        return None
    if info.max_drafts:
        max_drafts = min(max_drafts, info.max_drafts)
        logger.info(SPECULATION, max_drafts, "proposed by the shards' speculator")
        return ShardDrafts(max_drafts, budget.predict, info.max_drafting_rows or None)
    if info.num_states:
        logger.warning(
            "--speculate has no effect without --speculator: the model keeps a state, which only drafts of a "
            "speculator roll back"
        )
        return None
    logger.info(SPECULATION, max_drafts, "copied from the sequence's own tokens, because --speculate is set")
    return PromptLookup(max_drafts, budget.predict)


def _open_kv_events(config: RouterConfig) -> "KvEvents | None":
    """Return the publisher of cache events, if there is an endpoint. Raises StartupError."""
    if config.kv_events_endpoint is None:
        return None
    try:
        from tgis.router.engine.kv_events import KvEvents
    except ImportError as error:
        raise StartupError("--kv-events-endpoint needs pyzmq: pip install 'tgis-next[kv-events]'") from error
    return KvEvents(config.kv_events_endpoint, config.kv_events_replay_endpoint, config.kv_events_topic or "")


def _check_capacity(config: RouterConfig, info: shard_pb2.InfoResponse) -> None:
    """Check that a sequence of maximum length fits into the cache. Otherwise, it would wait forever. Raises
    StartupError."""
    max_sequence_length = config.max_sequence_length
    assert max_sequence_length is not None, "the launcher says how long a sequence may be"
    # The last token is never computed. An encoder-decoder model keeps input and output in separate blocks,
    # so it may need one more block.
    needed = -(-(max_sequence_length - 1) // info.block_size) + is_encoder_decoder(info)
    if info.num_blocks < needed:
        raise StartupError(
            f"max_sequence_length {max_sequence_length} takes {needed} cache blocks of {info.block_size} "
            f"tokens, but the shards have only {info.num_blocks}"
        )
