"""Generates the tables of accuracy in hand-written pages from the results of `python -m bench.accuracy`.

A table stands between `<!-- accuracy: NAME -->` and `<!-- end of accuracy -->`."""

import re
from dataclasses import dataclass
from pathlib import Path

from bench.accuracy.results import Result, read_results
from bench.accuracy.variants import REFERENCE, VARIANTS

DOCS = Path(__file__).resolve().parent.parent / "docs"
BLOCK = re.compile(r"(<!-- accuracy: (\w+) -->\n).*?(<!-- end of accuracy -->)", re.DOTALL)
TITLES = {"SmolLM2-135M-Instruct": "SmolLM2", "gemma-3-270m": "Gemma 3"}
# Precisions that the page about tuning compares.
SUMMARY = (
    "float16",
    "bfloat16",
    "bitsandbytes",
    "int8",
    "fp8",
    "int4",
    "int4-a8",
    "nf4",
    "fp4",
    "int8-cache",
    "fp8-e4m3-cache",
)
EXACT = "1.000"


@dataclass(frozen=True)
class PageWithTables:
    name: str

    def render(self) -> str:
        return replace_tables((DOCS / self.name).read_text(), read_results())


def replace_tables(page: str, results: list[Result]) -> str:
    """Return the page with its tables made from the results. Raises KeyError for the name of no table."""
    makers = {
        "loading": lambda: _make_full("loading", results),
        "command": lambda: _make_full("command", results),
        "gguf": lambda: _make_full("gguf", results),
        "noised": lambda: _make_noised(results),
        "summary": lambda: _make_summary(results),
        "tokens": lambda: _describe_tokens(results),
    }
    return BLOCK.sub(lambda match: f"{match[1]}\n{makers[match[2]]()}\n\n{match[3]}", page)


def _make_full(table: str, results: list[Result]) -> str:
    """Return a row for each precision that was measured, with the figures of each model."""
    columns = ("ratio", "mean difference", "same token", "tokens")
    head = ["precision", *(f"{title}: {column}" for title in TITLES.values() for column in columns)]
    by_key = {(each.model, each.variant): each for each in results if each.weights == "original"}
    rows = []
    for variant in VARIANTS:
        by_model = [by_key.get((model, variant.name)) for model in TITLES]
        if variant.table == table and any(by_model):
            rows.append([variant.label, *(cell for each in by_model for cell in _format(each))])
    return _format_table(head, rows)


def _format(result: Result | None) -> list[str]:
    if result is None:
        return ["–"] * 4
    agreement = f"{100 * result.greedy_agreement:.1f} %"
    return [_format_ratio(result), f"{result.mean_difference:.4f}", agreement, f"{result.num_tokens:,}"]


def _format_ratio(result: Result | None) -> str:
    if result is None:
        return "–"
    return EXACT if result.variant == REFERENCE.name else f"{result.ratio:.3f} ± {result.ratio_error:.3f}"


def _make_noised(results: list[Result]) -> str:
    """Return the ratios with the weights of the file, and with noise."""
    kinds = ("original", "noised")
    head = ["precision", *(f"{title}, {kind} weights" for title in TITLES.values() for kind in kinds)]
    by_key = {(each.model, each.weights, each.variant): each for each in results}
    rows = []
    for variant in VARIANTS:
        cells = [by_key.get((model, kind, variant.name)) for model in TITLES for kind in kinds]
        if any(each is not None and each.weights == "noised" for each in cells):
            rows.append([variant.label, *map(_format_ratio, cells)])
    return _format_table(head, rows)


def _make_summary(results: list[Result]) -> str:
    head = ["precision", *(f"perplexity of {title}, relative to `float32`" for title in TITLES.values())]
    by_key = {(each.model, each.variant): each for each in results if each.weights == "original"}
    labels = {variant.name: variant.label for variant in VARIANTS}
    rows = []
    for name in SUMMARY:
        by_model = [by_key.get((model, name)) for model in TITLES]
        if any(by_model):
            rows.append([labels[name], *map(_format_ratio, by_model)])
    return _format_table(head, rows)


def _describe_tokens(results: list[Result]) -> str:
    """Return the perplexities that the ratios relate to."""
    exact = [each for each in results if each.variant == REFERENCE.name]
    rows = [
        [TITLES[each.model], each.weights, f"{each.perplexity:.2f}", f"{each.num_tokens:,}"] for each in exact
    ]
    return _format_table(["model", "weights", "perplexity with `float32`", "tokens"], rows)


def _format_table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))
