"""Lists the pods of rendered objects of any kind: with the labels and variables that LeaderWorkerSet adds,
and as KServe merges a runtime with its service."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from integration_tests.deployment.manifests.rendering import Object, name_of

LWS = "leaderworkerset.sigs.k8s.io"
DEFAULT_GRACE_S = 30
OUR_IMAGE = "tgis-next"
LAUNCHER = "text-generation-launcher"

Container = dict[str, Any]


@dataclass(frozen=True)
class Pod:
    source: str
    spec: dict[str, Any]
    labels: dict[str, str]
    annotations: dict[str, str]
    injected: dict[str, str] = field(default_factory=dict)
    """Variables that the controller adds."""
    has_account: bool = True
    """True if the object sets the pod's service account; KServe sets it elsewhere."""

    @property
    def containers(self) -> list[Container]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def grace_s(self) -> int:
        return int(self.spec.get("terminationGracePeriodSeconds", DEFAULT_GRACE_S))

    @property
    def servers(self) -> list[Container]:
        """Containers that run the launcher."""
        return [one for one in self.containers if one.get("command", [None])[0] == LAUNCHER]


def is_ours(container: Container) -> bool:
    return str(container["image"]).rsplit("/", 1)[-1].partition(":")[0].partition("@")[0] == OUR_IMAGE


def pods_of(objects: list[Object]) -> list[Pod]:
    pods: list[Pod] = []
    for one in objects:
        if one["kind"] in ("Deployment", "Job", "StatefulSet"):
            pods.append(_pod(one, one["spec"]["template"]))
        elif one["kind"] == "LeaderWorkerSet":
            pods += _group(one)
        elif one["kind"] == "ServingRuntime":
            pods += _served(one, [other for other in objects if other["kind"] == "InferenceService"])
    return pods


def _pod(one: Object, template: dict[str, Any]) -> Pod:
    metadata = template.get("metadata", {})
    return Pod(name_of(one), template["spec"], metadata.get("labels", {}), metadata.get("annotations", {}))


def _group(one: Object) -> Iterator[Pod]:
    """Yield the first pod and one of the others; without its own template, the first is like the others."""
    name, group = one["metadata"]["name"], one["spec"]["leaderWorkerTemplate"]
    for index, template in enumerate(
        [group.get("leaderTemplate", group["workerTemplate"]), group["workerTemplate"]]
    ):
        pod = _pod(one, template)
        labels = {f"{LWS}/name": name, f"{LWS}/worker-index": str(index), f"{LWS}/group-index": "0"}
        variables = {
            "LWS_LEADER_ADDRESS": f"{name}-0.{name}.default",
            "LWS_GROUP_SIZE": str(group["size"]),
            "LWS_WORKER_INDEX": str(index),
        }
        yield Pod(f"{pod.source}[{index}]", pod.spec, pod.labels | labels, pod.annotations, variables)


def _served(runtime: Object, services: list[Object]) -> Iterator[Pod]:
    """Yield the runtime on its own, and with each service that names it."""
    spec = runtime["spec"]
    annotations = spec.get("annotations", {})
    yield Pod(name_of(runtime), spec, spec.get("labels", {}), annotations, has_account=False)
    for service in services:
        predictor = service["spec"]["predictor"]
        if predictor["model"].get("runtime") == runtime["metadata"]["name"]:
            merged = copy.deepcopy(spec) | {k: v for k, v in predictor.items() if k != "model"}
            _merge(merged["containers"][0], predictor["model"])
            yield Pod(name_of(service), merged, spec.get("labels", {}), annotations, has_account=False)


def _merge(container: Container, model: dict[str, Any]) -> None:
    """Merge as a strategic merge does: variables by name, everything else as a whole."""
    env = {one["name"]: one for one in [*container.get("env", []), *model.get("env", [])]}
    taken = ("env", "modelFormat", "runtime", "storageUri")
    container.update({key: value for key, value in model.items() if key not in taken})
    container["env"] = list(env.values())
