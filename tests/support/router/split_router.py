"""A router worker and an engine process of its own. Run like `python -m tgis`."""

import os
import subprocess
import sys
import tempfile
from functools import partial

from tgis.cli.main import main
from tgis.process.child import die_with


def run(arguments: list[str]) -> None:
    if arguments[:1] != ["router"]:
        main(arguments)
        return
    with tempfile.TemporaryDirectory(prefix="split-") as directory:
        split = ["--engine-path", f"{directory}/engine", "--metrics-dir", directory]
        engine = subprocess.Popen(
            [sys.executable, "-m", "tgis", "engine", *arguments[1:], *split],
            preexec_fn=partial(die_with, os.getpid()),  # no other thread runs yet
        )
        try:
            main([*arguments, *split])
        finally:
            engine.terminate()
            engine.wait(10)


if __name__ == "__main__":
    run(sys.argv[1:])
