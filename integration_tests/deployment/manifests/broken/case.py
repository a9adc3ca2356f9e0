"""Defines manifests with exactly one error, and the rule's message about it; the cases are in modules of this
folder."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from integration_tests.deployment.manifests.launch_rules import PROJECT
from integration_tests.deployment.manifests.rendering import Object, written
from integration_tests.deployment.manifests.rules import Rule

BASE = (
    "base/deployment.yaml",
    "base/service.yaml",
    "base/poddisruptionbudget.yaml",
    "base/serviceaccount.yaml",
)
POLICY = (*BASE, "components/network-policy/networkpolicy.yaml")
GROUP = tuple(
    f"overlays/multi-node/{name}.yaml"
    for name in ("certificates", "leaderworkerset", "networkpolicy", "service", "serviceaccount")
)
KSERVE = ("kserve/http/servingruntime.yaml", "kserve/http/inferenceservice.yaml")
HPA = "components/autoscale-hpa/horizontalpodautoscaler.yaml"
KEDA = "components/autoscale-keda/scaledobject.yaml"
GONE = object()

SERVER = "spec.template.spec.containers.0"
GROUP_POD = "spec.leaderWorkerTemplate.workerTemplate.spec"


@dataclass(frozen=True)
class Broken:
    rule: Rule
    files: tuple[str, ...]
    kind: str
    path: str
    """Path of the change in the first object of the kind; a number is an index of a list, or the next one."""
    value: Any
    says: str
    first: Callable[[list[Object]], None] = lambda objects: None
    """Change that makes the objects valid for the rule."""

    @property
    def name(self) -> str:
        return f"{self.rule.__name__}: {self.says}"


def change(objects: list[Object], kind: str, path: str, value: Any) -> None:
    place: Any = next(one for one in objects if one["kind"] == kind)
    *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in way:
        place = place.setdefault(part, {}) if isinstance(place, dict) else place[part]
    if value is GONE:
        del place[last]
    elif isinstance(place, list) and last == len(place):
        place.append(value)
    else:
        place[last] = value


def env(name: str, value: str) -> dict[str, str]:
    return {"name": name, "value": value}


def has_tls(objects: list[Object]) -> None:
    """The change of the component tls to the deployment."""
    pairs = {"TLS_CERT_PATH": "/tls/tls.crt", "TLS_KEY_PATH": "/tls/tls.key"}
    change(objects, "Deployment", f"{SERVER}.env", [env(*pair) for pair in pairs.items()])
    change(objects, "Deployment", f"{SERVER}.volumeMounts", [{"name": "tls", "mountPath": "/tls"}])
    volume = {"name": "tls", "secret": {"secretName": "inference-server-tls"}}
    change(objects, "Deployment", "spec.template.spec.volumes", [volume])


def has_fixed_image(objects: list[Object]) -> None:
    change(objects, "Deployment", f"{SERVER}.image", f"tgis-next:{PROJECT['version']}")


def cannot_write(objects: list[Object]) -> None:
    change(objects, "Deployment", f"{SERVER}.securityContext.readOnlyRootFilesystem", True)
    change(objects, "Deployment", f"{SERVER}.volumeMounts", [{"name": "tmp", "mountPath": "/tmp"}])
    change(objects, "Deployment", "spec.template.spec.volumes", [{"name": "tmp", "emptyDir": {}}])


def has_two_gpus(objects: list[Object]) -> None:
    limits = {"cpu": "16", "memory": "16Gi", "nvidia.com/gpu": "2"}
    change(objects, "Deployment", f"{SERVER}.resources.limits", limits)


def is_scaled(objects: list[Object]) -> None:
    change(objects, "Deployment", "spec.replicas", GONE)


def right(case: Broken) -> list[Object]:
    objects = written(*case.files)
    case.first(objects)
    return objects


def deployment(
    rule: Rule, path: str, value: Any, says: str, first: Callable[[list[Object]], None] = lambda objects: None
) -> Broken:
    """Objects of the base."""
    return Broken(rule, BASE, "Deployment", path, value, says, first)


def group(rule: Rule, path: str, value: Any, says: str) -> Broken:
    return Broken(rule, GROUP, "LeaderWorkerSet", path, value, says)


def policy(rule: Rule, path: str, value: Any, says: str) -> Broken:
    return Broken(rule, POLICY, "NetworkPolicy", path, value, says)


def hpa(rule: Rule, path: str, value: Any, says: str) -> Broken:
    return Broken(rule, (*BASE, HPA), "HorizontalPodAutoscaler", path, value, says, is_scaled)


def keda(rule: Rule, path: str, value: Any, says: str) -> Broken:
    return Broken(rule, (*BASE, KEDA), "ScaledObject", path, value, says, is_scaled)
