"""Errors in the permissions and resources of pods."""

from integration_tests.deployment.manifests import pod_rules as rules
from integration_tests.deployment.manifests.broken.case import (
    GONE,
    GROUP_POD,
    SERVER,
    Broken,
    cannot_write,
    deployment,
    env,
    group,
    has_two_gpus,
)

CASES = [
    deployment(rules.has_no_rights, "spec.template.spec.hostNetwork", True, "hostNetwork"),
    deployment(
        rules.has_no_rights, "spec.template.spec.volumes", [{"name": "a", "hostPath": {}}], "node's own files"
    ),
    deployment(rules.has_no_rights, "spec.template.spec.automountServiceAccountToken", True, "gets a token"),
    deployment(rules.has_no_rights, "spec.template.spec.securityContext.runAsNonRoot", GONE, "run as root"),
    deployment(rules.has_no_rights, f"{SERVER}.securityContext.runAsUser", 0, "run as root"),
    deployment(
        rules.has_no_rights, f"{SERVER}.securityContext.allowPrivilegeEscalation", GONE, "gain rights"
    ),
    deployment(
        rules.has_no_rights,
        f"{SERVER}.securityContext.capabilities.add",
        ["NET_ADMIN"],
        "has capabilities",
    ),
    deployment(
        rules.has_no_rights, "spec.template.spec.securityContext.seccompProfile", GONE, "all of the kernel"
    ),
    deployment(rules.resources_are_set, f"{SERVER}.resources.limits", GONE, "no memory in limits"),
    group(rules.volumes_exist, f"{GROUP_POD}.volumes.0", GONE, "no volume link"),
    group(rules.volumes_exist, f"{GROUP_POD}.volumes.0.secret.secretName", "lnk", "no secret lnk"),
    Broken(
        rules.volumes_exist,
        ("storage/download.yaml",),
        "Job",
        "spec.template.spec.volumes.0.persistentVolumeClaim.claimName",
        "model",
        "no claim model",
    ),
    deployment(
        rules.volumes_exist, "spec.template.spec.volumes", [{"name": "a", "emptyDir": {}}], "nobody mounts a"
    ),
    deployment(
        rules.accounts_exist, "spec.template.spec.serviceAccountName", "someone", "no account someone"
    ),
    group(
        rules.files_are_mounted,
        f"{GROUP_POD}.containers.0.env.6",
        env("LINK_KEY_PATH", "/link/key.pem"),
        "is in no secret",
    ),
    group(
        rules.files_are_mounted,
        f"{GROUP_POD}.containers.0.volumeMounts.0.subPath",
        "tls.crt",
        "by subPath",
    ),
    deployment(
        rules.can_write_where_it_must,
        f"{SERVER}.volumeMounts",
        [],
        "/tmp cannot be written",
        cannot_write,
    ),
    deployment(
        rules.writes_nowhere_else,
        f"{SERVER}.securityContext.readOnlyRootFilesystem",
        GONE,
        "the root can be written",
        cannot_write,
    ),
    deployment(
        rules.shards_share_memory,
        f"{SERVER}.env.0",
        env("NUM_SHARD", "2"),
        "without room in /dev/shm",
        has_two_gpus,
    ),
]
