"""The engine on tiny models of every family: as transformers, with captured steps and without, one step at a
time and ahead; and what a steady step must not do."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PretrainedConfig

from bench.gpu.step_speed import STEPS, load_runner, run_steps
from bench.gpu.target import Target, parse_target
from bench.steps import Rows
from tests.support.shard.checkpoints import write_model
from tests.support.shard.driver import Request, Router, configure
from tests.support.shard.family_cases.all import CASES
from tests.support.shard.family_oracle import NEW_TOKENS, Answer, Oracle, check, draw_inputs
from tests.support.shard.messages import GREEDY, SAMPLE
from tgis.config.processes import ShardConfig
from tgis.shard.runner.interface import ModelRunner
from tgis.shard.startup.load import load

STEADY_STEPS = 1000
DETAILS = {"logprobs": True, "ranks": True}
SIZES = {"kv_cache_tokens": 2048, "max_sequence_length": 128, "max_step_tokens": 64, "dtype": "float32"}


def main() -> None:
    target = parse_target("engine")
    check_steady_steps(target)
    cases = list(CASES.items())
    for name, make_config in cases[:2] if target.is_rehearsal else cases:
        if target.seconds_left < 5:
            target.recorder.problem("time", f"no family from {name} on")
            break
        with tempfile.TemporaryDirectory() as directory:
            check_family(target, name, Path(directory), make_config)


def check_family(
    target: Target, name: str, directory: Path, make_config: Callable[[], PretrainedConfig]
) -> None:
    config = make_config()
    write_model(directory, config)
    oracle = Oracle(directory, config)
    answers = [oracle.answer(ids) for ids in draw_inputs()]
    try:
        runner = load_model(target, configure(directory, **SIZES))
        detailed = run_requests(runner, oracle, answers, depth=2, details=DETAILS)
        for request, answer in zip(detailed, answers, strict=True):
            check(request, answer)
        ahead, alone = (run_requests(runner, oracle, answers, depth) for depth in (2, 1))
        eager = load_model(target, replace(configure(directory, **SIZES), cuda_graphs="0"))
        one_by_one = run_requests(eager, oracle, answers, depth=2)
    except (AssertionError, RuntimeError) as error:
        target.recorder.check(f"{name}: as transformers", False, str(error).partition("\n")[0][:200])
        return
    found = [[request.generated for request in requests] for requests in (ahead, alone, one_by_one)]
    target.recorder.check(f"{name}: as transformers", True)
    target.recorder.check(f"{name}: captured, ahead and alone are equal", found[0] == found[1] == found[2])


def load_model(target: Target, config: ShardConfig) -> ModelRunner:
    if not target.is_rehearsal:
        return load(replace(config, device="cuda"))
    from tests.support.cuda.runners import load_late

    runner = load_late(config)
    if config.cuda_graphs != "0":
        runner.graphs.capture([1, 2, 4, 8])
    return runner


def run_requests(
    runner: ModelRunner,
    oracle: Oracle,
    answers: Sequence[Answer],
    depth: int,
    details: dict[str, bool] | None = None,
) -> list[Request]:
    """Run greedy requests, and sampled ones where no details are wanted."""
    requests = []
    for sampling in (GREEDY,) if details else (GREEDY, {**SAMPLE, "seed": 7}):
        for answer in answers:
            is_encoded = oracle.is_encoder_decoder
            prompt = [oracle.start_token_id] if is_encoded else answer.input_ids
            encoder = answer.input_ids if is_encoded else []
            given = {"sampling": sampling, "details": details or {}, "encoder_token_ids": encoder}
            requests.append(Request(prompt, NEW_TOKENS, **given))
    runner.reset()
    Router(runner, seed=1, depth=depth).run(list(requests))
    return requests


def check_steady_steps(target: Target) -> None:
    """Check that steps in a row neither wait for the device nor allocate its memory."""
    runner = load_runner(target, target.shape("0.6b"))
    count = 20 if target.is_rehearsal else STEADY_STEPS
    rows = Rows(runner, 2, 8, count + 2 * STEPS)
    runner.launch(rows.resume()).answer()
    run_steps(runner, rows, STEPS)
    if target.is_rehearsal:
        return
    before = torch.cuda.memory_stats(target.device)["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_steps(runner, rows, count)
    except RuntimeError as error:
        target.recorder.check("steady steps never wait", False, str(error).partition("\n")[0])
    else:
        target.recorder.check("steady steps never wait", True, f"{count} steps")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    made = torch.cuda.memory_stats(target.device)["allocation.all.allocated"] - before
    target.recorder.check("steady steps allocate nothing", made == 0, f"{made} allocations")


if __name__ == "__main__":
    main()
