"""Every kernel against its twin, in the sizes of well-known models, on random numbers that are new each time.
What is computed twice must have the same bits."""

import sys

import torch
from torch import Tensor

from bench.gpu.kernel_inputs import Case, draw_cases
from bench.gpu.kernels import load_kernels
from bench.gpu.target import Target, parse_target
from tgis.shard.kernels.cuda.check.self_check import check
from tgis.shard.kernels.cuda.implementations import KERNELS, Implementations

# Largest relative errors, of norms of the whole results.
TOLERANCES = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}


def main() -> None:
    target = parse_target("kernels")
    kernels = load_kernels(target)
    failures = check(target.device, kernels=kernels)
    for name in KERNELS:
        target.recorder.check(f"{name}: check at start", name not in failures, failures.get(name, ""))
    compare_all(target, kernels)


def compare_all(target: Target, kernels: Implementations) -> None:
    """Compare what is left of the time. Errors of single cases are printed, the worst of a kernel is kept."""
    worst: dict[tuple[str, torch.dtype], float] = {}
    for case in draw_cases(target):
        if target.seconds_left < 0:
            target.recorder.problem("time", f"no case after {case.kernel} {case.label}")
            break
        error = compare(target, kernels, case)
        key = case.kernel, case.dtype
        worst[key] = max(worst.get(key, 0.0), error)
    for (name, dtype), error in worst.items():
        about = f"{name} {dtype}".replace("torch.", "")
        target.recorder.check(f"{about}: near its twin", error <= TOLERANCES[dtype], f"error {error:.1e}")


def compare(target: Target, kernels: Implementations, case: Case) -> float:
    """Return the largest relative error of a kernel's results."""
    kernel, twin = getattr(kernels, case.kernel), KERNELS[case.kernel].plain
    try:
        found, again, expected = (case.input.run(each) for each in (kernel, kernel, twin))
        target.synchronize()
    except RuntimeError as error:
        target.recorder.problem(f"{case.kernel} {case.label}", f"{type(error).__name__}: {error}")
        return torch.inf
    if not all(map(equal_bits, found, again)):
        target.recorder.check(f"{case.kernel} {case.label} {case.dtype}: equal bits twice", False)
    error = max(map(relative_error, found, expected))
    print(f"{case.kernel} {case.label} {case.dtype}: {error:.1e}", file=sys.stderr, flush=True)
    return error


def equal_bits(x: Tensor, y: Tensor) -> bool:
    return bool(((x == y) | (x.isnan() & y.isnan())).all())


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over that of what is expected, or infinity if only one has a NaN."""
    if not torch.equal(found.isnan(), expected.isnan()):
        return torch.inf
    x, y = (each.double().nan_to_num(0.0) for each in (found, expected))
    return ((x - y).norm() / y.norm().clamp(min=1e-30)).item()


if __name__ == "__main__":
    main()
