"""Accuracy of precisions: scores against transformers, noise against the steps of the gguf package, figures
against known values."""

import math
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from bench import shapes
from bench.accuracy.checkpoints import noise_of
from bench.accuracy.results import Result, add_result, compare, read_results
from bench.accuracy.scores import Scores, read_scores, score
from bench.accuracy.texts import NUM_WINDOWS, digest, read_calibration, read_windows
from bench.accuracy.variants import VARIANTS
from bench.service import BenchError
from scripts.accuracy_tables import replace_tables

# Benches are no part of the service: make test-all runs their tests.
pytestmark = pytest.mark.slow

TINY = shapes.Shape(2, 48, 4, 2, 8, 80, 600, max_length=2048)
TEXTS = ["A list of names is a name.", "The value of an object", "If this is so, return the list"]


def test_scores_are_those_of_transformers(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    shapes.write_checkpoint(TINY, tmp_path / "tiny")
    path = tmp_path / "scores.jsonl"
    score(tmp_path / "tiny", ["--dtype", "float32"], TEXTS[:1], path, math.inf)
    path.write_text(path.read_text() + '{"tokens": ["inter')
    score(tmp_path / "tiny", ["--dtype", "float32"], TEXTS, path, math.inf)
    model = LlamaForCausalLM.from_pretrained(tmp_path / "tiny", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tiny")
    for text, scores in zip(TEXTS, read_scores(path), strict=True):
        ids = torch.tensor(tokenizer(text).input_ids)
        logprobs = model(ids.unsqueeze(0)).logits[0, :-1].log_softmax(-1)
        expected = logprobs.gather(1, ids[1:].unsqueeze(1)).squeeze(1)
        assert scores.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
        assert scores.tokens == tokenizer.convert_ids_to_tokens(ids[1:])
        assert scores.likeliest == tokenizer.convert_ids_to_tokens(logprobs.argmax(-1))


def test_noise_is_half_a_step_of_the_file() -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(64, 256, generator=generator).numpy()
    for kind, bits in ((gguf.GGMLQuantizationType.Q4_1, 4), (gguf.GGMLQuantizationType.Q8_0, 8)):
        codes = gguf.quants.quantize(weight, kind)
        stored = torch.from_numpy(gguf.quants.dequantize(codes, kind).astype(np.float32))
        scales = codes.reshape(-1, codes.shape[1] // 8)[:, :2].copy().view(np.float16).astype(np.float32)
        steps = torch.from_numpy(scales).repeat(1, 32).reshape(64, 256)
        shares = noise_of(stored, generator) / steps
        # In a group of 16, weights of 8 bits may all be several steps apart.
        limit = 0.5 if bits == 4 else 8
        assert shares.abs().median() == pytest.approx(0.25, abs=0.03 if bits == 4 else 0.3)
        assert (shares.abs() <= limit + 1e-3).double().mean() > 0.99
    assert noise_of(torch.ones(2, 32), generator).abs().max() == 0


def test_results_are_those_of_known_differences() -> None:
    exact = [Scores(["a", "b"], [-1.0, -2.0], ["a", "c"]), Scores(["d", "e"], [-1.0, -3.0], ["d", "e"])]
    other = [Scores(["a", "b"], [-1.5, -1.9], ["a", "b"]), Scores(["d", "e"], [-1.2, -3.2], ["d", "e"])]
    result = compare("model", "original", "int4", exact, other)
    assert (result.num_tokens, result.greedy_agreement) == (4, 0.75)
    assert result.perplexity == pytest.approx(math.exp(7.8 / 4), abs=1e-4)
    assert result.ratio == pytest.approx(math.exp(0.2), abs=1e-5)
    assert result.mean_difference == pytest.approx(0.25)
    assert result.max_difference == pytest.approx(0.5)
    # The losses of both texts have the mean 0.2, so that only their equality shows.
    assert result.ratio_error == pytest.approx(0, abs=1e-5)
    apart = [other[0], replace(other[1], logprobs=[-1.0, -3.0])]
    # The means of the texts, 0.2 and 0, differ from 0.1 by 0.1 each; n = 2.
    assert compare("model", "original", "int4", exact, apart).ratio_error == pytest.approx(
        math.exp(0.1) * 0.1, abs=1e-5
    )


def test_only_equal_tokens_are_compared() -> None:
    exact = [Scores(["a"], [-1.0], ["a"])]
    with pytest.raises(BenchError, match="different tokens"):
        compare("model", "original", "int4", exact, [Scores(["b"], [-1.0], ["a"])])
    with pytest.raises(BenchError, match="must be measured first"):
        compare("model", "original", "int4", [], exact)


def test_calibration_has_none_of_the_measured_texts() -> None:
    windows, calibration = read_windows(), read_calibration()
    assert len(windows) == NUM_WINDOWS
    assert not any(window in calibration for window in windows)


def test_a_result_replaces_that_of_its_variant(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    result = Result("gemma-3-270m", "original", "int4", 10, 20.0, 1.5, 0.1, 0.5, 2.0, 0.7)
    add_result(result, digest(TEXTS), path)
    add_result(replace(result, variant="int8"), digest(TEXTS), path)
    add_result(replace(result, ratio=1.25), digest(TEXTS), path)
    assert [(each.variant, each.ratio) for each in read_results(path)] == [("int4", 1.25), ("int8", 1.5)]
    with pytest.raises(BenchError, match="another Python version"):
        add_result(result, digest(TEXTS[:1]), path)


def test_tables_hold_the_results() -> None:
    page = "before\n<!-- accuracy: loading -->\nold\n<!-- end of accuracy -->\nafter"
    results = [
        Result("SmolLM2-135M-Instruct", "original", "int4", 10_000, 20.0, 1.0754, 0.0021, 0.25, 2.0, 0.8612),
        Result("SmolLM2-135M-Instruct", "noised", "int4", 10_000, 20.0, 1.9, 0.0021, 0.25, 2.0, 0.8612),
    ]
    written = replace_tables(page, results)
    assert "| `--quantize int4` | 1.075 ± 0.002 | 0.2500 | 86.1 % | 10,000 | – | – | – | – |" in written
    assert written.startswith("before\n<!--")
    assert written.endswith("-->\nafter")
    assert "old" not in written
    assert "1.9" not in written
    assert replace_tables(written, results) == written


def test_names_of_variants_differ() -> None:
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS)
    assert len({variant.label for variant in VARIANTS}) == len(VARIANTS)
