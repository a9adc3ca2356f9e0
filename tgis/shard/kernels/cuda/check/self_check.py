"""Compares each kernel with its twin on random inputs of a few tokens when a shard starts on a GPU, at small
sizes and at those of the model and its speculator, for which kernels are compiled."""

import json
import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from tgis.errors import first_line
from tgis.shard.kernels.cuda.check.inputs import INPUTS, SMALL, KernelSizes
from tgis.shard.kernels.cuda.functions import dependent_launch
from tgis.shard.kernels.cuda.implementations import KERNELS, Implementations
from tgis.shard.kernels.cuda.kernel_cache import use_cache

logger = logging.getLogger(__name__)

# Maximum difference, relative to 1 + |expected|, by the type of weights: several times their rounding error;
# for float32, that of tensor cores. Integers must be equal.
TOLERANCES = {torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}
# Keys of 8 bits may differ by one step, where the rounding before decides.
STEPS = {torch.float8_e4m3fn: 2**-3, torch.float8_e5m2: 2**-2}

DTYPES = (torch.bfloat16, torch.float16)  # usual types of weights on GPUs


class _DifferenceError(Exception):
    """Error: a kernel and its twin return different results."""


def choose_implementations(
    device: torch.device,
    dtypes: Sequence[torch.dtype] = DTYPES,
    model: KernelSizes = SMALL,
    speculator: KernelSizes | None = None,
) -> Implementations:
    """Choose Triton's kernels. Those that fail the check at small sizes, at the model's or at those of its
    speculator are replaced by twins. Kernels of recurrent layers, experts and codes are not checked for
    models without them. If one that starts early fails, all are checked again, launched normally from now
    on."""
    dependent_launch.refuse(None)
    owners = (model,) if speculator is None else (model, speculator)
    all_sizes = dict.fromkeys(sizes for own in owners for sizes in (own.small, own))
    failures = check(device, dtypes, all_sizes=all_sizes)
    early = [name for name in dependent_launch.EARLY_KERNELS if name in failures]
    if early and dependent_launch.is_dependent(device):
        reason = f"{early[0]} fails its check: {failures[early[0]]}"
        logger.warning("kernels start only when those before them have ended: %s", reason)
        dependent_launch.refuse(reason)
        failures = check(device, dtypes, all_sizes=all_sizes)
    for name, reason in failures.items():
        logger.warning("GPU kernel %s is replaced by torch operators, which are slower: %s", name, reason)
    return Implementations.choose(frozenset(failures))


def check(
    device: torch.device,
    dtypes: Sequence[torch.dtype] = DTYPES,
    kernels: Implementations | None = None,
    all_sizes: Iterable[KernelSizes] = (SMALL,),
) -> dict[str, str]:
    """Return the kernels that fail for any of these types of weights and sizes, with the reason.

    Raises RuntimeError if the device is lost."""
    kernels = kernels or Implementations.choose()
    failures: dict[str, str] = {}
    cases = [(dtype, sizes) for sizes in all_sizes for dtype in dtypes]
    for name in KERNELS:
        try:
            reason = find_failure(name, kernels, device, cases)
        except RuntimeError:
            logger.error("the GPU failed in kernel %s, or in its twin in torch operators", name)
            raise
        if reason is not None:
            failures[name] = reason
    return failures


def find_failure(
    name: str,
    kernels: Implementations,
    device: torch.device,
    cases: Sequence[tuple[torch.dtype, KernelSizes]],
) -> str | None:
    """Return the reason why a kernel fails for any of these types and sizes, or None if it passes."""
    kernel = getattr(kernels, name)
    twin = KERNELS[name].plain
    draw = INPUTS[name]
    for dtype, sizes in cases:
        about = f"with weights of {dtype}" + (f" and {sizes.owner} sizes" if sizes != sizes.small else "")
        try:
            for each in draw(device, dtype, sizes):
                _compare(each.run(kernel), each.run(twin), TOLERANCES[dtype])
        except _DifferenceError as error:
            return f"{error}, {about}"
        except Exception as error:  # of the compiler, of the launch, or of the device
            _synchronise(device)
            return f"it does not run, {about}: {type(error).__name__}: {first_line(error)}"
    return None


def _compare(actual: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    """Raise _DifferenceError if the results differ."""
    for result, twin_result in zip(actual, expected, strict=True):
        if result.shape != twin_result.shape or result.dtype != twin_result.dtype:
            raise _DifferenceError("its results have wrong shapes or types")
        if not result.is_floating_point():
            if not torch.equal(result, twin_result):
                raise _DifferenceError("its integers differ")
            continue
        limit = max(tolerance, STEPS.get(result.dtype, 0.0))
        result, twin_result = result.double(), twin_result.double()
        differences = (result - twin_result).abs() / (1 + twin_result.abs())
        difference = differences.where(result != twin_result, 0.0).max().item()  # infinities may be equal
        if not difference <= limit:  # also if it is NaN
            raise _DifferenceError(f"it differs by {difference:.2g}, more than {limit:g}")


def _synchronise(device: torch.device) -> None:
    """Raise RuntimeError if the device has failed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Print the failures on each GPU as JSON."""
    use_cache(None)
    failures: dict[str, dict[str, str]] = {}
    for index in range(torch.cuda.device_count()):
        torch.cuda.set_device(index)
        failures[f"cuda {index}"] = check(torch.device("cuda", index))
    print(json.dumps(failures))


if __name__ == "__main__":
    main()
