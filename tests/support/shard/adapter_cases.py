"""Checkpoints of every family with LoRA adapters, and peft's answers."""

from pathlib import Path
from typing import Any

from tests.support.shard.checkpoints import write_model
from tests.support.shard.driver import Request
from tests.support.shard.family_cases.all import CASES
from tests.support.shard.family_oracle import NEW_TOKENS, draw_inputs
from tests.support.shard.relay import Copies
from tests.support.shard.tuned import Tuned, list_targets
from tests.support.shard.tuning_cells import Asked, Write
from tgis.prompts.lora_files import read_adapter_files

ALL_LINEAR = {"r": 4, "target_modules": "all-linear"}
# Layers that peft cannot change: routers whose outputs are not tensors, the layers of other parts of a
# multimodal model, and the last matrices of Mamba layers, which its kernels read.
EXCLUDED: dict[str, Any] = {
    "llama4": ["router"],
    "llama4_text": ["router"],
    "gemma4": r".*vision_tower.*",
    "qwen3_5": r".*visual.*",
    "qwen3_5_moe": r".*visual.*",
    "nemotron_h": ["out_proj"],
    "falcon_h1": ["out_proj"],
    "mamba2": ["out_proj"],
}
# Parameters that "all-linear" omits although they are linear layers.
EXPERTS = ["experts.gate_up_proj", "experts.down_proj", "router.weight"]
EXPERTS_WITHOUT_GATES = ["experts.up_proj", "experts.down_proj", "gate.weight"]
FUSED = {
    **dict.fromkeys(("granitemoe", "granitemoe_swa", "gpt_oss"), EXPERTS),
    **dict.fromkeys(("gemma4", "gemma4_text", "llama4", "llama4_text", "mistral3"), EXPERTS[:2]),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_next", "deepseek_v3"), EXPERTS[:2]),
    "nemotron_h": EXPERTS_WITHOUT_GATES,
}


class AdapterCase:
    """Checkpoint with two adapters, and its answers to a few inputs with each adapter and without one."""

    def __init__(self, name: str, root: Path, write: Write = write_model) -> None:
        self.directory, self.copies = root / name, Copies(str(root / f"{name}-shard"))
        write(self.directory, CASES[name]())
        base = Tuned(self.directory, root)
        self.is_encoder_decoder, self.start_token_id = base.is_encoder_decoder, base.start_token_id
        _, middle, long = draw_inputs()
        self.asked = [Asked(middle, "", base.answer(middle))]
        excluded = EXCLUDED.get(base.model.config.model_type)
        linear = {**ALL_LINEAR, "exclude_modules": excluded}
        both = {"linear": linear, "whole": {**choose_whole(base.model), "exclude_modules": excluded}}
        for seed, (kind, options) in enumerate(both.items()):
            files = root / f"{name}-{kind}"
            tuned = Tuned(self.directory, files, seed, **options)
            tensors, scales = read_adapter_files(files, 1 << 20)
            self.copies = self.copies.put("adapter", tensors, {"scales": scales})
            digest = self.copies.digests[-1]
            inputs = (middle, long) if kind == "linear" else (middle,)
            self.asked += [Asked(ids, digest, tuned.answer(ids)) for ids in inputs]

    def request(self, asked: Asked) -> Request:
        prompt, encoder = asked.token_ids, list[int]()
        if self.is_encoder_decoder:
            prompt, encoder = [self.start_token_id], asked.token_ids
        options = {"details": {"logprobs": True}, "adapter_digest": asked.content}
        return Request(prompt, NEW_TOKENS, encoder_token_ids=encoder, **options)


def choose_whole(model: Any) -> dict[str, Any]:
    """Return options for every linear layer that is a module, and for both ends where a family has its own,
    with different ranks and scales."""
    excluded = EXCLUDED.get(model.config.model_type, ())
    names = [name for name in list_targets(model) if name not in excluded]
    if model.config.is_encoder_decoder:
        names = [name for name in names if name not in ("shared", "embed_tokens")]
    experts = FUSED.get(model.config.model_type)
    if experts and any("expert" in name for name, _ in model.named_parameters()):
        return {"r": 3, "target_modules": names, "target_parameters": experts, "lora_alpha": 5}
    patterns = {"rank_pattern": {names[0]: 6, rf".*\.1\..*{names[-1]}": 2}, "alpha_pattern": {names[-1]: 20}}
    return {"r": 3, "target_modules": names, "use_rslora": True, **patterns}
