"""Compares the output of a tiny Llama on the device, for requests of every kind, with transformers, peft or
the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from bench.gpu.cases.models import answer_on_host, load_model, temporary_directory
from bench.gpu.target import Target
from tests.support.shard.adapter_cases import AdapterCase
from tests.support.shard.checkpoints import write_llama
from tests.support.shard.driver import Request, Router, configure, prompts
from tests.support.shard.family_oracle import Oracle, draw_inputs
from tests.support.shard.messages import GREEDY, SAMPLE
from tests.support.shard.prompt_cases import Case
from tests.support.tokenizers.trained import write_byte_level
from tgis.config.processes import ShardConfig
from tgis.pb import shard_pb2 as pb

VOCAB_SIZE, NEW_TOKENS = 403, 12
GRAMMAR = '%llguidance {"no_forcing": true}\nstart: /([a-c]{1,3} ){2,9}\\./'
SIZES = {"kv_cache_tokens": 2048, "max_step_tokens": 64, "cuda_graphs": "3,8"}
# Maximum error of log-probabilities caused by bfloat16 in two layers.
BFLOAT16_TOLERANCE = 0.15
KINDS: dict[str, dict[str, Any]] = {
    "guided": {"grammar": GRAMMAR, "eos": [2, 11, 30]},
    "top_p": {"sampling": {**SAMPLE, "top_p": 0.8}},
    "top_k": {"sampling": {**SAMPLE, "top_k": 20, "top_p": 0.95, "temperature": 1.5}},
    "typical_p": {"sampling": {**SAMPLE, "typical_p": 0.8}},
    "penalties": {"sampling": {**GREEDY, "repetition_penalty": 1.6, "frequency_penalty": 0.5}},
    "sampled": {"sampling": {**SAMPLE, "temperature": 0.6, "min_p": 0.05}},
    "details": {
        "sampling": {**SAMPLE, "temperature": 0.8},
        "details": {"logprobs": True, "ranks": True, "top_n": 5, "raw": True, "input_tokens": True},
    },
    "watermark": {"sampling": {**SAMPLE, "watermark_gamma": 0.5, "watermark_delta": 2.0}},
}
# Maximum error of log-probabilities in float32.
TOLERANCE = 1e-3


def check_bfloat16(target: Target) -> None:
    """Compare log-probabilities of the first tokens in bfloat16 with those of transformers in float32."""
    with temporary_directory() as directory:
        config = write_llama(directory)
        oracle = Oracle(directory, config)
        answers = [oracle.answer(ids) for ids in draw_inputs()]
        runner = load_model(target, configure(directory, **SIZES, dtype="bfloat16"))
        runner.reset()
        requests = [Request(list(each.input_ids), 8, details={"logprobs": True}) for each in answers]
        Router(runner, seed=1).run(list(requests))
    pairs = [
        (mine, theirs)
        for request, answer in zip(requests, answers, strict=True)
        for mine, theirs in _equal_tokens(request, answer.token_ids, answer.logprobs)
    ]
    worst = max((abs(mine - theirs) for mine, theirs in pairs), default=float("inf"))
    detail = f"difference of log-probabilities {worst:.2g} in {len(pairs)} equal tokens"
    target.recorder.check("bfloat16 as transformers", worst <= BFLOAT16_TOLERANCE, detail)


def _equal_tokens(
    request: Request, token_ids: list[int], logprobs: list[float]
) -> Iterator[tuple[float, float]]:
    for token, known, mine, theirs in zip(
        request.generated, token_ids, request.logprobs, logprobs, strict=True
    ):
        if token != known:
            return
        yield mine, theirs


def check_kind(target: Target, kind: str) -> None:
    """Compare tokens in float32 with those on the CPU."""
    with written_llama() as config:
        requests = [Request(prompt, NEW_TOKENS, **KINDS[kind]) for prompt in prompts(3, 6, longest=25)]
        answers = answer_on_host(config, requests)
        expected = [request.generated for request in answers]
        runner, copies = load_model(target, config), deepcopy(requests)
        runner.reset()
        router = Router(runner, seed=1, depth=2)
        router.run(list(copies))
    target.recorder.check(f"{kind} as on the CPU", [each.generated for each in copies] == expected)
    if "details" in KINDS[kind]:
        worst = max(map(compare_details, copies, answers))
        detail = f"difference of log-probabilities {worst:.2g}"
        target.recorder.check(f"{kind}: ranks and top tokens as on the CPU", worst <= TOLERANCE, detail)
    paths = {pb.StepPath.Name(response.path) for response in router.responses}
    is_captured = paths <= {"STEP_PATH_PROMPT", "STEP_PATH_GRAPH", "STEP_PATH_UNSPECIFIED"}
    target.recorder.check(f"{kind}: steps are graphs", is_captured, ", ".join(sorted(paths)))


def compare_details(mine: Request, other: Request) -> float:
    """Return the largest difference of log-probabilities, infinite if ranks or top tokens differ."""
    tops, other_tops = ([pair for top in each.tops for pair in top] for each in (mine, other))
    if mine.ranks != other.ranks or [token for token, _ in tops] != [token for token, _ in other_tops]:
        return float("inf")
    pairs = [*zip(mine.logprobs, other.logprobs, strict=True)]
    pairs += [(a, b) for (_, a), (_, b) in zip(tops, other_tops, strict=True)]
    return max((abs(a - b) for a, b in pairs), default=float("inf"))


def check_tuned(target: Target, kind: str) -> None:
    """Compare rows with soft prompts or adapters, beside rows without, with peft."""
    with temporary_directory() as directory:
        case = AdapterCase("llama_tied", directory) if kind == "adapters" else Case("llama_tied", directory)
        options = {"block_size": 16, "dtype": "float32", "uds_path": case.copies.uds_path}
        if kind == "adapters":
            options["adapter_cache"] = str(directory)  # so that steps with adapters are captured
        runner = load_model(target, configure(case.directory, **SIZES, **options))
        runner.reset()
        for digest in case.copies.digests:
            runner.adapters.load(digest)
        requests = [case.request(asked) for asked in case.asked]
        for request in requests[::2]:
            request.details = {}
        router = Router(runner, seed=1, depth=2)
        router.run(list(requests))
    paths = {response.path for response in router.responses}
    if kind == "adapters" and not target.is_rehearsal:  # kernels' fallbacks use no slots of adapters
        target.recorder.check(f"{kind}: no step leaves the graphs", pb.STEP_PATH_ADAPTER not in paths)
    for number, (request, asked) in enumerate(zip(requests, case.asked, strict=True)):
        certain = asked.answer.certain
        is_equal = request.generated[:certain] == asked.answer.token_ids[:certain]
        target.recorder.check(f"{kind}, request {number}: as peft", is_equal)


@contextmanager
def written_llama(**options: Any) -> Iterator[ShardConfig]:
    with temporary_directory() as directory:
        write_llama(directory, vocab_size=VOCAB_SIZE)
        write_byte_level(directory, VOCAB_SIZE - 3)
        yield configure(directory, **SIZES, dtype="float32", **options)
