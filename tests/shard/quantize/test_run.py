"""The quantize command, from a model to files that other programs read."""

import json
import logging
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from bench.real_model import convert_real_model, read_prose
from tests.support.shard import gptq_oracle
from tests.support.shard.calibration_text import BOS, draw_ids, write_text, write_tokenizer
from tests.support.shard.checkpoints import SMALL, write_model
from tests.support.shard.family_cases.all import CASES, family_of
from tests.support.shard.family_oracle import load_model
from tgis.cli.quantize import quantize as quantize_command
from tgis.hub import model_files
from tgis.shard.checkpoint.tensors import WeightsError
from tgis.shard.models import registry
from tgis.shard.quantize import gptq, run
from tgis.shard.quantize import output as output_files
from tgis.shard.quantize.calibration import read_calibration
from tgis.shard.quantize.group_codes import GroupCodes
from tgis.shard.quantize.plan import make_plan
from tgis.shard.quantize.report import describe_loss
from tgis.shard.quantize.settings import QuantizeError, QuantizeSettings

# Stacked, transposed, regrouped and expert matrices; tests of other decoders are slow.
QUICK = {"llama_biases", "gpt2", "gpt_neox", "granitemoe"}
# Heads of 12 channels, whose 4-bit codes do not fill words.
NARROW = {"gemma", "gemma3_capped_shared_kv_head", "mixtral_tied_window"}
# Parts of the names of matrices that are not quantized.
KEPT = (
    *"embed head router .gate. expert_gate conv1d in_proj_a in_proj_b kv_b_".split(),
    *"wte wpe project_ vis multi_".split(),
)
# Their experts are parameters, which formats cannot name.
REFUSED_FAMILIES = ("gpt_oss", "granitemoe_swa", "llama4", "mistral4", "qwen3_5_moe")
REFUSED = [name for name in CASES if family_of(name) in REFUSED_FAMILIES]
REFUSED += ["mistral3_mistral4", "gemma4_text_experts"]
VARYING = ("gemma4_text", "gemma4_multimodal")  # their layers differ in shape
DECODERS = [
    name for name in CASES if family_of(name) not in ("t5", "bart") and name not in (*REFUSED, *VARYING)
]
TEXT = draw_ids(600, 3, 40)
LENGTH = 24
AGAIN = "this model is already quantized; use the original model"
LITTLE = QuantizeSettings(group_size=16, sym=True, samples=8, seqlen=LENGTH)


def write(directory: Path, config: transformers.PretrainedConfig, ids: list[int] | None = None) -> Path:
    """Write a model, its tokenizer and a text; return the text's file."""
    write_model(directory, config)
    write_tokenizer(directory)
    return write_text(directory.with_suffix(".text"), TEXT if ids is None else ids)


def quantize(directory: Path, output: Path, settings: QuantizeSettings, text: Path | None) -> list[str]:
    """Return the lines that the command prints."""
    return run.quantize(directory, output, settings, text, directory / "hub").splitlines()


def losses(lines: list[str]) -> tuple[float, float]:
    [line] = [line for line in lines if line.startswith("loss on held-out text, in nats per token: ")]
    before, after = line.rpartition(": ")[2].split(", ")
    return float(before.removesuffix(" before")), float(after.removesuffix(" after"))


def call(*words: object, code: int = 1) -> str:
    """Return the output of the command, or the line of its error."""
    num_threads, cores = torch.get_num_threads(), os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # several threads would wait for each other on a busy machine
    try:
        result = CliRunner().invoke(quantize_command, [str(word) for word in words], catch_exceptions=False)
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(num_threads)
    assert result.exit_code == code, result.output
    lines = [line for line in result.stderr.splitlines() if " INFO " not in line]
    assert len(lines) == (code != 0), result.stderr
    return lines[0].removeprefix("error: ") if lines else result.stdout


