"""Accounts for generation calls: every call, refusal, failure and finished input is counted and timed once,
at the moment and under the labels of TGIS."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from tgis.router.errors import OverloadedError, RequestError, RouterError
from tgis.router.events import Output
from tgis.router.metrics import Metrics
from tgis.router.sequence import Sequence
from tgis.router.validation import Request

MISSING_REQUEST = "missing request"


class Call:
    """One call from its start to its end."""

    def __init__(self, metrics: Metrics, kind: str, num_inputs: int) -> None:
        """`kind` is single, batch or stream."""
        self._metrics, self._kind, self._started_at = metrics, kind, time.monotonic()
        metrics.request_count.add(kind)
        if num_inputs:
            metrics.request_input_count.add(amount=num_inputs)

    @contextmanager
    def counting_failures(self) -> Iterator[None]:
        """An error that passes through is counted once, under the label of its kind."""
        failure = self._metrics.request_failure
        try:
            yield
        except RequestError as error:
            if str(error) != MISSING_REQUEST:  # TGIS does not count this one
                failure.add("validation")
            raise
        except OverloadedError:
            failure.add("conc_limit")
            raise
        except RouterError:
            failure.add("generate")
            raise

    def accept(self, request: Request, sequences: list[Sequence]) -> None:
        """All inputs have been validated."""
        metrics = self._metrics
        metrics.request_validation_duration.observe(time.monotonic() - self._started_at)
        for sequence in sequences:
            metrics.request_input_length.observe(sequence.prompt_len)
            metrics.request_max_new_tokens.observe(request.stopping.max_new_tokens)

    def finish(self, sequence: Sequence, last: Output) -> None:
        """An input has ended with a stop reason."""
        metrics, timings, num_generated = self._metrics, last.timings, last.num_generated
        assert timings is not None, "the last output has timings"
        metrics.request_success.add(last.reason.name, self._kind)
        metrics.request_duration.observe(time.monotonic() - self._started_at)
        metrics.request_generated_tokens.observe(num_generated)
        metrics.request_total_tokens.observe(sequence.prompt_len + num_generated)
        if num_generated:
            metrics.request_inference_duration.observe(timings.inference_s)
            metrics.request_mean_time_per_token_duration.observe(timings.inference_s / num_generated)
