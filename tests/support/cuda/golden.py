"""Table of kernel resources on sm_90a. `python -m tests.support.cuda.golden` rewrites it; `python -m
tests.support.cuda.golden 80` writes nothing, and prints the faults of all models' kernels on sm_80."""

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import triton

from tests.support.cuda.machine_code import MachineCode, Resources, read_machine_code, read_resources
from tgis.shard.kernels.cuda.implementations import EXPERT_KERNELS, STATE_KERNELS
from tgis.shard.kernels.cuda.offline.driver import MAX_SHARED_BYTES, OfflineKernel, compile_only
from tgis.shard.kernels.cuda.offline.variants import NUM_TOKENS, Variant, find_variants

FILE = Path(__file__).parents[2] / "shard/kernels/cuda/golden_sm90.json"
CAPABILITY = 90
# Together, these models use every feature.
MODELS = (
    *("all", "llama-3.1-8b/1", "gemma-2-9b/1", "qwen3-8b/1", "gpt-oss-20b/1"),
    *("bloom-7b1/1", "flan-t5-xl/1", "starcoder/1"),
)
# Of these, only the kernels of experts.
EXPERT_MODELS = ("qwen3-30b-a3b/1",)
# Of these, only the kernels of states: others are as in the models above.
STATE_MODELS = ("granite-4.0-h-tiny/1", "falcon-h1-7b/1", "qwen3-next-80b/1")
Table = dict[str, MachineCode]
Code = TypeVar("Code", bound=Resources)


def of_models(*models: str, num_tokens: int = NUM_TOKENS) -> list[Variant]:
    """Return the variants of models in bfloat16."""
    results = [each for each in find_variants(num_tokens) if each.label.split()[0] in models]
    only = {**dict.fromkeys(STATE_MODELS, STATE_KERNELS), **dict.fromkeys(EXPERT_MODELS, EXPERT_KERNELS)}
    results = [each for each in results if each.kernel in only.get(each.label.split()[0], {each.kernel})]
    return [each for each in results if "float16" not in each.label.split()]


def measure(variants: Iterable[Variant]) -> tuple[Table, list[str]]:
    """Compile the kernels of variants. Return their resources, and one line per fault."""
    return _read_all(variants, CAPABILITY, read_machine_code)


def find_faults(variants: Iterable[Variant], capability: int) -> list[str]:
    """Compile the kernels of variants. Return one line per fault."""
    return _read_all(variants, capability, read_resources)[1]


def _read_all(
    variants: Iterable[Variant], capability: int, read_code: Callable[[OfflineKernel], Code]
) -> tuple[dict[str, Code], list[str]]:
    table: dict[str, Code] = {}
    results = []
    for variant in variants:
        name = f"{variant.kernel} {variant.label}"
        try:
            with compile_only(capability) as kernels:
                variant.run()
        except Exception as error:
            results.append(f"{name}: {error!r}")
        table |= {f"{name}: {kernel.name}": read_code(kernel) for kernel in kernels}
    limit = MAX_SHARED_BYTES[capability]
    return table, results + [
        f"{name}: {fault}" for name, code in table.items() for fault in code.faults(limit)
    ]


def read() -> tuple[str, Table]:
    """Return the version of Triton and the table."""
    result = json.loads(FILE.read_text())
    return result["triton"], {name: MachineCode(**code) for name, code in result["kernels"].items()}


def write(table: Table) -> None:
    rows = ",\n".join(f'"{name}": {json.dumps(asdict(code))}' for name, code in sorted(table.items()))
    FILE.write_text(f'{{"triton": "{triton.__version__}",\n"kernels": {{\n{rows}\n}}}}\n')


def main() -> int:
    with TemporaryDirectory() as directory:
        triton.knobs.cache.dir = directory
        if sys.argv[1:]:
            result = find_faults(find_variants(), int(sys.argv[1]))
        else:
            table, result = measure(of_models(*MODELS, *EXPERT_MODELS, *STATE_MODELS))
            write(table)
    print("\n".join(result))
    return bool(result)


if __name__ == "__main__":
    sys.exit(main())
