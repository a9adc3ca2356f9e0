"""The workers of peers, clients in bursts against canned responses, environments that are created once, and
the profile of a tiny model's steps."""

import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from bench import router_step, shapes, worker
from bench.contest import Sample, Spread
from bench.engine_worker import EngineAlone
from bench.limits import Rates
from bench.peers import __main__ as peers_main
from bench.peers import catalogue, environments
from bench.peers.environments import Environment
from bench.peers.report import find_figures, format_peers
from bench.peers.transformers import generate
from bench.profile import measure
from bench.profile_report import Profile, Work, format_profile, part_limits
from bench.report import describe_looks
from bench.service import BenchError
from bench.steps import Rows, load_runner
from bench.targets import TARGETS
from tgis.pb import shard_pb2 as pb
from tgis.shard.runner.interface import Pending

# Benches are no part of the service: make test-all runs their tests.
pytestmark = pytest.mark.slow

TINY = shapes.Shape(2, 48, 4, 2, 8, 80, 600, max_length=64)


@pytest.mark.slow
def test_a_worker_answers_until_it_is_left() -> None:
    with worker.start("bench.probe") as child:
        rates = Rates(**child.ask({}, 60))
        assert rates.read > 1e8
        assert rates.gemm > 1e8
        assert rates.bfloat16 is None or rates.bfloat16 > 1e8
        process = child._process
    assert process.returncode == 0


def test_a_worker_that_fails_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with (
        worker.start("bench.no_such_module") as child,
        pytest.raises(BenchError, match="failed with status 1"),
    ):
        child.ask({}, 60)
    assert "no_such_module" in capfd.readouterr().err


