"""Resources of kernels, read from their machine code for sm_90a without a GPU, equal `golden_sm90.json`. A
change of a kernel that changes its row is not an error, but must be reviewed: no other test detects narrow
loads and missing tensor core instructions. `python -m tests.support.cuda.golden` rewrites the table."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import triton

from scripts.check_locks import CUDA, ROOT, read_lock
from tests.support.cuda import golden
from tgis.shard.kernels.cuda.implementations import KERNELS
from tgis.shard.kernels.cuda.offline.driver import compile_only
from tgis.shard.kernels.cuda.offline.variants import find_check_variants, find_variants

QUICK = "all", "llama-3.1-8b/1"
STATEFUL = golden.STATE_MODELS[0], golden.STATE_MODELS[2]  # one of Mamba 2, one of gated DeltaNet
LONG = (  # to compile
    *("sample", "scan_mamba", "scan_delta"),
    *("multiply_codes", "widen_codes", "add_low_rank", "mix_experts"),
)
OLDEST = "3.6.0"
SIZES = 24, 1, 2, 3, 7, 16, 33, 100, 256, 1000


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
        yield


def _compare(*models: str) -> None:
    version, expected = golden.read()
    assert version == triton.__version__, "the table is another Triton's: python -m tests.support.cuda.golden"
    actual, faults = golden.measure(golden.of_models(*models))
    assert faults == []
    assert actual == {name: code for name, code in expected.items() if name.split()[1].rstrip(":") in models}


def test_the_table_is_of_the_image_s_triton() -> None:
    lock = read_lock((ROOT / f"locks/{CUDA}.lock").read_text())
    assert [entry.version for entry in lock if entry.name == "triton"] == [golden.read()[0]]


@pytest.mark.slow
def test_costs_of_a_model_equal_the_table() -> None:
    _compare(*QUICK)


@pytest.mark.parametrize(
    "kernel", [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in KERNELS]
)
def test_steps_of_all_sizes_launch_the_same(kernel: str) -> None:
    """A step never waits for the compilation of a kernel for its numbers of tokens and sequences."""
    with compile_only(90) as kernels:
        for num_tokens in SIZES:
            for variant in golden.of_models(*QUICK, *STATEFUL, *golden.EXPERT_MODELS, num_tokens=num_tokens):
                if variant.kernel == kernel:
                    variant.run()
            if num_tokens == SIZES[0]:
                first = len(kernels)
                assert first
    assert [(one.name, one.types, one.constants) for one in kernels[first:]] == []


# Its branches depend on the model, and one that does not compile replaces it for all models.
BRANCHED = ("turn_and_keep",)


@pytest.mark.parametrize(
    "kernel", [pytest.param(name, marks=() if name in BRANCHED else pytest.mark.slow) for name in KERNELS]
)
def test_the_check_at_the_start_compiles(kernel: str) -> None:
    known = find_check_variants()
    variants = [each for each in known if each.kernel == kernel and each.label.endswith("bfloat16")]
    assert variants
    assert golden.find_faults(variants, 90) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_costs_of_other_models_equal_the_table() -> None:
    _compare(*set(golden.MODELS) - set(QUICK))


@pytest.mark.slow
def test_costs_of_kernels_of_experts_equal_the_table() -> None:
    _compare(*golden.EXPERT_MODELS)


@pytest.mark.slow
def test_costs_of_kernels_of_states_equal_the_table() -> None:
    _compare(*golden.STATE_MODELS)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_all_models_compile(capability: int) -> None:
    assert golden.find_faults(find_variants(), capability) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_models_compile_with_the_oldest_triton(tmp_path: Path) -> None:
    """It comes with the oldest supported torch."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv/bin/python"
    install = [python, "-m", "pip", "install", "-q", "--no-deps", f"triton=={OLDEST}"]
    if subprocess.run(install, check=False).returncode:
        pytest.skip(f"triton {OLDEST} cannot be installed here")
    [packages] = (tmp_path / "venv/lib").glob("python*/site-packages")
    (packages / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    command = [python, "-m", "tests.support.cuda.golden", "90"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