@torch.inference_mode()
def measure_loss(directory: Path, config: transformers.PretrainedConfig) -> float:
    """Return the loss on the last tenth of TEXT, computed by transformers."""
    model, last = load_model(directory, config), TEXT[-len(TEXT) // 10 :]
    result = []
    for i in range(0, len(last), LENGTH - 1):
        ids = torch.tensor([[BOS, *last[i : i + LENGTH - 1]]])
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        result.append(F.cross_entropy(logits.float(), ids[0, 1:], reduction="none"))
    return float(torch.cat(result).mean())


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, GroupCodes]]:
    """Return the Hessian of every matrix and its rounded weight."""
    result: list[tuple[torch.Tensor, GroupCodes]] = []

    def record(weight: torch.Tensor, hessian: torch.Tensor, settings: QuantizeSettings) -> GroupCodes:
        result.append((hessian, solve(weight, hessian, settings)))
        return result[-1][1]

    solve = gptq.solve
    monkeypatch.setattr(gptq, "solve", record)
    return result


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in DECODERS]
)
def test_a_family(case: str, tmp_path: Path) -> None:
    """The reported loss equals transformers' loss with the written weights."""
    model, output, plain, config = tmp_path / "model", tmp_path / "output", tmp_path / "plain", CASES[case]()
    text = write(model, config)
    settings = replace(LITTLE, bits=8) if case in NARROW else LITTLE
    lines = quantize(model, output, settings, text)
    before, after = losses(lines)
    [ratio] = [line.split()[2] for line in lines if " x the perplexity of the original; below " in line]
    assert float(ratio) == pytest.approx(math.exp(after - before), abs=0.006)
    assert before == pytest.approx(measure_loss(model, config), rel=1e-4, abs=1e-4)
    gptq_oracle.write_plain(model, output, plain, config.model_type == "gpt2")
    assert after == pytest.approx(measure_loss(plain, config), rel=1e-4, abs=1e-4)
    assert after != before
    rounded = load_file(plain / "model.safetensors")
    for name, tensor in load_file(model / "model.safetensors").items():
        is_kept = tensor.dim() < 2 or any(word in name for word in KEPT)
        assert torch.equal(tensor, rounded[name]) == is_kept, name
    check_served(model, output, plain, settings)


def check_served(model: Path, output: Path, plain: Path, settings: QuantizeSettings) -> None:
    """Check that the service reads the same weights from the quantized and from the dequantized
    checkpoint."""
    plan = make_plan(model, settings)
    with ExitStack() as opened:
        packed, floats = (
            opened.enter_context(registry.open_weights(each, model_files.read_config(each), plan.spec))
            for each in (output, plain)
        )
        for path, shape in plan.shapes.items():
            actual = packed.find_matrix(path, shape).read()
            assert torch.equal(actual.float(), floats.find_matrix(path, shape).read().float()), path


def test_the_files_give_exactly_the_rounded_weights(
    tmp_path: Path, rounded: list[tuple[torch.Tensor, GroupCodes]]
) -> None:
    model, output = tmp_path / "model", tmp_path / "output"
    text = write(model, CASES["llama_grouped_queries"]())
    lines = quantize(model, output, LITTLE, text)
    plain = gptq_oracle.read_checkpoint(output)
    for layer in range(2):
        path = f"model.layers.{layer}."
        of_layer = [codes.dequantize() for _, codes in rounded[4 * layer : 4 * layer + 4]]
        groups = ["self_attn.q self_attn.k self_attn.v", "self_attn.o", "mlp.gate mlp.up", "mlp.down"]
        for weights, names in zip(of_layer, groups, strict=True):
            actual = torch.cat([plain[f"{path}{name}_proj.weight"] for name in names.split()])
            assert torch.equal(actual, weights)
    kinds = [line.split()[:2] for line in lines if line.strip()[:1].isdigit()]
    four = ["attention.qkv", "attention.out", "mlp.up", "mlp.down"]
    assert kinds == [[str(layer), kind] for layer in range(2) for kind in four]


