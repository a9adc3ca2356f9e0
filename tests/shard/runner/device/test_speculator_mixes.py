"""Speculators on an emulated device together with a cache of 8-bit floats, weights of codes, and adapters on
two ranks."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.cuda.capturing_device import CapturingDevice
from tests.support.cuda.late_device import LateDevice
from tests.support.cuda.late_platform import late_platform
from tests.support.cuda.queued_gloo import connect_queued
from tests.support.shard.adapted_drafts import write_lora
from tests.support.shard.draft_heads import States
from tests.support.shard.drafting import DraftingRouter, Foreseen, run_on_rank
from tests.support.shard.driver import Request, Router, configure
from tests.support.shard.eagle3_heads import make_eagle3
from tests.support.shard.portable import plain
from tests.support.shard.ranks import ALONE, Ranks
from tests.support.shard.relay import Copies
from tests.support.shard.speculator_scene import (
    HEADS,
    Base,
    Recorder,
    check_outputs,
    make_requests,
    write_base,
)
from tgis.shard.collectives import CPU, ProcessGroup
from tgis.shard.kernels.cuda.attention import CudaAttention
from tgis.shard.runner.device.model_runner import DeviceModelRunner
from tgis.shard.runner.proposers.draft_head import DraftHeadProposer
from tgis.shard.runner.proposers.draft_model import DraftModelProposer
from tgis.shard.startup.load import load
from tgis.shard.startup.memory.cache_type import FLOAT8

# Steps of different sizes round sums differently, and a number near the middle of two floats of 8 bits may
# therefore be stored as either.
TOLERANCE = 0.02
SIZES = {"max_step_tokens": 64, "cuda_graphs": "8"}

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("poisoned")]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return write_base(tmp_path_factory.mktemp("base"), plain(CPU), num_hidden_layers=4)


def make_speculator(kind: str, base: Base, directory: Path) -> Path:
    """Write a speculator. A draft model is the served model itself."""
    if kind == "draft_model":
        return Path(shutil.copytree(base.directory, directory))
    if kind == "mlp":
        return HEADS["mlp"](base).write(directory)
    texts = [text.token_ids for text in base.texts]
    return make_eagle3(States.load(base.directory), texts, [1, 2, 3])[0].write(directory)


def load_runner(directory: Path, **options: Any) -> DeviceModelRunner:
    runner = load(configure(directory, **{**SIZES, **options}), on=late_platform(LateDevice()))
    assert isinstance(runner, DeviceModelRunner)
    return runner


def answer_without(base: Base, **options: Any) -> Base:
    """Return the outputs of the same device without a speculator."""
    requests: list[Request] = [*make_requests()]
    runner = load_runner(base.directory, **options)
    runner.reset()
    Router(runner, 3).run(list(requests))
    return base._replace(requests=requests)


@pytest.mark.parametrize(
    ("kind", "cache"), [("mlp", "fp8_e4m3"), ("eagle3", "fp8_e4m3"), ("draft_model", "fp8_e5m2")]
)
def test_a_cache_of_8_bits(base: Base, kind: str, cache: str, tmp_path: Path) -> None:
    """The cache of a head or draft model has the type, too, and outputs are those without a speculator."""
    expected = answer_without(base, kv_cache_dtype=cache)
    assert [r.generated for r in expected.requests] != [r.generated for r in base.requests]
    speculator = make_speculator(kind, base, tmp_path / "speculator")
    runner = load_runner(base.directory, kv_cache_dtype=cache, speculator=str(speculator))
    recorder = Recorder(runner)
    router = check_outputs(runner, expected, tolerance=TOLERANCE)
    assert router.num_right > (80 if kind == "draft_model" else 20)
    proposer = recorder._proposer
    if isinstance(proposer, DraftHeadProposer):
        attention = proposer._forward._attention
    elif isinstance(proposer, DraftModelProposer):
        attention = proposer._forward.attention
    else:
        return
    assert isinstance(attention, CudaAttention)
    assert {pages.dtype for pages in attention.pages(0)} == {FLOAT8[cache]}


@pytest.mark.parametrize(
    ("kind", "quantize"), [("speculate", "bitsandbytes-nf4"), ("mlp", "int4"), ("eagle3", "int8")]
)
def test_weights_of_codes(base: Base, kind: str, quantize: str, tmp_path: Path) -> None:
    """Drafts of the router and of speculators change no output, and some are accepted."""
    options: dict[str, Any] = {"quantize": quantize, "dtype": "float32"}
    expected = answer_without(base, **options)
    if kind == "speculate":
        options |= {"speculate": 3}
    else:
        options |= {"speculator": str(make_speculator(kind, base, tmp_path / "speculator"))}
    runner = load_runner(base.directory, **options)
    if kind == "speculate":
        runner.reset()
        requests: list[Foreseen] = make_requests()
        for request, known in zip(requests, expected.requests, strict=True):
            request.truth = list(known.generated)
        router = DraftingRouter(runner, 0.8, 0)
        router.run([*requests])
        assert [r.generated for r in requests] == [r.generated for r in expected.requests]
    else:
        router = check_outputs(runner, expected, tolerance=2e-4)
    assert router.num_right > 5


def draft_on_rank(
    group: ProcessGroup,
    place: Path,
    directory: Path,
    speculator: str | None,
    requests: list[Foreseen],
    copies: Copies,
) -> tuple[list[list[int]], list[int]]:
    """Run requests, of which some have an adapter, with drafts of the shard. Return their tokens, on the
    first rank, and the digests of all steps."""
    mine = ALONE if group.size == 1 else connect_queued(group.rank, group.size, place)
    options = {"rank": group.rank, "world_size": group.size, "kv_cache_tokens": 2048, "dtype": "float32"}
    options |= {"speculator": speculator, "cuda_graphs": "4", "max_step_tokens": 16}
    options |= {"uds_path": copies.uds_path, "adapter_cache": str(directory)}
    runner = load(configure(directory, **options), mine, late_platform(CapturingDevice()))
    for digest in copies.digests:
        runner.adapters.load(digest)
    return run_on_rank(runner, group, requests)


@pytest.mark.parametrize("kind", ["eagle3", "draft_model"])
def test_adapters_on_two_ranks(base: Base, kind: str, ranks: Ranks, tmp_path: Path) -> None:
    speculator = make_speculator(kind, base, tmp_path / "speculator")
    copies = write_lora(base, tmp_path)
    requests, alone = make_requests()[:8], make_requests()[:8]
    for i, (request, other) in enumerate(zip(requests, alone, strict=True)):
        request.adapter_digest = other.adapter_digest = copies.digests[0] if i % 2 else ""
    host = load(
        configure(base.directory, uds_path=copies.uds_path, adapter_cache=str(tmp_path)), on=plain(CPU)
    )
    host.adapters.load(copies.digests[0])
    Router(host, 1).run([*alone])
    what = base.directory, str(speculator), requests, copies
    [(generated, digests), (_, theirs)] = ranks.run(2, draft_on_rank, tmp_path / "place", *what)
    assert digests == theirs
    assert generated == [request.generated for request in alone]
    without = [request.generated for request in base.requests[:8]]
    assert [a == b for a, b in zip(generated, without, strict=True)].count(False) > 2
