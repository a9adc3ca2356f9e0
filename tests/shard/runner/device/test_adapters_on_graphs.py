"""Steps with LoRA adapters are replayed, while adapters are loaded and unloaded, and give peft's tokens."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.cuda.capturing_device import CapturingDevice
from tests.support.cuda.interpreter import interpreted
from tests.support.cuda.late_platform import late_platform
from tests.support.shard.adapter_cases import AdapterCase
from tests.support.shard.drafting import DraftingRouter, Foreseen
from tests.support.shard.driver import Request, Router, configure
from tests.support.shard.family_cases.all import CASES, has_experts, runs_on_gpus
from tests.support.shard.tuning_cells import Asked
from tgis.config.processes import ShardConfig
from tgis.pb import shard_pb2 as pb
from tgis.shard.kernels.cuda.implementations import Implementations
from tgis.shard.kernels.cuda.products.codes import CudaCodeProduct
from tgis.shard.runner.device.model_runner import DeviceModelRunner
from tgis.shard.startup.load import load

GRAPH, ADAPTER = pb.STEP_PATH_GRAPH, pb.STEP_PATH_ADAPTER


def load_case(case: AdapterCase, kernels: Implementations | None = None, **options: Any) -> DeviceModelRunner:
    """Load a model with captured steps. The kernel of adapters is interpreted, because its fallback does not
    read the table of slots."""
    kernels = kernels or replace(Implementations.plain(), add_low_rank=interpreted().add_low_rank)
    runner = load(configure_case(case, **options), on=late_platform(CapturingDevice(), kernels))
    assert isinstance(runner, DeviceModelRunner)
    runner.reset()
    return runner


def configure_case(case: AdapterCase, **options: Any) -> ShardConfig:
    small = {"kv_cache_tokens": 2048, "block_size": 4, "max_step_tokens": 32, "dtype": "float32"}
    paths = {"uds_path": case.copies.uds_path, "adapter_cache": str(case.directory)}
    return configure(case.directory, **{**small, **paths, "cuda_graphs": "3,8", **options})


def ask(case: AdapterCase, all_asked: list[Asked]) -> list[Request]:
    requests = [case.request(asked) for asked in all_asked]
    for request in requests:
        request.details = {}
    return requests


def run(runner: DeviceModelRunner, case: AdapterCase, all_asked: list[Asked], seed: int) -> set[int]:
    """Check the answers of requests together. Return the paths of the steps."""
    requests = ask(case, all_asked)
    router = Router(runner, seed, depth=3)
    router.run(list(requests))
    for request, asked in zip(requests, all_asked, strict=True):
        certain = asked.answer.certain
        assert certain
        assert request.generated[:certain] == asked.answer.token_ids[:certain]
    return {response.path for response in router.responses}


@pytest.mark.slow
def test_adapters_come_and_go(tmp_path: Path) -> None:
    case = AdapterCase("llama_tied", tmp_path)
    runner = load_case(case, cuda_graphs="6", max_step_tokens=16)
    assert runner.graphs.have_adapters
    linear, whole = case.copies.digests
    by_adapter = {
        digest: [each for each in case.asked if each.content == digest] for digest in (linear, whole)
    }
    plain = [each for each in case.asked if not each.content]
    runner.adapters.load(linear)
    paths = run(runner, case, [*plain, *by_adapter[linear][:1]], 1)
    runner.adapters.unload([linear])
    for digest in (whole, linear):  # the first takes the slot that is free now
        runner.adapters.load(digest)
    paths |= run(runner, case, [*by_adapter[whole], *plain, *by_adapter[linear]], 2)
    assert paths - {pb.STEP_PATH_UNSPECIFIED} <= {GRAPH, pb.STEP_PATH_PROMPT}
    assert GRAPH in paths


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        name
        for name in (
            "gemma2",
            "t5",
            "bloom",
            "opt",
            "falcon_7b",
            "gpt_neox",
            "mpt",
            "qwen3_next",
            "falcon_h1",
        )
        if name in CASES and runs_on_gpus(name) and not has_experts(name)
    ],
)
def test_families(name: str, tmp_path: Path) -> None:
    case = AdapterCase(name, tmp_path)
    runner = load_case(case)
    for digest in case.copies.digests:
        runner.adapters.load(digest)
    paths = run(runner, case, case.asked, 0)
    assert GRAPH in paths
    assert ADAPTER not in paths


@pytest.mark.slow
def test_drafts(tmp_path: Path) -> None:
    """Steps with drafts of rows with different adapters, and of rows without one, are replayed."""
    case = AdapterCase("llama_tied", tmp_path)
    runner = load_case(case, speculate=3)
    for digest in case.copies.digests:
        runner.adapters.load(digest)
    requests = [Foreseen(**vars(request)) for request in ask(case, case.asked)]
    for request, asked in zip(requests, case.asked, strict=True):
        request.truth = asked.answer.token_ids
    router = DraftingRouter(runner, luck=0.8, seed=0)
    router.run([*requests])
    for request, asked in zip(requests, case.asked, strict=True):
        certain = asked.answer.certain
        assert request.generated[:certain] == asked.answer.token_ids[:certain]
    assert 0 < router.num_right < router.num_guessed
    paths = {response.path for response in router.responses}
    assert GRAPH in paths
    assert not paths & {ADAPTER, pb.STEP_PATH_DRAFTS}


@pytest.mark.slow
def test_products_of_codes(tmp_path: Path) -> None:
    """Their outputs get the same updates. The answers are those of the same codes on the CPU."""
    case = AdapterCase("llama_tied", tmp_path)
    runner = load_case(case, quantize="eetq")
    model: Any = runner.model
    assert isinstance(model._blocks[0]._feed_forward._down._multiply, CudaCodeProduct)
    answers = []
    for each in (runner, load(configure_case(case, quantize="eetq"))):
        for digest in case.copies.digests:
            each.adapters.load(digest)
        requests = ask(case, case.asked)
        router = Router(each, 0, depth=3)
        router.run(list(requests))
        answers.append([request.generated for request in requests])
        if each is runner:
            paths = {response.path for response in router.responses}
    assert answers[0] == answers[1]
    assert GRAPH in paths
    assert ADAPTER not in paths


@pytest.mark.slow
@pytest.mark.parametrize("reason", ["graphs", "kernel", "rank"])
def test_other_steps_launch_their_kernels(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without graphs, with the kernel's fallback, or with a larger rank than captured steps support."""
    case = AdapterCase("llama_tied", tmp_path)
    if reason == "rank":
        monkeypatch.setattr("tgis.shard.kernels.cuda.grouped.slots.MAX_RANK", 3)
    options = {"cuda_graphs": "0"} if reason == "graphs" else {}
    runner = load_case(case, Implementations.plain() if reason == "kernel" else None, **options)
    for digest in case.copies.digests:
        runner.adapters.load(digest)
    assert ADAPTER in run(runner, case, case.asked, 0)


@pytest.mark.slow
def test_adapters_of_experts(tmp_path: Path) -> None:
    """One adapter changes single experts, which are then computed one by one; the other one does not."""
    case = AdapterCase("granitemoe", tmp_path)
    runner = load_case(case, cuda_graphs="6", max_step_tokens=16)
    linear, whole = case.copies.digests
    for digest in (linear, whole):
        runner.adapters.load(digest)
    others = [each for each in case.asked if each.content != whole]
    assert ADAPTER not in run(runner, case, others, 1)
    assert {GRAPH, ADAPTER} <= run(runner, case, case.asked, 2)
