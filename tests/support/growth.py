"""How much a process grows per request, measured so that a small leak cannot hide and noise does not look
like one."""

from collections.abc import Callable

import psutil

NUM_SAMPLES = 100


def growth_per_request(pid: int, num_requests: int, serve: Callable[[int], None]) -> tuple[float, float]:
    """Bytes of resident memory, by least squares over the second half of the samples; and the memory at the
    end. `serve` makes that many requests of all that are asked for."""
    process, share = psutil.Process(pid), num_requests // NUM_SAMPLES
    samples = []
    for _ in range(NUM_SAMPLES):
        serve(share)
        samples.append(process.memory_info().rss)
    return slope(samples[NUM_SAMPLES // 2 :]) / share, samples[-1]


def slope(values: list[int]) -> float:
    """Of the line through them that fits best, per value."""
    middle, mean = (len(values) - 1) / 2, sum(values) / len(values)
    covariance = sum((i - middle) * (value - mean) for i, value in enumerate(values))
    return covariance / sum((i - middle) ** 2 for i in range(len(values)))
