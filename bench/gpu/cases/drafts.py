"""Checks drafts that the device verifies, and measures what they cost."""

import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from bench.gpu.cases.features import GRAMMAR, NEW_TOKENS, VOCAB_SIZE, written_llama
from bench.gpu.cases.models import answer_on_host, load_model
from bench.gpu.inputs.runners import CONTEXT, MAX_NEW, capture, count_steps, load_runner
from bench.gpu.target import Target
from bench.steps import Rows
from tests.support.shard.drafting import DraftingRouter, Foreseen
from tests.support.shard.driver import Request, opening, prompts
from tests.support.shard.messages import GREEDY, SAMPLE, Steps, integers
from tgis.pb import shard_pb2 as pb
from tgis.shard.runner.device.model_runner import DeviceModelRunner
from tgis.shard.runner.interface import ModelRunner

NUM_DRAFTS, NUM_ROWS = 3, (1, 16)
WRONG = 7  # a token that is never sampled, because of its bias
SAMPLINGS: list[dict[str, Any]] = [
    GREEDY,
    {**SAMPLE, "temperature": 0.6, "min_p": 0.05},
    {**GREEDY, "repetition_penalty": 1.6, "frequency_penalty": 0.5},
    {**SAMPLE, "top_k": 20, "top_p": 0.95},
]


def check(target: Target) -> None:
    """Compare accepted drafts, correct and incorrect ones, with tokens sampled one by one."""
    with written_llama(speculate=NUM_DRAFTS) as config:
        requests = [
            Foreseen(prompt, NEW_TOKENS, [2, 11, 30], {**SAMPLINGS[i % 4], "seed": i})
            for i, prompt in enumerate(prompts(3, 8, longest=25))
        ]
        for request in requests[::3]:
            request.grammar = GRAMMAR
        alone = Request([5, 6, 7, 8], NEW_TOKENS, row=0)
        *expected, known = answer_on_host(config, [*requests, alone])
        runner = load_model(target, config)
        tokens, paths = run_alone(runner, alone, known.generated)
        runner.reset()
        for request, answered in zip(requests, expected, strict=True):
            request.truth = answered.generated
        DraftingRouter(runner, luck=0.7, seed=1).run([*requests])
    target.recorder.check("drafts as tokens one by one", tokens == known.generated[: len(tokens)])
    are_equal = [each.generated for each in requests] == [each.generated for each in expected]
    target.recorder.check("drafts of several rows as on the CPU", are_equal)
    detail = ", ".join(sorted(map(pb.StepPath.Name, paths)))
    target.recorder.check("drafts: steps are graphs", paths == {pb.STEP_PATH_GRAPH}, detail)


def run_alone(runner: ModelRunner, request: Request, truth: list[int]) -> tuple[list[int], set[pb.StepPath]]:
    """Return the tokens of a row with drafts in each step, every second time with a wrong one, and the paths
    of the steps."""
    runner.reset()
    steps = Steps(runner.info.block_size, runner.info.num_blocks)
    opened = steps.step([(0, 0, len(request.prompt))], [opening(request)])
    tokens, paths = integers(runner.launch(opened).answer().token_ids), set[pb.StepPath]()
    while len(tokens) < NEW_TOKENS - NUM_DRAFTS - 1:
        end, guesses = len(request.prompt) + len(tokens), truth[len(tokens) :][:NUM_DRAFTS]
        if len(tokens) % 2 == 0:
            guesses[-1] = (guesses[-1] + 1) % VOCAB_SIZE
        response = runner.launch(steps.step([(0, end - 1, end)], drafts={0: guesses})).answer()
        tokens += integers(response.token_ids)
        paths.add(response.path)
    return tokens, paths


def measure(target: Target, name: str) -> None:
    """Measure a step with drafts, none of which is accepted, relative to one without, launched one by one."""
    runner = load_runner(target, target.shape(name), has_drafts=True)
    num_drafts = 1 if target.is_rehearsal else NUM_DRAFTS
    for num_rows in NUM_ROWS[:1] if target.is_rehearsal else NUM_ROWS:
        about = f"{name}: {num_rows} rows with {num_drafts} drafts"
        if capture(target, runner, [num_rows, num_rows * (num_drafts + 1)], f"{about}: steps"):
            plain, drafted = (time_steps(target, runner, num_rows, count) for count in (0, num_drafts))
            detail = f"{drafted * 1e3:.2f} ms instead of {plain * 1e3:.2f} ms"
            target.recorder.figure(f"{about}, relative to none", drafted / plain, "", detail)
        runner.graphs.clear()


def time_steps(target: Target, runner: DeviceModelRunner, num_rows: int, num_drafts: int) -> float:
    """Return the median seconds of steps from their launch to their answer."""
    count, num_warm = count_steps(target)
    context = 2 * count if target.is_rehearsal else CONTEXT
    biases = np.array([-1e9], "<f4").tobytes()
    sampling = {"bias_token_ids": np.array([WRONG], "<i4").tobytes(), "biases": biases}
    rows = Rows(runner, num_rows, context - count, MAX_NEW, sampling=sampling, max_drafts=NUM_DRAFTS)
    runner.reset()
    runner.launch(rows.resume()).answer()
    seconds, paths = list[float](), set[pb.StepPath]()
    for request in make_steps(rows, num_drafts, count):
        began = time.perf_counter()
        response = runner.launch(request).answer()
        seconds.append(time.perf_counter() - began)
        paths.add(response.path)
    target.recorder.check(f"{num_rows} rows with {num_drafts} drafts: graphs", paths == {pb.STEP_PATH_GRAPH})
    return statistics.median(seconds[num_warm:])


def make_steps(rows: Rows, num_drafts: int, count: int) -> Iterator[pb.StepRequest]:
    for _ in range(count):
        request = rows.decode()
        if num_drafts:
            request.num_drafts = np.full(rows.batch, num_drafts, "<i4").tobytes()
            request.draft_ids = np.full(rows.batch * num_drafts, WRONG, "<i4").tobytes()
        yield request
