"""`tgis bench` with a real router, over every API."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.router.router_process import Setup, start_router, stop_router
from tgis.load.workload.conversations import TokenScale

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
FLAGS = ("--grpc-api", "fmaas,vllm-engine", "--http-api", "openai,tgi,lmi", "--served-model-name", "m")
COMMON = ("--input-tokens", "40-60", "--output-tokens", "5", "--requests", "12", "--warm-up", "1")


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    directory = tmp_path_factory.mktemp("router")
    template = directory / "template.jinja"
    template.write_text(TEMPLATE)
    setup = start_router(directory, 1, *FLAGS, "--chat-template", str(template))
    yield setup
    assert stop_router(setup) == 0


def run(router: Setup, directory: Path, api: str, *flags: str) -> dict[str, Any]:
    is_grpc = api in ("fmaas", "engine")
    target = f"127.0.0.1:{router.service.grpc_port}" if is_grpc else router.http
    path = directory / "report.json"
    command = [sys.executable, "-m", "tgis", "bench", "--target", target, "--api", api, "--report", str(path)]
    done = subprocess.run([*command, *COMMON, *flags], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def check(level: dict[str, Any], num_tokens: float | None = 5, counts_inputs: bool = True) -> None:
    assert (level["errors"], level["faults"], level["succeeded"]) == ({}, {}, 12)
    assert num_tokens is None or level["output_tokens"] == num_tokens
    if counts_inputs:
        assert 45 <= level["input_tokens"] <= 55, "words are as long as the service counts them"
    assert level["requests_per_s"] > 0
    assert 0 < level["ttft"]["p50"] <= level["total"]["p50"]


def test_closed_and_open_loops_of_two_processes(router: Setup, tmp_path: Path) -> None:
    flags = ("--concurrency", "1,5", "--rate", "100", "--processes", "2", "--temperature", "1")
    report = run(router, tmp_path, "fmaas", *flags, "--repeat-share", "0.25")
    assert [level["label"] for level in report["levels"]] == ["concurrency 1", "concurrency 5", "rate 100"]
    for level in report["levels"]:
        check(level)
    assert report["levels"][0]["cached_tokens"] is not None


@pytest.mark.slow
@pytest.mark.parametrize("api", ["completions", "chat", "tgi", "lmi", "engine"])
def test_every_api(api: str, router: Setup, tmp_path: Path) -> None:
    report = run(router, tmp_path, api, "--concurrency", "4")
    check(report["levels"][0], None if api == "tgi" else 5, counts_inputs=api != "lmi")
    assert report["tokens_per_word"] != TokenScale().per_word, "it was measured"


@pytest.mark.slow
@pytest.mark.parametrize("api", ["fmaas", "completions", "chat", "tgi", "lmi", "engine"])
def test_sampled_texts_streamed_and_whole(api: str, router: Setup, tmp_path: Path) -> None:
    flags = ("--concurrency", "3", "--temperature", "1", "--top-k", "40", "--top-p", "0.9")
    flags += ("--seed", "3", "--requests", "6", "--repeat-share", "0.1")
    streamed, whole = (run(router, tmp_path, api, *flags, *more) for more in ((), ("--unary-share", "1")))
    for report in (streamed, whole):
        [level] = report["levels"]
        assert (level["errors"], level["faults"], level["succeeded"]) == ({}, {}, 6)
        assert api == "tgi" or level["output_tokens"] == 5
    assert whole["levels"][0]["itl"] == {"count": 0}, "a whole answer is one message"


@pytest.mark.slow
@pytest.mark.parametrize("api", ["fmaas", "completions", "tgi", "engine"])
def test_prompts_are_cut_to_exactly_the_length(api: str, router: Setup, tmp_path: Path) -> None:
    report = run(router, tmp_path, api, "--exact-input", "--input-tokens", "33")
    assert report["levels"][0]["input_tokens"] == 33


@pytest.mark.slow
@pytest.mark.parametrize("api", ["fmaas", "completions"])
def test_calls_of_several_prompts(api: str, router: Setup, tmp_path: Path) -> None:
    flags = ("--batch", "3", "--unary-share", "0.5", "--distinct", "4", "--concurrency", "2")
    report = run(router, tmp_path, api, *flags, "--input-tokens", "20", "--repetition-penalty", "1.2")
    [level] = report["levels"]
    assert (level["errors"], level["faults"], level["succeeded"]) == ({}, {}, 12)
    assert level["output_tokens"] == 15
    assert 54 <= level["input_tokens"] <= 66


@pytest.mark.slow
@pytest.mark.parametrize("api", ["fmaas", "completions", "chat", "tgi", "lmi", "engine"])
def test_cancelled_streams(api: str, router: Setup, tmp_path: Path) -> None:
    flags = ("--cancel-share", "0.5", "--output-tokens", "50", "--calls-per-connection", "2")
    [level] = run(router, tmp_path, api, *flags, "--concurrency", "3")["levels"]
    assert (level["errors"], level["faults"]) == ({}, {})
    assert 0 < level["cancelled"] < 12
    assert level["cancelled"] + level["succeeded"] == 12


@pytest.mark.slow
def test_violated_constraints_are_reported(router: Setup, tmp_path: Path) -> None:
    """The fake shard draws tokens without regard to grammars."""
    report = run(router, tmp_path, "fmaas", "--constraints", "choice=1", "--output-tokens", "100")
    assert report["levels"][0]["faults"]["constraint violated"] > 0


@pytest.mark.slow
def test_conversations_send_the_answers_before(router: Setup, tmp_path: Path) -> None:
    flags = ("--turns", "3", "--input-tokens", "10", "--concurrency", "2", "--requests", "4")
    report = run(router, tmp_path, "fmaas", *flags)
    [level] = report["levels"]
    assert (level["requests"], level["errors"]) == (12, {})
    assert level["cached_share"] > 0.2


@pytest.mark.slow
def test_a_sweep_ends_beyond_the_saturating_rate(router: Setup, tmp_path: Path) -> None:
    report = run(router, tmp_path, "fmaas", "--sweep", "--concurrency", "8")
    saturated, *opened = report["levels"]
    rates = [level["rate"] for level in opened]
    assert rates == sorted(rates)
    assert rates[0] < saturated["requests_per_s"] < rates[-1]


@pytest.mark.slow
def test_repeats_end_when_they_agree(router: Setup, tmp_path: Path) -> None:
    for precision, low, high in (("100", 2, 2), ("0.001", 4, 4)):
        report = run(router, tmp_path, "fmaas", "--precision", precision, "--max-repeats", "4")
        assert low <= len(report["levels"][0]["repeats"]) <= high


@pytest.mark.slow
def test_missing_adapters_are_errors_by_kind(router: Setup, tmp_path: Path) -> None:
    report = run(
        router, tmp_path, "fmaas", "--adapters", "none", "--adapter-share", "0.5", "--concurrency", "2"
    )
    [level] = report["levels"]
    assert set(level["errors"]) <= {"INVALID_ARGUMENT", "NOT_FOUND"}
    assert 0 < sum(level["errors"].values()) < 12
