"""Checks and measures the GPU engine section by section. Each is a process of its own, because an error on a
GPU ends the process that has it. Exits with 0 only if every gate is met."""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.gpu.predictions import PREDICTIONS
from bench.gpu.report import find_failures, format_report
from bench.gpu.results import Recorder, read_results

# In falling order of worth, with the seconds that each may take.
SECTIONS = {
    "about": 20,
    "limits": 30,
    "compile": 90,
    "kernels": 130,
    "engine": 160,
    "speed": 170,
    "service": 150,
    "peers": 90,
}
GRACE_S = 5.0


def main() -> None:
    options = parse_options(sys.argv[1:])
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text("")
    end = time.monotonic() + options.budget
    for section in options.only:
        run_section(section, options, end - time.monotonic())
    results = list(read_results(options.results))
    predictions = {} if options.rehearse else PREDICTIONS
    print("\n" + format_report(results, options.only, predictions))
    failures = list(find_failures(results, predictions))
    if failures:
        sys.exit("not met: " + "; ".join(failures))


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--only", type=_names, default=list(SECTIONS), help=f"of {','.join(SECTIONS)}")
    parser.add_argument("--budget", type=float, default=560.0, help="seconds in all (default %(default)s)")
    out = Path(os.environ.get("OUT", ".cache/gpu"))
    parser.add_argument("--results", type=Path, default=out / "results.jsonl", help="(default %(default)s)")
    parser.add_argument(
        "--rehearse", action="store_true", help="run at tiny sizes on the CPU, which measures nothing"
    )
    return parser.parse_args(arguments)


def run_section(section: str, options: argparse.Namespace, seconds_left: float) -> None:
    """Run a section in a child process. What it has written counts, however it ends."""
    recorder, seconds = (
        Recorder(section, options.results),
        min(float(SECTIONS[section]), seconds_left - GRACE_S),
    )
    if seconds <= 0:
        recorder.problem("time", "not begun: the budget is used up")
        return
    command = [sys.executable, "-m", f"bench.gpu.sections.{section}", "--results", str(options.results)]
    command += ["--seconds", str(seconds), "--device", "cpu" if options.rehearse else "cuda"]
    child = subprocess.Popen(command, start_new_session=True)
    try:
        status = child.wait(seconds + GRACE_S)
    except subprocess.TimeoutExpired:
        recorder.problem("time", f"ended after {seconds:.0f} s")
    else:
        if status != 0:
            recorder.problem("exit", f"ended with status {status}")
    finally:
        _kill_group(child)


def _kill_group(child: "subprocess.Popen[bytes]") -> None:
    """Kill the child and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _names(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no section {', '.join(unknown)}")
    return names


if __name__ == "__main__":
    main()
