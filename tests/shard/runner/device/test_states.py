"""States on a late device, with the kernels' twins: a prompt that continues from a snapshot has the tokens of
a prompt without, and the router sends no drafts."""

from pathlib import Path

import pytest

from tests.support.cuda.late_device import LateDevice
from tests.support.cuda.late_platform import late_platform
from tests.support.shard.checkpoints import write_model
from tests.support.shard.driver import configure
from tests.support.shard.family_cases.all import CASES
from tests.support.shard.scheduled import Service, draw_ids, greedy, results
from tgis.config.processes import RouterConfig
from tgis.router.engine.local_engine import _open_proposer
from tgis.router.scheduling.token_budget import TokenBudget
from tgis.shard.startup.load import load

BLOCK, INTERVAL, NEW_TOKENS = 4, 16, 5


@pytest.mark.slow
@pytest.mark.parametrize("case", ["mamba2", "granitemoehybrid", "qwen3_next"])
def test_a_prompt_continues_from_a_snapshot(case: str, tmp_path: Path) -> None:
    write_model(tmp_path, CASES[case]())
    options = {"block_size": BLOCK, "kv_cache_tokens": 1024, "dtype": "float32", "cuda_graphs": "0"}
    runner = load(configure(tmp_path, **options), on=late_platform(LateDevice()))
    service = Service(runner, 200, 16, INTERVAL)
    for length in (5, 17, 33, 47):
        prompt = draw_ids(length, length)
        sequences = [greedy(prompt, NEW_TOKENS) for _ in range(2)]
        before = service.num_computed
        service.run(sequences[:1])
        middle = service.num_computed
        service.run(sequences[1:])
        saved = middle - before - (service.num_computed - middle)
        assert saved == (length - 1) // BLOCK * BLOCK, "all full blocks are found with a state"
        [(first, *_), (second, *_)] = results(service, sequences)
        assert first == second
        assert len(first) == length + NEW_TOKENS


def test_models_with_states_get_no_drafts(tmp_path: Path) -> None:
    """Check that the router proposes none, because a device cannot roll back states."""
    write_model(tmp_path, CASES["mamba2"]())
    runner = load(configure(tmp_path, speculate=3, cuda_graphs="0"), on=late_platform(LateDevice()))
    info = runner.info
    assert info.num_states
    assert (info.max_drafts, info.max_drafting_rows) == (0, 0)
    config = RouterConfig(tokenizer_path="unused", speculate=3)
    assert _open_proposer(config, info, TokenBudget(64, 0.1)) is None
    info.num_states = 0
    assert _open_proposer(config, info, TokenBudget(64, 0.1)) is not None
