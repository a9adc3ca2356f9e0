"""Answers questions about a GGUF file with llama.cpp, in an environment that has it. Its argument is the
file. Standard input is a JSON object with `texts` to tokenize, `prompts` of token ids to continue by
`num_tokens`, and `scored` prompts. Standard output has the ids of the texts, greedy ids, and the logits of
the next token."""

import json
import sys
from typing import Any

import llama_cpp


def split(model: llama_cpp.Llama, text: str) -> list[int]:
    return model.tokenize(text.encode(), add_bos=True, special=True)


def generate(model: llama_cpp.Llama, prompt: list[int], num_tokens: int) -> list[int]:
    results: list[int] = []
    for token in model.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0, reset=True):
        results.append(token)
        if len(results) == num_tokens:
            return results
    return results


def score(model: llama_cpp.Llama, prompt: list[int]) -> list[float]:
    model.reset()
    model.eval(prompt)
    logits = llama_cpp.llama_get_logits_ith(model.ctx, -1)
    return [float(logits[id]) for id in range(model.n_vocab())]


def main() -> None:
    asked: dict[str, Any] = json.load(sys.stdin)
    prompts, num_tokens = asked.get("prompts", []), asked.get("num_tokens", 0)
    scored = asked.get("scored", [])
    length = max(map(len, [*prompts, *scored]), default=0) + num_tokens + 8
    model = llama_cpp.Llama(
        sys.argv[1],
        n_ctx=length,
        n_threads=1,
        n_threads_batch=1,
        vocab_only=not prompts and not scored,
        verbose=True,
        flash_attn=False,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
    )
    answers = {
        "texts": [split(model, text) for text in asked.get("texts", [])],
        "scored": [score(model, prompt) for prompt in scored],
        "prompts": [generate(model, prompt, num_tokens) for prompt in prompts],
    }
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
