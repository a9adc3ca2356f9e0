"""Check that a platform's kernels are imported only on that platform."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

# First a non-CPU platform with CPU memory, then the CPU. Last, a step that the CPU captures as a graph:
# it needs no compiler of torch's, whose import takes seconds.
SCRIPT = """
import sys
from pathlib import Path

import torch

from tests.support.shard.driver import Request, Router, configure
from tests.support.shard.portable import plain
from tgis.shard import server
from tgis.shard.startup.platforms.choose_platform import make_platform
from tgis.shard.startup.load import load


class Refusing:
    def __init__(self, *names):
        self.names = names
        assert not [name for name in sys.modules if name.startswith(names)]

    def find_spec(self, name, path=None, target=None):
        assert not name.startswith(self.names), name


sys.meta_path.insert(0, Refusing("numba", "llvmlite", "tgis.shard.kernels.cuda"))
request = Request([5, 6, 7], max_new_tokens=3)
Router(load(configure(Path(sys.argv[1])), on=plain(torch.device("cpu")))).run([request])
assert len(request.generated) == 3

sys.meta_path[0] = Refusing("tgis.shard.kernels.cuda", "tgis.shard.runner.device")
from tgis.shard.runner import graph_forward

make_platform(torch.device("cpu"))
assert "numba" in sys.modules

sys.meta_path[0] = Refusing("torch._dynamo")
runner = load(configure(Path(sys.argv[1])))
Router(runner).run([request := Request([5, 6, 7], max_new_tokens=3)])
assert len(request.generated) == 3
assert runner.forward.find_graph(1) is not None
"""


def test_no_platform_imports_the_kernels_of_another(checkpoint: Callable[[str], Path]) -> None:
    command = [sys.executable, "-c", SCRIPT, str(checkpoint("grouped_queries"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