@torch.inference_mode()
def test_hessians_use_outputs_of_rounded_layers(
    tmp_path: Path, rounded: list[tuple[torch.Tensor, GroupCodes]]
) -> None:
    """In transformers, the inputs of the queries are the outputs of the rounded layers before."""
    model, output, plain = tmp_path / "model", tmp_path / "output", tmp_path / "plain"
    config = CASES["llama_grouped_queries"]()
    text = write(model, config)
    quantize(model, output, LITTLE, text)
    gptq_oracle.write_plain(model, output, plain)
    reference, inputs = load_model(plain, config), defaultdict[int, list[torch.Tensor]](list)
    for i, layer in enumerate(reference.model.layers):
        layer.self_attn.q_proj.register_forward_pre_hook(lambda _, args, i=i: inputs[i].append(args[0][0]))
    for window in read_calibration(model, text, tmp_path, LITTLE).samples:
        reference(input_ids=torch.tensor([window]))
    for i, actual in inputs.items():
        x = torch.cat(actual)  # [num_tokens, hidden_size]
        assert len(x) == LITTLE.samples * LENGTH
        torch.testing.assert_close(rounded[4 * i][0], 2 / len(x) * x.T @ x, rtol=1e-4, atol=1e-5)
    assert len(inputs) == 2


def test_settings_and_copied_files(tmp_path: Path) -> None:
    model, output = tmp_path / "model", tmp_path / "output"
    text = write(model, CASES["llama_grouped_queries"]())
    (model / "special_tokens_map.json").write_text("{}")
    options = ["--bits", 8, "--groupsize", -1, "--act-order", "--no-sym", "--percdamp", 0.02, "--samples", 8]
    said = call(model, output, *options, "--seqlen", LENGTH, "--seed", 3, "--calibration", text, code=0)
    assert said.splitlines()[-1] == f"Saved quantized model to {output}"
    names = {file.name for file in output.iterdir()}
    weights = {f"model-{i:05}.safetensors" for i in (1, 2, 3)}
    others = {"model.safetensors.index.json", "quantize_config.json"} | {
        file.name for file in model.iterdir() if file.name != "model.safetensors"
    }
    assert names == weights | others
    config = json.loads((output / "config.json").read_text())
    described = config.pop("quantization_config")
    assert config == json.loads((model / "config.json").read_text())
    assert described == json.loads((output / "quantize_config.json").read_text())
    assert described == {
        "bits": 8,
        "group_size": -1,
        "desc_act": True,
        "static_groups": True,
        "sym": False,
        "damp_percent": 0.02,
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
    }
    assert transformers.GPTQConfig.from_dict(described).bits == 8
    for name in weights:
        assert (output / name).stat().st_mode == (output / "config.json").stat().st_mode
        with safe_open(output / name, framework="pt") as content:
            metadata = content.metadata()
        origin = {"format": "pt", "quantized": "gptq", "origin": "text-generation-server quantize"}
        assert {key: metadata[key] for key in origin} == origin
    rest = load_file(output / "model-00003.safetensors")
    for name, value in (("gptq_bits", 8), ("gptq_groupsize", -1)):
        assert torch.equal(rest[name], torch.tensor([value]))
        assert rest[name].dtype == torch.int64
    index = json.loads((output / "model.safetensors.index.json").read_text())
    stored = [tensor for name in weights for tensor in load_file(output / name).values()]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored)
    of_config = f"{output / 'config.json'}: quantization_config"
    assert call(output, tmp_path / "again") == f"{of_config}: {AGAIN}"
    (output / "quantize_config.json").unlink()
    (output / "config.json").write_text(json.dumps(config))
    assert call(output, tmp_path / "again") == f"{output}: {AGAIN}"  # by its tensors


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({}, 0.8),
        ({"bits": 3}, 0.8),
        ({"bits": 2, "act_order": True}, 0.8),
        ({"bits": 8, "sym": False}, 0.8),
        ({"group_size": -1}, 0.85),
    ],
    ids=str,
)
def test_errors_are_smaller_than_by_rounding_to_nearest(
    options: dict[str, Any], limit: float, tmp_path: Path
) -> None:
    """Inputs are correlated, because the text has few words. Rounding to nearest searches scales too, which
    helps it most in groups of whole rows."""
    model, output = tmp_path / "model", tmp_path / "output"
    config = transformers.LlamaConfig(**{**SMALL, "hidden_size": 64, "intermediate_size": 96})
    text = write(model, config, draw_ids(600, 3, 40))
    settings = QuantizeSettings(**{"group_size": 32, "samples": 16, "seqlen": 32, **options})
    lines = quantize(model, output, settings, text)
    rows = [line.split() for line in lines if line.strip()[:1].isdigit()]
    assert len(rows) == 8
    for layer in ("0", "1"):
        ours, nearest = (sum(float(row[i]) for row in rows if row[0] == layer) for i in (2, 3))
        assert 0 < ours < limit * nearest


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_real_model(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("\n\n".join(read_prose()))
    settings = QuantizeSettings(samples=8, seqlen=128)
    lines = quantize(convert_real_model(), tmp_path / "output", settings, text)
    before, after = losses(lines)
    assert before < 4
    assert math.exp(after - before) < 1.6, "perplexity"
    rows = [line.split() for line in lines if line.strip()[:1].isdigit()]
    assert len(rows) == 4 * 30
    ours, nearest = (sum(float(row[i]) for row in rows) for i in (2, 3))
    assert 0 < ours < 0.9 * nearest


def test_an_expert_without_tokens_is_rounded_to_nearest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rounded: list[tuple[torch.Tensor, GroupCodes]]
) -> None:
    model, output, plain = tmp_path / "model", tmp_path / "output", tmp_path / "plain"
    config = transformers.MixtralConfig(**SMALL, num_local_experts=16, num_experts_per_tok=1)
    text = write(model, config)
    with caplog.at_level(logging.WARNING):
        _, after = losses(quantize(model, output, QuantizeSettings(samples=1, seqlen=LENGTH), text))
    matrices = 2 * (2 + 2 * 16)
    assert 0 < len(rounded) < matrices
    assert len(caplog.messages) == matrices - len(rounded)
    first, *_ = caplog.messages
    assert first.startswith("blocks.0.mlp.experts.")
    assert " is rounded to nearest: only " in first
    gptq_oracle.write_plain(model, output, plain)
    assert after == pytest.approx(measure_loss(plain, config), rel=1e-4)


