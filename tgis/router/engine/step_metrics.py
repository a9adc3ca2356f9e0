"""Counts and times the steps in TGIS's terms. Prompt sequences count as a prefill, decode rows as a
next_token, and a step that has both counts as one of each."""

import time
from collections import deque

from tgis.router.metrics.metrics import MAKEUP, Metrics
from tgis.router.scheduling.step import Step

PREFILL, NEXT_TOKEN = "prefill", "next_token"


class StepMeter:
    """Meter of the steps. It must be told when steps are sent, answered, applied and lost, in order."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._sent: deque[tuple[Step, float]] = deque()
        self._last_answer_at = 0.0

    def send(self, step: Step) -> None:
        metrics = self._metrics
        self._sent.append((step, time.monotonic()))
        for method, num_sequences in _parts(step):
            metrics.batch_count.add(method)
            metrics.batch_size.observe(num_sequences, method)
        if step.num_prompts:
            metrics.batch_next_tokens.observe(step.num_prompt_tokens)
        if step.joins:
            metrics.batch_concatenation_count.add()

    def answer(self, step: Step, forward_s: float) -> None:
        """Record the answer to the oldest step. The time of a step sent ahead begins when the shards became
        free for it."""
        metrics, now = self._metrics, time.monotonic()
        _, sent_at = self._sent.popleft()
        for method, _ in _parts(step):
            metrics.batch_success.add(method)
        method = _method(step)
        metrics.batch_duration.observe(now - max(sent_at, self._last_answer_at), method, MAKEUP)
        metrics.forward_duration.observe(forward_s, method, MAKEUP)
        self._last_answer_at = now

    def apply(self, step: Step) -> None:
        """Record that the last answer has been applied."""
        seconds = time.monotonic() - self._last_answer_at
        self._metrics.tokproc_duration.observe(seconds, _method(step), MAKEUP)

    def lose_all(self) -> None:
        """Count the unanswered steps as failed, because the shards are lost."""
        for step, _ in self._sent:
            for method, _ in _parts(step):
                self._metrics.batch_failure.add(method, "connection")
        self._sent.clear()


def _method(step: Step) -> str:
    return PREFILL if step.num_prompts else NEXT_TOKEN


def _parts(step: Step) -> list[tuple[str, int]]:
    parts = ((PREFILL, step.num_prompts), (NEXT_TOKEN, step.num_decodes))
    return [(method, num_sequences) for method, num_sequences in parts if num_sequences]
