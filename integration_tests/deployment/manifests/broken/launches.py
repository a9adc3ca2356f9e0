"""Errors in the commands of containers."""

from integration_tests.deployment.manifests import launch_rules as rules
from integration_tests.deployment.manifests.broken.case import (
    GONE,
    GROUP_POD,
    KSERVE,
    SERVER,
    Broken,
    deployment,
    env,
    group,
    has_fixed_image,
)

CASES = [
    deployment(rules.commands_exist, f"{SERVER}.command", ["tgis-launch"], "tgis-launch"),
    deployment(
        rules.commands_exist,
        f"{SERVER}.livenessProbe.exec",
        {"command": ["curl", "localhost:3000/live"]},
        "no command curl",
    ),
    deployment(rules.variables_exist, f"{SERVER}.env.0", env("MODEL", "/m"), "nothing reads MODEL"),
    deployment(rules.options_are_read, f"{SERVER}.args", ["--modell=/m"], "No such option"),
    deployment(rules.options_are_read, f"{SERVER}.env.0", env("DTYPE", "int4"), "int4"),
    deployment(rules.options_are_read, f"{SERVER}.env.0", env("DTYPE", "float32"), "different"),
    deployment(
        rules.options_are_read,
        f"{SERVER}.env.0",
        env("PT2_COMPILE", "true"),
        "PT2_COMPILE has no effect",
    ),
    deployment(
        rules.options_are_read,
        f"{SERVER}.env.6",
        env("SHUTDOWN_TIMEOUT", "106"),
        "is more than the 105 s",
    ),
    Broken(
        rules.options_are_read, ("storage/download.yaml",), "Job", f"{SERVER}.args.0", "fetch", "no command"
    ),
    group(
        rules.options_are_read,
        f"{GROUP_POD}.containers.0.env.5",
        env("LOG_LEVEL", "info"),
        "TCP needs --link-",
    ),
    deployment(rules.drains_fit, "spec.template.spec.terminationGracePeriodSeconds", 60, "not the pod's 60"),
    deployment(rules.drains_fit, f"{SERVER}.lifecycle", GONE, "not the 0 of preStop"),
    deployment(
        rules.drains_fit,
        f"{SERVER}.lifecycle.preStop.sleep.seconds",
        40,
        "do not fit into 120 s",
    ),
    Broken(
        rules.drains_fit,
        KSERVE,
        "InferenceService",
        "spec.predictor.terminationGracePeriodSeconds",
        GONE,
        "not the pod's 30",
    ),
    deployment(rules.probes_meet_ports, f"{SERVER}.startupProbe", GONE, "is missing"),
    deployment(
        rules.probes_meet_ports,
        f"{SERVER}.livenessProbe.httpGet.path",
        "/health",
        "asks for /health",
    ),
    deployment(
        rules.probes_meet_ports,
        f"{SERVER}.readinessProbe.httpGet.port",
        "grpc",
        "asks at grpc, which is not the port 3000",
    ),
    deployment(rules.probes_meet_ports, f"{SERVER}.env.0", env("PORT", "3001"), "not the port 3001"),
    Broken(
        rules.probes_meet_ports,
        KSERVE,
        "ServingRuntime",
        "spec.containers.0.livenessProbe",
        {"exec": {"command": ["health-probe"]}},
        "is not health-probe --live",
    ),
    deployment(
        rules.probes_meet_ports,
        f"{SERVER}.livenessProbe",
        {"tcpSocket": {"port": "http"}},
        "asks neither",
    ),
    deployment(
        rules.probes_meet_ports,
        f"{SERVER}.livenessProbe.httpGet.scheme",
        "HTTPS",
        "does not speak",
    ),
    deployment(rules.ports_are_served, f"{SERVER}.ports.1.containerPort", 8034, "listens on grpc 8034"),
    deployment(
        rules.ports_are_served,
        "spec.template.metadata.annotations",
        {"prometheus.io/port": "8080"},
        "prometheus.io/port is not 3000",
    ),
    deployment(rules.images_are_fixed, f"{SERVER}.image", "tgis-next:latest", "latest", has_fixed_image),
    deployment(rules.devices_are_counted, f"{SERVER}.env.0", env("TGIS_DEVICE", "cuda"), "on None GPUs"),
]
