"""Sizes of captured steps."""

from tgis.shard.runner.graph_sizes import GraphSize


def of_rows(*numbers: int) -> list[GraphSize]:
    """Return sizes of steps without prompts."""
    return [GraphSize(number) for number in numbers]
