"""Copies the package, changes files of the copy, and runs programs with it."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from google.protobuf import descriptor_pb2

from tests.support.wire_shapes import ROOT, buf

Edits = Mapping[str, Mapping[str, str]]
"""By file: texts that occur once, with their replacements."""


def copy_patched(directory: Path, edits: Edits) -> None:
    """Copy the package, the protos and the edited files to `directory`, with the edits, and generate
    shard_pb2."""
    for name in ("tgis", "protos"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, directory / name, ignore=ignored)
    for name, replacements in edits.items():
        text = (ROOT / name).read_text()
        for old, new in replacements.items():
            assert text.count(old) == 1, f"{name}: {old}"
            text = text.replace(old, new)
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    _generate(directory)


def run_patched(directory: Path, *arguments: str) -> str:
    """Run Python with the copied package and this repository's tests, and return its standard output."""
    path = os.pathsep.join(map(str, (directory, ROOT, ROOT / "client")))
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": path},
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def _generate(directory: Path) -> None:
    """Replace the descriptor in the copy's shard_pb2 by that of its shard.proto, as compiled by buf."""
    image = directory / "image.binpb"
    arguments = ("build", str(directory / "protos"), "--as-file-descriptor-set", "-o", str(image))
    result = buf(*arguments, home=directory)
    assert result.returncode == 0, result.stderr
    files = descriptor_pb2.FileDescriptorSet.FromString(image.read_bytes()).file
    [file] = [file for file in files if file.name.endswith("shard.proto")]
    file.ClearField("source_code_info")
    file.name = "tgis/pb/shard.proto"
    module = directory / "tgis" / "pb" / "shard_pb2.py"
    call = f"AddSerializedFile({file.SerializeToString()!r})"
    code, count = re.subn(r"AddSerializedFile\(.*\)", lambda _: call, module.read_text())
    assert count == 1
    module.write_text(code)
