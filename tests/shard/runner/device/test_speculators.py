"""Compares speculators on an emulated device with plain models of them, and outputs with those of the CPU
without a speculator."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.cuda.capturing_device import CapturingDevice
from tests.support.cuda.late_device import LateDevice
from tests.support.cuda.late_platform import late_platform
from tests.support.shard.driver import configure
from tests.support.shard.portable import plain
from tests.support.shard.speculator_scene import VOCAB_SIZE, Base, Recorder, check_outputs, write_base
from tests.support.shard.speculators import Heads, make_medusa, make_mlp
from tgis.shard.collectives import CPU
from tgis.shard.runner.device.model_runner import DeviceModelRunner
from tgis.shard.startup.load import load


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return write_base(tmp_path_factory.mktemp("base"), plain(CPU))


MAKERS: dict[str, Callable[[Base], Heads]] = {
    "mlp": lambda base: make_mlp(base.texts, VOCAB_SIZE),
    "mlp_tied_scaled": lambda base: make_mlp(base.texts, VOCAB_SIZE, True, True, 4, prefix=""),
    "medusa": lambda base: make_medusa(base.texts, VOCAB_SIZE),
}


def load_runner(base: Base, speculator: Path, device: LateDevice, **options: Any) -> DeviceModelRunner:
    config = configure(base.directory, speculator=str(speculator), **options)
    runner = load(config, on=late_platform(device))
    assert isinstance(runner, DeviceModelRunner)
    return runner


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("is_captured", [False, True])
def test_proposals_are_the_plain_models_and_outputs_do_not_change(
    base: Base, kind: str, is_captured: bool, tmp_path: Path
) -> None:
    heads = MAKERS[kind](base)
    graphs = "8" if is_captured else "0"
    device = CapturingDevice() if is_captured else LateDevice()
    runner = load_runner(base, heads.write(tmp_path), device, cuda_graphs=graphs)
    recorder = Recorder(runner)
    router = check_outputs(runner, base, tolerance=1e-4)
    assert router.num_right > 30
    print({r.path for r in router.responses})
    assert all(proposed or len(known) == 1 for known, proposed in recorder.proposed)
    for known, proposed in recorder.proposed:
        if proposed:
            (text, *_) = (text for text in base.texts if text.token_ids[: len(known)] == known)
            assert proposed == heads.propose(text.states[len(known) - 2], known[-1], len(proposed))
