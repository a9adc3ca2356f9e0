"""Measures the machine's limits repeatedly between other measurements, in a process that keeps running."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bench import worker
from bench.limits import Rates

SECONDS = 0.2
INSTRUCTION_SECONDS = (
    0.05  # the result does not depend on the memory's latency, so a smaller buffer is enough
)
TIMEOUT_S = 60.0
MODULE = "bench.probe"

Probe = Callable[[], Rates]


@contextmanager
def probing() -> Iterator[Probe]:
    with worker.start(MODULE) as child:

        def probe() -> Rates:
            return Rates(**child.ask({}, TIMEOUT_S))

        probe()
        yield probe


def highest(first: Rates, second: Rates) -> Rates:
    """Return the higher rate of each kind."""
    return Rates(
        max(first.read, second.read),
        max(first.gemm, second.gemm),
        _higher(first.bfloat16, second.bfloat16),
        _higher(first.int8, second.int8),
    )


def _higher(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else max(first, second)


def main() -> None:
    from bench.instructions import PAIRS, QUADS
    from bench.machine import Limits

    limits = Limits()

    def answer(_: dict[str, Any]) -> dict[str, Any]:
        return {
            "read": limits.read(SECONDS),
            "gemm": limits.gemm(SECONDS),
            "bfloat16": limits.multiply(PAIRS, INSTRUCTION_SECONDS),
            "int8": limits.multiply(QUADS, INSTRUCTION_SECONDS),
        }

    worker.serve(answer)


if __name__ == "__main__":
    main()
