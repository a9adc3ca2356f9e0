"""Checks and measures the GPU engine, stage by stage.

Each case runs in a separate process, because an error on a GPU ends the process. Results are appended, and a
run continues an interrupted one. The exit status is 0 only if all cases have passed and every gate is met."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.gpu.course.case import Stage
from bench.gpu.course.supervisor import Course
from bench.gpu.report import find_failures, find_predictions, find_unfinished, format_report
from bench.gpu.results import keep_last_attempts, read_results
from bench.gpu.stages import AGAIN_BUDGET_S, BUDGET_S, STAGES, choose_rehearsed

NAMES = [stage.name for stage in STAGES]


def main() -> None:
    options = parse_options(sys.argv[1:])
    options.results.parent.mkdir(parents=True, exist_ok=True)
    stages = choose_stages(options)
    default = AGAIN_BUDGET_S if options.again else BUDGET_S
    budget = (default if options.budget is None else options.budget) * options.pace
    logs = options.results.with_name("logs.txt")
    course = Course(options.results, logs, "cpu" if options.rehearse else "cuda", options.pace)
    course.run(stages, budget)
    sys.exit(report(options, stages))


def report(options: argparse.Namespace, asked: Sequence[Stage]) -> str | None:
    """Write the report of all results, and return the failures among the requested cases."""
    results = keep_last_attempts(read_results(options.results))
    predictions = find_predictions(results)
    text = format_report(results, STAGES, predictions)
    options.results.with_name("report.md").write_text(text)
    print(f"\n{text}")
    names = {(stage.name, case.name) for stage in asked for case in stage.cases}
    own = [each for each in results if (each.stage, each.case) in names]
    missing = names - {(each.stage, each.case) for each in own if each.kind == "outcome"}
    failures = [*find_failures(own, predictions), *(f"{stage}: {case} has no end" for stage, case in missing)]
    return "not met: " + "; ".join(failures) if failures else None


def choose_stages(options: argparse.Namespace) -> list[Stage]:
    stages = choose_rehearsed(STAGES) if options.rehearse else STAGES
    first = NAMES.index(options.first) if options.first else 0
    chosen = [stage for stage in stages[first:] if stage.name in options.only]
    if options.again:
        return list(find_unfinished(keep_last_attempts(read_results(options.results)), chosen))
    return chosen


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--only", type=_split_names, default=NAMES, help=f"of {','.join(NAMES)}")
    parser.add_argument("--from", dest="first", choices=NAMES, help="stage to begin with")
    parser.add_argument("--again", action="store_true", help="run only what has not ended well")
    budget = f"seconds in all (default {BUDGET_S:.0f}, or {AGAIN_BUDGET_S:.0f} with --again)"
    parser.add_argument("--budget", type=float, help=budget)
    parser.add_argument("--pace", type=float, default=1.0, help="factor of all times (default %(default)s)")
    out = Path(os.environ.get("OUT", ".cache/gpu"))
    parser.add_argument("--results", type=Path, default=out / "results.jsonl", help="(default %(default)s)")
    parser.add_argument(
        "--rehearse", action="store_true", help="run at tiny sizes on the CPU, which measures nothing"
    )
    return parser.parse_args(arguments)


def _split_names(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise argparse.ArgumentTypeError(f"no stage {', '.join(unknown)}")
    return names


if __name__ == "__main__":
    main()
