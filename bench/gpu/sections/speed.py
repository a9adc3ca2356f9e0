"""The speed of products, attention and whole steps, beside the limits that the same run has measured. Weights
are made on the device."""

import torch
import torch.nn.functional as F

from bench.gpu.kernels import load_kernels
from bench.gpu.results import find_figure
from bench.gpu.roofline import Rates, kv_bytes, linear_seconds, list_linears, prefill_operations
from bench.gpu.scenes import draw_queries, draw_scene
from bench.gpu.step_speed import measure_steps
from bench.gpu.target import Target, parse_target

NUM_TOKENS = (1, 4, 16, 64, 256)
# Numbers of sequences and their lengths.
DECODES = ((1, 640), (1, 32768), (16, 640), (64, 640), (256, 640))
PROMPT = 8192


def main() -> None:
    target = parse_target("speed")
    rates = read_rates(target)
    measure_steps(target, rates)
    measure_attention(target, rates)
    measure_linears(target, rates)


def read_rates(target: Target) -> Rates:
    """Return the limits that the section before has measured, or those of the chip's makers."""
    read, copy = (find_figure(target.path, f"{name} bandwidth") for name in ("read", "copy"))
    gemm = find_figure(target.path, "gemm bf16")
    if read is None or copy is None or gemm is None:
        target.recorder.problem("limits", "were not measured: shares are of 4.3 TB/s and 780 TFLOP/s")
        return Rates(4.3e12, 780e12)
    return Rates(max(read, copy) * 1e12, gemm * 1e12)


def measure_linears(target: Target, rates: Rates) -> None:
    shape = target.shape("8b")
    for num_tokens in NUM_TOKENS:
        measured = floor = 0.0
        for rows, columns in list_linears(shape):
            weight = torch.randn(rows, columns, device=target.device).bfloat16()
            x = torch.randn(num_tokens, columns, device=target.device).bfloat16()
            measured += target.time(lambda x=x, weight=weight: F.linear(x, weight))  # type: ignore[misc]
            floor += linear_seconds(num_tokens, (rows, columns), rates)
        target.recorder.figure(f"8b linears {num_tokens}: share", floor / measured, "", "products of a layer")


def measure_attention(target: Target, rates: Rates) -> None:
    shape, kernels = target.shape("8b"), load_kernels(target)
    for num_rows, length in DECODES:
        length = 40 if target.is_rehearsal else length
        scene = draw_scene(target, shape, num_rows, length, torch.bfloat16)
        q = draw_queries(scene, num_rows)
        seconds = target.time(lambda scene=scene, q=q: scene.attend_segments(kernels, q))  # type: ignore[misc]
        floor = kv_bytes(shape, num_rows * length) / shape.num_layers / rates.bandwidth
        key, detail = f"attention {num_rows} x {length}", f"{seconds * 1e6:.1f} us a layer"
        target.recorder.figure(f"{key}: share of bandwidth", floor / seconds, "", detail)
        if target.is_rehearsal:
            break
    length = 40 if target.is_rehearsal else PROMPT
    scene = draw_scene(target, shape, 1, length, torch.bfloat16)
    q = draw_queries(scene, length)
    seconds = target.time(lambda: scene.attend_tiles(kernels, q))
    operations = prefill_operations(shape, length) / shape.num_layers
    operations -= sum(2 * rows * columns for rows, columns in list_linears(shape)) * length
    target.recorder.figure(f"attention of a prompt of {length}", operations / seconds / 1e12, "TFLOP/s")


if __name__ == "__main__":
    main()
