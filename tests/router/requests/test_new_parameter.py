"""A new sampling parameter, added to a copy of the package in six files, one of them a test. All other parts
of the service follow from its declaration."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.router.patched_package import copy_patched, run_patched
from tests.support.wire_shapes import ROOT

MAX_FILES = 6
FLOOR = 0.8  # above the temperature of the requests, 0.5
REFUSAL = "temperature_floor must be >= 0.0 and <= 2.0"
TEST = "tests/router/api/fmaas/test_call_metadata.py"
HELP = "Sample with at least this temperature"
EDITS = {
    "tgis/sampling_parameters.py": {
        "    presence_penalty: float = parameter(": f"""\
    temperature_floor: float = parameter(
        "f4",
        0.0,
        random_only=True,
        range=Range(0, 2, refusal="{REFUSAL}"),
        help="{HELP}",
    )
    presence_penalty: float = parameter(""",
    },
    "protos/shard.proto": {
        "  float min_p = 11; ": "  float temperature_floor = 18;\n  float min_p = 11; ",
    },
    "tgis/shard/sampling/sampler.py": {
        'if (batch.params["temperature"] != 1).any():': (
            'temperature = np.maximum(batch.params["temperature"], batch.params["temperature_floor"])\n'
            "    if (temperature != 1).any():"
        ),
        '_column(batch.params["temperature"], scores.device)': "_column(temperature, scores.device)",
    },
    "tgis/shard/kernels/cuda/sample.py": {
        'logits /= as_float(words[:, Word["TEMPERATURE"]])[:, None]': (
            'floor = as_float(words[:, Word["TEMPERATURE_FLOOR"]])\n'
            '    logits /= torch.maximum(as_float(words[:, Word["TEMPERATURE"]]), floor)[:, None]'
        ),
    },
    "tgis/shard/kernels/cuda/functions/sample_kernels.py": {
        'TEMPERATURE = tl.constexpr(Word["TEMPERATURE"])': (
            'TEMPERATURE = tl.constexpr(Word["TEMPERATURE"])\n'
            'TEMPERATURE_FLOOR = tl.constexpr(Word["TEMPERATURE_FLOOR"])'
        ),
        "temperature = load_float(state + TEMPERATURE)": (
            "temperature = tl.maximum(load_float(state + TEMPERATURE), load_float(state + TEMPERATURE_FLOOR))"
        ),
    },
    TEST: {
        '    ([("tgis-min-p", "0.25")], {}, {}),': """\
    ([("tgis-min-p", "0.25")], {}, {}),
    ([("tgis-temperature-floor", "0.8")], SAMPLE, {"temperature_floor": 0.8}),""",
    },
}
APIS = pytest.mark.parametrize("api", ["fmaas", "openai"])


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("copy")
    copy_patched(directory, EDITS)
    return directory


@pytest.fixture(scope="module")
def report(copy: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    arguments = ("temperature_floor", str(FLOOR), "2.5", str(tmp_path_factory.mktemp("run")))
    return json.loads(run_patched(copy, "-m", "tests.support.router.parameter_report", *arguments))


def test_a_parameter_takes_few_files() -> None:
    assert len(EDITS) <= MAX_FILES


@pytest.mark.slow
def test_the_effect_of_the_key_is_tested(copy: Path) -> None:
    _run_tests(copy, copy / TEST, "-k", "effect")  # one of the tests expects an effect of every key


def test_grpc_metadata_is_checked(report: Any) -> None:
    assert report["fmaas"]["refusal"] == ["INVALID_ARGUMENT", f"tgis-temperature-floor: {REFUSAL}"]


def test_a_json_field_is_checked_and_described(report: Any) -> None:
    status, parameter, message = report["openai"]["refusal"]
    assert (status, parameter) == (400, "temperature_floor")
    assert "<= 2" in message
    assert report["openai"]["schema"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 2}
    assert report["lmi"] == FLOOR


@APIS
def test_a_call_is_counted(report: Any, api: str) -> None:
    assert report[api]["counted"] == {"temperature_floor": 1}


def test_accepted_calls_are_traced(report: Any) -> None:
    traced = [span.get("tgis.temperature_floor") for span in report["spans"]]
    assert [value for value in traced if value is not None] == [FLOOR, FLOOR]


@APIS
@pytest.mark.parametrize("kind", ["cpu", "device", "kernel"])
def test_every_sampler_has_the_effect(report: Any, api: str, kind: str) -> None:
    of_api = report[api]
    assert of_api["received"] == pytest.approx(FLOOR)
    expected = np.float32(of_api["logits"]) / np.float32(FLOOR)
    assert np.allclose(of_api[kind], expected, rtol=1e-6)


def test_the_client_has_an_option(report: Any) -> None:
    sent = {"tgis-temperature-floor": str(FLOOR)}
    assert report["client"] == {"has_help": True, "metadata": sent, "method": 1}


def test_the_page_of_metadata_has_a_row(report: Any) -> None:
    row = f"| {HELP[0].lower()}{HELP[1:]}; no effect with GREEDY; 0 to 2 |"
    [line] = [line for line in report["page"].splitlines() if line.startswith("| `tgis-temperature-floor` |")]
    assert line.endswith(row)
    assert "`temperature_floor`" in report["page"]
    assert "`--temperature-floor`" in report["page"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "file",
    [
        "test_sampling_parameters.py",
        "shard/runner/test_columns.py",
        "router/api/openai/test_parameters.py",
        "router/api/lmi/test_parameters.py",
        "cli/client/test_command.py",
    ],
)
def test_existing_tests_hold_with_the_parameter(copy: Path, file: str) -> None:
    _run_tests(copy, ROOT / "tests" / file)


def _run_tests(copy: Path, file: Path, *options: str) -> None:
    # Otherwise pytest would import the package from this repository, whose root it puts first.
    own = ("--import-mode=append", "-c", str(ROOT / "pyproject.toml"))
    run_patched(copy, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", *own, *options, str(file))
