"""The benchmark's parts: checkpoints against transformers, figures against known times, the load against a
service with canned responses on a real port."""

import json
import math
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from bench import __main__ as bench
from bench import options, service, shapes
from bench.children import run_child
from bench.figures import median_figures, percentile, summarize, token_gaps
from bench.load import Answer, Job, make_prompts
from bench.memory import MemoryJob, measure_loading
from bench.report import format_report
from bench.service import BenchError
from tests.support.canned_service import WORDS, CannedService, serve

# Benches are no part of the service: make test-all runs their tests.
pytestmark = pytest.mark.slow

TINY = shapes.Shape(2, 48, 4, 2, 8, 80, 600, max_length=64)
JOB = Job("nowhere", "stream", 2, 3, 5, 3, seed=1, time_limit=30.0)


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_is_what_transformers_expects(tmp_path: Path, tied: bool) -> None:
    shape = replace(TINY, tie_embeddings=tied)
    shapes.write_checkpoint(shape, tmp_path)
    model, loading = LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert {name: list(wrong) for name, wrong in loading.items() if wrong} == {}
    assert sum(parameter.numel() for parameter in model.parameters()) == shapes.count_parameters(shape)
    assert model.dtype == torch.bfloat16
    logits = model(torch.tensor([[0, 5, 599]])).logits  # [1, 3, vocab]
    assert torch.isfinite(logits).all()
    assert logits.std() > 0.01


def test_the_tokenizer_fills_the_vocabulary(tmp_path: Path) -> None:
    shapes.write_checkpoint(TINY, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == TINY.vocab_size
    ids = tokenizer("naïve 🙂 words").input_ids
    assert ids[0] == tokenizer.bos_token_id == 0
    assert tokenizer.decode(ids, skip_special_tokens=True) == "naïve 🙂 words"
    wide = replace(TINY, vocab_size=shapes.MAX_TRAINED_TOKENS + 10)
    shapes.write_checkpoint(wide, tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).decode([wide.vocab_size - 1]) == " fill4105"


def test_a_checkpoint_is_written_once_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.SHAPES, "135m", TINY)
    (tmp_path / "135m").mkdir()
    (tmp_path / "135m" / "config.json").write_text("{}")
    directory = shapes.ensure_checkpoint("135m", tmp_path)
    weights = directory / "model.safetensors"
    written = weights.stat().st_mtime_ns
    assert json.loads((directory / "config.json").read_text())["hidden_size"] == TINY.hidden_size
    assert shapes.ensure_checkpoint("135m", tmp_path) == directory
    assert weights.stat().st_mtime_ns == written
    assert [path.name for path in tmp_path.iterdir()] == ["135m"]


def test_real_shapes_have_their_size() -> None:
    millions = {name: round(shapes.count_parameters(shape) / 1e6) for name, shape in shapes.SHAPES.items()}
    assert millions == {"15m": 15, "135m": 116, "500m": 490, "1b": 1100}


PERCENTILES = [
    ([3.0, 1.0, 2.0], 50, 2.0),
    ([1.0, 2.0], 50, 1.0),
    ([1.0, 2.0], 51, 2.0),
    ([float(n) for n in range(1, 101)], 90, 90.0),
    ([float(n) for n in range(1, 101)], 99, 99.0),
    ([7.0], 99, 7.0),
    ([5.0, 4.0], 0, 4.0),
]


@pytest.mark.parametrize(("values", "percent", "expected"), PERCENTILES)
def test_percentile_is_a_value_that_was_seen(values: list[float], percent: float, expected: float) -> None:
    assert percentile(values, percent) == expected


def test_figures_of_known_times() -> None:
    """Two clients; the second one's last two tokens arrive in one message."""
    first = Answer(0, sent=1.0, arrivals=[1.5, 1.75, 2.25, 2.5], counts=[1, 2, 3, 4], input_tokens=5)
    second = Answer(1, sent=1.0, arrivals=[2.0, 2.5, 4.5], counts=[1, 2, 4], input_tokens=7)
    assert token_gaps(second) == [0.5, 1.0, 1.0]
    figures = summarize(JOB, [first, second, Answer(1, sent=0.0, error="UNAVAILABLE: gone")])
    assert (figures["requests"], figures["failed"], figures["input_tokens"]) == (2, 1, 6)
    assert figures["output_tokens_per_s"] == pytest.approx(8 / 3.5)
    assert (figures["first_token_ms_p50"], figures["first_token_ms_p90"]) == (500, 1000)
    assert (figures["answer_ms_p50"], figures["answer_ms_p99"]) == (1500, 3500)
    assert (figures["token_ms_p50"], figures["token_ms_p99"]) == (500, 1000)
    # 3 tokens in 1 s and 3 in 2.5 s.
    assert figures["decode_tokens_per_s"] == pytest.approx(2 * (3.0 + 1.2) / 2)


