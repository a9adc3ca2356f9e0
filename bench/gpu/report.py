"""The closing table: every figure beside its prediction and gate, and what failed."""

from collections.abc import Iterable, Iterator, Mapping

from bench.gpu.predictions import Prediction
from bench.gpu.results import Result

Predictions = Mapping[str, Prediction]


def format_report(results: Iterable[Result], sections: Iterable[str], predictions: Predictions) -> str:
    found, asked = list(results), list(sections)
    lines = [
        "| section | what | measured | predicted | gate (goal) | |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [_format_row(each, predictions) for each in found if each.kind in ("figure", "check")]
    facts = [f"- {each.key}: {each.value}" for each in found if each.kind == "fact"]
    problems = [f"- {each.section}: {each.key}: {each.detail}" for each in found if each.kind == "problem"]
    silent = [f"- {name}: no result" for name in asked if name not in {each.section for each in found}]
    parts = ["\n".join(facts), "\n".join(lines), "\n".join(problems + silent)]
    return "\n\n".join(part for part in parts if part)


def find_failures(results: Iterable[Result], predictions: Predictions) -> Iterator[str]:
    """Yield the gates that were missed, checks that do not hold, and problems."""
    for each in results:
        if each.is_failure:
            yield f"{each.section}: {each.key}"
        elif each.kind == "figure" and _is_met(each, predictions) is False:
            yield f"{each.section}: {each.key} misses its gate"


def _is_met(result: Result, predictions: Predictions) -> bool | None:
    prediction = predictions.get(result.key)
    return None if prediction is None else prediction.is_met(float(result.value or 0.0))


def _format_row(result: Result, predictions: Predictions) -> str:
    prediction = predictions.get(result.key)
    value = f"{result.value:.4g} {result.unit}".rstrip() if result.kind == "figure" else str(result.value)
    predicted = f"{prediction.low:g} to {prediction.high:g}" if prediction else ""
    gate = ""
    if prediction is not None and prediction.gate is not None:
        gate = f"{'at most' if prediction.at_most else 'at least'} {prediction.gate:g}"
        gate += f" ({prediction.goal:g})" if prediction.goal is not None else ""
    verdict = {True: "met", False: "MISSED", None: ""}[_verdict(result, predictions)]
    name = f"{result.key}: {result.detail}" if result.detail else result.key
    return f"| {result.section} | {name} | {value} | {predicted} | {gate} | {verdict} |"


def _verdict(result: Result, predictions: Predictions) -> bool | None:
    if result.kind == "check":
        return result.value is True
    return _is_met(result, predictions)
