"""Runs vLLM on the CPU; a worker process in an environment that has it. Arguments: the model's directory,
the type of weights and arithmetic, and eager or compiled."""

import random
import sys
import time
from typing import Any

from vllm import LLM, SamplingParams

from bench import worker

FIRST_ID = 2
MAX_LENGTH = 2048


def generate(model: LLM, vocab_size: int, question: dict[str, Any]) -> dict[str, Any]:
    source, new_tokens = random.Random(question["seed"]), question["new_tokens"]
    ids = range(FIRST_ID, vocab_size)
    prompts = [
        {"prompt_token_ids": source.choices(ids, k=question["input_tokens"])}
        for _ in range(question["batch"])
    ]
    greedy = SamplingParams(
        temperature=0, max_tokens=new_tokens, min_tokens=new_tokens, ignore_eos=True, detokenize=False
    )
    start = time.perf_counter()
    results = model.generate(prompts, greedy, use_tqdm=False)
    seconds = time.perf_counter() - start
    assert all(len(result.outputs[0].token_ids) == new_tokens for result in results)
    return {"seconds": seconds}


def main() -> None:
    directory, dtype, steps = sys.argv[1:]
    model = LLM(
        directory,
        dtype=dtype,
        max_model_len=MAX_LENGTH,
        enforce_eager=steps == "eager",  # with compilation, it takes minutes to start
        enable_prefix_caching=False,
    )
    vocab_size = model.llm_engine.model_config.get_vocab_size()
    worker.serve(lambda question: generate(model, vocab_size, question))


if __name__ == "__main__":
    main()
