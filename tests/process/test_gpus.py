"""Detection of GPUs by device files alone, and the launcher's use of it."""

from pathlib import Path

import pytest

from tgis.config.processes import LauncherConfig
from tgis.launcher import plan as launch_plan
from tgis.process.gpus import count_gpus, has_gpus


@pytest.mark.parametrize(
    ("files", "variable", "expected"),
    [
        (["nvidia0", "nvidiactl"], None, True),
        (["nvidia7"], "7", True),
        (["nvidia0"], "GPU-8f3e", True),
        (["nvidiactl", "nvidia-uvm", "null"], None, False),
        (["nvidia0"], "", False),
        (["nvidia0"], "-1", False),
        (["nvidia0"], "NoDevFiles", False),
        ([], "0", False),
    ],
)
def test_finds_gpus(files: list[str], variable: str | None, expected: bool, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).touch()
    assert has_gpus(variable, tmp_path) is expected


def test_counts_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert count_gpus(tmp_path) == 3
    monkeypatch.setattr(launch_plan, "count_gpus", lambda: 3)
    for listed in ({}, {"nvidia_visible_devices": "all"}):
        assert launch_plan.count_shards(LauncherConfig(sharded=True, **listed), is_cuda=True) == 3


@pytest.mark.parametrize(
    ("device", "has_device", "num_shards"),
    [("auto", True, 2), ("cuda", True, 2), ("cpu", True, 1), ("auto", False, 1)],
)
def test_visible_gpus_count(
    device: str, has_device: bool, num_shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(launch_plan, "has_gpus", lambda variable: has_device and variable == "0,1")
    config = LauncherConfig(model_name=f"{tmp_path}/", device=device, cuda_visible_devices="0,1")
    assert launch_plan.make_plan(config).num_shards == num_shards
