"""The systemd unit, checked by systemd-analyze and by our own rules."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from integration_tests.deployment.systemd.units import faults, read_unit

pytestmark = pytest.mark.deploy

ROOT = Path(__file__).parents[3]
DIRECTORY = ROOT / "deployment" / "systemd"
UNIT, VARIABLES = ((DIRECTORY / f"tgis-next.{end}").read_text() for end in ("service", "env"))
FETCHED = ROOT / ".cache" / "systemd"
LIBRARIES = ("lib", "usr/lib")
MAX_EXPOSURE = 20  # of 100; systemd's default is 96; ten times the printed number
REFUSED = [
    ("KillMode=mixed", "KillMode=some"),
    ("Type=exec", "Typ=exec"),
    ("TimeoutStopSec=120", "TimeoutStopSec=soon"),
    ("OOMPolicy=continue", "OOMPolicy=ignore"),
    ("AF_NETLINK", "AF_NETLNK"),
    ("@system-service", "@system-servic"),
    ("ExecStart=/", "ExecStart=/nowhere/"),
    ("[Service]", "[Services]"),
]
BROKEN = [
    ("KillMode=mixed", "KillMode=control-group", "KillMode is not mixed"),
    ("OOMPolicy=continue\n", "", "OOMPolicy is not continue"),
    ("MemoryDenyWriteExecute=no", "MemoryDenyWriteExecute=yes", "MemoryDenyWriteExecute is not no"),
    (" AF_NETLINK", "", "RestrictAddressFamilies lacks AF_NETLINK"),
    ("text-generation-launcher", "tgis-launcher", "the project has no command tgis-launcher"),
    ("ExecStart=/opt/tgis/bin/text-generation-launcher", r"\g<0> --modell=m", "No such option"),
    ("SHUTDOWN_TIMEOUT=110", "SHUTDOWN_TIMEOUT=116", "is more than the 115 s"),
    ("TimeoutStopSec=120", "TimeoutStopSec=90", "TERMINATION_GRACE_PERIOD is not the 90 s"),
    ("TimeoutStopSec=120", "TimeoutStopSec=90", "a drain and 5 s do not fit into the 90 s"),
    ("LimitNOFILE=8192", "LimitNOFILE=4096", "LimitNOFILE is less than"),
    ("HOME=%S/tgis-next", "HOME=/home/tgis", "HOME is not /var/lib/tgis-next"),
    ("SHUTDOWN_TIMEOUT=110", "DRAIN_TIMEOUT=110", "nothing reads DRAIN_TIMEOUT"),
]


def analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    env, program = dict(os.environ), shutil.which("systemd-analyze")
    if program is None:
        program = str(FETCHED / "usr/bin/systemd-analyze")
        if not Path(program).is_file():
            pytest.skip(
                "NOTICE: systemd-analyze is missing (scripts/fetch_debian.sh): the unit is not checked"
            )
        machine = f"{os.uname().machine}-linux-gnu"
        places = [
            f"{FETCHED}/{one}/{more}"
            for one in LIBRARIES
            for more in (machine, f"{machine}/systemd", "systemd")
        ]
        env |= {"LD_LIBRARY_PATH": ":".join(places), "SYSTEMD_UNIT_PATH": f"{FETCHED}/lib/systemd/system"}
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, env=env)


def write(directory: Path, text: str) -> Path:
    """Replace the program with an existing one."""
    path = directory / "tgis-next.service"
    path.write_text(text.replace("/opt/tgis/bin/text-generation-launcher", "/bin/true"))
    return path


def verify(directory: Path, text: str) -> str:
    """Return systemd's warnings; it does not fail for lines that it ignores."""
    checked = analyze("verify", "--man=no", write(directory, text))
    return (
        checked.stdout + checked.stderr + ("" if checked.returncode == 0 else f"status {checked.returncode}")
    )


def test_systemd_has_nothing_to_say(tmp_path: Path) -> None:
    assert verify(tmp_path, UNIT) == ""


@pytest.mark.parametrize(("ours", "broken"), REFUSED)
def test_systemd_would_say_it(tmp_path: Path, ours: str, broken: str) -> None:
    assert ours in UNIT
    assert verify(
        tmp_path, UNIT.replace("/opt/tgis/bin/text-generation-launcher", "/bin/true").replace(ours, broken)
    )


def test_it_may_do_little(tmp_path: Path) -> None:
    command = ("security", "--offline=true", f"--threshold={MAX_EXPOSURE}")
    checked = analyze(*command, write(tmp_path, UNIT))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    exposed = UNIT.replace("CapabilityBoundingSet=\n", "")
    assert analyze(*command, write(tmp_path, exposed)).returncode != 0


def test_our_own_rules() -> None:
    assert list(faults(read_unit(UNIT, VARIABLES))) == []


@pytest.mark.parametrize(("ours", "broken", "fault"), BROKEN)
def test_our_own_rules_report_violations(ours: str, broken: str, fault: str) -> None:
    assert ours in UNIT
    text = UNIT.replace(ours, broken.replace(r"\g<0>", ours))
    assert any(fault in one for one in faults(read_unit(text, VARIABLES)))


@pytest.mark.parametrize(
    ("ours", "broken", "fault"),
    [
        ("MODEL_NAME=", "MODEL=", "nothing reads MODEL"),
        ("#NUM_SHARD=", "#SHARDS=", "nothing reads SHARDS"),
        ("MODEL_NAME=", "SHUTDOWN_TIMEOUT=300\nMODEL_NAME=", "is more than the 115 s"),
    ],
)
def test_variables_of_the_file_count(ours: str, broken: str, fault: str) -> None:
    assert ours in VARIABLES
    assert any(fault in one for one in faults(read_unit(UNIT, VARIABLES.replace(ours, broken))))
