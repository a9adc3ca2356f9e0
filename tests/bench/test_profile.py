"""Profiles of steps with only batches or only prompts."""

import sys
from pathlib import Path

import pytest

from bench import profile, shapes

# Benches are no part of the service: make test-all runs their tests.
pytestmark = pytest.mark.slow

TINY = shapes.Shape(2, 64, 4, 2, 16, 128, 600, max_length=64)


@pytest.mark.parametrize(
    ("batch", "prefill", "wanted"),
    [("1,2", "", ["decode of 1", "decode of 2"]), ("", "16", ["prefill of 16"])],
)
def test_steps_of_one_kind_alone(
    batch: str,
    prefill: str,
    wanted: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(shapes.SHAPES, "135m", TINY)
    own = ["--batch", batch, "--prefill", prefill, "--context", "40", "--cache", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["profile", *own])
    profile.main()
    text = capsys.readouterr().out
    assert [name in text for name in wanted] == [True] * len(wanted)
    assert ("prefill" in text) == bool(prefill)
    assert ("decode" in text) == bool(batch)
