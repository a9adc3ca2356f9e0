"""Reports the results of peers and the service side by side, as figures and as Markdown."""

from collections.abc import Sequence
from typing import Any

from bench.contest import Sample, rates_of
from bench.peers.catalogue import DEFAULT_PEERS, PEERS
from bench.rates import find_ratio
from bench.report import describe_looks, format_table, format_targets
from bench.targets import ALL_TARGETS, Figure
from bench.variants import OURS

RIVALS = {peer.name: peer.rival for peer in (*PEERS, *DEFAULT_PEERS)}


def find_figures(samples: Sequence[Sample], clients: Sequence[int], prefills: Sequence[int]) -> list[Figure]:
    """Return this service's speed as a multiple of each peer's, by peer and case, if both were measured."""
    cases = [(f"decode {count}", str(count)) for count in clients]
    cases += [(f"prefill {length}", f"prefill {length}") for length in prefills]
    names = dict.fromkeys(sample.contender for sample in samples if not sample.contender.startswith(OURS))
    figures = []
    for name in names:
        for case, label in cases:
            figures.append(find_ratio(samples, f"{name} {label}", (RIVALS[name], case), (name, case)))
    return [figure for figure in figures if figure is not None]


def format_peers(result: dict[str, Any]) -> str:
    samples: Sequence[Sample] = result["samples"]
    cases = list(dict.fromkeys(sample.case for sample in samples))
    rows = [
        [result["titles"][name], *(_cell(samples, name, case) for case in cases)]
        for name in dict.fromkeys(sample.contender for sample in samples)
    ]
    pursued = {target.key for target in ALL_TARGETS}
    reported = [each for each in result["figures"] if each.key in pursued or each.key.startswith("gguf")]
    missing = {key: reason for key in pursued if (reason := _find_reason(result["failures"], key))}
    about = (
        f"{result['shape']}, tokens/s, medians of {result['rounds']} in turns (least to greatest). "
        f"The machine {describe_looks(samples)}."
    )
    parts = [
        about,
        format_table(["", *cases], rows),
        "Ours beside each peer, the one that computes likewise:",
        format_targets(reported, missing, result["shape"]),
        *(f"{name} was left out: {reason}" for name, reason in result["failures"].items()),
    ]
    return "\n\n".join(parts)


def _find_reason(failures: dict[str, str], key: str) -> str | None:
    """Return the reason why the peer of a target, or the contender that it is compared with, was not
    measured."""
    peer = key.partition(" ")[0]
    return failures.get(peer) or failures.get(RIVALS.get(peer, ""))


def _cell(samples: Sequence[Sample], name: str, case: str) -> str:
    spread = rates_of(samples, name, case)
    return "–" if spread is None else f"{spread:.0f}"
