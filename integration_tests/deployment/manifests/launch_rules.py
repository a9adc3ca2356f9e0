"""Rules for the commands of containers: commands, flags and variables exist, values are accepted without
warnings, and the launcher's options match the pod."""

import re
import tomllib
from collections.abc import Iterator

from integration_tests.deployment.manifests.launches import config_of, launch, variables
from integration_tests.deployment.manifests.pods import Container, Pod, is_ours, pods_of
from integration_tests.deployment.manifests.rendering import ROOT, Object
from tgis.config.aliases.tgis import PASSED_ON, TGIS_NAMES
from tgis.config.option import variables_of
from tgis.config.processes import LauncherConfig
from tgis.launcher.plan import END_S

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Read by libraries, and therefore not options.
OF_LIBRARIES = {
    *PASSED_ON,
    "HF_TOKEN",
    "HF_ENDPOINT",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "OTEL_RESOURCE_ATTRIBUTES",
}
KNOWN = {*variables_of(LauncherConfig), *OF_LIBRARIES} | {
    one.variable_name for one in TGIS_NAMES if one.variable and "launcher" in one.commands
}
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def ours(objects: list[Object]) -> Iterator[tuple[Pod, Container, str]]:
    """Return the container's name as the beginning of a sentence."""
    for pod in pods_of(objects):
        for container in filter(is_ours, pod.containers):
            yield pod, container, f"{pod.source} {container['name']}:"


def commands_exist(objects: list[Object]) -> Iterator[str]:
    for _, container, where in ours(objects):
        run = [container.get("command")] + [
            container.get(probe, {}).get("exec", {}).get("command") for probe in PROBES
        ]
        run.append(container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command"))
        for words in filter(None, run):
            if words[0] not in PROJECT["scripts"]:
                yield f"{where} the image has no command {words[0]}"


def variables_exist(objects: list[Object]) -> Iterator[str]:
    for _, container, where in ours(objects):
        for one in container.get("env", []):
            if one["name"] not in KNOWN:
                yield f"{where} nothing reads {one['name']}"


def options_are_read(objects: list[Object]) -> Iterator[str]:
    for pod, container, where in ours(objects):
        yield from (f"{where} {problem}" for problem in launch(pod, container).problems)


def drains_fit(objects: list[Object]) -> Iterator[str]:
    """The launcher's options contain the pod's grace period, which is long enough."""
    for pod in pods_of(objects):
        for container in pod.servers:
            where = f"{pod.source} {container['name']}:"
            config = config_of(pod, container)
            delay_s = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
            if config.termination_grace_period != pod.grace_s:
                yield f"{where} TERMINATION_GRACE_PERIOD is not the pod's {pod.grace_s}"
            if config.pre_stop_delay != delay_s:
                yield f"{where} PRE_STOP_DELAY is not the {delay_s} of preStop"
            if delay_s + config.shutdown_timeout + END_S > pod.grace_s:
                yield f"{where} preStop, drain and {END_S:g} s do not fit into {pod.grace_s} s"


def probes_meet_ports(objects: list[Object]) -> Iterator[str]:
    for pod in pods_of(objects):
        for container in pod.servers:
            for name in PROBES:
                problem = _problem_of_probe(pod, container, name)
                if problem:
                    yield f"{pod.source} {container['name']}: {name} {problem}"


def _problem_of_probe(pod: Pod, container: Container, name: str) -> str | None:
    probe = container.get(name)
    if probe is None:
        return "is missing"
    is_live = name == "livenessProbe"
    if "exec" in probe:
        expected = ["health-probe", *(["--live"] if is_live else [])]
        return None if probe["exec"]["command"] == expected else f"is not {' '.join(expected)}"
    http = probe.get("httpGet")
    if http is None:
        return "asks neither over HTTP nor by a command"
    config = config_of(pod, container)
    names = {one["name"]: one["containerPort"] for one in container.get("ports", [])}
    if http.get("path") != ("/live" if is_live else "/health"):
        return f"asks for {http.get('path')}"
    if names.get(http["port"], http["port"]) != config.port:
        return f"asks at {http['port']}, which is not the port {config.port}"
    if http.get("scheme", "HTTP") != ("HTTPS" if config.http_tls else "HTTP"):
        return "does not speak as the port does"
    return None


def ports_are_served(objects: list[Object]) -> Iterator[str]:
    """The declared ports are open, and the annotations name the port of the metrics."""
    for pod in pods_of(objects):
        for container in pod.servers:
            config, where = config_of(pod, container), f"{pod.source} {container['name']}:"
            served = {
                "http": config.port,
                "http1": config.port,
                "grpc": config.grpc_port,
                "h2c": config.grpc_port,
                "openai": config.http_api_port,
            }
            for port in container.get("ports", []):
                if served.get(port["name"]) != port["containerPort"]:
                    yield f"{where} nothing listens on {port['name']} {port['containerPort']}"
            expected = {"scrape": "true", "port": str(config.port), "path": "/metrics"}
            for name, value in expected.items():
                if pod.annotations.get(f"prometheus.io/{name}") != value:
                    yield f"{where} the annotation prometheus.io/{name} is not {value}"


def images_are_fixed(objects: list[Object]) -> Iterator[str]:
    """Only for production."""
    for _, container, where in ours(objects):
        version = re.escape(PROJECT["version"])
        if not re.search(rf":{version}$|@sha256:[0-9a-f]{{64}}$", container["image"]):
            yield f"{where} {container['image']} is not this version, nor a digest"


def devices_are_counted(objects: list[Object]) -> Iterator[str]:
    for pod in pods_of(objects):
        for container in pod.servers:
            where, given = f"{pod.source} {container['name']}:", variables(container)
            gpus = container["resources"]["limits"].get("nvidia.com/gpu")
            if given.get("TGIS_DEVICE") == "cuda" and (gpus is None or gpus != given.get("NUM_SHARD")):
                yield f"{where} {given.get('NUM_SHARD')} shards on {gpus} GPUs"
            if gpus and given.get("TGIS_DEVICE") != "cuda":
                yield f"{where} may compute on the CPU in silence"
