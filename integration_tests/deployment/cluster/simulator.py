"""Simulates a pod's life without a cluster: from its manifest to its end, with a client that calls it before
and after the request to end."""

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc

from integration_tests.deployment.cluster.container import Container, Mount, Spec
from integration_tests.deployment.cluster.kubelet import Event, Kubelet
from integration_tests.deployment.cluster.manifest import Pod
from integration_tests.deployment.cluster.volumes import Cluster, mounts_of
from integration_tests.deployment.image import containerfile
from integration_tests.support.hardened import Relay
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

STEP_S = 0.05
"""Minimum time of a step: a stream of the smallest model would otherwise end too early."""
SLOW_STEPS = {"FAILPOINTS": f"shard.before_forward=sleep:{STEP_S}"}
READY_S = 180.0
QUIET_S = 3.0  # time that it stays ready before it is called
NUM_SHORT = 8
MORE_S = 3.0  # time that the stream continues after SIGTERM


@dataclass(frozen=True)
class Life:
    """Observations of a pod."""

    status: int
    events: list[Event]
    probed: Mapping[str, int]
    """Numbers of probes by kind."""
    rights: Mapping[str, list[str]]
    """Lines of /proc/PID/status."""
    writable: set[str]
    """Mounts that the manifest does not explain."""
    written: set[str]
    """Files outside all mounts."""
    compiled: set[str]
    """Compiled kernels that did not come with the image."""
    short: str
    """Response to a call."""
    late: str
    """Response to the same call after the request to end."""
    streamed: str
    num_streamed: int
    num_asked: int
    stop_reason: int
    termination_log: str
    output: str

    def at(self, what: str) -> float:
        return next(event.at for event in self.events if event.what.startswith(what))


@dataclass(frozen=True)
class Client:
    """Credentials for calls, if the service has a certificate."""

    roots: bytes
    chain: bytes
    key: bytes
    name: str

    @contextmanager
    def stub(
        self, container: Container, port: int, env: Mapping[str, str]
    ) -> Iterator[GenerationServiceStub]:
        relay = Relay(container.pid, port)
        try:
            with self._channel(f"127.0.0.1:{relay.ports[0]}", env) as channel:
                yield GenerationServiceStub(channel)
        finally:
            relay.stop()

    def _channel(self, target: str, env: Mapping[str, str]) -> grpc.Channel:
        if not env.get("TLS_CERT_PATH"):
            return grpc.insecure_channel(target)
        pair = (self.key, self.chain) if env.get("TLS_CLIENT_CA_CERT_PATH") else (None, None)
        credentials = grpc.ssl_channel_credentials(self.roots, *pair)
        return grpc.secure_channel(target, credentials, [("grpc.ssl_target_name_override", self.name)])


def live(pod: Pod, image: Path, cluster: Cluster, client: Client, scratch: Path) -> Life:
    """Run a pod. Raises PodFault if a cluster would restart or kill it."""
    container = Container(_spec(pod, image, cluster, scratch))
    kubelet = Kubelet(pod, container)
    try:
        kubelet.wait_until_ready(READY_S)
        kubelet.wait_for(QUIET_S)
        ports, env = {"grpc": 8033, **pod.ports}, container.spec.env
        with client.stub(container, ports.get("h2c", ports["grpc"]), env) as stub:
            return _observe(pod, container, kubelet, stub)
    finally:
        kubelet.stop()


def _observe(pod: Pod, container: Container, kubelet: Kubelet, stub: GenerationServiceStub) -> Life:
    short, num_asked = _ask(stub), _num_tokens(pod)
    stream = stub.GenerateStream(
        pb.SingleGenerationRequest(request=_request(), params=_parameters(num_asked)), timeout=120
    )
    parts = [next(stream), next(stream)]
    rights, writable = _rights(container.pid), _writable(container)
    written, compiled = _written(container), _compiled(container)
    with ThreadPoolExecutor(2) as threads:
        end = threads.submit(kubelet.delete)
        late = threads.submit(_ask, stub)
        try:
            parts += stream
        except grpc.RpcError:
            end.result()  # the reason of the kill is more useful
            raise
        status = end.result()
    return Life(
        status,
        kubelet.events,
        kubelet.probed,
        rights,
        writable,
        written,
        compiled,
        short,
        late.result(),
        "".join(part.text for part in parts),
        parts[-1].generated_token_count,
        num_asked,
        parts[-1].stop_reason,
        (Path(container.spec.scratch) / "termination-log").read_text(),
        container.output,
    )


def _spec(pod: Pod, image: Path, cluster: Cluster, scratch: Path) -> Spec:
    file = containerfile.read(Path("deployment/Containerfile").read_text())
    said = {name: os.path.expandvars(text) for name, text in file.final.pairs("ENV").items()}
    spec = Spec(str(image.absolute()), str(scratch), [], {}, is_root_read_only=pod.is_root_read_only)
    env = pod.env(said, spec.address) | SLOW_STEPS
    model = _model_name(pod, env)
    return replace(
        spec,
        command=pod.command(file.command, env),
        env=env,
        mounts=[*_base(image), *mounts_of(pod, cluster, model, scratch)],
        directory=pod.container.get("workingDir", file.final.all("WORKDIR")[-1]),
        user=pod.security.get("runAsUser", spec.user),
        groups=pod.groups,
    )


def _base(image: Path) -> list[Mount]:
    """Return the image. The parts of its base, libc and Python, come from this machine. It has no shell."""
    settings = dict(
        line.split(" = ")
        for line in (image / "opt/tgis/pyvenv.cfg").read_text().splitlines()
        if " = " in line
    )
    python = Path(settings["home"])
    shown = ["/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache"]
    shown += [settings["executable"]] if python.parent == Path("/usr") else [str(python.parent)]
    return [Mount(path, path, is_read_only=True) for path in shown if Path(path).exists()]


def _model_name(pod: Pod, env: Mapping[str, str]) -> str:
    flags = [word.partition("=")[2] for word in pod.command([], env) if word.startswith("--model-name=")]
    return os.path.normpath(flags[0] if flags else env["MODEL_NAME"])


def _num_tokens(pod: Pod) -> int:
    """Return the number of tokens for which the stream continues after SIGTERM."""
    pre_stop = pod.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    return int((pre_stop + MORE_S) / STEP_S)


def _request() -> pb.GenerationRequest:
    return pb.GenerationRequest(text="once upon a time")


def _parameters(num_tokens: int) -> pb.Parameters:
    return pb.Parameters(stopping=pb.StoppingCriteria(max_new_tokens=num_tokens, min_new_tokens=num_tokens))


def _ask(stub: GenerationServiceStub) -> str:
    message = pb.BatchedGenerationRequest(requests=[_request()], params=_parameters(NUM_SHORT))
    text: str = stub.Generate(message, timeout=60).responses[0].text
    return text


def _rights(pid: int) -> dict[str, list[str]]:
    lines = [line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    return {name: value.split() for name, value in lines}


def _writable(container: Container) -> set[str]:
    targets = set()
    for line in Path(f"/proc/{container.pid}/mountinfo").read_text().splitlines():
        mount, _, filesystem = line.partition(" - ")
        target, options = mount.split()[4:6]
        if {"ro"}.isdisjoint([*options.split(","), *filesystem.split()[2].split(",")]):
            targets.add(target)
    given = {mount.target for mount in container.spec.mounts if not mount.is_read_only}
    return {path for path in targets - given if not path.startswith(("/dev/", "/proc"))}


def _written(container: Container) -> set[str]:
    """Return the container's files on the image's disk, without other disks."""
    root = Path(f"/proc/{container.pid}/root")
    paths, device = set(), root.stat().st_dev
    for directory, below, files in os.walk(f"{root}/"):
        below[:] = [name for name in below if os.lstat(os.path.join(directory, name)).st_dev == device]
        for name in (*files, *below):
            path = os.path.join(directory, name)
            if os.lstat(path).st_uid == container.spec.user:
                paths.add("/" + os.path.relpath(path, root))
    return paths


def _compiled(container: Container) -> set[str]:
    """Return the files newer than the container; files copied from the image keep their time."""
    began = (Path(container.spec.scratch) / "spec.json").stat().st_mtime
    places = [Path(f"/proc/{container.pid}/root") / name for name in ("tmp", "home/tgis")]
    files = [path for place in places for path in place.rglob("*.nbc")]
    assert files, "it has copied what the image brings"
    return {path.name for path in files if path.stat().st_mtime > began}
