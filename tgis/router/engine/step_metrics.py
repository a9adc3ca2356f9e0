"""Counts and times steps in TGIS's terms, and exports the scheduler's state. The prompts of a step count as
one prefill batch and its decode rows as one next_token batch, so a step with both counts as one of each."""

import time
from collections import deque
from typing import NamedTuple

from tgis.router.metrics.metrics import MAKEUP, Metrics
from tgis.router.metrics.token_rate import TokenRate
from tgis.router.scheduling.scheduler import Scheduler
from tgis.router.scheduling.state_pool import StatePool
from tgis.router.scheduling.step import Step
from tgis.router.shards.codec import StepAnswer

PREFILL, NEXT_TOKEN = "prefill", "next_token"


class _SentStep(NamedTuple):
    at: float
    method: str
    parts: list[tuple[str, int]]
    """Methods and numbers of their sequences."""


class StepMetrics:
    """Metrics of steps. The engine must report each step in order: sent, answered and applied, or lost."""

    def __init__(self, scheduler: Scheduler, metrics: Metrics) -> None:
        self._metrics = metrics
        self._sent: deque[_SentStep] = deque()
        self._last_answer_at = 0.0
        self._last_method = NEXT_TOKEN
        self._rate = TokenRate()
        metrics.generation_throughput.follow(lambda: self._rate.read(time.monotonic()))
        metrics.accepted_by_position.add("0", amount=0)  # shown before the first draft
        _follow_scheduler(scheduler, metrics)

    def send(self, step: Step) -> None:
        metrics = self._metrics
        parts = _parts(step)
        self._sent.append(_SentStep(time.monotonic(), parts[0][0], parts))
        for method, num_sequences in parts:
            metrics.batch_count.add(method)
            metrics.batch_size.observe(num_sequences, method)
        if step.num_prompts:
            metrics.batch_next_tokens.observe(step.num_prompt_tokens)
        if step.joins:
            metrics.batch_concatenation_count.add()

    def answer(self, answer: StepAnswer) -> None:
        """Record the answer to the oldest step. The time of a step that was sent early starts when the shards
        answered the previous step."""
        metrics = self._metrics
        now = time.monotonic()
        sent_at, method, parts = self._sent.popleft()
        self._rate.add(len(answer.sampled), now)
        for each, _ in parts:
            metrics.batch_success.add(each)
        if answer.path:
            metrics.steps_by_path.add(answer.path)
        metrics.batch_duration.observe(now - max(sent_at, self._last_answer_at), method, MAKEUP)
        metrics.forward_duration.observe(answer.forward_s, method, MAKEUP)
        for result in answer.drafts:
            metrics.drafted_rows.add()
            for position in range(result.num_accepted):
                metrics.accepted_by_position.add(str(position))
        if metrics.aliases is not None:
            metrics.aliases.observe_step(answer.num_tokens)
        self._last_answer_at = now
        self._last_method = method

    def apply(self) -> None:
        """Record that the last answer has been applied."""
        seconds = time.monotonic() - self._last_answer_at
        self._metrics.tokproc_duration.observe(seconds, self._last_method, MAKEUP)
        self._metrics.publish()

    def lose_all(self) -> None:
        """Count the unanswered steps as failed, because the shards are lost."""
        for step in self._sent:
            for method, _ in step.parts:
                self._metrics.batch_failure.add(method, "connection")
        self._sent.clear()


def _follow_scheduler(scheduler: Scheduler, metrics: Metrics) -> None:
    """Make each scrape read the scheduler's state, so that steps need not update these metrics."""
    metrics.queue_size.follow(lambda: len(scheduler.waiting))
    metrics.queue_tenants.follow(lambda: scheduler.waiting.num_tenants)
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
    metrics.prefix_cache_hit_rate.follow(lambda: _hit_rate(scheduler))
    metrics.queue_uncached_tokens.follow(
        lambda: (1 - _hit_rate(scheduler)) * sum(len(each.token_ids) for each in scheduler.waiting)
    )
    metrics.preemptions.follow(lambda: scheduler.num_preemptions)
    metrics.deferred.follow(lambda: scheduler.num_deferred)
    metrics.drafts.follow(lambda: scheduler.num_drafts)
    metrics.accepted_drafts.follow(lambda: scheduler.num_accepted_drafts)
    metrics.follow_resource("block", scheduler.pool.resource_count)
    metrics.follow_resource("row", scheduler.rows.resource_count)
    if (states := scheduler.pool.states) is not None:
        metrics.follow_resource("state", states.resource_count)
        metrics.state_usage.follow(lambda: _states(scheduler).num_used / _states(scheduler).num_slots)
        metrics.state_snapshots.follow(lambda: _states(scheduler).num_snapshots)


def _states(scheduler: Scheduler) -> StatePool:
    states = scheduler.pool.states
    assert states is not None, "a renewed pool has states if the first one has"
    return states


def _hit_rate(scheduler: Scheduler) -> float:
    return scheduler.num_cache_hits / max(scheduler.num_cache_queries, 1)


def _parts(step: Step) -> list[tuple[str, int]]:
    parts = ((PREFILL, step.num_prompts), (NEXT_TOKEN, step.num_decodes))
    return [(method, num_sequences) for method, num_sequences in parts if num_sequences]
