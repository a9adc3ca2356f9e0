"""Measures transformers' continuous batching on the same checkpoint, 64 sequences at once."""

import time
from typing import Any

import torch
import transformers

from bench.gpu.inputs.checkpoint import written_checkpoint
from bench.gpu.results import find_figure
from bench.gpu.target import Target

NUM_SEQUENCES, INPUT_TOKENS, NEW_TOKENS = 64, 512, 256


def measure(target: Target, name: str) -> None:
    with written_checkpoint(target, name) as path:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    generate(target, name, model.to(target.device).eval())


def generate(target: Target, name: str, model: transformers.PreTrainedModel) -> None:
    input_tokens, new_tokens = (24, 8) if target.is_rehearsal else (INPUT_TOKENS, NEW_TOKENS)
    size = (2 if target.is_rehearsal else NUM_SEQUENCES, input_tokens)
    input_ids = torch.randint(2, model.config.vocab_size, size).tolist()
    settings = transformers.GenerationConfig(
        max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    generate_batch = getattr(model, "generate_batch", None)
    if generate_batch is None:
        target.recorder.problem("transformers", "this version has no continuous batching")
        return
    try:
        start = time.perf_counter()
        outputs = generate_batch(inputs=input_ids, generation_config=settings, **_limit_cache(target))
        seconds = time.perf_counter() - start
    except Exception as error:  # a failed peer is recorded, and the service is measured without it
        target.recorder.problem("transformers", f"{type(error).__name__}: {error}".splitlines()[0])
        return
    num_tokens = sum(len(output.generated_tokens) for output in outputs.values())
    target.recorder.figure("transformers 64: output", num_tokens / seconds, "tokens/s", "with its warm-up")
    ours = find_figure(target.path, f"{name} stream {NUM_SEQUENCES}: output")
    if ours is not None:
        target.recorder.figure("transformers 64: ratio", ours / (num_tokens / seconds), "", "ours to theirs")


def _limit_cache(target: Target) -> dict[str, Any]:
    """Return the options of a rehearsal, which has little memory for a cache."""
    if not target.is_rehearsal:
        return {}
    limits = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    return {"continuous_batching_config": limits, "warmup": False}
