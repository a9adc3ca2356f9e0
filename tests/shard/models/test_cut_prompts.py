"""Prompts that are cut at every length, around ends of blocks, chunks and windows, against transformers'
whole forward pass."""

from pathlib import Path

import pytest
import torch

from tests.support.shard.checkpoints import write_model
from tests.support.shard.driver import Request, Router, configure
from tests.support.shard.family_cases.llamas import CASES
from tests.support.shard.family_oracle import load_model
from tests.support.shard.messages import GREEDY
from tests.support.shard.stepping import Stepper, load
from tgis.shard.startup.load import load as start

IDS = [3 + 7 * i % 90 for i in range(23)]


@pytest.mark.parametrize("case", ["llama4_text", "ministral3_tied_window", "smollm3_untied_window", "olmo3"])
def test_equals_transformers(case: str, tmp_path: Path) -> None:
    config = CASES[case]()
    write_model(tmp_path, config)
    with torch.inference_mode():
        expected = load_model(tmp_path, config)(torch.tensor([IDS])).logits[0]
    model = load(tmp_path)
    for cut in range(1, len(IDS)):
        stepper = Stepper(model, block_size=(4, 16)[cut % 2])
        parts = [stepper.step({0: (IDS[:cut], 0)})[0], stepper.step({0: (IDS, cut)})[0]]
        torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ["ministral3", "smollm3"])
def test_steps_are_captured(case: str, tmp_path: Path) -> None:
    """Query scales and layers without a rotary embedding use kernels only."""
    write_model(tmp_path, CASES[case]())
    runner = start(configure(tmp_path))
    Router(runner, seed=1).run([Request(IDS, 3, sampling=GREEDY)])
    assert runner.forward.find_graph(1) is not None
