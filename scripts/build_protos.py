"""Generates typed protobuf and gRPC stubs of protos/ in tgis/pb/, and typed messages in
client/tgis_client/pb/. It runs in every build of either distribution as a hatchling hook, and as a script for
both."""

import sys
from importlib.metadata import distribution
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("generation", "orca", "shard")
CLIENT_NAMES = ("generation", "client")
HEADER = '"""Generated from protos/ by scripts/build_protos.py."""\n'
# A program may have other stubs of the package fmaas, and protobuf's default pool takes each message once.
CLIENT_MODULE = f"""{HEADER}
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

POOL = DescriptorPool()
DESCRIPTOR = POOL.AddSerializedFile(%r)
globals().update((name, GetMessageClass(each)) for name, each in DESCRIPTOR.message_types_by_name.items())
"""


def generate(root: Path) -> None:
    """Generate the stubs of the distribution in `root`."""
    if (root / "tgis_client").is_dir():
        generate_client(root)
    else:
        generate_service(root)


def generate_service(root: Path) -> None:
    """Generate the service's stubs. This needs grpcio-tools and mypy-protobuf in the running interpreter."""
    out = root / "tgis" / "pb"
    out.mkdir(exist_ok=True)
    _update(out / "__init__.py", HEADER.encode())
    with TemporaryDirectory() as made:
        # A virtual path: the folder protos/ becomes the package tgis.pb, so generated imports are absolute.
        _run_protoc(
            f"-Itgis/pb={root / 'protos'}",
            f"-I{files('grpc_tools') / '_proto'}",  # the messages that protobuf itself has
            f"--python_out={made}",
            f"--pyi_out={made}",
            f"--grpc_python_out={made}",
            f"--plugin=protoc-gen-mypy_grpc={_typing_plugin()}",
            f"--mypy_grpc_out={made}",
            *(f"tgis/pb/{name}.proto" for name in NAMES),
        )
        for file in (Path(made) / "tgis" / "pb").iterdir():
            _update(out / file.name, file.read_bytes())


def generate_client(root: Path) -> None:
    """Generate the client's messages, in a descriptor pool of their own. This needs grpcio-tools."""
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    out = root / "tgis_client" / "pb"
    out.mkdir(exist_ok=True)
    _update(out / "__init__.py", HEADER.encode())
    with TemporaryDirectory() as made:
        for name in CLIENT_NAMES:
            image, stub = Path(made) / f"{name}.binpb", f"tgis_client/pb/{name}_pb2.pyi"
            _run_protoc(
                f"-Itgis_client/pb={root / 'protos'}",
                f"--descriptor_set_out={image}",
                f"--pyi_out={made}",
                f"tgis_client/pb/{name}.proto",
            )
            [file] = FileDescriptorSet.FromString(image.read_bytes()).file
            _update(out / f"{name}_pb2.py", (CLIENT_MODULE % file.SerializeToString()).encode())
            _update(out / f"{name}_pb2.pyi", (Path(made) / stub).read_bytes())


def _run_protoc(*arguments: str) -> None:
    from grpc_tools import protoc

    if protoc.main(["protoc", *arguments]) != 0:
        raise SystemExit("protoc failed")


def _update(file: Path, content: bytes) -> None:
    """Write a file only if its content changes: other processes may read it during the build."""
    if not file.exists() or file.read_bytes() != content:
        file.write_bytes(content)


def _typing_plugin() -> Path:
    """Return the program's path: in a directory that pip filled with `--target`, which moves programs from
    their recorded paths; in a virtual environment; or in pip's isolated build environment."""
    name, package = "protoc-gen-mypy_grpc", distribution("mypy-protobuf")
    moved = Path(str(package.locate_file(f"bin/{name}")))
    recorded = (Path(str(file.locate())).resolve() for file in package.files or [] if file.stem == name)
    for path in (moved, *recorded):
        if path.exists():
            return path
    raise SystemExit(f"mypy-protobuf has no {name}")


if __name__ == "__main__":
    generate(ROOT)
    generate(ROOT / "client")
    sys.exit()

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a script, without hatchling
    pass
else:

    class StubsHook(BuildHookInterface):  # type: ignore[type-arg]
        """Build hook; hatchling locates this class by its base class."""

        def initialize(self, version: str, build_data: dict[str, object]) -> None:
            generate(Path(self.root))
