"""Check that requests get the same tokens from replayed steps as from eager steps."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.cuda.capturing_device import CapturingDevice
from tests.support.cuda.runners import load_late
from tests.support.shard.checkpoints import write_model
from tests.support.shard.driver import Request, Router, configure
from tests.support.shard.family_cases.all import CASES
from tests.support.shard.messages import GREEDY, SAMPLE
from tgis.config.processes import ShardConfig
from tgis.pb import shard_pb2 as pb
from tgis.shard.kernels.cuda.step_state import MAX_TOP_N
from tgis.shard.runner.graph_sizes import GraphSize

SIZES = (GraphSize(2), GraphSize(6), GraphSize(4, 16), GraphSize(4, 48))
KINDS: list[dict[str, Any]] = [
    GREEDY,
    SAMPLE,
    {**SAMPLE, "min_p": 0.02, "presence_penalty": 0.5},
    {**GREEDY, "repetition_penalty": 1.4, "min_new_tokens": 4},
    {**SAMPLE, "temperature": 2.0, "frequency_penalty": 0.7},
    {**SAMPLE, "temperature": 2.0, "top_k": 40, "top_p": 0.95},
    {**SAMPLE, "typical_p": 0.8},
    {**SAMPLE, "watermark_gamma": 0.5, "watermark_delta": 2.0},
]
DETAILS: list[dict[str, Any]] = [{}, {"ranks": True, "top_n": 3}, {"logprobs": True, "raw": True}]
ON_THE_HOST = {"top_n": MAX_TOP_N + 1}


def make_requests(is_encoder_decoder: bool) -> list[Request]:
    requests = []
    for i in range(9):
        ids = list(range(3 + i, 4 + 4 * i))
        prompt, encoder = ([0], ids) if is_encoder_decoder else (ids, [])
        sampling, details = {**KINDS[i % len(KINDS)], "seed": i}, DETAILS[i % len(DETAILS)]
        count = 4 + 2 * i
        if i == 8:
            details, count = ON_THE_HOST, 3
        requests.append(Request(prompt, count, [5, 9], sampling, details, encoder_token_ids=encoder))
    return requests


def serve(config: ShardConfig, depth: int, *, is_captured: bool) -> tuple[list[Request], list[int]]:
    """Return the requests with their tokens, and the paths of the steps."""
    runner = load_late(config, device=CapturingDevice())
    if is_captured:
        is_decoder = not runner.model.spec.is_encoder_decoder
        sizes = [size for size in SIZES if is_decoder or not size.num_prompt_tokens]
        runner.graphs.capture(sizes)
        assert runner.graphs.sizes == sizes
        runner.reset()
    router, requests = Router(runner, depth=depth), make_requests(runner.model.spec.is_encoder_decoder)
    router.run(list(requests))
    return requests, [response.path for response in router.responses]


@pytest.mark.parametrize(
    ("case", "depth"),
    [
        ("llama_grouped_queries", 2),
        pytest.param("llama_grouped_queries", 1, marks=pytest.mark.slow),
        pytest.param("gemma2", 2, marks=pytest.mark.slow),
        pytest.param("phi3_short_and_long", 2, marks=pytest.mark.slow),
        pytest.param("bloom", 2, marks=pytest.mark.slow),
        pytest.param("t5", 2, marks=pytest.mark.slow),
        pytest.param("bart", 2, marks=pytest.mark.slow),
    ],
)
def test_replayed_steps_give_the_same_tokens(case: str, depth: int, tmp_path: Path) -> None:
    write_model(tmp_path, CASES[case]())
    config = configure(tmp_path, max_batch_size=8)
    launched, paths = serve(config, depth, is_captured=False)
    assert pb.STEP_PATH_GRAPH not in paths
    replayed, paths = serve(config, depth, is_captured=True)
    for mine, other in zip(replayed, launched, strict=True):
        assert mine.generated == other.generated
        assert mine.ranks == other.ranks
        assert [[token for token, _ in top] for top in mine.tops] == [
            [token for token, _ in top] for top in other.tops
        ]
    assert [len(tops) for tops in replayed[1].tops] == [3] * len(replayed[1].generated)
    assert len({tuple(each.generated) for each in replayed}) > 6, "requests differ"
    assert paths.count(pb.STEP_PATH_GRAPH) >= 6
    assert pb.STEP_PATH_DETAILS in paths
