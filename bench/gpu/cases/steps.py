"""Checks whole steps of a model of real size: captured steps have the results of eager ones, launched ahead
or one at a time, and steady steps neither wait for the device nor allocate memory on it."""

import torch

from bench.gpu.inputs.runners import capture, count_steps, load_runner, run_steps
from bench.gpu.target import Target
from bench.steps import Rows
from tgis.shard.runner.device.model_runner import DeviceModelRunner

NUM_STEPS, NUM_ROWS, PROMPT = 1000, 8, 32


def compare_captured(target: Target, name: str) -> None:
    """Compare the tokens of captured steps, launched ahead and one by one, with those of eager ones."""
    runner, num_rows = load_runner(target, target.shape(name)), 2 if target.is_rehearsal else NUM_ROWS
    is_captured = capture(target, runner, [num_rows], f"{name}: steps of {num_rows} rows")
    count = 4 if target.is_rehearsal else NUM_STEPS
    if is_captured:
        ahead, alone = (decode(runner, num_rows, count, depth) for depth in (runner.max_pending, 1))
        target.recorder.check(f"{name}: {count} captured steps, ahead and one by one", ahead == alone)
        runner.graphs.clear()
        eager = decode(runner, num_rows, count, runner.max_pending)
        equal = sum(map(lambda x, y: x == y, ahead, eager)) / len(eager)
        target.recorder.check(f"{name}: {count} eager steps as captured", equal == 1, f"{equal:.1%} equal")
    else:
        ahead, alone = (decode(runner, num_rows, count, depth) for depth in (runner.max_pending, 1))
        target.recorder.check(f"{name}: {count} eager steps, ahead and one by one", ahead == alone)


def decode(runner: DeviceModelRunner, num_rows: int, count: int, depth: int) -> list[bytes]:
    """Return the tokens of the steps after a prompt."""
    rows = Rows(runner, num_rows, PROMPT, count + 1)
    runner.reset()
    for step in rows.prefill(num_rows * PROMPT):
        runner.launch(step).answer()
    return run_steps(runner, rows, count, depth)


def check_steady(target: Target, name: str) -> None:
    """Check that consecutive steps neither wait for the device nor allocate memory on it."""
    runner, num_rows = load_runner(target, target.shape(name)), 2 if target.is_rehearsal else NUM_ROWS
    capture(target, runner, [num_rows], f"{name}: steps of {num_rows} rows")
    (num_before, _), count = count_steps(target), 4 if target.is_rehearsal else NUM_STEPS
    rows = Rows(runner, 2, 8, count + 2 * num_before)
    runner.launch(rows.resume()).answer()
    run_steps(runner, rows, num_before)
    if target.is_rehearsal:
        target.recorder.fact("steady steps", "not watched on a CPU")
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
