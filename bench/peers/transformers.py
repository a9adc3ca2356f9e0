"""Runs transformers' `generate`; a worker process whose arguments are the model's directory and the type of
its weights."""

import sys
import time
from typing import Any

import torch
from transformers import LlamaForCausalLM

from bench import worker


def generate(model: LlamaForCausalLM, question: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds for all sequences together."""
    generator = torch.Generator().manual_seed(question["seed"])
    size = (question["batch"], question["input_tokens"])
    input_ids = torch.randint(2, model.config.vocab_size, size, generator=generator)  # [batch, input_tokens]
    new_tokens = question["new_tokens"]
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
    seconds = time.perf_counter() - start
    assert output.shape[1] == input_ids.shape[1] + new_tokens
    return {"seconds": seconds}


def main() -> None:
    directory, dtype = sys.argv[1:]
    model = LlamaForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    worker.serve(lambda question: generate(model, question))


if __name__ == "__main__":
    main()
