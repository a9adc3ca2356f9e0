"""Checks that a run needs only the machine's packages and the pack's: `python -m bench.gpu.pack.gate
[NAME...]`, with the packages of the pack, by default those of `make gpu-pack`. It needs an environment with
all of them."""

import importlib
import importlib.metadata
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from packaging.utils import canonicalize_name

from bench.gpu.course.case import find_function
from bench.gpu.pack.wheels import list_names, read_machine
from bench.gpu.stages import LIBRARIES, list_functions

# modules of the service, which cases start as processes
PROGRAMS = (
    "tgis.__main__",
    "tgis.launcher.main",
    "tgis.router.app",
    "tgis.shard.server",
    "tgis.shard.kernels.cuda.check.self_check",
    "bench.clients",
    "tgis.load.worker",
    "tgis.load.apis.fmaas",
)
OWN = frozenset({"tgis-next", "tgis-next-client"})


class Gate(MetaPathFinder):
    """Import hook that refuses modules of packages that are not allowed."""

    def __init__(self, allowed: Iterable[str]):
        names = {canonicalize_name(name) for name in allowed} | OWN
        owners = importlib.metadata.packages_distributions()
        self._refused = {
            module: packages[0]
            for module, packages in owners.items()
            if not names & {canonicalize_name(package) for package in packages}
        }

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package = self._refused.get(name.partition(".")[0])
        if package is not None:
            raise ModuleNotFoundError(f"{name} is of {package}, which the machine lacks", name=name)
        return None


def main() -> None:
    sys.meta_path.insert(0, Gate(read_machine() | set(sys.argv[1:] or list_names())))
    problems = []
    for name in (*LIBRARIES, *PROGRAMS, *dict.fromkeys(list_functions())):
        try:
            find_function(name) if ":" in name else importlib.import_module(name)
        except ImportError as error:
            problems.append(f"{name}: {error}")
    sys.exit("\n".join(problems) or None)


if __name__ == "__main__":
    main()
