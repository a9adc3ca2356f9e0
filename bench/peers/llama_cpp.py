"""Runs llama.cpp; a worker process in an environment that has it. Arguments: the model's file and the number
of threads. Sequences are decoded together, each in its own part of the cache."""

import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import llama_cpp
import numpy as np

from bench import worker

FIRST_ID = 2
MAX_LENGTH = 1280  # tokens of a sequence
MAX_TOKENS = 2048  # tokens of a call


@dataclass
class Engine:
    path: str
    num_threads: int
    _contexts: dict[int, "Sequences"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(self.path.encode(), params)
        assert self._model, "the file cannot be loaded"

    def generate(self, question: dict[str, Any]) -> dict[str, Any]:
        batch, new_tokens = question["batch"], question["new_tokens"]
        if batch not in self._contexts:
            self._contexts[batch] = Sequences(self._model, batch, self.num_threads)
        sequences = self._contexts[batch]
        source, vocab_size = random.Random(question["seed"]), sequences.vocab_size
        prompts = [
            [source.randrange(FIRST_ID, vocab_size) for _ in range(question["input_tokens"])]
            for _ in range(batch)
        ]
        start = time.perf_counter()
        tokens = sequences.generate(prompts, new_tokens)
        seconds = time.perf_counter() - start
        assert all(len(each) == new_tokens for each in tokens)
        return {"seconds": seconds}


class Sequences:
    """Context of llama.cpp for a number of sequences."""

    def __init__(self, model: Any, count: int, num_threads: int):
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = count * MAX_LENGTH, count
        params.n_batch = MAX_TOKENS
        params.n_threads = params.n_threads_batch = num_threads
        self._context = llama_cpp.llama_init_from_model(model, params)
        assert self._context, "there is no context of that size"
        self._batch = llama_cpp.llama_batch_init(MAX_TOKENS, 0, 1)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """Return the new tokens of each prompt, sampled greedily."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)
        generated: list[list[int]] = [[] for _ in prompts]
        length = len(prompts[0])
        at_once = max(1, MAX_TOKENS // length)
        for first in range(0, len(prompts), at_once):
            rows = range(first, min(first + at_once, len(prompts)))
            self._decode([(row, prompts[row]) for row in rows], 0, generated)
        for position in range(length, length + new_tokens - 1):
            self._decode([(row, tokens[-1:]) for row, tokens in enumerate(generated)], position, generated)
        return generated

    def _decode(self, rows: list[tuple[int, list[int]]], position: int, generated: list[list[int]]) -> None:
        """Compute tokens from `position` on, and append the likeliest next token to each row."""
        batch, index = self._batch, 0
        for row, tokens in rows:
            for offset, token in enumerate(tokens):
                batch.token[index], batch.pos[index] = token, position + offset
                batch.n_seq_id[index], batch.seq_id[index][0] = 1, row
                batch.logits[index] = offset == len(tokens) - 1
                index += 1
        batch.n_tokens = index
        status = llama_cpp.llama_decode(self._context, batch)
        assert status == 0, f"llama_decode gave {status}"
        address = llama_cpp.llama_get_logits(self._context)
        logits = np.ctypeslib.as_array(address, (len(rows), self.vocab_size))  # [rows, vocab_size]
        for (row, _), token in zip(rows, logits.argmax(1).tolist(), strict=True):
            generated[row].append(token)


def main() -> None:
    path, num_threads = sys.argv[1:]
    worker.serve(Engine(path, int(num_threads)).generate)


if __name__ == "__main__":
    main()
