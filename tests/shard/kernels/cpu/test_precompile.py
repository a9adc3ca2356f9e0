"""Compiled code of one directory is found by another, and by another process. An installation compiles what
the first start needs."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest
from numba.core.caching import _CacheLocator
from numba.core.dispatcher import Dispatcher

from tests.support.real_models import SMOLLM2
from tgis.shard.kernels.cpu.precompile import _numba_name, all_kernels

# Prints the names of the kernels that a start and a request have used.
USES = """
import sys
from dataclasses import replace
from pathlib import Path

from tests.support.shard.driver import Request, Router, configure
from tgis.convert.gguf.model_directory import write_model_directory
from tgis.shard.kernels.cpu.precompile import all_kernels, usual_kernels
from tgis.shard.startup.load import load

file, directory = map(Path, sys.argv[1:])
write_model_directory([file], directory)
Router(load(replace(configure(directory), cpu_arithmetic="auto"))).run([Request([5, 6, 7], max_new_tokens=3)])
used = {kernel for kernel in all_kernels() if "_compiled" in vars(kernel)}
others = used.symmetric_difference(usual_kernels())
# Only prompts of 64 and more tokens round rows once for all threads.
print(*sorted(kernel.name for kernel in others if not kernel.name.startswith("round_rows_for")))
"""

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
from tgis.shard.kernels.cpu.precompile import all_kernels
all_kernels()
"""


def test_directories_have_the_names_that_numba_gives_them(tmp_path: Path) -> None:
    assert _numba_name(tmp_path) == _CacheLocator.get_suitable_cache_subpath(str(tmp_path / "kernels.py"))


def test_no_kernel_encloses_a_compiled_function() -> None:
    """Numba finds stored code by the enclosed variables, and a compiled function differs in each process."""
    gc.unfreeze()  # the collector knows all kernels, except those that conftest.py has exempted
    kernels = all_kernels()
    gc.freeze()
    enclosed = {
        kernel.function.__qualname__: [cell.cell_contents for cell in kernel.function.__closure__ or ()]
        for kernel in kernels
    }
    assert not [name for name, values in enclosed.items() if any(isinstance(v, Dispatcher) for v in values)]
    assert len(enclosed) > 20


@pytest.mark.slow
def test_an_installation_for_cpus_has_no_triton() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_an_installation_compiles_the_kernels_of_the_first_start(tmp_path: Path) -> None:
    command = [sys.executable, "-c", USES, str(SMOLLM2), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
