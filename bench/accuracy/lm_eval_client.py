"""Runs a local task of `lm-eval` in an environment that has it. Arguments: the URL of completions, the
directory of the tokenizer, the directory of the task, the name of the task and of the model, the file for the
scores."""

import json
import os
import sys
from pathlib import Path

# Nothing may be downloaded.
os.environ.update(
    HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TRANSFORMERS_OFFLINE="1", OPENAI_API_KEY="none"
)

import lm_eval
from lm_eval.tasks import TaskManager


def main() -> None:
    url, tokenizer, directory, task, output = sys.argv[1:]
    results = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": task,
            "base_url": url,
            "tokenizer": tokenizer,
            "tokenizer_backend": "huggingface",
            "max_length": 2048,
            "max_retries": 1,
        },
        tasks=[task],
        task_manager=TaskManager(include_path=directory, include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
    )
    assert results is not None
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    pairs = [sample["filtered_resps"][0] for sample in samples]
    scores = {"logprobs": [float(pair[0]) for pair in pairs], "is_greedy": [bool(pair[1]) for pair in pairs]}
    Path(output).write_text(json.dumps(scores))


if __name__ == "__main__":
    main()
