"""Check the log lines written while a checkpoint is read and kernels are compiled."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tgis.shard.checkpoint.progress import CompileProgress, LoadProgress
from tgis.shard.checkpoint.weights import Weights, stack


def fields(caplog: pytest.LogCaptureFixture) -> list[dict[str, float]]:
    return [record.fields for record in caplog.records]  # type: ignore[attr-defined]


def test_a_line_for_ten_percent_or_half_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    now = 0.0
    progress = LoadProgress(1000, lambda: now)
    said = []
    for i in range(100):  # ten bytes of each of a hundred tensors; this rank reads half of them
        now += 0.25 if i < 50 else 6.0
        progress.add(f"tensor {i}", 10, 5)
        said.append(len(caplog.records))
    assert fields(caplog)[0] == {"percent": 10, "bytes": 50, "seconds": 2.5, "gb_per_s": 0.0}
    assert [line["percent"] for line in fields(caplog)[:5]] == [10, 20, 30, 40, 50]
    assert [line["percent"] for line in fields(caplog)[5:7]] == [55, 60], "slow: by time"
    progress.finish()
    assert fields(caplog)[-1] == {"bytes": 500, "seconds": 312.5, "gb_per_s": 0.0}


def test_fast_loading_logs_little(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    progress = LoadProgress(100, lambda: 0.0)
    for i in range(100):
        progress.add(f"tensor {i}", 1, 1)
    assert not caplog.records


def test_counts_the_bytes_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    save_file({"a.weight": torch.ones(8, 4), "b.weight": torch.ones(2, 4)}, tmp_path / "model.safetensors")
    with Weights(tmp_path, {"x": stack("a", "b"), "y": "b"}) as weights:
        weights.find("x.weight", (10, 4)).read(slice(6, 9), slice(0, 2))
        weights.find("y.weight", (2, 4)).read()
    assert [record.message for record in caplog.records] == ["weights read and packed"]
    assert fields(caplog)[0]["bytes"] == (3 * 2 + 2 * 4) * 4


def test_compiling_is_logged_after_a_second_and_every_five(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    progress = CompileProgress()
    for _ in range(16):
        progress.add(0.75, "is kept")
    progress.finish()
    first, *others = caplog.messages
    assert first.endswith(" on an idle machine this takes 10 to 30 seconds, and the code is kept")
    assert others == [
        "compiled 9 kernels in 6.8 s so far",
        "compiled 16 kernels in 12.0 s so far",
        "compiled 16 kernels in 12.0 s",
    ]


def test_little_or_no_compiling_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    progress = CompileProgress()
    progress.finish()
    progress.add(0.9, "is kept")
    progress.finish()
    assert not caplog.records
