"""Chooses the sizes of steps that are captured as CUDA graphs."""

from collections.abc import Sequence
from typing import NamedTuple

# Upper end of each range of sizes, and the spacing of sizes in it.
_SPACING = ((4, 2), (16, 4), (64, 8), (256, 16))
_LAST_SPACING = 64
_PROMPT_ROWS = (4, 16, 64, 256)
# For larger steps, the GPU takes longer than the host needs to launch the kernels.
_PROMPT_TOKENS = (16, 64, 128, 256, 384, 512)
MAX_PROMPT_TOKENS = _PROMPT_TOKENS[-1]


class GraphSize(NamedTuple):
    """Capacity of a captured step: rows with one new token each, and prompt tokens of other rows."""

    num_rows: int
    num_prompt_tokens: int = 0
    has_adapters: bool = False  # the step computes the updates of LoRA adapters, too

    @property
    def num_tokens(self) -> int:
        return self.num_rows + self.num_prompt_tokens

    def __str__(self) -> str:
        prompts = f" and {self.num_prompt_tokens} prompt tokens" if self.num_prompt_tokens else ""
        return f"{self.num_rows} rows{prompts}" + (" with adapters" if self.has_adapters else "")


def graph_sizes(
    configured: Sequence[int] | None, max_rows: int, max_prompt_tokens: int = 0
) -> list[GraphSize]:
    """Return the sizes of steps to capture, sorted by number of tokens. `configured` has the operator's
    numbers of rows: 0 disables graphs, numbers above `max_rows` are ignored, None selects defaults up to
    `max_rows`. Unless graphs are disabled, there are also sizes with up to `max_prompt_tokens` prompt
    tokens."""
    if configured is None:
        rows = _choose_rows(max_rows)
    else:
        rows = sorted({n for n in configured if 0 < n <= max_rows})
    max_prompt_rows = min(rows[-1], _PROMPT_ROWS[-1]) if rows else 0
    prompt_rows = sorted({min(n, max_prompt_rows) for n in _PROMPT_ROWS}) if max_prompt_rows else []
    prompts = [n for n in _PROMPT_TOKENS if n <= max_prompt_tokens]
    sizes = [GraphSize(n) for n in rows] + [GraphSize(n, count) for n in prompt_rows for count in prompts]
    return sorted(sizes, key=lambda size: size.num_tokens)


def add_adapter_sizes(sizes: Sequence[GraphSize]) -> list[GraphSize]:
    """Return these sizes, and fewer of them for steps with adapters, sorted by number of tokens: without
    prompts, numbers of rows that are powers of two, and the largest; with prompts, every second of both
    numbers from the largest down. Steps without adapters have graphs of their own, because the kernels of
    adapters would cost them several hundred launches."""
    rows = sorted({size.num_rows for size in sizes if not size.num_prompt_tokens})
    kept_rows = {n for n in rows if n & (n - 1) == 0 or n == rows[-1]}
    prompts = [size for size in sizes if size.num_prompt_tokens]
    prompt_rows, counts = (sorted({size[i] for size in prompts})[::-2] for i in range(2))
    chosen = [size for size in prompts if size.num_rows in prompt_rows and size.num_prompt_tokens in counts]
    chosen += [size for size in sizes if not size.num_prompt_tokens and size.num_rows in kept_rows]
    added = [size._replace(has_adapters=True) for size in chosen]
    return sorted([*sizes, *added], key=lambda size: (size.num_tokens, size.has_adapters))


def _choose_rows(max_rows: int) -> list[int]:
    sizes = []
    size = 1
    while size < max_rows:
        sizes.append(size)
        spacing = next((spacing for end, spacing in _SPACING if size < end), _LAST_SPACING)
        size = size + spacing if size > 1 else 2
    return [*sizes, max_rows]
