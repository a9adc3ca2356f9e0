"""Words whose log-likelihoods `lm-eval` reads."""

import json
import math
from pathlib import Path

import pytest

from bench.accuracy.next_words import TASK, WordScores, write_task
from bench.accuracy.texts import read_windows

# Benches are no part of the service: make test-all runs their tests.
pytestmark = pytest.mark.slow


def test_items_are_words_of_the_texts(tmp_path: Path) -> None:
    write_task(tmp_path)
    items = [json.loads(line) for line in (tmp_path / f"{TASK}.jsonl").read_text().splitlines()]
    assert len(items) == 200
    assert len({item["text"] for item in items}) == 200
    for number, item in enumerate(items):
        window = " ".join(read_windows()[number // 4].split())
        assert f"{item['text']} {item['last']}" in window
        assert len(item["text"].split()) == 30


def test_scores_are_compared_with_those_of_float32() -> None:
    exact, other = WordScores([-1.0, -2.0], [True, True]), WordScores([-1.5, -1.9], [True, False])
    assert other.describe(exact) == (
        f"2 words, accuracy 0.500 (1.000), perplexity {math.exp(0.2):.4f} of float32's, "
        "mean difference 3.00e-01"
    )
