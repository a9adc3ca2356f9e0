"""Rules for the permissions and resources of pods: no privileges, bounded resources, existing volumes and
secrets."""

from collections.abc import Iterator
from typing import Any

from integration_tests.deployment.manifests.launches import config_of, variables
from integration_tests.deployment.manifests.pods import Container, Pod, pods_of
from integration_tests.deployment.manifests.rendering import Object

# Created manually, or by objects that deployment/README.md names.
OUTSIDE = {"PersistentVolumeClaim/models-pvc", "Secret/hub-token"}
OF_CERTIFICATES = {"tls.crt", "tls.key", "ca.crt"}


def has_no_rights(objects: list[Object]) -> Iterator[str]:
    for pod in pods_of(objects):
        of_pod = pod.spec.get("securityContext", {})
        for name in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"):
            if pod.spec.get(name):
                yield f"{pod.source}: {name}"
        if any("hostPath" in volume for volume in pod.spec.get("volumes", [])):
            yield f"{pod.source}: a volume of the node's own files"
        if pod.has_account and pod.spec.get("automountServiceAccountToken") is not False:
            yield f"{pod.source}: gets a token of its account"
        for container in pod.containers:
            yield from (
                f"{pod.source} {container['name']}: {problem}" for problem in _rights(of_pod, container)
            )


def _rights(of_pod: dict[str, Any], container: Container) -> Iterator[str]:
    context = of_pod | container.get("securityContext", {})
    if context.get("runAsNonRoot") is not True or context.get("runAsUser") == 0:
        yield "may run as root"
    if context.get("allowPrivilegeEscalation") is not False or context.get("privileged"):
        yield "may gain rights"
    if context.get("capabilities") != {"drop": ["ALL"]}:
        yield "has capabilities"
    if context.get("seccompProfile") != {"type": "RuntimeDefault"}:
        yield "may call all of the kernel"


def resources_are_set(objects: list[Object]) -> Iterator[str]:
    for pod in pods_of(objects):
        for container in pod.containers:
            resources = container.get("resources", {})
            for kind in ("requests", "limits"):
                for name in ("cpu", "memory"):
                    if name not in resources.get(kind, {}):
                        yield f"{pod.source} {container['name']}: no {name} in {kind}"


def volumes_exist(objects: list[Object]) -> Iterator[str]:
    """Every mount has a volume, every volume a mount and a source."""
    for pod in pods_of(objects):
        volumes = {one["name"]: one for one in pod.spec.get("volumes", [])}
        mounted = {mount["name"] for one in pod.containers for mount in one.get("volumeMounts", [])}
        yield from (f"{pod.source}: no volume {name}" for name in sorted(mounted - volumes.keys()))
        yield from (f"{pod.source}: nobody mounts {name}" for name in sorted(volumes.keys() - mounted))
        for name, volume in volumes.items():
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            if claim and f"PersistentVolumeClaim/{claim}" not in _made(objects):
                yield f"{pod.source}: volume {name} has no claim {claim}"
            secret = volume.get("secret", {}).get("secretName")
            if secret and f"Secret/{secret}" not in _made(objects):
                yield f"{pod.source}: volume {name} has no secret {secret}"


def _made(objects: list[Object]) -> set[str]:
    secrets = {f"Secret/{one['spec']['secretName']}" for one in objects if one["kind"] == "Certificate"}
    return OUTSIDE | secrets | {f"{one['kind']}/{one['metadata']['name']}" for one in objects}


def accounts_exist(objects: list[Object]) -> Iterator[str]:
    for pod in pods_of(objects):
        account = pod.spec.get("serviceAccountName")
        if account and f"ServiceAccount/{account}" not in _made(objects):
            yield f"{pod.source}: no account {account}"


def files_are_mounted(objects: list[Object]) -> Iterator[str]:
    """Paths of certificates are keys of a mounted secret. A file that is mounted on its own would never be
    updated."""
    for pod in pods_of(objects):
        secrets = {one["name"] for one in pod.spec.get("volumes", []) if "secret" in one}
        for container in pod.containers:
            where, mounts = f"{pod.source} {container['name']}:", container.get("volumeMounts", [])
            places = {one["mountPath"] for one in mounts if one["name"] in secrets}
            if any("subPath" in one for one in mounts if one["name"] in secrets):
                yield f"{where} a secret is mounted by subPath"
            for name, path in variables(container).items():
                if name.startswith(("TLS_", "LINK_")) and name.endswith("_PATH"):
                    directory, _, file = path.rpartition("/")
                    if directory not in places or file not in OF_CERTIFICATES:
                        yield f"{where} {name}={path} is in no secret"


def can_write_where_it_must(objects: list[Object]) -> Iterator[str]:
    """If nothing else is writable, /tmp is."""
    for pod in pods_of(objects):
        for container in pod.containers:
            if container.get("securityContext", {}).get("readOnlyRootFilesystem"):
                places = {
                    one["mountPath"] for one in container.get("volumeMounts", []) if not one.get("readOnly")
                }
                if "/tmp" not in places:
                    yield f"{pod.source} {container['name']}: /tmp cannot be written"


def writes_nowhere_else(objects: list[Object]) -> Iterator[str]:
    """Only for deployments that are served unchanged."""
    for pod in pods_of(objects):
        for container in pod.servers:
            if not container.get("securityContext", {}).get("readOnlyRootFilesystem"):
                yield f"{pod.source} {container['name']}: the root can be written"


def shards_share_memory(objects: list[Object]) -> Iterator[str]:
    """Shards on several GPUs of a pod need more shared memory than a container's 64 MiB."""
    for pod in pods_of(objects):
        memory = {
            one["name"]
            for one in pod.spec.get("volumes", [])
            if one.get("emptyDir", {}).get("medium") == "Memory"
        }
        for container in pod.servers:
            mounts = {one["mountPath"]: one["name"] for one in container.get("volumeMounts", [])}
            is_many = config_of(pod, container).num_shard not in (None, 1) and _has_gpus(pod, container)
            if is_many and mounts.get("/dev/shm") not in memory:
                yield f"{pod.source} {container['name']}: several shards without room in /dev/shm"


def _has_gpus(pod: Pod, container: Container) -> bool:
    return "nvidia.com/gpu" in container.get("resources", {}).get("limits", {})
