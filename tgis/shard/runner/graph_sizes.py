"""Sizes of steps that are captured as CUDA graphs."""

from collections.abc import Sequence
from typing import NamedTuple

# Ends of ranges of sizes, and the steps between the sizes of each.
_SPACING = ((4, 2), (16, 4), (64, 8), (256, 16))
_WIDEST = 64
# Larger steps take the GPU longer than the host needs to launch their kernels.
_PROMPT_ROWS, _PROMPT_TOKENS = (4, 16, 64, 256), (16, 64, 128, 256, 384, 512)
MAX_PROMPT_TOKENS = _PROMPT_TOKENS[-1]


class GraphSize(NamedTuple):
    """The most that a captured step computes: rows with one new token each, and tokens of other rows."""

    num_rows: int
    num_prompt_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_rows + self.num_prompt_tokens

    def __str__(self) -> str:
        prompts = f" and {self.num_prompt_tokens} tokens of prompts" if self.num_prompt_tokens else ""
        return f"{self.num_rows} rows{prompts}"


def graph_sizes(asked: Sequence[int] | None, max_rows: int, max_prompt_tokens: int = 0) -> list[GraphSize]:
    """Return the sizes of steps to capture, those with fewer tokens first. `asked` are the numbers of rows of
    the operator, 0 for none; larger ones than `max_rows` have no use. None: the default ones, of which the
    largest is `max_rows`. With any there are steps of at most `max_prompt_tokens` tokens of prompts, too."""
    rows = _choose_rows(max_rows) if asked is None else sorted({n for n in asked if 0 < n <= max_rows})
    most = min(rows[-1], _PROMPT_ROWS[-1]) if rows else 0
    beside = sorted({min(n, most) for n in _PROMPT_ROWS}) if most else []
    prompts = [n for n in _PROMPT_TOKENS if n <= max_prompt_tokens]
    sizes = [GraphSize(n) for n in rows] + [GraphSize(n, count) for n in beside for count in prompts]
    return sorted(sizes, key=lambda size: size.num_tokens)


def _choose_rows(max_rows: int) -> list[int]:
    sizes, size = [], 1
    while size < max_rows:
        sizes.append(size)
        spacing = next((spacing for end, spacing in _SPACING if size < end), _WIDEST)
        size = size + spacing if size > 1 else 2
    return [*sizes, max_rows]
