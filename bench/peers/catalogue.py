"""Lists the measured peers: environment, program and precision of each."""

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench import worker
from bench.peers import environments
from bench.peers.environments import Environment, list_cores
from bench.variants import BFLOAT16, INT8, OURS, W4A8

VLLM_SERVER = "vllm-server"
OURS_HTTP = f"{OURS} over HTTP"


@dataclass(frozen=True)
class Peer:
    name: str
    title: str
    """Name, with the precision of weights, arithmetic and cache."""
    module: str
    arguments: Callable[[Path, Path], list[str]]
    """Function from the checkpoint and the directory of peers to the arguments; it converts the checkpoint if
    needed."""
    environment: Environment | None = None
    """Environment; None: the service's own."""
    variables: Callable[[], dict[str, str]] = dict
    """Additional variables of the process's environment."""
    rival: str = OURS
    """Contender of this service to compare with, because both compute with the same precision."""
    is_server: bool = False
    """True if the program replies with the address of a server with OpenAI's API."""


def _openvino(weights: str, arithmetic: str, cache: str) -> Callable[[Path, Path], list[str]]:
    def arguments(model: Path, root: Path) -> list[str]:
        directory = _export(model, root, weights)
        return [str(directory), str(len(list_cores())), arithmetic, cache]

    return arguments


GROUPS = (128, 64, 32)


def _rounding(model: Path, weights: str) -> tuple[str, ...]:
    """Return the options of the conversion. Every layer that may be rounded to 4 bits is, symmetrically, in
    the largest groups that divide its size; the converter refuses others."""
    if weights != "int4":
        return ()
    config = json.loads((model / "config.json").read_text())
    sizes = (config["hidden_size"], config["intermediate_size"])
    group = next(group for group in GROUPS if not any(size % group for size in sizes))
    return ("--sym", "--group-size", str(group), "--ratio", "1.0")


def _export(model: Path, root: Path, weights: str) -> Path:
    """Return the checkpoint in OpenVINO's format, complete or absent. Raises BenchError."""
    directory = root / "models" / f"{model.name}-openvino-{weights}"
    if directory.is_dir():
        return directory
    directory.parent.mkdir(exist_ok=True)
    tool = environments.ensure(environments.OPENVINO, root).with_name("optimum-cli")
    fresh = Path(tempfile.mkdtemp(dir=directory.parent))
    try:
        task = ("--task", "text-generation-with-past", "--weight-format", weights)
        task += _rounding(model, weights)
        command = [str(tool), "export", "openvino", "-m", str(model.absolute()), *task, str(fresh)]
        environments.run(command, root / "openvino.log")
        fresh.rename(directory)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return directory


def _llama_cpp(kind: str) -> Callable[[Path, Path], list[str]]:
    def arguments(model: Path, root: Path) -> list[str]:
        return [str(_write_gguf(model, root, kind)), str(len(list_cores()))]

    return arguments


def _write_gguf(model: Path, root: Path, kind: str) -> Path:
    """Write the checkpoint in llama.cpp's format, complete or not at all, and return its path. Raises
    BenchError."""
    file = root / "models" / f"{model.name}-{kind}.gguf"
    if file.is_file():
        return file
    file.parent.mkdir(exist_ok=True)
    python = environments.ensure(environments.LLAMA_CPP, root).absolute()
    with tempfile.TemporaryDirectory(dir=file.parent) as directory:
        fresh = Path(directory) / file.name
        command = [str(python), "-m", "bench.peers.gguf", str(model.absolute()), kind, str(fresh.absolute())]
        environments.run(command, root / "llama-cpp.log", {"PYTHONPATH": str(worker.ROOT)})
        fresh.rename(file)
    return file


def _vllm_variables() -> dict[str, str]:
    """Return the peer's engine in the measured process, with a thread on every core."""
    return {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | _vllm_server_variables()


def _vllm_server_variables() -> dict[str, str]:
    return {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, list_cores())),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
    }


PEERS = (
    Peer(
        "openvino",
        "OpenVINO GenAI: float16 weights, float32 arithmetic, float16 cache",
        "bench.peers.openvino",
        _openvino("fp16", "f32", "f16"),
        environments.OPENVINO,
    ),
    Peer(
        "openvino-default",
        "OpenVINO GenAI: float16 weights, arithmetic and cache of its choice",
        "bench.peers.openvino",
        _openvino("fp16", "default", "default"),
        environments.OPENVINO,
        rival=BFLOAT16,
    ),
    Peer(
        "openvino-int8",
        "OpenVINO GenAI: int8 weights, arithmetic and cache of its choice",
        "bench.peers.openvino",
        _openvino("int8", "default", "default"),
        environments.OPENVINO,
        rival=INT8,
    ),
    Peer(
        "openvino-int4",
        "OpenVINO GenAI: int4 weights, arithmetic and cache of its choice",
        "bench.peers.openvino",
        _openvino("int4", "default", "default"),
        environments.OPENVINO,
        rival=W4A8,
    ),
    Peer(
        "llama-cpp",
        "llama.cpp: q4_0 weights, float16 cache",
        "bench.peers.llama_cpp",
        _llama_cpp("q4_0"),
        environments.LLAMA_CPP,
        rival=W4A8,
    ),
    Peer(
        "llama-cpp-q8_0",
        "llama.cpp: q8_0 weights, float16 cache",
        "bench.peers.llama_cpp",
        _llama_cpp("q8_0"),
        environments.LLAMA_CPP,
        rival=INT8,
    ),
    Peer(
        "llama-cpp-f16",
        "llama.cpp: float16 weights and cache",
        "bench.peers.llama_cpp",
        _llama_cpp("f16"),
        environments.LLAMA_CPP,
    ),
    Peer(
        "vllm",
        "vLLM: float32, eager",
        "bench.peers.vllm",
        lambda model, _: [str(model), "float32", "eager"],
        environments.VLLM,
        _vllm_variables,
    ),
    Peer(
        VLLM_SERVER,
        "vLLM's own server, over HTTP: float32, eager",
        "bench.peers.vllm_server",
        lambda model, _: [str(model), "float32"],
        environments.VLLM,
        _vllm_server_variables,
        OURS_HTTP,
        is_server=True,
    ),
    Peer(
        "transformers",
        "transformers `generate`: float32",
        "bench.peers.transformers",
        lambda model, _: [str(model), "float32"],
    ),
)

# Each with the arithmetic, the types and the compilation of its choice.
DEFAULT_PEERS = (
    Peer(
        "openvino defaults",
        "OpenVINO GenAI",
        "bench.peers.openvino",
        _openvino("fp16", "default", "default"),
        environments.OPENVINO,
    ),
    Peer(
        "vllm defaults",
        "vLLM",
        "bench.peers.vllm",
        lambda model, _: [str(model), "auto", "compiled"],
        environments.VLLM,
        _vllm_variables,
    ),
    Peer(
        "llama-cpp defaults",
        "llama.cpp, float16 file",
        "bench.peers.llama_cpp",
        _llama_cpp("f16"),
        environments.LLAMA_CPP,
    ),
    Peer(
        "transformers defaults",
        "transformers `generate`",
        "bench.peers.transformers",
        lambda model, _: [str(model), "auto"],
    ),
)