@pytest.mark.parametrize(("method", "max_bytes"), [("int8", 10**10), ("fp8", 10_000)])
def test_transformers_reads_eight_bits(
    method: str, max_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No text is needed. Weights equal those that the format's library reads from the files."""
    model, output = tmp_path / "model", tmp_path / "output"
    monkeypatch.setattr(output_files, "MAX_FILE_BYTES", max_bytes)
    write_model(model, CASES["llama_tied"]())
    assert quantize(model, output, QuantizeSettings(method=method), None) == [  # type: ignore[arg-type]
        f"Saved quantized model to {output}"
    ]
    assert not (output / "quantize_config.json").exists()
    read = transformers.AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    read(input_ids=torch.tensor([[1, 2]]))  # decompresses
    original = load_file(model / "model.safetensors")
    files = [load_file(file) for file in sorted(output.glob("*.safetensors"))]
    stored = {name: tensor for content in files for name, tensor in content.items()}
    assert (len(files) == 3) == (method == "int8")
    for content in files[2:]:
        assert len(content) == 1 or sum(tensor.nbytes for tensor in content.values()) <= max_bytes
    actual, compared = read.state_dict(), 0
    for name, tensor in original.items():
        if name.endswith("_proj.weight"):
            assert torch.equal(actual[name], stored[name].float() * stored[f"{name}_scale"])
            assert 0 < (actual[name] - tensor).norm() < (0.01 if method == "int8" else 0.04) * tensor.norm()
            compared += 1
        else:
            assert torch.equal(actual[name], tensor)
    assert compared == 14


@pytest.mark.parametrize("case", ["t5", "granitemoe", "gpt2"])
def test_eight_bits_of_other_families(case: str, tmp_path: Path) -> None:
    """Scales belong to rows of the matrix as [out, in], also if the model stores it transposed."""
    model, output, config = tmp_path / "model", tmp_path / "output", CASES[case]()
    write_model(model, config)
    quantize(model, output, QuantizeSettings(method="int8"), None)
    original = load_file(model / "model.safetensors")
    stored: dict[str, torch.Tensor] = {}
    for file in output.glob("*.safetensors"):
        stored |= load_file(file)
    scaled = [name.removesuffix("_scale") for name in stored if name.endswith("_scale")]
    assert len(scaled) >= 8
    for name in scaled:
        weight = original[name].transpose(-1, -2) if config.model_type == "gpt2" else original[name]
        scale = weight.abs().amax(-1, keepdim=True) / 127
        assert torch.equal(stored[f"{name}_scale"], scale)
        assert torch.equal(stored[name], (weight / scale).round().to(torch.int8))
        del stored[name], stored[f"{name}_scale"]
    assert all(torch.equal(tensor, original[name]) for name, tensor in stored.items())


def read_all(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.mark.slow
def test_a_killed_run_resumes(tmp_path: Path, rounded: list[tuple[torch.Tensor, GroupCodes]]) -> None:
    model, killed, whole = tmp_path / "model", tmp_path / "killed", tmp_path / "whole"
    config = transformers.LlamaConfig(**{**SMALL, "num_hidden_layers": 8})
    text = write(model, config)
    settings = QuantizeSettings(group_size=16, samples=32, seqlen=LENGTH)
    code = (
        "import sys; from pathlib import Path; from tgis.shard.quantize.run import quantize; "
        "from tgis.shard.quantize.settings import QuantizeSettings; import torch; torch.set_num_threads(1); "
        f"quantize(*map(Path, sys.argv[1:3]), {settings!r}, Path(sys.argv[3]), Path())"
    )
    process = subprocess.Popen([sys.executable, "-c", code, model, killed, text], stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 120
        while not (killed / "model-00002.safetensors").exists():
            assert process.poll() is None, "the run ended before it was killed"
            assert time.monotonic() < until
            time.sleep(0.005)
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL
    left = read_all(killed)
    assert not {"config.json", "model.safetensors.index.json", "model-00008.safetensors"} & left.keys()
    lines = quantize(model, killed, settings, text)
    assert 0 < len(rounded) <= 4 * 6
    assert quantize(model, whole, settings, text)[:-1] == lines[:-1]
    assert read_all(killed) == read_all(whole)
    for name, content in left.items():
        if name.endswith(".safetensors"):
            assert (killed / name).read_bytes() == content


def test_refusals(tmp_path: Path) -> None:
    model, output = tmp_path / "model", tmp_path / "output"
    text = write(model, CASES["llama_grouped_queries"]())
    assert call("nobody/x", output) == "Weights not found in local cache for model nobody/x"
    assert "is needed: the default text, wikitext-2," in call(model, output)
    assert call(model, output, "--upload-to-model-id", "org/m") == (
        f"--upload-to-model-id is not supported: quantize without it, then: hf upload org/m {output}"
    )
    assert call(model, output, "--bits", "5", code=2).startswith("Invalid value for '--bits'")
    assert "neither -1 nor a number" in call(model, output, "--groupsize", "0", code=2)
    assert call(model, output, "--bits", "3", "--calibration", text).startswith(
        "model.layers.0.self_attn.k_proj has 16 rows, whose codes of 3 bits do not fill words of 32 bits: use"
    )
    assert not output.exists()
    output.mkdir()
    (output / "mine").write_text("")
    refused = f"{output} exists and does not contain a run to resume: use another directory"
    assert call(model, output, "--method", "fp8") == refused
    assert os.listdir(output) == ["mine"]
    (model / "quantize_config.json").write_text('{"bits": 4}')
    assert call(model, output) == f"{model / 'quantize_config.json'}: {AGAIN}"


def test_other_settings_do_not_resume(tmp_path: Path) -> None:
    model, output = tmp_path / "model", tmp_path / "output"
    text = write(model, CASES["llama_grouped_queries"]())
    quantize(model, output, LITTLE, text)
    (output / "config.json").unlink()
    facts = {
        "method": "gptq",
        "bits": 4,
        "sensitive_bits": 8,
        "group_size": 16,
        "sensitive_group_size": 16,
        "act_order": False,
        "sym": False,
    }
    facts |= {"percdamp": 0.01, "samples": 8, "seqlen": LENGTH, "seed": 0}
    facts["model"] = model_files.fingerprint(model)
    (output / ".quantize.json").write_text(json.dumps({**facts, "calibration": "another"}))
    options = ["--groupsize", 16, "--samples", 8, "--seqlen", LENGTH, "--calibration", text]
    assert call(model, output, *options).startswith(
        f"{output} contains a run with calibration another, but this"
    )
    assert call(model, output, *options, "--act-order").startswith(
        f"{output} contains a run with act_order False, but this run has True: use the same options, text and"
    )


@pytest.mark.parametrize(
    ("after", "options", "expected"),
    [
        (2.0488, {}, ["This is 1.05 x the perplexity of the original; below 1.1 is usual for 4 bits"]),
        (
            1.98,
            {"bits": 8},
            ["This is 0.98 x the perplexity of the original; below 1.01 is usual for 8 bits"],
        ),
        (2.05, {"bits": 3}, ["This is 1.05 x the perplexity of the original"]),
        (
            2.2,
            {},
            [
                "This is 1.22 x",
                "To lose less, try more bits (--bits 8 or --method int8), or a longer --calibrat",
            ],
        ),
        (
            2.2,
            {"sym": True, "group_size": -1},
            ["This is 1.22 x", "To lose less, try --no-sym, or --groupsize 32, or "],
        ),
        (
            2.2,
            {"bits": 3, "group_size": 128},
            ["This is 1.22 x", "To lose less, try --groupsize 32, or more bits"],
        ),
        (
            2.2,
            {"bits": 8},
            ["This is 1.22 x", "To lose less, try a longer --calibration text that resembles"],
        ),
        (math.nan, {}, ["This is nan x", "To lose less, try"]),
    ],
    ids=str,
)
def test_what_the_loss_means(after: float, options: dict[str, Any], expected: list[str]) -> None:
    lines = describe_loss(2.0, after, QuantizeSettings(**{"group_size": 32, **options})).splitlines()
    assert lines[0] == f"loss on held-out text, in nats per token: 2.0000 before, {after:.4f} after"
    assert len(lines) == 1 + len(expected)
    for line, begin in zip(lines[1:], expected, strict=True):
        assert line.startswith(begin)


def test_groups_are_smaller_in_small_models(tmp_path: Path) -> None:
    """The size that the command chooses is the one that readers are given."""
    model, output = tmp_path / "model", tmp_path / "output"
    text = write(model, transformers.LlamaConfig(**{**SMALL, "hidden_size": 64, "intermediate_size": 96}))
    call(model, output, "--samples", 8, "--seqlen", LENGTH, "--calibration", text, code=0)
    described = json.loads((output / "config.json").read_text())["quantization_config"]
    assert (described["group_size"], described["sym"], described["bits"]) == (32, False, 4)
    stored = gptq_oracle.read_checkpoint(output)
    assert stored["model.layers.0.self_attn.q_proj.weight"].shape == (64, 64)
    assert [QuantizeSettings().for_model(num).group_size for num in (10**9 - 1, 10**9)] == [32, 128]
    assert QuantizeSettings(group_size=-1).for_model(10).group_size == -1


def test_sensitive_matrices_of_small_models_have_eight_bits(tmp_path: Path) -> None:
    """`dynamic` names them as GPTQModel and vLLM read it; vLLM asks for the names of merged modules."""
    model, output = tmp_path / "model", tmp_path / "output"
    config = transformers.LlamaConfig(**{**SMALL, "num_hidden_layers": 8})
    text = write(model, config)
    quantize(model, output, replace(LITTLE, samples=1), text)
    described = json.loads((output / "config.json").read_text())["quantization_config"]
    assert described["bits"] == 4
    values = [f"self_attn.{name}_proj" for name in ("q", "k", "v", "qkv")]
    others = ["self_attn.o_proj", "mlp.gate_up_proj", "mlp.gate_proj", "mlp.down_proj"]
    eight = [f"model.layers.{i}.{name}" for i in (0, 6, 7) for name in values]
    eight += [f"model.layers.7.{name}" for name in others]
    four = ["lm_head", *(f"model.layers.{i}.{name}" for i in (0, 6, 70) for name in others)]
    assert {name: gptq_oracle.find_bits(described, name) for name in eight + four} == {
        **dict.fromkeys(eight, 8),
        **dict.fromkeys(four, 4),
    }
    assert transformers.GPTQConfig.from_dict(described).bits == 4
    gptq_oracle.write_plain(model, output, tmp_path / "plain")  # compares the bits of every module
    check_served(model, output, tmp_path / "plain", LITTLE)


@pytest.mark.parametrize(
    ("options", "num_weights", "widths", "expected"),
    [
        ({}, 10**9 - 1, [576, 1536], (8, 64)),
        ({}, 10, [640, 2048], (8, 128)),
        ({}, 10, [96, 64], (8, 32)),
        ({}, 10, [], (8, 32)),
        ({"group_size": 16}, 10, [640], (8, 16)),
        ({}, 10**9, [640], (4, 128)),
        ({"bits": 3}, 10, [640], (3, 32)),
        ({"sensitive_bits": 4}, 10, [640], (4, 32)),
        ({"bits": 2, "sensitive_bits": 4}, 10**9, [640], (4, 128)),
    ],
)
def test_bits_of_sensitive_matrices(
    options: dict[str, Any], num_weights: int, widths: list[int], expected: tuple[int, int]
) -> None:
    settings = QuantizeSettings(**options).for_model(num_weights, widths)
    own, other = settings.for_matrix(True), settings.for_matrix(False)
    assert (own.bits, own.group_size) == expected
    assert other.bits == options.get("bits", 4)
    differs = expected != (other.bits, other.group_size)
    assert ("dynamic" in settings.describe([], ["x"])) == differs


def test_an_encoder_decoder_needs_another_method(tmp_path: Path) -> None:
    write_model(tmp_path, CASES["t5"]())
    text = "^GPTQ supports only decoder-only models; use --method int8 or fp8$"
    with pytest.raises(QuantizeError, match=text):
        quantize(tmp_path, tmp_path / "x", LITTLE, None)


@pytest.mark.parametrize("case", REFUSED)
def test_experts_that_are_parameters_are_refused(case: str, tmp_path: Path) -> None:
    write_model(tmp_path, CASES[case]())
    with pytest.raises(QuantizeError, match=r"experts\.\w+_proj\.0 is a parameter and not a layer"):
        make_plan(tmp_path, LITTLE)


@pytest.mark.parametrize("case", VARYING)
def test_layers_that_differ_are_refused(case: str, tmp_path: Path) -> None:
    write_model(tmp_path, CASES[case]())
    with pytest.raises(QuantizeError, match="GPTQ does not support models whose layers differ; use --method"):
        quantize(tmp_path, tmp_path / "x", LITTLE, write_text(tmp_path / "text", TEXT))


def test_weights_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    model = tmp_path / "model"
    text = write(model, CASES["llama_grouped_queries"]())
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 4] = math.inf
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(WeightsError, match=r"^blocks\.1\.mlp\.down contains values that are not finite"):
        quantize(model, tmp_path / "a", LITTLE, text)
    with pytest.raises(
        WeightsError, match=r" tensor model\.layers\.1\.mlp\.down_proj\.weight contains values that are not"
    ):
        quantize(model, tmp_path / "b", QuantizeSettings(method="int8"), None)


def test_a_full_disk(tmp_path: Path) -> None:
    """A file size limit acts like a full disk. Finished files stay."""
    model, output = tmp_path / "model", tmp_path / "output"
    write_model(model, CASES["llama_grouped_queries"]())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    failed = rf"^{output / 'model-00003.safetensors'} cannot be written: "
    resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, hard))
    try:
        with pytest.raises(QuantizeError, match=failed):
            quantize(model, output, QuantizeSettings(method="int8"), None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {"model-00001.safetensors", ".quantize.json"} < {file.name for file in output.iterdir()}
    quantize(model, output, QuantizeSettings(method="int8"), None)
    assert (output / "config.json").exists()
