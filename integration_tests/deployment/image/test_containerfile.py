"""The Containerfile, checked by hadolint and by our own rules. No image is built here; the same script builds
its layers for `integration_tests/deployment`."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from integration_tests.deployment.image.containerfile import faults, read

pytestmark = pytest.mark.deploy

FILE = Path("deployment/Containerfile")
TEXT = FILE.read_text()
STEPS = Path("deployment/build.sh").read_text()
PROJECT = tomllib.loads(Path("pyproject.toml").read_text())["project"]
BROKEN = [
    ("UBI_TAG=9.7", "UBI_TAG=latest", "ubi-micro:latest is not pinned"),
    ("ubi-micro:${UBI_TAG} AS micro", "ubi-micro AS micro", "ubi-micro is not pinned"),
    ("--from=build /opt/tgis", "--from=built /opt/tgis", "COPY --from=built: there is no such stage before"),
    ("--from=build /opt/tgis ", "--from=build /opt/tg ", "COPY --from=build /opt/tg: nothing makes it there"),
    ("USER 2000:0", "USER tgis", "the image's user is tgis, not a number above 0 with group 0"),
    ("USER 2000:0", "USER 0:0", "the image's user is 0:0, not a number above 0 with group 0"),
    ("USER 2000:0\n", "", "the image's user is root, not a number above 0 with group 0"),
    ("ENV PATH", "ENV HF_TOKEN=abc PATH", "HF_TOKEN looks like a secret"),
    (
        'CMD ["text-generation-launcher"]',
        'CMD ["tgis-launcher"]',
        "tgis-launcher is no command of the project",
    ),
    ('CMD ["health-probe"]', 'CMD ["curl"]', "curl is no command of the project"),
    ("COPY tgis tgis", "ADD tgis tgis", "ADD may fetch or unpack: write COPY"),
]


def list_faults(text: str) -> list[str]:
    return list(faults(read(text), PROJECT["scripts"], STEPS))


def lint(text: str) -> subprocess.CompletedProcess[str]:
    hadolint = shutil.which("hadolint") or pytest.skip(
        "hadolint is not installed: make deploy-check installs it"
    )
    return subprocess.run([hadolint, "-"], input=text, capture_output=True, text=True, timeout=60)


def test_hadolint_has_nothing_to_say() -> None:
    checked = lint(TEXT)
    assert (checked.returncode, checked.stdout) == (0, ""), checked.stdout + checked.stderr


def test_hadolint_would_say_it() -> None:
    assert "DL3006" in lint(TEXT.replace(":${UBI_TAG} AS micro", " AS micro")).stdout


def test_our_own_rules() -> None:
    assert list_faults(TEXT) == []


@pytest.mark.parametrize(("ours", "broken", "fault"), BROKEN)
def test_our_own_rules_report_violations(ours: str, broken: str, fault: str) -> None:
    assert ours in TEXT
    assert any(fault in one for one in list_faults(TEXT.replace(ours, broken)))


def test_the_image_of_the_gateway() -> None:
    """Its packages are those of `make gateway`, and its last stage has no installer."""
    text = Path("deployment/gateway/Containerfile").read_text()
    checked = lint(text)
    assert (checked.returncode, checked.stdout) == (0, "")
    file = read(text)
    assert list(faults(file, ["smg"], "")) == []
    assert not file.final.all("RUN")
    [lock] = [text for stage in file.stages for text in stage.all("COPY") if not text.startswith("--from")]
    assert Path("locks", lock.split()[0]).is_file()
    assert "--require-hashes" in " ".join(file.stages[1].all("RUN"))


def test_it_suits_manifests_of_tgis() -> None:
    final = read(TEXT).final
    env = final.pairs("ENV")
    assert (env["PORT"], env["GRPC_PORT"], env["HOME"]) == ("3000", "8033", "/home/tgis")
    assert final.all("EXPOSE") == ["3000 8033"]
    assert final.all("USER") == ["2000:0"]
    assert read(TEXT).command == ["text-generation-launcher"]
    assert not final.all("ENTRYPOINT"), "a command given as `args:` alone would become its arguments"


def test_its_version_is_the_project_s() -> None:
    assert read(TEXT).arguments["VERSION"] == PROJECT["version"]


def test_no_compiler_is_in_it() -> None:
    """It also has no installer: the last stage gets only what `dnf` installed below /system."""
    file = read(TEXT)
    [system] = [stage for stage in file.stages if stage.name == "system"]
    [installed] = re.findall(r"--nodocs (.*?) &&", " ".join(system.all("RUN")))
    assert set(installed.split()) == {"libgomp", "python3.11"}
    assert not file.final.all("RUN")


def test_copied_files_are_not_ignored() -> None:
    """The file exists: the two files are read by different programs."""
    ignored = Path(".containerignore").read_text().splitlines()
    kept = {line[1:] for line in ignored if line.startswith("!")}
    copied = {
        source
        for stage in read(TEXT).stages
        for text in stage.all("COPY")
        if not text.startswith("--from")
        for source in text.split()[:-1]
    }
    assert copied == kept
    assert all(Path(source).exists() for source in copied)
    assert "*" in ignored


def test_scripts_are_plain_shell() -> None:
    shellcheck = shutil.which("shellcheck") or pytest.skip(
        "shellcheck is not installed: make deploy-check installs it"
    )
    names = ("fetch_debian.sh", "image_root.sh", "lock.sh")
    scripts = ["deployment/build.sh", *(f"scripts/{name}" for name in names)]
    checked = subprocess.run([shellcheck, *scripts], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stdout
