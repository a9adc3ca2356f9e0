"""Measures the machine's limits: bandwidth, rate of products, and the cost of launches and copies."""

from collections.abc import Callable

import torch

from bench.gpu.target import Target

GIB = 1 << 30
LAUNCHES = 1000
UPLOAD_WORDS = 4096


def measure_bandwidth(target: Target) -> None:
    num_bytes = 1 << 20 if target.is_rehearsal else 4 * GIB
    x = torch.randn(num_bytes // 4, device=target.device)
    y = torch.empty_like(x)
    copy_s = target.time(lambda: y.copy_(x))
    target.recorder.figure("copy bandwidth", 2 * num_bytes / copy_s / 1e12, "TB/s", "read and written")
    target.recorder.figure("read bandwidth", num_bytes / target.time(x.sum) / 1e12, "TB/s", "a sum")


def measure_products(target: Target) -> None:
    size = 128 if target.is_rehearsal else 8192
    a, b = (torch.randn(size, size, device=target.device).bfloat16() for _ in range(2))
    seconds = target.time(lambda: a @ b)
    target.recorder.figure("gemm bf16", 2 * size**3 / seconds / 1e12, "TFLOP/s", f"{size}, random numbers")
    if target.is_rehearsal:
        return
    left, right = a.to(torch.float8_e4m3fn), b.t().contiguous().to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=target.device)
    try:
        seconds = target.time(lambda: torch._scaled_mm(left, right, one, one, out_dtype=torch.bfloat16))
    except RuntimeError as error:
        target.recorder.problem("gemm fp8", type(error).__name__)
    else:
        target.recorder.figure("gemm fp8", 2 * size**3 / seconds / 1e12, "TFLOP/s")


def measure_launches(target: Target) -> None:
    x = torch.zeros(1, device=target.device)

    def launch_all() -> None:
        for _ in range(LAUNCHES):
            x.add_(1)

    replay: Callable[[], None] = launch_all
    if not target.is_rehearsal:
        launch_all()
        target.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch_all()
        replay = graph.replay
    seconds = target.time(replay)
    target.recorder.figure("launch in a graph", seconds / LAUNCHES * 1e6, "us", "of kernels that do nothing")
    seconds = target.time(launch_all)
    target.recorder.figure("launch by torch", seconds / LAUNCHES * 1e6, "us")


def measure_copies(target: Target) -> None:
    pinned = torch.zeros(UPLOAD_WORDS, dtype=torch.int32, pin_memory=not target.is_rehearsal)
    device = torch.zeros_like(pinned, device=target.device)
    upload_s = target.time(lambda: device.copy_(pinned, non_blocking=True))
    target.recorder.figure("upload latency", upload_s * 1e6, "us", f"{4 * UPLOAD_WORDS} bytes")
    download_s = target.time(lambda: pinned.copy_(device, non_blocking=True))
    target.recorder.figure("download latency", download_s * 1e6, "us", f"{4 * UPLOAD_WORDS} bytes")
