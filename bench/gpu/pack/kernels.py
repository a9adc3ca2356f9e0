"""Compiles the kernels of a run for sm_90a, with the machine's version of Triton: `python -m
bench.gpu.pack.kernels DIRECTORY TRITON`, in a process that imports that version.

Triton's names of compiled kernels depend on its own files, one of which differs between versions of Python.
They are computed from TRITON, the package as installed on the machine. Code that Triton compiles from C is
left to the machine, because it depends on its Python."""

import hashlib
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import triton
from triton import knobs
from triton.runtime import cache

from bench.gpu.inputs.shapes import SHAPES
from tgis.shard.kernels.cuda.kernel_cache import make_keys_repeatable
from tgis.shard.kernels.cuda.offline.driver import compile_only
from tgis.shard.kernels.cuda.offline.variants import (
    MODELS,
    ModelShape,
    Variant,
    find_accept_drafts,
    find_begin_step,
    find_check_variants,
    find_few_variants,
    find_group_rows,
    find_model_variants,
)

CAPABILITY = 90
# Triton compiles separate kernels for one token, for multiples of 16 and for other numbers.
NUM_TOKENS = (1, 24, 64)
[EXPERTS] = (model for model in MODELS if model.name == "qwen3-30b-a3b")


def main() -> None:
    directory, machine = map(Path, sys.argv[1:])
    knobs.cache.dir = str(directory)
    knobs.compilation.store_binary_only = True
    key = compute_key(machine)
    cache.triton_key = lambda: key
    make_keys_repeatable()
    failed = []
    with compile_only(CAPABILITY) as kernels:
        for variant in list_variants():
            try:
                variant.run()
            except Exception as error:
                failed.append(f"{variant.kernel} of {variant.label}: {type(error).__name__}: {error}")
    print(f"{len(kernels)} kernels with Triton {triton.__version__}")
    if failed:
        sys.exit("\n".join(failed))


def list_variants() -> Iterator[Variant]:
    yield from find_check_variants()
    for num_tokens in NUM_TOKENS:
        yield find_begin_step(num_tokens)
        yield find_accept_drafts(num_tokens)
        yield find_group_rows(num_tokens)
        yield from find_few_variants(num_tokens, (torch.bfloat16,))
        yield from find_model_variants(EXPERTS, num_tokens, (torch.bfloat16,))
        for name, shape in SHAPES.items():
            heads = shape.num_heads, shape.num_kv_heads, shape.head_dim
            sizes = shape.hidden_size, shape.intermediate_size, *heads, shape.vocab_size
            model = ModelShape(name, *sizes, has_adapters=name == "8b")
            yield from find_model_variants(model, num_tokens, (torch.bfloat16,))


def compute_key(package: Path) -> str:
    """Return the value of this version's `triton_key` on the machine where the package is installed."""
    contents = [_hash(package / "runtime" / "cache.py")]
    for folder in ("compiler", "backends"):
        contents += [_hash(path) for path in _list_modules(package / folder, f"triton.{folder}.")]
    contents.append(_hash(package / "_C" / "libtriton.so"))
    contents += [_hash(path) for path in _list_modules(package / "language", "triton.language.")]
    return f"{triton.__version__}" + "-".join(contents)


def _list_modules(folder: Path, prefix: str) -> Iterator[Path]:
    """Yield the files of modules in the order in which Triton reads them."""
    for module in pkgutil.walk_packages([str(folder)], prefix=prefix):
        path = folder.joinpath(*module.name.removeprefix(prefix).split("."))
        yield path / "__init__.py" if module.ispkg else path.with_suffix(".py")


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    main()
