"""Errors in what stands in front of several replicas."""

from typing import Any

from integration_tests.deployment.manifests import gateway_rules as rules
from integration_tests.deployment.manifests.broken.case import BASE, SERVER, Broken, change, env
from integration_tests.deployment.manifests.rendering import Object

PLACE = "overlays/inference-pool"
ACCESS = (f"{PLACE}/picker.yaml", f"{PLACE}/picker-access.yaml")
GATEWAY = (*BASE, "gateway/common/gateway.yaml")
POOL = (*BASE, *ACCESS, f"{PLACE}/inferencepool.yaml", f"{PLACE}/httproute.yaml")


def serves_a_pool(objects: list[Object]) -> None:
    """The changes of the overlay to the deployment."""
    change(objects, "Deployment", f"{SERVER}.env.0", env("HTTP_API", "openai"))
    change(objects, "Deployment", f"{SERVER}.env.1", env("METRICS_ALIAS", "vllm"))


def discovers(objects: list[Object]) -> None:
    """The changes of gateway/common and gateway/discovery, with the gateway first."""
    _serves_the_gateway(objects)
    words = ["--service-discovery", "--service-discovery-namespace=a", "--service-discovery-port=8033"]
    change(objects, "Deployment", f"{SERVER}.args", [*words, "--selector=app=inference-server"])


def lists(objects: list[Object]) -> None:
    """The changes of gateway/common and gateway/mutual-tls, with the gateway first."""
    _serves_the_gateway(objects)
    change(objects, "Deployment", f"{SERVER}.args", ["--worker-urls", "grpc://a:1", "grpc://a:2"])
    change(objects, "StatefulSet", f"{SERVER}.env.1", env("TLS_CERT_PATH", "/tls/tls.crt"))
    change(objects, "StatefulSet", f"{SERVER}.env.2", env("TLS_KEY_PATH", "/tls/tls.key"))
    change(objects, "StatefulSet", f"{SERVER}.env.3", env("TLS_CLIENT_CA_CERT_PATH", "/tls/ca.crt"))
    domain = "inference-server.b.svc.cluster.local"
    hosts = [f"bind a:{index + 1}\n server r inference-server-{index}.{domain}:8033" for index in range(2)]
    objects.append(
        {"kind": "ConfigMap", "metadata": {"name": "a"}, "data": {"haproxy.cfg": "\n".join(hosts)}}
    )


def _serves_the_gateway(objects: list[Object]) -> None:
    change(objects, "Deployment", f"{SERVER}.env.0", env("GRPC_API", "vllm-engine"))
    objects[0]["kind"] = "StatefulSet"
    objects[0]["metadata"]["namespace"] = "b"
    objects[0]["spec"] |= {"serviceName": "inference-server", "replicas": 2}


def access(kind: str, path: str, value: Any, says: str) -> Broken:
    return Broken(rules.tokens_have_few_rights, ACCESS, kind, path, value, says)


def pool(kind: str, path: str, value: Any, says: str) -> Broken:
    return Broken(rules.pools_lead_to_servers, POOL, kind, path, value, says, serves_a_pool)


def discovery(kind: str, path: str, value: Any, says: str) -> Broken:
    return Broken(rules.gateways_find_replicas, GATEWAY, kind, path, value, says, discovers)


def listed(kind: str, path: str, value: Any, says: str) -> Broken:
    return Broken(rules.gateways_find_replicas, GATEWAY, kind, path, value, says, lists)


ENCRYPTED = [
    env("GRPC_API", "vllm-engine"),
    env("TLS_CERT_PATH", "/tls/tls.crt"),
    env("TLS_KEY_PATH", "/tls/tls.key"),
]
CASES = [
    access("Role", "rules.0.verbs", ["get", "delete"], "allows delete"),
    access("Role", "rules.1.resources", ["*"], "allows *"),
    access("RoleBinding", "roleRef.name", "other", "no role other"),
    access("RoleBinding", "subjects.0.name", "other", "has a token without a role"),
    access("Deployment", "spec.template.spec.volumes", [], "has a role without a token"),
    pool("InferencePool", "spec.targetPorts.0.number", 8000, "leads to [8000]"),
    pool("InferencePool", "spec.endpointPickerRef.name", "other", "no picker other"),
    pool("InferencePool", "spec.endpointPickerRef.port.number", 9003, "has no port 9003"),
    pool("Deployment", f"{SERVER}.env.0", env("HTTP_API", "tgi"), "OpenAI's API is not at 3000"),
    pool("Deployment", f"{SERVER}.env.2", env("HTTP_API_PORT", "8000"), "OpenAI's API is not at 3000"),
    pool("Deployment", f"{SERVER}.env.1", env("DTYPE_STR", "float16"), "knows no series"),
    Broken(
        rules.routes_lead_to_pools,
        POOL,
        "HTTPRoute",
        "spec.rules.0.backendRefs.0.name",
        "other",
        "no pool other",
    ),
    Broken(
        rules.routes_lead_to_pools,
        POOL,
        "HTTPRoute",
        "spec.rules.0.backendRefs.0.group",
        "inference.networking.x-k8s.io",
        "no pool inference-server",
    ),
    discovery("StatefulSet", f"{SERVER}.env.0", env("GRPC_API", "fmaas"), "serve its API"),
    discovery("Deployment", f"{SERVER}.args.3", "--selector=app=other", "does not select"),
    discovery("Deployment", f"{SERVER}.args.2", "--service-discovery-port=80", "gRPC is at 8033"),
    discovery("Deployment", f"{SERVER}.args.1", "--log-json", "in all namespaces"),
    discovery("StatefulSet", f"{SERVER}.env", ENCRYPTED, "without it"),
    listed("Deployment", f"{SERVER}.args.2", "grpc://a:3", "does not lead to 2 replicas"),
    listed("StatefulSet", "spec.replicas", 3, "does not lead to 3 replicas"),
    listed("StatefulSet", f"{SERVER}.env.3", env("DTYPE_STR", "float16"), "do not verify it"),
]
