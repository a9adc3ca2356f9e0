"""Converts a pod's volumes to its container's mounts: memory for empty directories, directories of this
machine for volumes of the cluster."""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from integration_tests.deployment.cluster.container import Mount
from integration_tests.deployment.cluster.manifest import Object, Pod, quantity

VERSION = "..2026_01_31_12_00_00.1"  # kubelet's prefix of the directories that it swaps


@dataclass(frozen=True)
class Cluster:
    """Objects and files outside the manifest."""

    model: Path
    """Checkpoint, which every claim contains where the service expects it."""
    secret: Callable[[str], Mapping[str, str]]
    """Contents of secrets that were not rendered, by name."""


def mounts_of(pod: Pod, cluster: Cluster, model_name: str, scratch: Path) -> list[Mount]:
    volumes = {one["name"]: one for one in pod.spec.get("volumes", [])}
    mounts = [
        _mount(pod, cluster, volumes[one["name"]], one, model_name, scratch)
        for one in pod.container.get("volumeMounts", [])
    ]
    has_model = any(mount.source and _is_below(model_name, mount.target) for mount in mounts)
    if not has_model:  # the base has no volume: an operator adds the one of a model
        mounts.append(Mount(model_name, str(cluster.model), is_read_only=True))
    log = scratch / "termination-log"
    log.touch()
    log.chmod(0o666)
    return [*mounts, Mount(pod.container.get("terminationMessagePath", "/dev/termination-log"), str(log))]


def _mount(
    pod: Pod, cluster: Cluster, volume: Object, mount: Object, model_name: str, scratch: Path
) -> Mount:
    target, is_read_only = mount["mountPath"], bool(mount.get("readOnly"))
    if "emptyDir" in volume:
        said = volume["emptyDir"] or {}
        return Mount(target, size=quantity(said.get("sizeLimit", "1Gi")))
    source = scratch / "volumes" / volume["name"]
    inside = source / mount.get("subPath", "")
    if "persistentVolumeClaim" in volume or "hostPath" in volume:
        is_read_only |= bool(volume.get("persistentVolumeClaim", {}).get("readOnly"))
        if _is_below(model_name, target):
            shutil.copytree(cluster.model, inside / os.path.relpath(model_name, target), dirs_exist_ok=True)
        inside.mkdir(parents=True, exist_ok=True)
        return Mount(target, str(inside), is_read_only)
    _write(source, _data(pod, cluster, volume), _mode_of(volume), pod.groups)
    return Mount(target, str(inside), is_read_only=True)


def _is_below(path: str, directory: str) -> bool:
    return Path(path).is_relative_to(directory)


def _data(pod: Pod, cluster: Cluster, source: Object) -> dict[str, str]:
    """Return the files of a volume that consists of objects."""
    if projected := source.get("projected"):
        parts = [_data(pod, cluster, one) for one in projected["sources"]]
        return {name: text for part in parts for name, text in part.items()}
    kind = "ConfigMap" if "configMap" in source else "Secret"
    said = source.get("configMap") or source["secret"]
    name = said.get("secretName") or said["name"]
    try:
        data = pod.data_of(kind, name)
    except LookupError:
        data = dict(cluster.secret(name))
    items = said.get("items") or [{"key": key, "path": key} for key in data]
    return {item["path"]: data[item["key"]] for item in items}


def _mode_of(volume: Object) -> int:
    [said] = [volume[kind] for kind in ("secret", "configMap", "projected") if kind in volume]
    mode: int = said.get("defaultMode", 0o644)
    return mode


def _write(directory: Path, files: Mapping[str, str], mode: int, groups: Sequence[int]) -> None:
    """Write the files as kubelet does: links to a directory that can be swapped, owned by root or the pod's
    group."""
    (directory / VERSION).mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / VERSION / name).write_text(text)
        (directory / VERSION / name).chmod(mode | 0o440 if groups else mode)
        os.chown(directory / VERSION / name, 0, groups[0] if groups else 0)
        if not (directory / name).is_symlink():
            (directory / name).symlink_to(f"..data/{name}")
    if not (directory / "..data").is_symlink():
        (directory / "..data").symlink_to(VERSION)
