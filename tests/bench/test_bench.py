"""The benchmark's parts: checkpoints against transformers, figures against known times, the load against a
service with canned responses on a real port."""

import json
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
from bench.clients import MODES, Calls, measure_calls
from bench.generator import Loaded, load_processes, new_prompts
from bench.memory import MemoryJob, measure_loading
from bench.report import format_report
from bench.service import BenchError
from tests.support.canned_service import WORDS, CannedService, serve
from tgis.load.workload.conversations import ConversationSource, TokenScale
from tgis.pb import generation_pb2 as pb

# Benches are no part of the service: make test-all runs their tests.
pytestmark = pytest.mark.slow

TINY = shapes.Shape(2, 48, 4, 2, 8, 80, 600, max_length=64)


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


def test_new_prompts_differ_and_are_long_enough() -> None:
    prompts = [ConversationSource(new_prompts(5, 3), TokenScale()).make(index) for index in range(2)]
    texts = [prompt.turns[0].text for prompt in prompts]
    assert texts[0] != texts[1]
    assert all(len(text.split()) == 5 for text in texts)
    again = ConversationSource(new_prompts(5, 3, seed=7), TokenScale()).make(0)
    assert again == ConversationSource(new_prompts(5, 3, seed=7), TokenScale()).make(0)


@pytest.mark.parametrize("mode", MODES)
def test_clients_send_as_often_as_they_should(mode: str) -> None:
    asked = CannedService(delay=0.05)
    calls = Calls(mode=mode, clients=2, requests=3, input_tokens=5, new_tokens=3, time_limit=30.0)
    with serve(asked) as target, load_processes() as generator:
        figures = measure_calls(generator, target, calls)
    sent = [request for request in asked.asked if not isinstance(request, pb.ModelInfoRequest)]
    assert len(sent) == 2 + 6  # one per client before the measurement
    assert all(request.params.truncate_input_tokens == 5 for request in sent)
    stopping = [request.params.stopping for request in sent]
    assert {(each.min_new_tokens, each.max_new_tokens) for each in stopping} == {(3, 3)}
    assert (figures["requests"], figures["succeeded"], figures["input_tokens"]) == (6, 6, 4)
    assert figures["ttft"]["min"] >= 0.05
    # Two clients side by side; no response can be faster than its delays.
    least = 3 * 0.05 if mode == "stream" else 0.05
    assert len(WORDS) / least < figures["output_tokens_per_s"] <= 2 * len(WORDS) / least
    decode = figures["decode_tokens_per_s"]
    assert decode is None if mode == "unary" else 0 < decode <= 2 / 0.05


def test_calls_end_at_their_time_limit() -> None:
    calls = Calls(mode="stream", clients=2, requests=9, input_tokens=5, new_tokens=3, time_limit=0.5)
    with serve(CannedService(delay=0.4)) as target, load_processes() as generator:
        figures = measure_calls(generator, target, calls)
        assert (figures["requests"], figures["errors"]) == (2, {"timeout": 2})
        assert figures["decode_tokens_per_s"] is None
        figures = measure_calls(generator, target, replace(calls, time_limit=3.0))
    assert 4 <= figures["requests"] <= 6, "three after another, or two on a busy machine"
    assert figures["errors"] == {}


def test_a_contender_has_all_its_answers() -> None:
    asked = CannedService(delay=0.05)
    with serve(asked) as target, load_processes() as generator:
        contender = Loaded("ours", generator, target)
        assert contender.generate(3, 5, 3, seed=1) >= 3 * 0.05
        with pytest.raises(BenchError, match="3 of 3 requests failed, first: wrong length"):
            contender.generate(3, 5, 4, seed=1)
    texts = [
        request.request.text for request in asked.asked if isinstance(request, pb.SingleGenerationRequest)
    ]
    assert len(set(texts)) == 3


def test_a_service_that_is_not_there_is_an_error() -> None:
    with load_processes() as generator:
        with pytest.raises(BenchError, match="cannot be reached"):
            Loaded("none", generator, "127.0.0.1:1").generate(1, 5, 3, seed=1)


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
    assert all(len(entry["figures"]["repeats"]) == 2 for entry in result["service"])
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
