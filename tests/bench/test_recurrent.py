"""The bench of models with recurrent layers, on tiny models."""

import sys
from pathlib import Path

import pytest

from bench import recurrent, shapes

# Benches are no part of the service: make test-all runs their tests.
pytestmark = pytest.mark.slow

TINY = shapes.Shape(2, 64, 4, 2, 16, 128, 600, max_length=64)


def test_reports_every_kind_in_both_arithmetics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(shapes.SHAPES, recurrent.BASE, TINY)
    monkeypatch.setattr(recurrent, "BATCHES", (1, 2))
    monkeypatch.setattr(recurrent, "STEPS", 2)
    monkeypatch.setattr(recurrent, "RATE_SECONDS", 0.01)
    options = ["--prompt", "16", "--rounds", "1", "--cache", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["recurrent", *options])
    recurrent.main()
    text = capsys.readouterr().out
    for name in ("attention", *recurrent.KINDS):
        assert text.count(f"| {name}, ") == len(recurrent.ARITHMETICS)
    for arithmetic in recurrent.ARITHMETICS:
        assert f"--cpu-arithmetic {arithmetic}" in text
