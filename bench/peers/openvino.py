"""Runs OpenVINO GenAI's continuous batching; a worker process in an environment that has it. Arguments: the
model's directory, the number of threads, and the types of arithmetic and cache; default leaves the choice to
OpenVINO."""

import random
import sys
import time
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

from bench import worker

CACHE_GB = 1
FIRST_ID = 2


class Pipeline:
    def __init__(self, directory: str, num_threads: int, arithmetic: str, cache_type: str):
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.enable_prefix_caching = False
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": num_threads}
        asked = {"INFERENCE_PRECISION_HINT": arithmetic, "KV_CACHE_PRECISION": cache_type}
        properties |= {name: value for name, value in asked.items() if value != "default"}
        self._pipeline = genai.ContinuousBatchingPipeline(directory, scheduler, "CPU", properties)
        self._vocab_size = len(self._pipeline.get_tokenizer().get_vocab())

    def generate(self, question: dict[str, Any]) -> dict[str, Any]:
        source, new_tokens = random.Random(question["seed"]), question["new_tokens"]
        prompts = [self._draw(source, question["input_tokens"]) for _ in range(question["batch"])]
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = new_tokens
        config.ignore_eos, config.do_sample = True, False
        start = time.perf_counter()
        results = self._pipeline.generate(prompts, [config] * len(prompts))
        seconds = time.perf_counter() - start
        assert all(len(result.m_generation_ids[0]) == new_tokens for result in results)
        return {"seconds": seconds}

    def _draw(self, source: random.Random, count: int) -> openvino.Tensor:
        ids = [source.randrange(FIRST_ID, self._vocab_size) for _ in range(count)]
        return openvino.Tensor(np.array([ids], np.int64))  # [1, count]


def main() -> None:
    directory, num_threads, arithmetic, cache_type = sys.argv[1:]
    pipeline = Pipeline(directory, int(num_threads), arithmetic, cache_type)
    worker.serve(pipeline.generate)


if __name__ == "__main__":
    main()
