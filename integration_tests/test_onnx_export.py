"""`convert-to-onnx` in a separate environment, and its result on ONNX Runtime against transformers.

optimum-onnx needs an older transformers than the service, so pip installs the exporter into its own
environment."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import transformers

from tests.support.shard.checkpoints import SMALL, write_model
from tests.support.shard.stepping import ALONE, Stepper, read_config
from tgis.shard.models.onnx_runtime import load as onnx_runtime

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[1]
# Versions that work together; docs/model-files.md lists them.
EXPORTER = ("optimum-onnx[onnxruntime]==0.1.0", "optimum==2.1.0", "transformers==4.57.6", "onnx==1.23.2")
COMMAND_LINE = ("click", "grpcio", "prometheus-client", "protobuf")  # further imports of our command
TORCH = f"torch=={version('torch').partition('+')[0]}"
CPU_BUILDS = os.environ.get("TORCH_INDEX", "https://download.pytorch.org/whl/cpu")
CONFIGS = {
    "llama": transformers.LlamaConfig(**SMALL),
    "gpt2": transformers.GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=64),
}
TOKEN_IDS = [5, 17, 60, 3, 98, 41, 22, 7, 80]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of the exporter's environment."""
    directory = tmp_path_factory.mktemp("exporter") / "env"
    python = directory / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "-q"]
    ours = [f"{name}=={version(name)}" for name in COMMAND_LINE]
    for command in (
        [sys.executable, "-m", "venv", str(directory)],
        # From the index of builds for CPUs, because other builds include gigabytes of CUDA libraries.
        [*install, "--no-deps", "--retries", "0", "--index-url", CPU_BUILDS, TORCH],
        [*install, TORCH, *EXPORTER, *ours],
    ):
        subprocess.run(command, check=True, timeout=1500)
    return python


@pytest.mark.parametrize("name", CONFIGS)
def test_an_exported_model_scores_as_its_checkpoint(name: str, python: Path, tmp_path: Path) -> None:
    checkpoint, exported = tmp_path / "checkpoint", tmp_path / "exported"
    checkpoint.mkdir()
    write_model(checkpoint, CONFIGS[name])
    ended = subprocess.run(
        [str(python), "-m", "tgis", "convert-to-onnx", str(checkpoint), str(exported)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'client'}", "HF_HUB_OFFLINE": "1"},
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        "Provider: CPUExecutionProvider, merge graphs: False, optimize: False",
        f"Model type: {name}",
        f"Saved ONNX model to {exported}",
    ]
    spec = onnx_runtime.make_spec(exported, read_config(exported))
    stepper = Stepper(onnx_runtime.load(spec, ALONE, num_threads=1))
    steps = [stepper.step({0: (TOKEN_IDS[:end], start)})[0] for start, end in ((0, 4), (4, 8), (8, 9))]
    oracle = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = oracle(torch.tensor([TOKEN_IDS])).logits[0]  # [num_tokens, vocab_size]
    torch.testing.assert_close(torch.cat(steps), expected, atol=1e-4, rtol=1e-4)
