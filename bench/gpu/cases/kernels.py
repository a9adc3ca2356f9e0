"""Compares every kernel with its reference, in the sizes of well-known models, on new random numbers each
time. A repeated computation must have the same bits."""

import torch
from torch import Tensor

from bench.gpu.inputs.compilations import count_compilations
from bench.gpu.inputs.kernel_inputs import KernelInput, draw_far_inputs, draw_inputs
from bench.gpu.inputs.kernels import load_kernels
from bench.gpu.target import Target
from tgis.shard.kernels.cuda.check.inputs import SMALL, Input
from tgis.shard.kernels.cuda.check.self_check import find_failure
from tgis.shard.kernels.cuda.implementations import KERNELS, Implementations

# Maximum relative errors of the norms of whole results.
TOLERANCES = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}
NUM_RUNS = 20


def compare(target: Target, kernel: str, dtype_name: str, group: str) -> None:
    """Compare one kernel with its reference for a type of weights and a group of models.

    Errors of single inputs are printed, and the largest is recorded."""
    count, kernels, dtype = count_compilations(), load_kernels(target), getattr(torch, dtype_name)
    reason = find_failure(kernel, kernels, target.device, [(dtype, SMALL)])
    target.recorder.check(f"{kernel} {dtype_name}: check at start", reason is None, reason or "")
    worst, labels = 0.0, list[str]()
    for given in draw_inputs(target, kernel, dtype, group):
        worst = max(worst, _compare_one(target, kernels, given))
        labels.append(given.label)
    target.recorder.fact(f"code of {kernel} {dtype_name} {group}", str(count))
    detail = f"error {worst:.1e}, {len(labels)} inputs"
    target.recorder.check(f"{kernel} {dtype_name} {group}: near its twin", worst <= TOLERANCES[dtype], detail)


def compare_far(target: Target, kernel: str) -> None:
    """Compare a kernel's results on blocks beyond 2^31 elements of a cache with its results on the same
    blocks of a small cache."""
    kernels = load_kernels(target)
    for label, near, far in draw_far_inputs(target, kernel):
        expected, actual = (_run(kernels, kernel, given) for given in (near, far))
        results = expected, [x[-len(y) :] for x, y in zip(actual, expected, strict=True)]
        key = f"{kernel} {label}: equal bits in a cache of more than 2^31 elements"
        target.recorder.check(key, all(map(equal_bits, *results)))


def _compare_one(target: Target, kernels: Implementations, given: KernelInput) -> float:
    """Return the largest relative error of a kernel's results."""
    about = f"{given.kernel} {given.label} {given.dtype}".replace("torch.", "")
    expected = given.input.run(KERNELS[given.kernel].plain)
    actual = _run(kernels, given.kernel, given.input)
    for _ in range(1 if target.is_rehearsal else NUM_RUNS - 1):
        if not all(map(equal_bits, actual, _run(kernels, given.kernel, given.input))):
            target.recorder.check(f"{about}: equal bits in {NUM_RUNS} runs", False)
            break
    error = max(map(relative_error, actual, expected))
    print(f"{about}: {error:.1e}", flush=True)
    return error


def _run(kernels: Implementations, kernel: str, given: Input) -> list[Tensor]:
    return given.run(getattr(kernels, kernel))


def equal_bits(x: Tensor, y: Tensor) -> bool:
    return bool(((x == y) | (x.isnan() & y.isnan())).all())


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference divided by the norm of the expected result; infinity if only one of
    them has a NaN. Integers must be equal."""
    if not actual.is_floating_point():
        return 0.0 if torch.equal(actual, expected) else torch.inf
    if not torch.equal(actual.isnan(), expected.isnan()):
        return torch.inf
    x, y = (each.double().nan_to_num(0.0) for each in (actual, expected))
    return ((x - y).norm() / y.norm().clamp(min=1e-30)).item()
