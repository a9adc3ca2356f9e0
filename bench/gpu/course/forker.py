"""Process that imports the libraries and forks a keeper for each case, so that no case waits for the imports.

`python -m bench.gpu.course.forker LIBRARY...` prints a line for each library, then reads one job per line and
prints a line when it has ended. A library that cannot be imported is left to the cases that need it."""

import importlib
import json
import os
import sys
import time
import traceback

from bench.gpu.course.case import Job
from bench.gpu.course.keeper import keep
from bench.gpu.course.processes import POLL_S, adopt_orphans, end_descendants, has_opened_gpu


def main() -> None:
    parent, answers = os.getppid(), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries is not a reply
    adopt_orphans()
    for name in sys.argv[1:]:
        _import(name)
        print(name, file=answers, flush=True)
    for line in sys.stdin:
        _run(Job(**json.loads(line)), parent)
        print("ended", file=answers, flush=True)


def _import(name: str) -> None:
    try:
        importlib.import_module(name)
    except BaseException:  # also a library that exits
        traceback.print_exc()


def _run(job: Job, parent: int) -> None:
    """Wait for a case. If the requesting process is gone, end all cases."""
    is_forked = job.is_forked and not has_opened_gpu()
    pid = os.fork()
    if pid == 0:
        try:
            keep(job, is_forked)
        finally:
            os._exit(0)
    while not os.waitpid(pid, os.WNOHANG)[0]:
        if os.getppid() != parent:
            end_descendants()
            os._exit(1)
        time.sleep(POLL_S)
    end_descendants()


if __name__ == "__main__":
    main()
