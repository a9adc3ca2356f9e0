"""The measurement of soft prompts and adapters: its files against peft, its load against canned responses,
and the whole of it on a tiny service."""

import json
from pathlib import Path

import peft
import pytest
import torch
from transformers import LlamaForCausalLM

from bench import shapes, tuning
from bench.generator import closed_loop, load_processes, new_prompts
from bench.store import ensure_store
from tests.support.canned_service import CannedService, serve
from tgis.pb import generation_pb2 as pb

# Benches are no part of the service: make test-all runs their tests.
pytestmark = pytest.mark.slow

TINY = shapes.Shape(2, 48, 4, 2, 8, 80, 600, max_length=128)


def test_the_store_equals_files_written_by_peft(tmp_path: Path) -> None:
    shapes.write_checkpoint(TINY, tmp_path)
    [prompt], [adapter] = ensure_store(TINY, tmp_path / "store", 1, 5, 1, 3)
    base = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tuned = peft.PeftModel.from_pretrained(base, tmp_path / "store" / adapter)
    names = {name for name, values in tuned.named_parameters() if "lora_B" in name and values.abs().max() > 0}
    assert len(names) == 2 * 7, "all linear layers of both blocks"
    config = peft.PromptTuningConfig.from_pretrained(tmp_path / "store" / prompt)
    assert config.num_virtual_tokens == 5


def test_ids_take_turns() -> None:
    service = CannedService()
    workload = new_prompts(5, 3, soft_prompt_ids=("a", "b"), adapter_ids=("x", "y", "z"))
    with serve(service) as target, load_processes() as generator:
        generator.answers(closed_loop(target, workload, clients=2, num_conversations=6))
    sent = [each for each in service.asked if isinstance(each, pb.SingleGenerationRequest)]
    expected = [("a", "x"), ("b", "y"), ("a", "z"), ("b", "x"), ("a", "y"), ("b", "z")]
    assert sorted((each.prefix_id, each.adapter_id) for each in sent) == sorted(expected)


@pytest.mark.slow
def test_everything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(shapes.SHAPES, "15m", TINY)
    flags = "--shape 15m --dtype float32 --prompts 40 --prompt-tokens 4 --adapters 20 --rank 2".split()
    flags += "--clients 4 --rounds 1 --repeat 1 --adapter-cache-mb 1 --prompt-cache-mb 1".split()
    result = tuning.measure(tuning.parse_options([*flags, "--cache", str(tmp_path)]))
    assert set(result["batches"]) == {"0", "1", "4", "16"}
    cycle = result["cycle"]
    assert cycle["failed"] == 0
    assert cycle["series"]["tgi_prompt_cache_misses"] >= 40
    assert 0 < cycle["memory_mib"]["before"] <= cycle["memory_mib"]["most"]
    assert json.loads(json.dumps(result))
    assert "| 16 |" in tuning.format_result(result)
