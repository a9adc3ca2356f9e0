"""Rules for objects that select pods: services, policies, budgets, monitors and autoscalers select existing
pods and ports."""

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from integration_tests.deployment.manifests.launch_rules import ours
from integration_tests.deployment.manifests.launches import config_of
from integration_tests.deployment.manifests.pods import LWS, Pod, pods_of
from integration_tests.deployment.manifests.rendering import Object, name_of
from tgis.router.api.vllm.series import VllmSeries
from tgis.router.metrics.metrics import MetricLimits, Metrics

CALM_S = 300  # seconds before fewer replicas
METRICS = Metrics(MetricLimits(2048, 1024, 256), partial(VllmSeries, "model", 2048))
ALIASES = {one.name for one in METRICS.aliases.series} if METRICS.aliases else set()
SERIES = {one.name for one in METRICS.series} - ALIASES
DEMANDS = (
    {"tgi_queue_size", "tgi_requests_running"},
    {"vllm:num_requests_waiting", "vllm:num_requests_running"},
)  # waiting and running requests


def matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Return the labels of a selector; ours have no expressions."""
    assert set(selector) <= {"matchLabels"}, selector
    return selector.get("matchLabels", {}).items() <= labels.items()


def selectors_find_pods(objects: list[Object]) -> Iterator[str]:
    pods = pods_of(objects)
    for one in objects:
        selector = _selector(one)
        if selector is not None and not any(matches(selector, pod.labels) for pod in pods):
            yield f"{name_of(one)}: selects no pod"
        if selector == {}:
            yield f"{name_of(one)}: selects every pod"


def _selector(one: Object) -> dict[str, Any] | None:
    spec = one.get("spec", {})
    if one["kind"] == "Service":
        return {"matchLabels": spec.get("selector", {})}
    if one["kind"] in ("Deployment", "InferencePool", "PodDisruptionBudget", "PodMonitor", "StatefulSet"):
        return dict(spec["selector"])
    return dict(spec["podSelector"]) if one["kind"] == "NetworkPolicy" else None


def spread_is_of_its_own(objects: list[Object]) -> Iterator[str]:
    for pod in pods_of(objects):
        for one in pod.spec.get("topologySpreadConstraints", []):
            if not matches(one["labelSelector"], pod.labels):
                yield f"{pod.source}: is spread among pods that are not its own"


def services_lead_to_ports(objects: list[Object]) -> Iterator[str]:
    for one in objects:
        if one["kind"] == "Service":
            for port in one["spec"]["ports"]:
                for pod in _selected(one, objects):
                    if port["targetPort"] not in _ports(pod):
                        yield f"{name_of(one)}: {pod.source} has no port {port['targetPort']}"
            if one["spec"].get("clusterIP") != "None" and any(pod.servers for pod in _selected(one, objects)):
                yield f"{name_of(one)}: has an address, so that clients see one replica only"


def _selected(one: Object, objects: list[Object]) -> list[Pod]:
    selector = _selector(one)
    return [pod for pod in pods_of(objects) if selector is not None and matches(selector, pod.labels)]


def _ports(pod: Pod) -> set[str | int]:
    ports = [port for one in pod.containers for port in one.get("ports", [])]
    return {port["containerPort"] for port in ports} | {port["name"] for port in ports}


def monitors_lead_to_ports(objects: list[Object]) -> Iterator[str]:
    for one in objects:
        if one["kind"] == "PodMonitor":
            for endpoint in one["spec"]["podMetricsEndpoints"]:
                for pod in _selected(one, objects):
                    if endpoint["port"] not in _ports(pod) or endpoint["path"] != "/metrics":
                        yield f"{name_of(one)}: {pod.source} has no metrics at {endpoint['port']}"


def policies_fit_ports(objects: list[Object]) -> Iterator[str]:
    """A policy allows some clients, but not all, to all ports of its pods and no others, and limits the pods'
    own connections."""
    for one in objects:
        if one["kind"] == "NetworkPolicy":
            yield from (f"{name_of(one)}: {problem}" for problem in _problems_of_policy(one, objects))


def _problems_of_policy(policy: Object, objects: list[Object]) -> Iterator[str]:
    spec, pods = policy["spec"], _selected(policy, objects)
    if set(spec.get("policyTypes", [])) != {"Ingress", "Egress"}:
        yield "binds one direction only"
    declared = {port for pod in pods for port in _ports(pod) if isinstance(port, int)}
    let_in = {port["port"] for rule in spec.get("ingress", []) for port in rule.get("ports", [])}
    if declared != let_in:
        yield f"lets to ports {sorted(let_in)}, and the pods have {sorted(declared)}"
    for side, key in (("ingress", "from"), ("egress", "to")):
        for rule in spec.get(side, []):
            peers = rule.get(key, [])
            if not peers or any(not any(peer.values()) for peer in peers):
                yield f"{side} is open to everybody"
            if not rule.get("ports") and not all(_is_among(peer, pods) for peer in peers):
                yield f"{side} has every port for others than the pods themselves"


def _is_among(peer: dict[str, Any], pods: list[Pod]) -> bool:
    return set(peer) == {"podSelector"} and all(matches(peer["podSelector"], pod.labels) for pod in pods)


def traces_may_leave(objects: list[Object]) -> Iterator[str]:
    """A policy of a pod that sends traces allows them."""
    for policy in (one for one in objects if one["kind"] == "NetworkPolicy"):
        let_out = {
            port["port"] for rule in policy["spec"].get("egress", []) for port in rule.get("ports", [])
        }
        for pod in _selected(policy, objects):
            for container in pod.servers:
                port = (config_of(pod, container).otlp_endpoint or "").rpartition(":")[2].rstrip("/")
                if port.isdigit() and int(port) not in let_out:
                    yield f"{name_of(policy)}: traces to port {port} are held back"


def autoscalers_scale_on_demand(objects: list[Object]) -> Iterator[str]:
    """Scale up fast, scale down slowly, never by CPU or memory, never to zero, and on existing series;
    nothing else sets the number of replicas."""
    targets = {name_of(one): one for one in objects}
    servers = [(pod, container) for pod in pods_of(objects) for container in pod.servers]
    is_aliased = all(config_of(pod, container).metrics_alias for pod, container in servers)
    for one in objects:
        if one["kind"] in ("HorizontalPodAutoscaler", "ScaledObject"):
            spec = one["spec"]
            target = targets.get(f"{spec['scaleTargetRef']['kind']}/{spec['scaleTargetRef']['name']}")
            problems = [*_problems_of_scaling(one, SERIES | ALIASES if is_aliased else SERIES)]
            if target is None:
                problems.append("scales nothing")
            else:
                problems += _problems_of_target(one, target)
            yield from (f"{name_of(one)}: {problem}" for problem in problems)


def _problems_of_target(one: Object, target: Object) -> Iterator[str]:
    if "replicas" in target["spec"]:
        yield "is not alone in saying how many replicas there are"
    labels = dict(target["spec"]["selector"]["matchLabels"])
    if namespace := target["metadata"].get("namespace"):
        labels["namespace"] = namespace
    for trigger in one["spec"].get("triggers", []):
        query = trigger["metadata"].get("query", "")
        yield from (
            f'asks not only for {name}="{value}"'
            for name, value in labels.items()
            if query and f'{name}="{value}"' not in query
        )


def _problems_of_scaling(one: Object, series: set[str]) -> Iterator[str]:
    spec = one["spec"]
    if one["kind"] == "ScaledObject":
        behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        kinds = {trigger["type"] for trigger in spec["triggers"]} - {"prometheus"}
        names = re.findall(
            r"(?:tgi_|vllm:)\w+",
            " ".join(trigger["metadata"].get("query", "") for trigger in spec["triggers"]),
        )
        least = spec["minReplicaCount"]
    else:
        behavior, least = spec["behavior"], spec["minReplicas"]
        kinds = {metric["type"] for metric in spec["metrics"]} - {"Pods"}
        names = [metric["pods"]["metric"]["name"] for metric in spec["metrics"] if "pods" in metric]
    if kinds:
        yield f"scales on {', '.join(sorted(kinds))}"
    yield from (f"there is no series {name}" for name in names if name not in series)
    if not any(demand <= {*names} for demand in DEMANDS):
        yield "does not look at what waits and what runs"
    if least < 1:
        yield "scales to zero"
    if behavior["scaleUp"].get("stabilizationWindowSeconds") != 0:
        yield "waits before there are more replicas"
    if behavior["scaleDown"].get("stabilizationWindowSeconds", 0) < CALM_S:
        yield f"does not wait {CALM_S} s before there are fewer replicas"


def groups_recover(objects: list[Object]) -> Iterator[str]:
    """A lost worker is restarted alone; pods of a group resolve each other before they are ready, by a
    service that ours must not hide; clients reach only the first pod."""
    services = [one for one in objects if one["kind"] == "Service"]
    for one in objects:
        if one["kind"] == "LeaderWorkerSet":
            where, template = name_of(one), one["spec"]["leaderWorkerTemplate"]
            if template.get("restartPolicy") != "None":
                yield f"{where}: a lost worker takes its group with it"
            if one["spec"].get("startupPolicy", "LeaderCreated") != "LeaderCreated":
                yield f"{where}: workers wait for a leader that waits for them"
            if any(service["metadata"]["name"] == one["metadata"]["name"] for service in services):
                yield f"{where}: a service of its name hides that of the group"
            if any(service["spec"]["selector"].get(f"{LWS}/worker-index") != "0" for service in services):
                yield f"{where}: clients are sent to workers"


def names_are_certified(objects: list[Object]) -> Iterator[str]:
    """Certificates have the names of their services, or those that links expect."""
    certificates = {one["spec"]["secretName"]: one for one in objects if one["kind"] == "Certificate"}
    for pod, container, where in ours(objects):
        mounts = {one["mountPath"]: one["name"] for one in container.get("volumeMounts", [])}
        secrets = {
            one["name"]: one["secret"]["secretName"] for one in pod.spec.get("volumes", []) if "secret" in one
        }
        env = {one["name"]: one.get("value", "") for one in container.get("env", [])}
        for variable, names in (
            ("TLS_CERT_PATH", _names_of_services(pod, objects)),
            ("LINK_CERT_PATH", {env.get("LINK_SERVER_NAME", "")}),
        ):
            if variable in env:
                secret = secrets.get(mounts.get(env[variable].rpartition("/")[0], ""), "")
                has = {*certificates.get(secret, {}).get("spec", {}).get("dnsNames", [])}
                yield from (f"{where} no certificate for {name!r}" for name in sorted(names - has))


def _names_of_services(pod: Pod, objects: list[Object]) -> set[str]:
    names: set[str] = set()
    for one in objects:
        if one["kind"] == "Service" and matches({"matchLabels": one["spec"]["selector"]}, pod.labels):
            name, namespace = one["metadata"]["name"], one["metadata"].get("namespace")
            names |= {name} | ({f"{name}.{namespace}.svc"} if namespace else set())
    return names


def issuers_exist(objects: list[Object]) -> Iterator[str]:
    """Yield the names of certificates, and the secrets of issuers; a CA does not use a server's name."""
    issuers = {one["metadata"]["name"] for one in objects if one["kind"] == "Issuer"}
    secrets = {one["spec"]["secretName"] for one in objects if one["kind"] == "Certificate"}
    for one in objects:
        if one["kind"] == "Certificate" and one["spec"]["issuerRef"]["name"] not in issuers:
            yield f"{name_of(one)}: no issuer {one['spec']['issuerRef']['name']}"
        if one["kind"] == "Issuer" and one["spec"].get("ca", {}).get("secretName") not in {None, *secrets}:
            yield f"{name_of(one)}: no secret {one['spec']['ca']['secretName']}"
