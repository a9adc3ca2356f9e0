"""Formats a profile as Markdown, each part beside the machine's limit for it."""

import math
from dataclasses import dataclass

from bench import limits
from bench.limits import Rates
from bench.report import format_table
from bench.shapes import Shape

CACHE_WIDTH = 2.0  # bytes of a number in the cache
HEAD = ("part", "calls", "ms", "of the step", "limit ms", "of the limit")


@dataclass(frozen=True)
class Work:
    """Work of one step: a number of sequences with the same number of new tokens; the last step has this
    `context`."""

    batch: int
    new_tokens: int
    context: int

    @property
    def name(self) -> str:
        if self.new_tokens > 1:
            return f"prefill of {self.new_tokens:,} tokens"
        return f"decode of {self.batch}, context {self.context:,}"


@dataclass(frozen=True)
class Profile:
    """Seconds of a step and of its model part, both as in service; seconds and calls of its kernels by name,
    each run separately."""

    work: Work
    step_s: float
    model_s: float
    kernels: dict[str, tuple[float, int]]
    is_captured: bool


def part_limits(shape: Shape, work: Work, width: float, rates: Rates) -> dict[str, float]:
    """Return the minimum seconds of products and attention of a step; `width` is the bytes per weight."""
    hidden, inner, layers = shape.hidden_size, shape.intermediate_size, shape.num_layers
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    tokens = work.batch * work.new_tokens

    def product(rows: int, weights: int) -> float:
        return max(weights * width / rates.read, 2 * rows * weights / rates.gemm)

    return {
        "product qkv": layers * product(tokens, hidden * (q_size + 2 * kv_size)),
        "product o": layers * product(tokens, hidden * q_size),
        "product gate_up": layers * product(tokens, 2 * hidden * inner),
        "product down": layers * product(tokens, hidden * inner),
        "product head": product(work.batch, hidden * shape.vocab_size),
        "attend": _attention_limit(shape, work, rates),
    }


def _attention_limit(shape: Shape, work: Work, rates: Rates) -> float:
    start = work.context - work.new_tokens
    operations = work.batch * limits.count_attention(shape, start, work.context)
    numbers = 2 * work.batch * work.context * shape.num_layers * shape.num_kv_heads * shape.head_dim
    return max(operations / rates.gemm, numbers * CACHE_WIDTH / rates.read)


def format_profile(profile: Profile, shape: Shape, width: float, rates: Rates) -> str:
    """Return the table; shares are relative to the step."""
    allowed, step = part_limits(shape, profile.work, width, rates), profile.step_s
    rows = [
        _row(name, str(calls), seconds, step, allowed.get(name))
        for name, (seconds, calls) in sorted(profile.kernels.items(), key=lambda item: -item[1][0])
    ]
    spent = sum(seconds for seconds, _ in profile.kernels.values())
    least = sum(allowed.values())
    rows.append(_row("*kernels, one by one*", "", spent, step, least))
    how = "as one kernel graph" if profile.is_captured else "call by call"
    rows.append(_row(f"*the model, {how}*", "", profile.model_s, step, least))
    rows.append(_row("packing, sampling, answering", "", step - profile.model_s, step))
    return "\n\n".join((_describe(profile, rates, least), format_table(HEAD, rows)))


def _describe(profile: Profile, rates: Rates, least: float) -> str:
    work, step = profile.work, profile.step_s
    rate = work.batch * work.new_tokens / step
    machine = f"{rates.read / 1e9:.1f} GB/s and {rates.gemm / 1e9:.0f} GFLOP/s"
    return (
        f"**{work.name}**: {1e3 * step:.2f} ms a step, {rate:.0f} tokens/s, {least / step:.0%} of the limit "
        f"({1e3 * least:.2f} ms at {machine})."
    )


def _row(name: str, calls: str, seconds: float, step: float, least: float | None = None) -> list[str]:
    limit = ("–", "–") if least is None else (f"{1e3 * least:.3f}", f"{_share(least, seconds):.0%}")
    return [name, calls, f"{1e3 * seconds:.3f}", f"{_share(seconds, step):.0%}", *limit]


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
