"""Log-likelihoods of 200 words by `lm-eval`, which reads them over HTTP: four words of each text, with the
words before them.

`python -m bench.accuracy.next_words --python ENVIRONMENT/bin/python` needs an environment with `lm-eval[api]`
and prints a line for each precision."""

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.accuracy.checkpoints import FILES, Subject
from bench.accuracy.scores import OPTIONS
from bench.accuracy.texts import read_windows
from bench.accuracy.variants import REFERENCE, VARIANTS, Variant
from bench.service import BenchError, exit_on_sigterm, first_line, launch

TASK = "next_words"
PLACES = (60, 120, 180, 240)  # of the words, in a text of 300
CONTEXT_WORDS = 30
CLIENT = Path(__file__).with_name("lm_eval_client.py")


@dataclass(frozen=True)
class WordScores:
    """What `lm-eval` reports about each word: its log-likelihood, and whether it is greedy."""

    logprobs: list[float]
    is_greedy: list[bool]

    def describe(self, exact: "WordScores") -> str:
        """Return a line that compares the scores with those of float32."""
        losses = np.subtract(exact.logprobs, self.logprobs)
        return (
            f"{len(losses)} words, accuracy {np.mean(self.is_greedy):.3f} ({np.mean(exact.is_greedy):.3f}), "
            f"perplexity {math.exp(losses.mean()):.4f} of float32's, "
            f"mean difference {np.abs(losses).mean():.2e}"
        )


def list_items(windows: Sequence[str]) -> Iterator[dict[str, str]]:
    """Yield words and what precedes them."""
    for window in windows:
        words = window.split()
        for place in PLACES:
            yield {"text": " ".join(words[place - CONTEXT_WORDS : place]), "last": words[place]}


def write_task(directory: Path) -> None:
    """Write the task's description and data for `lm-eval`. JSON is YAML, too."""
    directory.mkdir(parents=True, exist_ok=True)
    data = directory / f"{TASK}.jsonl"
    data.write_text("".join(f"{json.dumps(item)}\n" for item in list_items(read_windows())))
    description = {
        "task": TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data.absolute())}},
        "test_split": "test",
        "output_type": "loglikelihood",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{' ' + last}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (directory / f"{TASK}.yaml").write_text(json.dumps(description))


def measure(subject: Subject, variant: Variant, python: Path) -> WordScores:
    """Return the words' scores, from a file if they were measured before. Raises BenchError."""
    directory = subject.directory / TASK
    path = directory / f"{variant.name}.json"
    if not path.is_file():
        write_task(directory)
        flags = [*OPTIONS, *variant.flags, "--http-api", "openai", "--served-model-name", TASK]
        with launch(subject.make(variant), path.with_suffix(".log"), flags) as (_, command):
            url = f"http://127.0.0.1:{command[command.index('--port') + 1]}/v1/completions"
            names = [url, subject.make_wide(), directory, TASK, path]
            client = [str(each) for each in (python, CLIENT, *names)]
            done = subprocess.run(client, capture_output=True, text=True)
        if done.returncode:
            raise BenchError(f"lm-eval failed: {done.stderr.strip().splitlines()[-1]}")
    return WordScores(**json.loads(path.read_text()))


def main() -> None:
    exit_on_sigterm()
    parser = argparse.ArgumentParser(prog="python -m bench.accuracy.next_words", description=__doc__)
    parser.add_argument("--python", type=Path, required=True, help="Python of an environment with lm-eval")
    parser.add_argument("--model", choices=list(FILES), default=next(iter(FILES)))
    parser.add_argument("--only", type=lambda text: text.split(","), default=["int8", "int4", "gptq"])
    options = parser.parse_args()
    subject = Subject(options.model, "original")
    try:
        exact = measure(subject, REFERENCE, options.python)
        for variant in VARIANTS:
            if variant.name in options.only:
                scores = measure(subject, variant, options.python)
                print(f"{options.model} {variant.name}: {scores.describe(exact)}", flush=True)
    except BenchError as error:
        sys.exit(first_line(error))


if __name__ == "__main__":
    main()
