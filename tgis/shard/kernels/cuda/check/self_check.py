"""Compares each kernel with its twin on small random input, when a shard starts on a GPU."""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tgis.errors import first_line
from tgis.shard.kernels.cuda.check.inputs import INPUTS, Input
from tgis.shard.kernels.cuda.implementations import KERNELS, Implementations
from tgis.shard.kernels.cuda.kernel_cache import use_cache

logger = logging.getLogger(__name__)

# Largest difference, relative to 1 + |number|, of kernels that read and write weights of these types. It is
# some times their rounding, and float32's is that of products of tensor cores. Integers must be equal.
TOLERANCES = {torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}

DTYPES = (torch.bfloat16, torch.float16)  # of weights that GPUs usually have


class _DifferenceError(Exception):
    """Error: a kernel computes something else than its twin."""


def choose_implementations(device: torch.device, dtypes: Sequence[torch.dtype] = DTYPES) -> Implementations:
    """Choose Triton's kernels, or their twins in the place of those that fail the check."""
    failures = check(device, dtypes)
    for name, reason in failures.items():
        logger.warning("GPU kernel %s is replaced by torch operators, which are slower: %s", name, reason)
    return Implementations.choose(frozenset(failures))


def check(
    device: torch.device,
    dtypes: Sequence[torch.dtype] = DTYPES,
    kernels: Implementations | None = None,
) -> dict[str, str]:
    """Return the kernels that fail for weights of any of these types, with the reason.

    Raises RuntimeError if the device is lost."""
    kernels = kernels or Implementations.choose()
    failures: dict[str, str] = {}
    for name, module in KERNELS.items():
        try:
            reason = _find_failure(getattr(kernels, name), module.plain, INPUTS[name], device, dtypes)
        except RuntimeError:
            logger.error("the GPU is lost: kernel %s, or its twin in torch operators, broke it", name)
            raise
        if reason is not None:
            failures[name] = reason
    return failures


def _find_failure(
    kernel: Callable[..., Any],
    twin: Callable[..., Any],
    draw: Callable[[torch.device, torch.dtype], Iterator[Input]],
    device: torch.device,
    dtypes: Sequence[torch.dtype],
) -> str | None:
    for dtype in dtypes:
        try:
            for each in draw(device, dtype):
                _compare(each.run(kernel), each.run(twin), TOLERANCES[dtype])
        except _DifferenceError as error:
            return f"{error}, with weights of {dtype}"
        except Exception as error:  # of the compiler, of the launch, or of the device
            _synchronise(device)
            return f"it does not run, with weights of {dtype}: {type(error).__name__}: {first_line(error)}"
    return None


def _compare(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    """Raise _DifferenceError if the results differ."""
    for mine, theirs in zip(found, expected, strict=True):
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            raise _DifferenceError("its results have other shapes or types")
        if not mine.is_floating_point():
            if not torch.equal(mine, theirs):
                raise _DifferenceError("its integers differ")
            continue
        mine, theirs = mine.double(), theirs.double()
        difference = ((mine - theirs).abs() / (1 + theirs.abs())).max().item()
        if not difference <= tolerance:  # also if it is NaN
            raise _DifferenceError(f"it differs by {difference:.2g}, more than {tolerance:g}")


def _synchronise(device: torch.device) -> None:
    """Raise RuntimeError if the device computes nothing any more."""
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