@pytest.mark.slow
def test_transformers_generates_as_many_tokens(tmp_path: Path) -> None:
    shapes.write_checkpoint(TINY, tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    question = {"batch": 3, "input_tokens": 8, "new_tokens": 4, "seed": 0}
    assert generate(model, question)["seconds"] > 0


def test_an_environment_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Create an environment without packages, so that no index is needed."""
    commands: list[list[str]] = []
    run = environments.run

    def run_all_but_installs(command: list[str], log: Path) -> None:
        commands.append(command)
        if "venv" in command:
            run([*command, "--without-pip"], log)

    monkeypatch.setattr(environments, "run", run_all_but_installs)
    small = Environment("small", ("nothing==1",), unwanted=("much",))
    python = environments.ensure(small, tmp_path)
    assert python.is_file()
    assert [command[1:4] for command in commands[1:]] == [
        ["-m", "pip", "install"],
        ["-m", "pip", "uninstall"],
    ]
    assert environments.ensure(small, tmp_path) == python
    assert len(commands) == 3
    environments.ensure(Environment("small", ("nothing==2",)), tmp_path)
    assert commands[-1][-1] == "nothing==2"


def test_a_command_that_fails_says_why(tmp_path: Path) -> None:
    failing = [sys.executable, "-c", "raise SystemExit('no such wheel')"]
    with pytest.raises(BenchError, match="no such wheel"):
        environments.run(failing, tmp_path / "log")


def test_peers_are_reported_beside_ours() -> None:
    rates = {"ours": 150.0, "openvino": 100.0, "transformers": 300.0}
    samples = [
        Sample("decode 1", name, number, 0.1, 1.0, rate, (Rates(32e9, 2e11), Rates(30e9, 1e11)))
        for name, rate in rates.items()
        for number in range(2)
    ]
    figures = find_figures(samples, [1, 8], [512])
    assert [(figure.key, figure.spread) for figure in figures] == [
        ("openvino 1", Spread(1.5, 1.5, 1.5, 2)),
        ("transformers 1", Spread(0.5, 0.5, 0.5, 2)),
    ]
    titles = {name: name for name in rates}
    result = {"shape": "135m", "rounds": 2, "samples": samples, "figures": figures, "titles": titles}
    failures = {"ours bfloat16": "no instruction", "llama-cpp": "no compiler", "vllm": "no wheel"}
    text = format_peers(result | {"failures": failures})
    assert "| openvino | 100 (100 to 100) |" in text
    assert "reads 31.0 GB/s (30.0 to 32.0 over the run), float32 GEMM 150 GFLOP/s (100 to 200), " in text
    assert "unmeasured with AVX512_BF16, unmeasured with VNNI" in text
    looks = (Rates(32e9, 2e11, 4e11, 8e11), Rates(30e9, 1e11, 5e11, 9e11))
    described = describe_looks([replace(samples[0], looks=looks)])
    assert described.endswith("450 GFLOP/s with AVX512_BF16, 850 GOP/s with VNNI")
    missing = "| int4 with int8 activations, 8 clients | × llama.cpp q4_0 | – | ≥ 1.1 | no compiler |  |  |"
    assert missing in text.splitlines()
    emulated = "| bfloat16 arithmetic, 8 clients | × OpenVINO GenAI, its own arithmetic | – | ≥ 1.3 |"
    assert f"{emulated} no instruction |  |  |" in text.splitlines()
    assert "OpenVINO GenAI int4" not in text, "it was not asked for"
    assert "| 1.5 | ≥ 1.4 | pass |" in text
    assert text.endswith("vllm was left out: no wheel")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    shapes.write_checkpoint(TINY, directory)
    return directory


def test_servers_are_compared_over_http() -> None:
    looks = (Rates(32e9, 2e11), Rates(30e9, 1e11))
    rates = {"ours": 400.0, "ours over HTTP": 300.0, "vllm-server": 100.0}
    samples = [Sample("decode 8", name, 0, 0.1, 1.0, rate, looks) for name, rate in rates.items()]
    [figure] = find_figures(samples, [8], [])
    assert (figure.key, figure.spread.median) == ("vllm-server 8", 3.0)


def test_a_peer_is_compared_with_the_one_of_ours_that_computes_likewise() -> None:
    looks = (Rates(1, 1), Rates(1, 1))
    rates = {"ours": 100.0, "ours int8": 180.0, "ours bfloat16": 120.0, "ours w4a8": 240.0}
    peers = {"openvino-default": 80.0, "openvino-int8": 90.0, "openvino-int4": 60.0, "llama-cpp": 160.0}
    samples = [Sample("decode 8", name, 0, 0.1, 1, rate, looks) for name, rate in (rates | peers).items()]
    ratios = {figure.key: figure.spread.median for figure in find_figures(samples, [8], [])}
    assert ratios == {
        "openvino-default 8": 1.5,
        "openvino-int8 8": 2.0,
        "openvino-int4 8": 4.0,
        "llama-cpp 8": 1.5,
    }
    samples = [sample for sample in samples if sample.contender != "ours bfloat16"]
    assert "openvino-default 8" not in {figure.key for figure in find_figures(samples, [8], [])}


def test_every_target_of_a_peer_can_be_measured() -> None:
    peers = {peer.name: peer.rival for peer in catalogue.PEERS}
    command = ["--bfloat16", "--int8", "--int4"]
    variants = {variant.name for variant in peers_main.find_variants(peers_main.parse_options(command))}
    assert variants == {"ours int8", "ours bfloat16", "ours int4", "ours w4a8"}
    for target in TARGETS:
        if target.section == "peers":
            name, case = target.key.split(" ", 1)
            assert peers[name] in variants | {"ours", "ours over HTTP"}
            assert case in ("1", "8", "32", *(f"prefill {length}" for length in peers_main.PREFILLS))


def test_source_is_not_built_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BenchError, match="no C\\+\\+ compiler"):
        environments.ensure(environments.LLAMA_CPP, tmp_path / "peers")
    assert not (tmp_path / "peers").exists()


def test_a_profile_has_all_parts_of_a_step(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.profile.STEPS", 3)
    monkeypatch.setattr("bench.steps.MAX_LENGTH", 64)
    engine = load_runner(model, "float16", 1024)
    for work in (Work(2, 1, 20), Work(1, 24, 24)):
        profile = measure(engine, TINY, work)
        calls = {name: count for name, (_, count) in profile.kernels.items()}
        assert set(part_limits(TINY, work, 2.0, Rates(1, 1))) <= set(calls)
        assert calls["product gate_up"] == calls["attend"] == TINY.num_layers
        assert calls["product head"] == 1
        assert profile.is_captured
        assert 0 < profile.model_s < profile.step_s


def test_rows_go_on_where_their_prompts_end(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are as many steps whether rows were computed or pretend to be; if computed, the tokens do not
    depend on other rows."""
    monkeypatch.setattr("bench.steps.MAX_LENGTH", 64)
    engine = load_runner(model, "float32", 1024)
    rows = Rows(engine, 2, 20, 8)
    answers = [
        engine.launch(step).answer() for step in [*rows.prefill(40), *(rows.decode() for _ in range(6))]
    ]
    assert [len(answer.token_ids) for answer in answers] == [2 * 4] * 7
    engine.reset()
    one_by_one = Rows(engine, 2, 20, 8)
    first, second = (engine.launch(step).answer().token_ids for step in one_by_one.prefill(20))
    assert first + second == answers[0].token_ids
    engine.reset()
    made_up = Rows(engine, 2, 20, 8)
    assert len(engine.launch(made_up.resume()).answer().token_ids) == 2 * 4
    assert len(engine.launch(made_up.decode()).answer().token_ids) == 2 * 4


def test_limits_of_parts_add_up() -> None:
    """Reading alone: every weight and every key and value once."""
    reading = Rates(read=1.0, gemm=1e30)
    parts = part_limits(TINY, Work(2, 1, 20), 2.0, reading)
    weights = 2 * (48 * (32 + 32) + 48 * 32 + 3 * 48 * 80) + 600 * 48
    assert sum(parts.values()) - parts["attend"] == 2 * weights
    assert parts["attend"] == 2 * (2 * 20) * 2 * 2 * 8 * 2


def test_a_profile_is_a_table() -> None:
    kernels = {"attend": (0.002, 2), "write": (0.001, 2)}
    profile = Profile(Work(2, 1, 20), 0.01, 0.0025, kernels, is_captured=True)
    lines = format_profile(profile, TINY, 2.0, Rates(1e9, 1e9)).splitlines()
    assert lines[0].startswith("**decode of 2, context 20**: 10.00 ms a step, 200 tokens/s")
    assert lines[4].startswith("| attend | 2 | 2.000 | 20% |")
    assert lines[5] == "| write | 2 | 1.000 | 10% | – | – |"
    assert lines[6].startswith("| *kernels, one by one* |  | 3.000 | 30% |")
    assert lines[7].startswith("| *the model, as one kernel graph* |  | 2.500 | 25% |")
    assert lines[8] == "| packing, sampling, answering |  | 7.500 | 75% | – | – |"


def test_the_engine_alone_answers_as_a_contender(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token of every sequence arrives, and each job has all rows and blocks free."""
    monkeypatch.setattr("bench.steps.MAX_LENGTH", 64)
    engine = load_runner(model, "float32", 128)
    launch, num_tokens = engine.launch, list[int]()

    def count(step: pb.StepRequest) -> Pending:
        pending = launch(step)
        num_tokens.append(len(pending.answer().token_ids) // 4)
        return pending

    monkeypatch.setattr(engine, "launch", count)
    alone = EngineAlone(engine)
    for seed in (1, 2):
        question = {"batch": 3, "input_tokens": 20, "new_tokens": 4, "seed": seed}
        assert alone.answer(question)["seconds"] > 0
        assert sum(num_tokens) == seed * 3 * 4


def test_the_router_is_timed_by_itself(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = {"SIZES": (2, 8), "ENGINE_SIZES": (4,), "WARM_STEPS": 2, "STEPS": 4, "NEW_TOKENS": 9}
    for name, value in short.items():
        monkeypatch.setattr(router_step, name, value)
    result = router_step.run(Namespace(rounds=3), model)
    assert list(result["figures"]) == ["router", "router growth", "engine process 4"]
    assert all(len(figure["values"]) == 3 for figure in result["figures"].values())
    assert all(0 < each[size] < 0.1 for each in result["rounds"] for size in (2, 8))
    assert all(0 < each[4] < 0.1 for each in result["engine rounds"])
    assert capsys.readouterr().err.startswith("router's step: ")
