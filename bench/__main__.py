"""`python -m bench`: start the service on a model of a named shape, compare it with the machine's limits,
with its targets and with transformers, print Markdown and write JSON."""

import json
import os
import sys
import time
from argparse import Namespace
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from bench import clients, shapes
from bench.children import run_child
from bench.options import parse_options
from bench.report import format_report
from bench.sections import Outcome, run_sections
from bench.service import BenchError, exit_on_sigterm
from bench.targets import TARGETS

MACHINE_TIMEOUT_S = 60.0


def main() -> None:
    options = parse_options(sys.argv[1:])
    exit_on_sigterm()
    try:
        result = measure(options)
    except BenchError as error:
        sys.exit(f"error: {error}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1, default=_plain) + "\n")
    print(format_report(result))


def measure(options: Namespace) -> dict[str, Any]:
    """Return all figures, as written to the JSON file. Raises BenchError."""
    attached = options.attach is not None
    model = None if attached else shapes.ensure_checkpoint(options.shape, options.cache)
    before = os.getloadavg()
    # measured before the service starts: they must not share the machine
    (machine,) = run_child("bench.machine", None, MACHINE_TIMEOUT_S)
    outcomes, failures = ({}, {}) if model is None else run_sections(options, model)
    table = clients.measure(options, model) if "clients" in options.only else {"service": []}
    return {
        "model": options.attach or f"{options.shape} {options.dtype}",
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "bench_command": sys.argv,
        "input_tokens": options.input_tokens,
        "new_tokens": options.new_tokens,
        "rounds": options.rounds,
        "shape_name": options.shape,
        "shape": None if attached else shapes.describe(options.shape),
        "machine": machine,
        "load_average": {"before": before, "after": os.getloadavg()},
        **_collect(outcomes, failures, options),
        **table,
    }


def _collect(outcomes: dict[str, Outcome], failures: dict[str, str], options: Namespace) -> dict[str, Any]:
    figures = [figure for outcome in outcomes.values() for figure in outcome.figures]
    samples = outcomes["rates"].raw if "rates" in outcomes else []
    return {
        "figures": figures,
        "missing": _explain(failures, options),
        "samples": samples,
        "sections": {name: outcome.raw for name, outcome in outcomes.items() if name != "rates"},
    }


def _explain(failures: dict[str, str], options: Namespace) -> dict[str, str]:
    """Return the reasons why targets have no figure, by key, for requested sections with a known reason."""
    wanted = failures.keys() & {*options.only, "peers"}
    return {target.key: failures[target.section] for target in TARGETS if target.section in wanted}


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return str(value) if isinstance(value, Path) else value.tolist()


if __name__ == "__main__":
    main()
