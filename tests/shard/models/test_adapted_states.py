"""Adapters and soft prompts on models with recurrent layers behind the scheduler, with steps in flight, few
blocks and states, equal prompts with other adapters, cancelled sequences and lost shards: every result is
that of a sequence which runs alone."""

import random
from pathlib import Path

import pytest
import torch

from tests.support.shard.adapter_cases import AdapterCase
from tests.support.shard.driver import configure
from tests.support.shard.pipelined import PipelinedService
from tests.support.shard.scheduled import compute_alone, draw_ids, greedy, results
from tgis.router.sequence import AdapterInfo, AdapterKind, CallAdapters
from tgis.shard.runner.interface import ModelRunner
from tgis.shard.startup.load import load

CASES = ("granitemoehybrid", "qwen3_next", "mamba2", "nemotron_h_experts", "falcon_h1")
NUM_VIRTUAL = 6


def start(case: str, root: Path) -> tuple[ModelRunner, list[CallAdapters]]:
    """Return a model with two LoRA adapters and a soft prompt, and the kinds of calls."""
    adapted = AdapterCase(case, root)
    options = {"block_size": 4, "kv_cache_tokens": 1024, "dtype": "float32"}
    runner = load(configure(adapted.directory, uds_path=adapted.copies.uds_path, **options))
    torch.manual_seed(1)
    copies = adapted.copies.put("prompt", {"decoder": torch.randn(NUM_VIRTUAL, 32) * 0.3}, {})
    for digest in copies.digests:
        runner.adapters.load(digest)  # type: ignore[attr-defined]
    *digests, prompt_digest = copies.digests
    loras = [AdapterInfo(AdapterKind.LORA, digest) for digest in digests]
    prompt = AdapterInfo(AdapterKind.SOFT_PROMPT, prompt_digest, num_decoder_tokens=NUM_VIRTUAL)
    return runner, [
        CallAdapters(),
        *(CallAdapters(lora=lora) for lora in loras),
        CallAdapters(soft_prompt=prompt),
        CallAdapters(soft_prompt=prompt, lora=loras[0]),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_results_never_depend_on_other_adapters(case: str, tmp_path: Path) -> None:
    runner, kinds = start(case, tmp_path)
    num_preemptions = num_hits = 0
    for seed in range(12):
        rng = random.Random(seed)
        num_tokens = rng.choice([3, 12, 20])
        prefix = draw_ids(seed, rng.choice([16, 33, 40]))
        asked = [(prefix[: rng.randint(1, 40)] + draw_ids(i, 5), rng.choice(kinds)) for i in range(8)]
        asked += [(asked[0][0], kind) for kind in kinds]
        expected = [compute_alone(runner, ids, num_tokens, kind) for ids, kind in asked]
        runner.reset()
        service = PipelinedService(
            runner,
            num_blocks=rng.choice([19, 20, 24]),
            num_states=rng.choice([1, 3, 9, 16]),
            interval=rng.choice([4, 8, 16]),
            max_prompt_tokens=rng.choice([0, 1, 5]),
            seed=seed,
            depth=rng.choice([1, 2]),
            cancelling=rng.choice([0, 0.02]),
            losing=rng.choice([0, 0.02]),
        )
        sequences = [greedy(ids, num_tokens, kind) for ids, kind in asked]
        service.run_all(sequences)
        for sequence, result, whole in zip(sequences, results(service, sequences), expected, strict=True):
            parts = zip(whole, result, strict=True)
            assert all(
                full[: len(part)] == part if sequence in service.cancelled else full == part
                for full, part in parts
            )
        num_preemptions += service.scheduler.num_preemptions
        num_hits += service.scheduler.num_cache_hits
    assert num_preemptions
    assert num_hits
