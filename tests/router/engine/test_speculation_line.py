"""Tests the line of the start that says whether sequences get drafts, how many, and from where."""

import logging

import pytest

from tgis.config.processes import RouterConfig
from tgis.pb import shard_pb2
from tgis.router.engine.local_engine import _open_proposer
from tgis.router.scheduling.token_budget import TokenBudget

ON = "speculation is on: at most %d draft tokens per sequence and step, "
OWN = ON + "copied from the sequence's own tokens, because --speculate is set"
SHARDS = ON + "proposed by the shards' speculator"


@pytest.mark.parametrize(
    ("speculate", "max_drafts", "line"),
    [
        (None, 0, None),
        (0, 4, None),
        (3, 0, OWN % 3),
        (None, 4, SHARDS % 4),
        (3, 4, SHARDS % 3),
        (9, 4, SHARDS % 4),
    ],
)
def test_the_start_names_the_source_of_drafts(
    speculate: int | None, max_drafts: int, line: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    config = RouterConfig(tokenizer_path="unused", speculate=speculate)
    with caplog.at_level(logging.INFO):
        proposer = _open_proposer(config, shard_pb2.InfoResponse(max_drafts=max_drafts), TokenBudget(64, 0.1))
    assert (proposer is None) == (line is None)
    assert caplog.messages == ([] if line is None else [line])
