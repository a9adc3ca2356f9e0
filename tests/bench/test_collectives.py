"""The bench of collectives, with few sums."""

import sys

import pytest

from bench import collectives

# Benches are no part of the service: make test-all runs their tests.
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("ranks", [2, 3])
def test_reports_every_tensor(
    ranks: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["collectives", "--ranks", str(ranks), "--rounds", "1"])
    collectives.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{ranks} ranks"
    assert len(lines) == 4 + len(collectives.SHAPES)