def test_a_unary_answer_has_no_first_token() -> None:
    figures = summarize(replace(JOB, mode="unary"), [Answer(0, 1.0, [3.0], [64], 128)])
    assert (figures["output_tokens_per_s"], figures["answer_ms_p50"]) == (32.0, 2000.0)
    assert "first_token_ms_p50" not in figures


def test_no_answer_is_no_figure() -> None:
    figures = summarize(JOB, [Answer(0, 0.0, error="UNAVAILABLE: gone")])
    assert figures["failed"] == 1
    assert math.isnan(figures["output_tokens_per_s"])


def test_the_median_is_of_each_figure() -> None:
    repeats = [{"a": 1.0, "b": 9.0}, {"a": 3.0, "b": 2.0}, {"a": 2.0, "b": 4.0}]
    assert median_figures(repeats) == {"a": 2.0, "b": 4.0}


def test_prompts_differ_and_are_long_enough() -> None:
    prompts = make_prompts(JOB)
    first, second = next(prompts), next(prompts)
    assert first != second
    assert len(first.split()) == JOB.input_tokens
    assert next(make_prompts(JOB)) == first
    assert next(make_prompts(replace(JOB, seed=2))) != first


@pytest.mark.parametrize("mode", ["stream", "unary"])
def test_the_load_asks_as_often_as_it_should(mode: str) -> None:
    asked = CannedService(delay=0.05)
    with serve(asked) as target:
        job = replace(JOB, target=target, mode=mode)
        (raw,) = run_child("bench.load", job, 30.0)
    answers = [Answer(**answer) for answer in raw["answers"]]
    assert [answer.client for answer in answers] == [0, 0, 0, 1, 1, 1]
    assert len(asked.asked) == 2 + 6  # a short one per client before the measurement
    assert all(request.params.truncate_input_tokens == job.input_tokens for request in asked.asked)
    measured = [request.params.stopping for request in asked.asked[2:]]
    assert {(each.min_new_tokens, each.max_new_tokens) for each in measured} == {(3, 3)}
    for answer in answers:
        assert answer.counts == ([1, 2, 3] if mode == "stream" else [3])
        assert (answer.input_tokens, answer.error) == (4, None)
        assert answer.arrivals[0] - answer.sent >= 0.05
    figures = summarize(job, answers)
    # Two clients side by side; no response can be faster than its delays.
    least = 3 * 0.05 if mode == "stream" else 0.05
    assert figures["output_tokens_per_s"] <= 2 * len(WORDS) / least
    assert figures["output_tokens_per_s"] > len(WORDS) / least


def test_the_load_ends_at_its_time_limit() -> None:
    with serve(CannedService(delay=0.4)) as target:
        (raw,) = run_child("bench.load", replace(JOB, target=target, time_limit=1.5), 30.0)
    answers = [Answer(**answer) for answer in raw["answers"]]
    assert len(answers) == 4
    assert [(answer.error or "").partition(":")[0] for answer in answers] == ["", "DEADLINE_EXCEEDED"] * 2


def test_a_child_that_fails_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BenchError, match="failed with status"):
        run_child("bench.no_such_module", None, 30.0)
    assert "no_such_module" in capfd.readouterr().err


@pytest.mark.slow
def test_attached_to_a_service_the_whole_run_is_reported(tmp_path: Path) -> None:
    with serve(CannedService()) as target:
        arguments = ["--attach", target, "--clients", "1,2", "--repeat", "2", "--requests", "1"]
        arguments += ["--modes", "stream,unary"]
        result = bench.measure(options.parse_options(arguments))
    assert [(entry["clients"], entry["mode"]) for entry in result["service"]] == [
        (1, "stream"),
        (1, "unary"),
        (2, "stream"),
        (2, "unary"),
    ]
    assert all(len(entry["repeats"]) == 2 for entry in result["service"])
    assert result["machine"]["read_gb_per_s"] > 0.1
    assert json.loads(json.dumps(result))["service_command"] == []
    report = format_report(result)
    rows = [line for line in report.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + 4
    assert {row.count("|") for row in rows} == {8}


@pytest.mark.slow
def test_the_memory_of_loading_is_measured(tmp_path: Path) -> None:
    """Far more than other tests may have left: 16 MiB of bfloat16, twice that after reading."""
    shapes.write_checkpoint(replace(TINY, hidden_size=1024, vocab_size=8192), tmp_path)
    figures = measure_loading(MemoryJob(str(tmp_path), "float32"))
    assert figures["file_bytes"] == (tmp_path / "model.safetensors").stat().st_size
    assert figures["peak_bytes"] > 1.5 * figures["file_bytes"]


def test_a_service_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="not found"):
        with service.launch(tmp_path / "nothing", tmp_path / "log", []):
            pytest.fail("it started")


def test_a_service_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "STOP_TIMEOUT_S", 0.3)
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    command = [sys.executable, "-c", deaf]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        service.stop(process)
        assert process.returncode == -signal.SIGKILL
