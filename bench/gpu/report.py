"""Writes the report of a run: the machine, the outcome of each case, figures beside predictions and gates,
the kernels of a step, and failures."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from bench.gpu.course.case import Stage
from bench.gpu.predictions import Prediction, predict
from bench.gpu.results import DONE, NOT_BEGUN, Result

Predictions = Mapping[str, Prediction]
KERNEL = ": kernel "
MAX_DETAIL = 160


def find_predictions(results: Iterable[Result]) -> Predictions:
    """Return the predictions for the GPU in the results."""
    names = [str(each.value) for each in results if each.kind == "fact" and each.key == "gpu"]
    return predict(names[-1]) if names else {}


def format_report(results: Sequence[Result], stages: Sequence[Stage], predictions: Predictions) -> str:
    parts = {
        "The machine": _list_facts(results),
        "Stages": _list_stages(results, stages),
        "Predictions and outcomes": _list_predicted(results, predictions),
        "Checks": _list_checks(results, stages),
        "Other figures": _list_figures(results, predictions),
        "Kernels": _list_kernels(results),
        "What failed": _list_failures(results, predictions),
    }
    texts = {title: "\n".join(lines) for title, lines in parts.items()}
    return "\n\n".join(f"### {title}\n\n{text}" for title, text in texts.items() if text) + "\n"


def find_failures(results: Iterable[Result], predictions: Predictions) -> Iterator[str]:
    """Yield missed gates, failed checks, problems, and cases that did not pass."""
    for each in results:
        name = f"{each.stage}: {each.case if each.kind == 'outcome' else each.key}"
        if each.is_failure:
            yield f"{name} {each.value}" if each.kind == "outcome" else name
        elif each.kind == "figure" and _is_met(each, predictions) is False:
            yield f"{name} misses its gate"


def find_unfinished(results: Iterable[Result], stages: Iterable[Stage]) -> Iterator[Stage]:
    """Yield the stages with the cases that have not passed, or in which anything failed."""
    ended, failed = set(), set()
    for each in results:
        key = each.stage, each.case
        if each.is_failure:
            failed.add(key)
        elif each.kind == "outcome":
            ended.add(key)
    for stage in stages:
        left = [case for case in stage.cases if (stage.name, case.name) not in ended - failed]
        if left:
            yield replace(stage, cases=tuple(left))


def _list_facts(results: Iterable[Result]) -> Iterator[str]:
    yield from (f"- {each.key}: {each.value}" for each in results if each.kind == "fact")


def _list_stages(results: Sequence[Result], stages: Iterable[Stage]) -> Iterator[str]:
    yield from [
        "| stage | cases | done | failed | not begun | without an end |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for stage in stages:
        names = {case.name for case in stage.cases}
        ends = {
            each.case: each.value
            for each in results
            if each.kind == "outcome" and each.stage == stage.name and each.case in names
        }
        done, idle = ([*ends.values()].count(value) for value in (DONE, NOT_BEGUN))
        begun = {each.case for each in results if each.stage == stage.name} & names
        numbers = len(names), done, len(ends) - done - idle, idle + len(names - begun), len(begun - set(ends))
        yield f"| {stage.name} | " + " | ".join(map(str, numbers)) + " |"


def _list_predicted(results: Iterable[Result], predictions: Predictions) -> Iterator[str]:
    last = {each.key: each for each in results if each.kind == "figure"}
    if predictions:
        yield from ["| what | measured | predicted | gate (goal) | |", "| --- | --- | --- | --- | --- |"]
    for key, prediction in predictions.items():
        gate, value = "", "unmeasured"
        if prediction.gate is not None:
            gate = f"{'at most' if prediction.at_most else 'at least'} {prediction.gate:g}"
            gate += f" ({prediction.goal:g})" if prediction.goal is not None else ""
        verdict = None
        if key in last:
            value, verdict = _format_value(last[key]), _is_met(last[key], predictions)
        words = {True: "met", False: "MISSED", None: ""}[verdict]
        yield f"| {key} | {value} | {prediction.low:g} to {prediction.high:g} | {gate} | {words} |"


def _list_checks(results: Iterable[Result], stages: Iterable[Stage]) -> Iterator[str]:
    """Count the checks of each stage, and list those with measurements."""
    checks = [each for each in results if each.kind == "check"]
    if checks:
        yield from ["| stage | checks | hold |", "| --- | --- | --- |"]
    for stage in stages:
        outcomes = [each.value is True for each in checks if each.stage == stage.name]
        if outcomes:
            yield f"| {stage.name} | {len(outcomes)} | {sum(outcomes)} |"
    measured = [each for each in checks if each.detail]
    if measured:
        yield from ["", "| stage | what | holds | |", "| --- | --- | --- | --- |"]
    for each in measured:
        holds = "yes" if each.value is True else "NO"
        yield f"| {each.stage} | {each.key} | {holds} | {_shorten(each.detail)} |"


def _list_figures(results: Iterable[Result], predictions: Predictions) -> Iterator[str]:
    figures = [each for each in results if each.kind == "figure" and KERNEL not in each.key]
    if figures:
        yield from ["| stage | what | measured | |", "| --- | --- | --- | --- |"]
    for each in figures:
        if each.key not in predictions or each.detail:
            yield f"| {each.stage} | {each.key} | {_format_value(each)} | {_shorten(each.detail)} |"


def _list_kernels(results: Iterable[Result]) -> Iterator[str]:
    figures = [each for each in results if each.kind == "figure" and KERNEL in each.key]
    if figures:
        yield from ["| step | kernel | µs a step | launches |", "| --- | --- | --- | --- |"]
    for each in figures:
        step, _, kernel = each.key.partition(KERNEL)
        yield f"| {step} | `{kernel.replace('|', ' ')}` | {each.value:.1f} | {each.detail} |"


def _list_failures(results: Iterable[Result], predictions: Predictions) -> Iterator[str]:
    for each in results:
        if each.is_failure or (each.kind == "figure" and _is_met(each, predictions) is False):
            what = f"{each.case}: {each.value}" if each.kind == "outcome" else each.key
            yield f"- {each.stage}: {what}: {_shorten(each.detail)}"


def _is_met(result: Result, predictions: Predictions) -> bool | None:
    prediction = predictions.get(result.key)
    return None if prediction is None else prediction.is_met(float(result.value or 0.0))


def _format_value(result: Result) -> str:
    return f"{float(result.value or 0.0):.4g} {result.unit}".rstrip()


def _shorten(detail: str) -> str:
    return detail.partition("\n")[0].replace("|", "/")[:MAX_DETAIL]
