"""Reads a rendered manifest: the command, environment and mounts of our container in a pod, as Kubernetes and
KServe read them."""

import copy
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]
CONTAINERS = ("server", "kserve-container")
KSERVE_MODEL = "/mnt/models"
_REFERENCE = re.compile(r"\$\$|\$\((\w[\w.-]*)\)")
_UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "k": 10**3, "M": 10**6, "G": 10**9}


@dataclass(frozen=True)
class Pod:
    name: str
    metadata: Object
    spec: Object
    container: Object
    objects: Sequence[Object]
    """All objects that were rendered together."""

    @property
    def grace_period(self) -> float:
        return float(self.spec.get("terminationGracePeriodSeconds", 30))

    @property
    def is_root_read_only(self) -> bool:
        return bool(self.security.get("readOnlyRootFilesystem"))

    @property
    def security(self) -> Object:
        """Return a field of the container's security context, or of the pod's if it is not set."""
        return {**self.spec.get("securityContext", {}), **self.container.get("securityContext", {})}

    @property
    def groups(self) -> list[int]:
        """Supplementary groups; the primary group is 0."""
        return [self.security["fsGroup"]] if "fsGroup" in self.security else []

    @property
    def ports(self) -> dict[str, int]:
        """Return a volume by name."""
        return {port["name"]: port["containerPort"] for port in self.container.get("ports", [])}

    def port(self, said: int | str) -> int:
        """Return the port of a probe, given as a number or a port's name."""
        return said if isinstance(said, int) else self.ports[said]

    def command(self, of_image: Sequence[str], env: Mapping[str, str]) -> list[str]:
        """Command and arguments; the image has no entry point."""
        words = self.container.get("command", []) + self.container.get("args", []) or [*of_image]
        return [_expand(word, env) for word in words]

    def env(self, of_image: Mapping[str, str], address: str) -> dict[str, str]:
        variables = {**of_image, "HOSTNAME": self.name, **self._service_links()}
        for source in self.container.get("envFrom", []):
            kind = "ConfigMap" if "configMapRef" in source else "Secret"
            variables |= self.data_of(kind, next(iter(source.values()))["name"])
        for entry in self.container.get("env", []):
            text = (
                self._value_from(entry["valueFrom"], address)
                if "valueFrom" in entry
                else entry.get("value", "")
            )
            variables[entry["name"]] = _expand(str(text), variables)
        return variables

    def data_of(self, kind: str, name: str) -> dict[str, str]:
        return dict(self._object(kind, name).get("data", {}))

    def _object(self, kind: str, name: str) -> Object:
        for one in self.objects:
            if one["kind"] == kind and one["metadata"]["name"] == name:
                return one
        raise LookupError(f"no {kind} {name} was rendered")

    def _value_from(self, source: Object, address: str) -> str:
        if reference := source.get("fieldRef"):
            return self._field(reference["fieldPath"], address)
        if reference := source.get("resourceFieldRef"):
            kind, name = reference["resource"].split(".")
            return str(quantity(self.container["resources"][kind][name]))
        kind = "ConfigMap" if "configMapKeyRef" in source else "Secret"
        reference = next(iter(source.values()))
        return self.data_of(kind, reference["name"])[reference["key"]]

    def _field(self, path: str, address: str) -> str:
        if match := re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path):
            return str(self.metadata.get(match[1], {}).get(match[2], ""))
        known = {
            "metadata.name": self.name,
            "metadata.namespace": "default",
            "metadata.uid": "00000000-0000-0000-0000-000000000007",
            "spec.nodeName": "node",
            "spec.serviceAccountName": "default",
            "status.podIP": address,
            "status.podIPs": address,
            "status.hostIP": "192.0.2.1",
        }
        return known[path]

    def _service_links(self) -> dict[str, str]:
        """Return the variables that Kubernetes adds for each service with an address, `NAME_PORT=tcp://...`;
        those of its own API always exist."""
        variables = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
        services = [one for one in self.objects if one["kind"] == "Service"]
        for service in services if self.spec.get("enableServiceLinks", True) else []:
            if service["spec"].get("clusterIP") != "None":
                name = service["metadata"]["name"].upper().replace("-", "_")
                port = service["spec"]["ports"][0]["port"]
                variables |= {f"{name}_SERVICE_HOST": "10.96.0.9", f"{name}_SERVICE_PORT": str(port)}
                variables[f"{name}_PORT"] = f"tcp://10.96.0.9:{port}"
        return variables


def render(directory: Path) -> list[Object]:
    rendered = subprocess.run(
        ["kubectl", "kustomize", str(directory)], capture_output=True, text=True, timeout=60
    )
    assert rendered.returncode == 0, rendered.stderr
    return [one for one in yaml.safe_load_all(rendered.stdout) if one]


def pod_of(objects: Sequence[Object]) -> Pod:
    """Return the pod of the Deployment, or of a KServe runtime with the service that uses it."""
    by_kind = {one["kind"]: one for one in objects}
    if runtime := by_kind.get("ServingRuntime") or by_kind.get("ClusterServingRuntime"):
        template = _predictor(runtime, by_kind["InferenceService"])
    else:
        template = by_kind["Deployment"]["spec"]["template"]
    containers = [one for one in template["spec"]["containers"] if one["name"] in CONTAINERS]
    assert len(containers) == 1, f"one of {CONTAINERS} is to be there"
    return Pod("inference-server-0", template["metadata"], template["spec"], containers[0], objects)


def _predictor(runtime: Object, service: Object) -> Object:
    """Return the runtime's container with the service's changes for the model, which is mounted read-only."""
    spec, predictor = copy.deepcopy(runtime["spec"]), service["spec"]["predictor"]
    model = predictor.get("model", {})
    for container in spec["containers"]:
        if container["name"] == "kserve-container":
            container["args"] = container.get("args", []) + model.get("args", [])
            container["env"] = container.get("env", []) + model.get("env", [])
            container.setdefault("volumeMounts", []).append(
                {"name": "kserve-provision-location", "mountPath": KSERVE_MODEL, "readOnly": True}
            )
            changed = ("resources", "readinessProbe", "livenessProbe", "startupProbe", "lifecycle")
            container |= {name: model[name] for name in changed if name in model}
    of_pod = {name: value for name, value in predictor.items() if name != "model"}
    volume = {"name": "kserve-provision-location", "persistentVolumeClaim": {"claimName": "model"}}
    volumes = [*spec.get("volumes", []), *of_pod.pop("volumes", []), volume]
    metadata = {name: spec.get(name, {}) for name in ("labels", "annotations")}
    return {"metadata": metadata, "spec": {**spec, **of_pod, "volumes": volumes}}


def quantity(text: str | int) -> int:
    match = re.fullmatch(r"(\d+)([A-Za-z]*)", str(text))
    assert match, text
    return int(match[1]) * _UNITS[match[2]]


def _expand(text: str, env: Mapping[str, str]) -> str:
    """Expand `$(NAME)` for known variables; `$$` is a dollar sign."""
    return _REFERENCE.sub(lambda match: env.get(match[1], match[0]) if match[1] else "$", text)
