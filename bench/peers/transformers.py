"""The same model and the same numbers of tokens through transformers' `generate`. Run as a child process with
a PeerJob on stdin; prints one JSON object per batch size as soon as it is measured."""

import json
import sys
import time
from dataclasses import dataclass

import torch
from transformers import LlamaForCausalLM


@dataclass(frozen=True)
class PeerJob:
    model: str
    """Directory of the checkpoint."""
    batch_sizes: list[int]
    input_tokens: int
    new_tokens: int
    repeat: int
    seed: int
    dtype: str = "float32"


def measure(model: LlamaForCausalLM, job: PeerJob, batch_size: int) -> dict[str, float]:
    """Medians over the repeats. The time to the first token is that of a run of its own that ends there."""
    generator = torch.Generator().manual_seed(job.seed)
    size = (batch_size, job.input_tokens)
    input_ids = torch.randint(2, model.config.vocab_size, size, generator=generator)  # [batch, input_tokens]
    _generate(model, input_ids, 2)
    first = [_generate(model, input_ids, 1) for _ in range(job.repeat)]
    whole = [_generate(model, input_ids, job.new_tokens) for _ in range(job.repeat)]
    first_s, whole_s = _median(first), _median(whole)
    return {
        "batch_size": batch_size,
        "first_token_ms": first_s * 1e3,
        "token_ms": (whole_s - first_s) / (job.new_tokens - 1) * 1e3,
        "output_tokens_per_s": batch_size * job.new_tokens / whole_s,
        "decode_tokens_per_s": batch_size * (job.new_tokens - 1) / (whole_s - first_s),
    }


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _generate(model: LlamaForCausalLM, input_ids: torch.Tensor, new_tokens: int) -> float:
    """Seconds."""
    start = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
        )  # [batch, input_tokens + new_tokens]
    assert output.shape[1] == input_ids.shape[1] + new_tokens
    return time.perf_counter() - start


def main() -> None:
    job = PeerJob(**json.load(sys.stdin))
    model = LlamaForCausalLM.from_pretrained(job.model, dtype=getattr(torch, job.dtype)).eval()
    for batch_size in job.batch_sizes:
        print(json.dumps(measure(model, job, batch_size)), flush=True)


if __name__ == "__main__":
    main()
