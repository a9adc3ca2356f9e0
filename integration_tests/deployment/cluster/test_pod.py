"""Pods of the manifests, each from its start to its end, and broken ones that are detected. It needs root for
namespaces, but no cluster and no container engine."""

import contextlib
import copy
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import trustme

from integration_tests.deployment.cluster.kubelet import PodFault
from integration_tests.deployment.cluster.manifest import Pod, pod_of, render
from integration_tests.deployment.cluster.simulator import Client, Life, live
from integration_tests.deployment.cluster.volumes import Cluster
from tests.support.shard.checkpoints import write_llama
from tests.support.tokenizers.trained import write_byte_level
from tgis.pb import generation_pb2 as pb

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(600)]

DEPLOYMENT = Path("deployment")
VARIANTS = ("base", "overlays/tls", "overlays/read-only", "kserve")
IMAGE = Path("build/image-root")
NAME = "inference-server"
END_S = 10.0
TOOLS = ("kubectl", "unshare", "nsenter", "mount", "ip")


def break_liveness(pod: Pod) -> None:
    pod.container["livenessProbe"] = {
        "httpGet": {"path": "/live", "port": 3001},
        "periodSeconds": 1,
        "failureThreshold": 2,
    }


def take_away_all_places_to_write(pod: Pod) -> None:
    pod.container.setdefault("securityContext", {})["readOnlyRootFilesystem"] = True
    pod.container["volumeMounts"] = []


def give_too_little_time(pod: Pod) -> None:
    pod.spec["terminationGracePeriodSeconds"] = 3
    set_variables(pod, TERMINATION_GRACE_PERIOD="", PRE_STOP_DELAY="0")


def promise_too_little_time(pod: Pod) -> None:
    set_variables(pod, TERMINATION_GRACE_PERIOD="3")


def set_variables(pod: Pod, **variables: str) -> None:
    kept = [one for one in pod.container["env"] if one["name"] not in variables]
    pod.container["env"] = kept + [
        {"name": name, "value": value} for name, value in variables.items() if value
    ]


def encrypt_http_too(pod: Pod) -> None:
    """The probes use both methods."""
    set_variables(pod, HTTP_TLS="true")
    pod.container["readinessProbe"]["httpGet"]["scheme"] = "HTTPS"
    pod.container["startupProbe"] = {
        "exec": {"command": ["health-probe"]},
        "timeoutSeconds": 5,
        "failureThreshold": 60,
    }
    pod.container["livenessProbe"] = {"exec": {"command": ["health-probe", "--live"]}, "timeoutSeconds": 5}


CHANGED = {encrypt_http_too: "overlays/tls"}
BROKEN: dict[Callable[[Pod], None], str] = {
    break_liveness: r"to be restarted: the liveness probe failed 2 times, .*Connection refused",
    take_away_all_places_to_write: r"the container ended with status 1: .*error: ",
    give_too_little_time: r"killed at the end of its grace period of 3 s",
    promise_too_little_time: r"the container ended with status 1: .*error: .*shutdown",
}


@pytest.fixture(scope="module")
def image() -> Path:
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root, and {missing or 'no more'}, to run pods")
    made = subprocess.run(
        ["scripts/image_root.sh", str(IMAGE), sys.executable], capture_output=True, text=True, timeout=400
    )
    assert made.returncode == 0, made.stderr
    return IMAGE


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def client(authority: trustme.CA) -> Client:
    own = authority.issue_cert("client")
    chain_of_own = b"".join(blob.bytes() for blob in own.cert_chain_pems)
    return Client(authority.cert_pem.bytes(), chain_of_own, own.private_key_pem.bytes(), NAME)


@pytest.fixture(scope="module")
def cluster(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    model = tmp_path_factory.mktemp("models") / "tiny"
    write_llama(model, vocab_size=403, max_position_embeddings=2048, eos_token_id=1)
    write_byte_level(model, 400)
    for path in (model, *model.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)

    def secret(name: str) -> Mapping[str, str]:
        """Create the secret as cert-manager does."""
        own = authority.issue_cert(NAME, f"{NAME}.default.svc")
        pem = b"".join(blob.bytes() for blob in own.cert_chain_pems).decode()
        key, roots = own.private_key_pem.bytes().decode(), authority.cert_pem.bytes().decode()
        return {"tls.crt": pem, "tls.key": key, "ca.crt": roots}

    return Cluster(model, secret)


@pytest.fixture(scope="module")
def lives(
    image: Path, cluster: Cluster, client: Client, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Life]]]:
    """Run all pods simultaneously: most of a pod's life is waiting."""
    pods = {name: pod_of(render(DEPLOYMENT / name)) for name in VARIANTS}
    for change, name in CHANGED.items():
        pods[change.__name__] = copy.deepcopy(pods[name])
        change(pods[change.__name__])
    for change in BROKEN:
        broken = copy.deepcopy(pods["base"])
        broken.container["startupProbe"]["periodSeconds"] = 1
        change(broken)
        pods[change.__name__] = broken
    with ThreadPoolExecutor(len(pods)) as threads:
        yield {
            name: threads.submit(live, pod, image, cluster, client, tmp_path_factory.mktemp("pod"))
            for name, pod in pods.items()
        }
    # A killed pod ends after all its processes, which takes a while on a busy machine.
    deadline = time.monotonic() + END_S
    while (left := running_from("/opt/tgis/bin/")) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, "no pod outlives its test"


def running_from(place: str) -> set[str]:
    """Return the command lines of running processes."""
    commands = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # the process has just ended
            if (line := path.read_text()).startswith(place):
                commands.add(line.replace("\0", " "))
    return commands


@pytest.fixture(params=[*VARIANTS, *(change.__name__ for change in CHANGED)])
def life(request: pytest.FixtureRequest, lives: dict[str, Future[Life]]) -> Life:
    return lives[request.param].result()


def test_probes_and_termination_work(life: Life) -> None:
    """A stream that runs when the pod is deleted completes after SIGTERM, and so does a late call: other
    nodes of a cluster learn of the deletion later than the pod."""
    assert life.status == 0, life.output
    assert life.short
    assert life.late == life.short
    assert life.streamed.startswith(life.short)
    assert (life.num_streamed, life.stop_reason) == (life.num_asked, pb.StopReason.MAX_TOKENS)
    assert life.at("started") <= life.at("ready") < life.at("deleted") < life.at("SIGTERM") < life.at("ended")
    assert not life.termination_log
    assert set(life.probed) == {"startup", "liveness", "readiness"}


def test_it_has_no_rights(life: Life) -> None:
    user, *_ = life.rights["Uid"]
    assert int(user) > 1000
    assert (life.rights["Uid"], life.rights["Gid"]) == ([user] * 4, ["0"] * 4)
    assert all(life.rights[f"Cap{kind}"] == ["0" * 16] for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb"))
    assert life.rights["NoNewPrivs"] == ["1"]


def test_it_compiles_nothing(life: Life) -> None:
    """Kernels come with the image if they cannot be written."""
    assert not life.compiled


def test_it_writes_where_it_may(life: Life) -> None:
    """Return the mounts of the manifest and, if the image's disk is writable, the two directories on which
    others are mounted."""
    assert life.writable <= {"/"}
    assert all(path.startswith(("/tmp/", "/home/tgis/")) for path in life.written), life.written


@pytest.mark.parametrize("change", BROKEN)
def test_violations_are_reported(change: Callable[[Pod], None], lives: dict[str, Future[Life]]) -> None:
    with pytest.raises(PodFault, match=BROKEN[change]):
        lives[change.__name__].result()
