"""Programmatic dependent launch: a kernel starts while the one before it in the stream still runs, and waits
for it before it reads results.

Every kernel that is launched in this way waits in all of its programs before it writes anything and before
it reads anything but weights, which no kernel writes. A kernel is complete only when all of its programs have
ended, so a complete kernel implies that all kernels before it in the stream are complete, also those two or
more launches back: nothing can overwrite what an earlier kernel still reads. Kernels that are launched
normally start when all earlier ones are complete."""

import torch
import triton
import triton.language as tl

from tgis.shard.kernels.cuda.functions.processors import find_capability

MIN_CAPABILITY = 90
EARLY_KERNELS = "multiply_few", "add_parts", "norm", "gate", "turn_and_keep"  # that are launched so


class _EarlyStartRefusal:
    reason: str | None = None


def refuse(reason: str | None) -> None:
    """Launch all kernels normally from now on, for this reason; or as usual again, if it is None."""
    _EarlyStartRefusal.reason = reason


def is_dependent(device: torch.device) -> bool:
    """Return True if kernels on this device start before their predecessors end. The interpreter's do not."""
    if (
        device.type == "cpu"
        or _EarlyStartRefusal.reason is not None
        or not hasattr(tl.extra.cuda, "gdc_wait")
    ):
        return False
    return find_capability(device) >= MIN_CAPABILITY


def stop(device: torch.device) -> bool:
    """Launch all kernels normally from now on, because a capture failed. Return False if they were
    before."""
    if not is_dependent(device):
        return False
    refuse("a step could not be captured")
    return True


@triton.jit
def wait_for_inputs():
    """Let the next kernel start, and wait until all kernels before this one are complete."""
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(address):
    """Read the 128 bytes at each address into the second-level cache, without waiting."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )
