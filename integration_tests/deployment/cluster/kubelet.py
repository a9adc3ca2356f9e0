"""Handles a container as kubelet does: probes it, reports its readiness, and ends it within its grace period.
A restart or kill by the cluster raises an error here."""

import http.client
import signal
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from integration_tests.deployment.cluster.container import Container
from integration_tests.deployment.cluster.manifest import Object, Pod
from integration_tests.support.hardened import Relay

NO_PROBE: Object = {}


class PodFault(Exception):
    """Error for a restart or kill of the pod by the cluster, with the reason."""


@dataclass(frozen=True)
class Event:
    at: float
    """Seconds since the container was started."""
    what: str


class Kubelet:
    """Start the probes."""

    def __init__(self, pod: Pod, container: Container) -> None:
        self.events: list[Event] = []
        self.probed: Counter[str] = Counter()
        self._pod, self._container, self._began = pod, container, time.monotonic()
        self._is_ready, self._over, self._fault = threading.Event(), threading.Event(), ""
        self._threads: list[threading.Thread] = []
        self._start(self._start_up)

    def wait_until_ready(self, timeout: float) -> None:
        """Wait until the pod is ready. Raises PodFault."""
        deadline = time.monotonic() + timeout
        while not self._is_ready.wait(0.05):
            self._check()
            if time.monotonic() > deadline:
                raise PodFault(f"not ready after {timeout:g} s: {self.log}")
        self._check()

    def wait_for(self, seconds: float) -> None:
        """Watch the pod for this time. Raises PodFault."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._check()
            time.sleep(0.05)

    def delete(self) -> int:
        """End the pod, and return its exit status. Raises PodFault if it is killed, or its hook fails."""
        self._check()
        deadline = time.monotonic() + self._pod.grace_period
        self._record("deleted")
        self._over.set()  # a pod that is being deleted is not restarted
        self._run_hook(deadline)
        self._record("SIGTERM")
        self._container.signal(signal.SIGTERM)
        status = self._container.wait(
            max(deadline, time.monotonic() + 2)
        )  # kubelet leaves at least two seconds
        if status is None:
            self._container.kill()
            raise PodFault(
                f"killed at the end of its grace period of {self._pod.grace_period:g} s: {self.log}"
            )
        self._record(f"ended with status {status}")
        return status

    def stop(self) -> None:
        """Kill the container, and remove its files."""
        self._over.set()
        if self._container.process.poll() is None:
            self._container.kill()
        for thread in self._threads:
            thread.join()

    @property
    def log(self) -> str:
        return "; ".join(f"{event.at:.1f} s: {event.what}" for event in self.events)

    def _record(self, what: str) -> None:
        self.events.append(Event(time.monotonic() - self._began, what))

    def _check(self) -> None:
        if self._fault:
            raise PodFault(f"{self._fault}: {self.log}")
        if (status := self._container.process.poll()) is not None:
            last = [line for line in self._container.output.splitlines() if line][-1:]
            raise PodFault(f"the container ended with status {status}: {last}")

    def _start(self, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run)
        self._threads.append(thread)
        thread.start()

    def _start_up(self) -> None:
        """The other probes wait until it has succeeded once."""
        probes = self._pod.container
        self._probe("startup", probes.get("startupProbe", NO_PROBE), is_once=True)
        if not self._fault and not self._over.is_set():
            self._record("started")
            self._start(lambda: self._probe("liveness", probes.get("livenessProbe", NO_PROBE)))
            self._start(lambda: self._probe("readiness", probes.get("readinessProbe", NO_PROBE)))

    def _probe(self, kind: str, probe: Object, is_once: bool = False) -> None:
        if not probe:
            if kind == "readiness":
                self._is_ready.set()
            return
        failures = successes = 0
        self._over.wait(probe.get("initialDelaySeconds", 0))
        while not self._over.is_set():
            is_good, reason = self._ask(probe)
            self.probed[kind] += 1
            successes, failures = (successes + 1, 0) if is_good else (0, failures + 1)
            if kind == "readiness":
                self._set_ready(successes, failures, probe, reason)
            elif failures == probe.get("failureThreshold", 3):
                self._fault = (
                    f"to be restarted: the {kind} probe failed {failures} times, the last one with: {reason}"
                )
                return
            if is_good and is_once:
                return
            self._over.wait(probe.get("periodSeconds", 10))

    def _set_ready(self, successes: int, failures: int, probe: Object, reason: str) -> None:
        if successes >= probe.get("successThreshold", 1) and not self._is_ready.is_set():
            self._record("ready")
            self._is_ready.set()
        if failures >= probe.get("failureThreshold", 3) and self._is_ready.is_set():
            self._fault = f"not ready any more: {reason}"

    def _ask(self, probe: Object) -> tuple[bool, str]:
        """Run the probe once; return whether it succeeded, and its output."""
        timeout = float(probe.get("timeoutSeconds", 1))
        kinds = {"httpGet": self._get, "exec": self._run, "grpc": self._call, "tcpSocket": self._knock}
        [kind] = kinds.keys() & probe.keys()
        try:
            return kinds[kind](probe[kind], timeout)
        except (OSError, http.client.HTTPException, grpc.RpcError) as error:
            return False, f"{kind}: {error or type(error).__name__}"

    def _get(self, said: Object, timeout: float) -> tuple[bool, str]:
        connection = http.client.HTTPConnection(self._container.spec.address, timeout=timeout)
        connection.sock = self._container.connect(self._pod.port(said["port"]), timeout)
        if said.get("scheme") == "HTTPS":
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            connection.sock = context.wrap_socket(connection.sock)
        with connection.sock:
            headers = {one["name"]: one["value"] for one in said.get("httpHeaders", [])}
            connection.request("GET", said.get("path", "/"), headers=headers)
            status = connection.getresponse().status
        return 200 <= status < 400, f"HTTP status {status}"

    def _run(self, said: Object, timeout: float) -> tuple[bool, str]:
        code, output = self._container.run(said["command"], timeout)
        return code == 0, f"exit status {code}: {output.strip()}"

    def _call(self, said: Object, timeout: float) -> tuple[bool, str]:
        relay = Relay(self._container.pid, said["port"])
        try:
            with grpc.insecure_channel(f"127.0.0.1:{relay.ports[0]}") as channel:
                asked = health_pb2.HealthCheckRequest(service=said.get("service", ""))
                status = HealthStub(channel).Check(asked, timeout=timeout).status
        finally:
            relay.stop()
        return status == health_pb2.HealthCheckResponse.SERVING, f"gRPC health {status}"

    def _knock(self, said: Object, timeout: float) -> tuple[bool, str]:
        self._container.connect(self._pod.port(said["port"]), timeout).close()
        return True, "a connection"

    def _run_hook(self, deadline: float) -> None:
        """Run the hook, which uses the grace period and is killed at its end."""
        hook = self._pod.container.get("lifecycle", {}).get("preStop", {})
        left = deadline - time.monotonic()
        if sleep := hook.get("sleep"):
            time.sleep(min(left, sleep["seconds"]))
        elif said := hook.get("exec"):
            code, output = self._container.run(said["command"], left)
            if code:
                raise PodFault(f"the preStop hook failed with exit status {code}: {output.strip()}")
        elif hook:
            is_good, reason = self._get(hook["httpGet"], left)
            if not is_good:
                raise PodFault(f"the preStop hook failed: {reason}")
