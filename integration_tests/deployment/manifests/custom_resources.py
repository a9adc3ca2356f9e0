"""Checks custom resources against their definitions: schemas made from the definitions of KServe,
LeaderWorkerSet and the inference extension, stored outside this repository, and types from npm for other
operators."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

from integration_tests.deployment.manifests.rendering import ROOT, Object, name_of
from tests.support import npm_packages

# Stored beside the repository, because they are large and not ours.
SCHEMAS = ROOT.parent / "shared" / "schemas"
OF_SCHEMAS = ("InferencePool", "InferenceService", "LeaderWorkerSet", "ServingRuntime")
OF_TYPES = {
    "Certificate": "cert-manager/cert-manager.io/v1",
    "HTTPRoute": "gateway-api/gateway.networking.k8s.io/v1",
    "Issuer": "cert-manager/cert-manager.io/v1",
    "PodMonitor": "prometheus-operator/monitoring.coreos.com/v1",
    "PrometheusRule": "prometheus-operator/monitoring.coreos.com/v1",
    "ScaledObject": "keda/keda.sh/v1alpha1",
}
OPTIONS = ("--noEmit", "--strict", "--skipLibCheck", "--module", "commonjs", "--target", "es2020")


def refused_by_schemas(objects: list[Object], check_jsonschema: str, work: Path) -> Iterator[str]:
    """Return the output of check-jsonschema; the schemas refuse unknown fields."""
    for kind in OF_SCHEMAS:
        files = []
        for index, one in enumerate(one for one in objects if one["kind"] == kind):
            files.append(work / f"{kind}-{index}.json")
            files[-1].write_text(json.dumps(one))
        if files:
            schema = SCHEMAS / f"{kind.lower()}.json"
            result = subprocess.run(
                [check_jsonschema, "--schemafile", schema, *files],
                capture_output=True,
                text=True,
                check=False,
            )
            if result.returncode:
                yield result.stdout + result.stderr


def refused_by_types(objects: list[Object], work: Path) -> str:
    """Return the errors of TypeScript's compiler for the objects as literals of their types, which refuse
    unknown fields; empty if there are none. This needs npm."""
    packages = npm_packages.install(Path(__file__).parent / "custom_types", "custom-types")
    (work / "node_modules").symlink_to(packages / "node_modules")
    lines = [
        f'import type {{ I{kind} }} from "@kubernetes-models/{place}/{kind}";'
        for kind, place in OF_TYPES.items()
    ]
    for index, one in enumerate(one for one in objects if one["kind"] in OF_TYPES):
        lines.append(f"export const o{index}: I{one['kind']} = {json.dumps(one)}; // {name_of(one)}")
    (work / "objects.ts").write_text("\n".join(lines))
    compiler = packages / "node_modules" / "typescript" / "bin" / "tsc"
    command = ["node", str(compiler), *OPTIONS, "objects.ts"]
    result = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
    return result.stdout + result.stderr
