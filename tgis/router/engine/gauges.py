"""Connects gauges to the scheduler's state. A scrape reads it, so that steps need no work for these
metrics."""

from tgis.router.metrics.metrics import Metrics
from tgis.router.scheduling.scheduler import Scheduler


def show(scheduler: Scheduler, metrics: Metrics) -> None:
    """Connect the metrics to the scheduler, which every scrape from now on reads."""
    metrics.queue_size.follow(lambda: len(scheduler.waiting))
    metrics.batch_current_size.follow(lambda: len(scheduler.running))
    metrics.requests_running.follow(lambda: len(scheduler.running))
    metrics.batch_input_tokens.follow(
        lambda: sum(each.num_input_tokens + each.num_generated for each in scheduler.running)
    )
    metrics.batch_max_remaining_tokens.follow(
        lambda: sum(each.max_tokens - len(each.token_ids) for each in scheduler.running)
    )
    metrics.kv_cache_usage.follow(lambda: scheduler.pool.num_used / scheduler.pool.num_blocks)
    metrics.prefix_cache_queries.follow(lambda: scheduler.num_cache_queries)
    metrics.prefix_cache_hits.follow(lambda: scheduler.num_cache_hits)
    metrics.preemptions.follow(lambda: scheduler.num_preemptions)
    metrics.deferred.follow(lambda: scheduler.num_deferred)
    metrics.drafts.follow(lambda: scheduler.num_drafts)
    metrics.accepted_drafts.follow(lambda: scheduler.num_accepted_drafts)
    metrics.follow_resource("block", scheduler.pool.resource_count)
    metrics.follow_resource("row", scheduler.rows.resource_count)
