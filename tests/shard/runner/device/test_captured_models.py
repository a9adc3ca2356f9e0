"""Check that replayed steps of real models equal eager steps bit for bit."""

import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.cuda.decode_scene import MAX_ROWS, DecodeScene
from tests.support.cuda.fake_graph import FakeStream
from tests.support.cuda.graph_sizes import of_rows
from tests.support.cuda.interpreter import interpreted
from tests.support.shard.checkpoints import write_model
from tests.support.shard.family_cases.all import CASES, runs_on_gpus
from tests.support.shard.stepping import ALONE, read_config
from tgis.shard.collectives import CPU
from tgis.shard.kernels.cuda.implementations import Implementations
from tgis.shard.kernels.cuda.ops import CudaKernels
from tgis.shard.kernels.cuda.step_state import Flag
from tgis.shard.models import registry
from tgis.shard.runner.device.graphs import CaptureLimits, StepGraphs
from tgis.shard.runner.graph_sizes import GraphSize

SIZES = (2, MAX_ROWS)
# test_every_family captures windows and soft caps, two rotary tables, and an encoder.
QUICK = ("llama_grouped_queries", "mixtral")
# Sliding windows and soft caps, an encoder, ALiBi slopes, position embeddings, and two rotary tables.
OTHERS = ("gemma2", "t5", "bloom", "opt", "phi3_short_and_long", "gpt_oss")


def load(directory: Path, case: str, kernels: Implementations, dtype: torch.dtype = torch.float32) -> Any:
    write_model(directory, CASES[case]())
    return registry.load(directory, read_config(directory), ALONE, dtype, CudaKernels(CPU, kernels))


def equal(x: Tensor, y: Tensor) -> bool:
    return torch.allclose(x, y, rtol=0, atol=0, equal_nan=True)


def compare(
    model: Any, kernels: Implementations, dtype: torch.dtype, sizes: tuple[int, ...], steps: int
) -> None:
    """Compute the steps of two scenes, one with graphs, while rows join, leave, end and restart."""
    eager, graphed = (DecodeScene(model, kernels, dtype) for _ in range(2))
    parts = {size: eager.make_parts(GraphSize(size)) for size in sizes}
    graphs = StepGraphs(FakeStream(), graphed.make_parts, CaptureLimits(lambda: 0))
    graphs.capture(of_rows(*sizes))
    assert graphs.sizes == of_rows(*sorted(sizes))
    rng, met, num_described = random.Random(1), set(), 0
    for number in range(steps):
        count = rng.randrange(1, max(sizes) + 1)
        step = graphs.find(count)
        assert step is not None
        for scene in (eager, graphed):
            scene.stage(step.size.num_rows, count)
        parts[step.size.num_rows].forward()
        step.forward.replay()
        one, other = eager.bucket(step.size.num_rows), graphed.bucket(step.size.num_rows)
        assert one.logits[:count].isfinite().any()
        assert equal(one.logits[:count], other.logits[:count])  # captures advance the dummy state, too
        if number % 2:
            parts[step.size.num_rows].sample()
            step.sample.replay()
        else:
            parts[step.size.num_rows].sample_detailed()
            step.sample_detailed.replay()
            assert all(map(equal, one.details, other.details))
            num_described += int(one.details.words[:count, 0].lt(model.spec.vocab_size).sum())
        assert one.answers.equal(other.answers)
        assert eager.rows.words.equal(graphed.rows.words)
        met.update((step.size.num_rows, *answer) for answer in other.answers.tolist())
    for pages in ("keys", "values"):
        x, y = (getattr(scene.cache, pages)[:, :-1] for scene in (eager, graphed))
        assert equal(x, y)
    assert num_described > 0
    assert {size for size, _, flags in met if flags & Flag.SAMPLED} == set(sizes)
    assert len({token for _, token, _ in met}) > steps / 2, "the rows differ"


def list_cases() -> list[object]:
    cases = [case for case in CASES if runs_on_gpus(case)]
    return [pytest.param(case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in cases]


@pytest.mark.parametrize("case", list_cases())
def test_replayed_steps_equal_launched_ones(case: str, tmp_path: Path) -> None:
    kernels = Implementations.plain()
    compare(load(tmp_path, case, kernels), kernels, torch.float32, SIZES, 8)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", QUICK + OTHERS)
def test_replayed_steps_in_other_types(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    kernels = Implementations.plain()
    compare(load(tmp_path, case, kernels, dtype), kernels, dtype, SIZES, 30)


@pytest.mark.parametrize(
    "case",
    [
        "llama_grouped_queries",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("gemma2", "gpt2", "mixtral")),
    ],
)
def test_replayed_launches_of_kernels(case: str, tmp_path: Path) -> None:
    kernels = interpreted()
    compare(load(tmp_path, case, kernels), kernels, torch.float32, (2,), 2)


def test_idle_rows_change_nothing(tmp_path: Path) -> None:
    kernels = Implementations.plain()
    model = load(tmp_path, "llama_grouped_queries", kernels)
    exact, padded = (DecodeScene(model, kernels, torch.float32) for _ in range(2))
    for count in (3, 1, 6, 2, 5, 4, 6, 1, 3):
        results = []
        for scene, size in ((exact, count), (padded, MAX_ROWS)):
            scene.stage(size, count)
            parts = scene.make_parts(GraphSize(size))
            parts.forward()
            results.append(scene.bucket(size).logits[:count].clone())
            parts.sample()
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
        assert exact.rows.words.equal(padded.rows.words)


def test_experts_that_are_computed_one_by_one_have_no_graphs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example those with codes. The host counts the tokens of each expert."""
    monkeypatch.setattr(CudaKernels, "join_experts", lambda *_: None)
    kernels = Implementations.plain()
    scene = DecodeScene(load(tmp_path, "mixtral", kernels), kernels, torch.float32)
    graphs = StepGraphs(FakeStream(), scene.make_parts, CaptureLimits(lambda: 0))
    with caplog.at_level(logging.WARNING):
        graphs.capture(of_rows(*SIZES))
    assert graphs.sizes == []
    [record] = [record for record in caplog.records if record.name.endswith("device.graphs")]
    assert record.message.startswith("no CUDA graphs: steps of 6 rows cannot be captured: captured work uses")
