"""Compiling the kernels of well-known models for this machine's GPU, and the resources that they take."""

import tempfile
import time
from pathlib import Path

import torch

from bench.gpu.target import Target, parse_target
from tgis.shard.kernels.cuda.offline.driver import compile_only
from tgis.shard.kernels.cuda.offline.precompile import precompile
from tgis.shard.kernels.cuda.offline.variants import find_variants

REHEARSED = 90, "begin_step"  # compute capability and kernel


def main() -> None:
    target = parse_target("compile")
    if target.is_rehearsal:
        rehearse(target)
        return
    major, minor = torch.cuda.get_device_capability(target.device)
    with tempfile.TemporaryDirectory() as directory:
        start = time.perf_counter()
        num_kernels, failed = precompile(Path(directory), [10 * major + minor])
        seconds = time.perf_counter() - start
    target.recorder.figure("kernels compiled", num_kernels, "", f"in {seconds:.0f} s")
    target.recorder.check("all kernels compile", not failed, "; ".join(failed[:3]))


def rehearse(target: Target) -> None:
    capability, name = REHEARSED
    with compile_only(capability) as kernels:
        for variant in find_variants():
            if variant.kernel == name:
                variant.run()
    target.recorder.figure("kernels compiled", len(kernels), "", "of one kind")


if __name__ == "__main__":
    main()
