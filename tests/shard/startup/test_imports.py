"""A platform's kernels are imported only where it computes."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

REFUSING = """
import sys

import torch

from tgis.shard import server

FORBIDDEN = sys.argv[1].split()


class Refusing:
    def find_spec(self, name, path=None, target=None):
        assert not name.startswith(tuple(FORBIDDEN)), name


sys.meta_path.insert(0, Refusing())
"""
# On a platform that is no CPU's, though its memory is.
SERVE = """
from pathlib import Path

from tests.support.shard.driver import Request, Router, configure
from tests.support.shard.portable import plain
from tgis.shard.startup.load import load

request = Request([5, 6, 7], max_new_tokens=3)
Router(load(configure(Path(sys.argv[2])), on=plain(torch.device("cpu")))).run([request])
assert len(request.generated) == 3
"""
CHOOSE = """
from tgis.shard.runner import graph_forward
from tgis.shard.startup.choose_platform import make_platform

make_platform(torch.device("cpu"))
"""
CHECK = """
found = [name for name in sys.modules if name.startswith(tuple(FORBIDDEN))]
assert not found, found
"""


def run(script: str, *arguments: str) -> None:
    command = [sys.executable, "-c", REFUSING + script + CHECK, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_other_platforms_do_without_the_compiler_of_the_cpus_kernels(
    checkpoint: Callable[[str], Path],
) -> None:
    run(SERVE, "numba llvmlite", str(checkpoint("grouped_queries")))


def test_the_cpu_does_without_the_kernels_of_gpus() -> None:
    run(CHOOSE, "tgis.shard.kernels.cuda tgis.shard.runner.device tgis.shard.startup.cuda_platform")
