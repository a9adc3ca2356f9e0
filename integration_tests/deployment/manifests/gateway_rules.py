"""Rules for what stands in front of several replicas: pools and routes of the Gateway API, and the rights of
programs that look for replicas."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from integration_tests.deployment.manifests.launches import config_of
from integration_tests.deployment.manifests.pods import Container, Pod, pods_of
from integration_tests.deployment.manifests.rendering import Object, name_of
from integration_tests.deployment.manifests.selection_rules import matches
from tgis.config.network import split_names
from tgis.config.processes import LauncherConfig

READING = {"get", "list", "watch"}
ENGINE_API = "vllm-engine"
PROXIED = re.compile(r"bind (\S+)\s+server \S+ (\S+):(\d+)")
"""Port of HAProxy, and the replica to which it leads."""


def tokens_have_few_rights(objects: list[Object]) -> Iterator[str]:
    """Only pods whose account has a role get a token, and roles allow to read some kinds of objects."""
    roles = {one["metadata"]["name"]: one for one in objects if one["kind"] == "Role"}
    bound: set[str] = set()
    for one in objects:
        if one["kind"] == "RoleBinding":
            bound |= {subject["name"] for subject in one["subjects"]}
            if one["roleRef"]["kind"] != "Role" or one["roleRef"]["name"] not in roles:
                yield f"{name_of(one)}: no role {one['roleRef']['name']}"
    for role in roles.values():
        for rule in role["rules"]:
            words = {*rule["verbs"]} - READING | {"*"} & {*rule["resources"], *rule["apiGroups"]}
            yield from (f"{name_of(role)}: allows {word}" for word in sorted(words))
    for pod in pods_of(objects):
        account, has_token = pod.spec.get("serviceAccountName", ""), _has_token(pod)
        if has_token and account not in bound:
            yield f"{pod.source}: has a token without a role"
        if not has_token and account in bound:
            yield f"{pod.source}: has a role without a token"


def _has_token(pod: Pod) -> bool:
    volumes = pod.spec.get("volumes", [])
    sources = (source for one in volumes for source in one.get("projected", {}).get("sources", []))
    return any("serviceAccountToken" in source for source in sources)


def pools_lead_to_servers(objects: list[Object]) -> Iterator[str]:
    """A pool's port serves OpenAI's API, and metrics under vLLM's names for its picker, which is a service
    among the objects."""
    for one in objects:
        if one["kind"] == "InferencePool":
            yield from (f"{name_of(one)}: {problem}" for problem in _problems_of_pool(one, objects))


def _problems_of_pool(pool: Object, objects: list[Object]) -> Iterator[str]:
    ports = [port["number"] for port in pool["spec"]["targetPorts"]]
    for pod in pods_of(objects):
        for container in pod.servers if matches(pool["spec"]["selector"], pod.labels) else ():
            config = config_of(pod, container)
            if ports != [config.port]:
                yield f"leads to {ports}, and metrics are at {config.port}"
            if "openai" not in split_names(config.http_api) or config.http_api_port is not None:
                yield f"OpenAI's API is not at {config.port}"
            if config.metrics_alias != "vllm":
                yield "the picker knows no series of the replicas"
    picker = pool["spec"]["endpointPickerRef"]
    services = {other["metadata"]["name"]: other for other in objects if other["kind"] == "Service"}
    if picker["name"] not in services:
        yield f"no picker {picker['name']}"
    elif picker["port"]["number"] not in [port["port"] for port in services[picker["name"]]["spec"]["ports"]]:
        yield f"the picker has no port {picker['port']['number']}"


def routes_lead_to_pools(objects: list[Object]) -> Iterator[str]:
    pools = {one["metadata"]["name"]: one for one in objects if one["kind"] == "InferencePool"}
    for one in objects:
        if one["kind"] == "HTTPRoute":
            for backend in (backend for rule in one["spec"]["rules"] for backend in rule["backendRefs"]):
                group = pools.get(backend["name"], {}).get("apiVersion", "").partition("/")[0]
                if backend["kind"] != "InferencePool" or backend["group"] != group:
                    yield f"{name_of(one)}: no pool {backend['name']}"


class Replicas(NamedTuple):
    """Replicas that a gateway may call."""

    pod: Pod
    config: LauncherConfig
    owner: Object
    """Object that creates them."""


def gateways_find_replicas(objects: list[Object]) -> Iterator[str]:
    """A gateway finds all replicas by discovery, or by a list of ports from which HAProxy leads to them with
    mutual TLS. The replicas serve its API."""
    for pod in pods_of(objects):
        for container in pod.containers:
            if container.get("command") == ["smg", "launch"]:
                problems = _problems_of_gateway(container, objects)
                yield from (f"{pod.source} {container['name']}: {problem}" for problem in problems)


def _problems_of_gateway(container: Container, objects: list[Object]) -> Iterator[str]:
    replicas = list(_replicas(objects))
    flags = dict(re.findall(r"--([a-z-]+)[ =]?((?:(?!--)\S+ ?)*)", " ".join(container["args"])))
    if any(ENGINE_API not in split_names(each.config.grpc_api) for each in replicas) or not replicas:
        yield "no replicas that serve its API"
    elif "service-discovery" in flags:
        yield from _problems_of_discovery(flags, replicas)
    else:
        yield from _problems_of_list(flags.get("worker-urls", "").split(), replicas, objects)


def _replicas(objects: list[Object]) -> Iterator[Replicas]:
    owners = {name_of(one): one for one in objects}
    for pod in pods_of(objects):
        for container in pod.servers:
            yield Replicas(pod, config_of(pod, container), owners[pod.source])


def _problems_of_discovery(flags: dict[str, str], replicas: list[Replicas]) -> Iterator[str]:
    name, _, value = flags["selector"].strip().partition("=")
    for each in replicas:
        if each.pod.labels.get(name) != value:
            yield f"does not select {each.pod.source}"
        if flags["service-discovery-port"].strip() != str(each.config.grpc_port):
            yield f"gRPC is at {each.config.grpc_port}"
        if each.config.tls_cert_path is not None:
            yield "calls replicas that have TLS without it"
    if not flags.get("service-discovery-namespace"):
        yield "looks for replicas in all namespaces"


def _problems_of_list(urls: list[str], replicas: list[Replicas], objects: list[Object]) -> Iterator[str]:
    texts = (text for one in objects if one["kind"] == "ConfigMap" for text in one["data"].values())
    proxied = {bind: (host, int(port)) for text in texts for bind, host, port in PROXIED.findall(text)}
    called = {proxied.get(url.removeprefix("grpc://"), (url, 0)) for url in urls}
    for each in replicas:
        spec, namespace = each.owner["spec"], each.owner["metadata"]["namespace"]
        domain = f"{spec.get('serviceName')}.{namespace}.svc.cluster.local"
        names = [f"{each.owner['metadata']['name']}-{index}.{domain}" for index in range(spec["replicas"])]
        if called != {(name, each.config.grpc_port) for name in names}:
            yield f"its list does not lead to {spec['replicas']} replicas"
        if each.config.tls_client_ca_cert_path is None:
            yield "the replicas do not verify it"
