"""The machine's limits, measured again and again between other measurements by a process that is there
already."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bench import worker
from bench.limits import Rates

SECONDS = 0.2
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
    """Of either kind."""
    return Rates(max(first.read, second.read), max(first.gemm, second.gemm))


def main() -> None:
    from bench.machine import Limits

    limits = Limits()

    def answer(_: dict[str, Any]) -> dict[str, Any]:
        return {"read": limits.read(SECONDS), "gemm": limits.gemm(SECONDS)}

    worker.serve(answer)


if __name__ == "__main__":
    main()
