"""Seeds of random tests."""

import pytest


def seed_ranges(quick: int, total: int) -> pytest.MarkDecorator:
    """Return a parametrization of `seeds`: `make test` tries the first, `make test-all` all."""
    others = pytest.param(range(quick, total), id="others", marks=pytest.mark.slow)
    return pytest.mark.parametrize("seeds", [pytest.param(range(quick), id="first"), others])
