"""How tests are spread over processes."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of a file together, because they share services, and files that share one."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.as_posix()))
