"""Families of different attention with a cache of 8-bit floats on the emulated device, compared with torch's
operators on the host."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cuda.capturing_device import CapturingDevice
from tests.support.cuda.late_platform import late_platform
from tests.support.shard.checkpoints import write_model
from tests.support.shard.driver import Request, Router, configure
from tests.support.shard.family_cases.all import CASES
from tests.support.shard.family_oracle import draw_inputs
from tests.support.shard.portable import plain
from tests.support.shard.stepping import read_config
from tgis.pb import shard_pb2 as pb
from tgis.shard.collectives import CPU
from tgis.shard.startup.load import load
from tgis.shard.startup.platforms.interface import Platform

NEW_TOKENS = 8
# A number near the middle of two floats of 8 bits may be stored as either, because sums differ in rounding.
TOLERANCE = 0.02

FAMILIES = {
    "gemma2": "soft caps, windows in some layers",
    "t5": "an encoder, relative biases, cross-attention",
    "llama_grouped_queries": "grouped queries",
    "mistral_window": "windows in all layers",
    "gpt_bigcode": "one head of keys and values",
    "bloom": "slopes (ALiBi)",
    "gpt_oss": "sinks",
    "qwen3": "normalised heads",
    "llama4_text": "chunks",
    "falcon_h1": "states beside attention",
}
QUICK = ("t5",)
KINDS = ("fp8_e4m3", "fp8_e5m2")


def plan() -> Iterator[object]:
    for case, kind in itertools.product(FAMILIES, KINDS):
        is_quick = case in QUICK and kind == KINDS[0]
        yield pytest.param(case, kind, marks=[] if is_quick else [pytest.mark.slow])


def answer(directory: Path, on: Platform, cache: str) -> tuple[list[Request], set[pb.StepPath]]:
    """Return the requests with their answers, and the paths of their steps."""
    sizes = {"kv_cache_tokens": 1024, "block_size": 4, "max_step_tokens": 64, "cuda_graphs": "3,8"}
    runner = load(configure(directory, dtype="float32", kv_cache_dtype=cache, **sizes), on=on)
    runner.reset()
    start = read_config(directory).get("decoder_start_token_id")
    requests = []
    for ids in draw_inputs():
        prompt, encoder = (ids, []) if start is None else ([start], ids)
        requests.append(
            Request(prompt, NEW_TOKENS, details={"logprobs": True, "top_n": 2}, encoder_token_ids=encoder)
        )
    router = Router(runner, seed=1)
    router.run([*requests])
    return requests, {response.path for response in router.responses}


def find_difference(request: Request, other: Request) -> float:
    """Return the largest difference of the log-probabilities, up to the first different token."""
    differences = [0.0]
    for token, other_token, top, score in zip(
        request.generated, other.generated, request.tops, other.logprobs, strict=True
    ):
        scores = dict(top)
        if other_token not in scores:
            return 1.0
        differences.append(abs(scores[other_token] - score))
        if token != other_token:
            differences.append(abs(scores[token] - scores[other_token]))
            break
    return max(differences)


@pytest.mark.parametrize(("case", "kind"), list(plan()))
def test_answers_are_those_of_the_host(case: str, kind: str, tmp_path: Path) -> None:
    write_model(tmp_path, CASES[case]())
    answers, paths = answer(tmp_path, late_platform(CapturingDevice()), kind)
    assert pb.STEP_PATH_GRAPH in paths
    expected, _ = answer(tmp_path, plain(CPU), kind)
    exact, _ = answer(tmp_path, plain(CPU), "auto")
    assert max(map(find_difference, answers, expected)) <= TOLERANCE
    assert max(map(find_difference, answers, exact)) > TOLERANCE, "nothing was rounded"
