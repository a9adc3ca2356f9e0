"""The check of rounded weights at the start: its reference against transformers, its log lines, and the
factors that it finds for activations."""

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support.shard import stepping
from tests.support.shard.checkpoints import CASES, SMALL, write_llama, write_model
from tests.support.shard.driver import Request, Router, configure
from tests.support.shard.messages import GREEDY
from tests.support.shard.ranks import Ranks
from tests.support.tokenizers.trained import write_byte_level
from tgis.shard.checkpoint import progress
from tgis.shard.collectives import ProcessGroup
from tgis.shard.kernels.cpu.ops import CpuKernels
from tgis.shard.memory.host_limits import HostMemory
from tgis.shard.models import registry
from tgis.shard.models.spec import DecoderSpec
from tgis.shard.models.streamed import score_prompt
from tgis.shard.quant.registry import SCHEMES
from tgis.shard.startup.load import load
from tgis.shard.startup.quantize.probe import MAX_TOKENS, USUAL, open_probe
from tgis.shard.startup.quantize.probe import TEXT as PROBE_TEXT

VOCAB_SIZE = 400
IDS = list(range(5, 40))
TEXT = "changes the log-probabilities of a probe text by"
ROUNDING = 1e-4  # error of logits by the order of sums


def write(directory: Path, **overrides: Any) -> Path:
    write_llama(directory, vocab_size=VOCAB_SIZE, **overrides)
    write_byte_level(directory, VOCAB_SIZE)
    return directory


def add_outliers(directory: Path, factor: float = 300) -> None:
    """Multiply two columns of the matrices after each norm by a factor, and divide the norm's weights there,
    so that the unrounded model stays the same."""
    content = load_file(directory / "model.safetensors")
    followers = {
        "input_layernorm": ("q_proj", "k_proj", "v_proj"),
        "post_attention_layernorm": ("gate", "up"),
    }
    for layer in range(SMALL["num_hidden_layers"]):
        for norm, names in followers.items():
            content[f"model.layers.{layer}.{norm}.weight"][3::16] /= factor
            for key in content:
                if f".layers.{layer}." in key and any(f".{name}" in key for name in names):
                    content[key][:, 3::16] *= factor
    save_file(content, directory / "model.safetensors", metadata={"format": "pt"})


def score(group: ProcessGroup, directory: Path) -> torch.Tensor:
    config = stepping.read_config(directory)
    spec = registry.make_spec(config)
    assert isinstance(spec, DecoderSpec)
    return score_prompt(directory, config, spec, group, torch.float32, IDS).logprobs


EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}


def test_the_pass_before_loading_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the lines of the two passes over a checkpoint read as one that runs backwards."""
    monkeypatch.setattr(progress, "MIN_INTERVAL_S", 0.0)
    write_llama(tmp_path)
    with caplog.at_level(logging.INFO):
        score(ProcessGroup(0, 1), tmp_path)
    *lines, last = [one.message for one in caplog.records if one.name == progress.__name__]
    assert {*lines} == {"measuring the weights before they are rounded"}
    assert last == "weights measured before they are rounded"


@pytest.mark.parametrize("case", ["tied", "biases", "llama3_rope", "mixtral"])
def test_the_reference_is_that_of_transformers(case: str, ranks: Ranks, tmp_path: Path) -> None:
    if case == "mixtral":
        write_model(tmp_path, transformers.MixtralConfig(**{**SMALL, **EXPERTS}))
    else:
        write_llama(tmp_path, **CASES[case])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.tensor(IDS)
    with torch.inference_mode():
        logprobs = theirs(ids.unsqueeze(0)).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(1, ids[1:].unsqueeze(1))[:, 0]
    for size in (1, 2):
        for actual in ranks.run(size, score, tmp_path):
            torch.testing.assert_close(actual, expected, rtol=0, atol=ROUNDING)


def list_probe_lines(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(record.levelno, record.message) for record in caplog.records if TEXT in record.message]


def read_figure(caplog: pytest.LogCaptureFixture, level: int) -> float:
    """Return the difference in the only line of a check."""
    [(actual, text)] = list_probe_lines(caplog)
    caplog.clear()
    assert actual == level
    return float(text.partition(f"{TEXT} ")[2].split()[0])


def find_factors(group: ProcessGroup, directory: Path, **options: Any) -> dict[str, torch.Tensor]:
    config = stepping.read_config(directory)
    chosen = configure(directory, no_quantize_check=True, **{"quantize": "int8", **options})
    kernels = CpuKernels(chosen.activations is not None)
    spec = registry.make_spec(config)
    probe = open_probe(chosen, config, spec, group, torch.float32, kernels)
    return dict(probe.inputs.factors) if probe is not None else {}


@pytest.mark.parametrize("factor", [300, 1 / 300])
def test_outliers_of_weights_or_activations_are_smoothed(
    factor: float, ranks: Ranks, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = write(tmp_path)
    with caplog.at_level(logging.INFO):
        load(configure(directory, quantize="int8"))
        usual = read_figure(caplog, logging.INFO)
        before = find_factors(stepping.ALONE, directory)
        add_outliers(directory, factor)
        load(configure(directory, quantize="int8"))
        assert read_figure(caplog, logging.INFO) <= 1.5 * usual
    [expected] = ranks.run(1, find_factors, directory)
    ratios = torch.stack([expected[path] / before[path] for path in expected if path.startswith("blocks")])
    assert (ratios[:, 3::16] / ratios[:, :1]).log2().add(math.log2(factor)).abs().max() <= 1
    for actual in ranks.run(2, find_factors, directory):
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[path], expected[path]) for path in expected)


def test_only_activations_that_are_rounded_to_8_bits_are_smoothed(tmp_path: Path) -> None:
    directory = write(tmp_path)

    def has_factors(**options: Any) -> bool:
        return bool(find_factors(stepping.ALONE, directory, **options))

    assert has_factors(quantize="bitsandbytes", activations="int8")
    assert not has_factors(quantize="bitsandbytes")
    for name in ("int4", "fp8", "bitsandbytes-nf4"):
        assert not has_factors(quantize=name, activations="int8")


def find_importance(group: ProcessGroup, directory: Path) -> dict[str, torch.Tensor]:
    config = stepping.read_config(directory)
    spec = registry.make_spec(config)
    chosen = configure(directory, no_quantize_check=True, quantize="int4")
    probe = open_probe(chosen, config, spec, group, torch.float32, CpuKernels())
    assert probe is not None
    return dict(probe.inputs.importance)


MODULES = {"attention.qkv": "self_attn.q_proj", "attention.out": "self_attn.o_proj"}
MODULES |= {"mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj"}


@pytest.mark.slow
def test_importance_is_the_mean_square_of_inputs_on_any_number_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """Compare with the inputs of transformers' layers, up to the nearest power of two."""
    directory = write(tmp_path)
    [expected] = ranks.run(1, find_importance, directory)
    for actual in ranks.run(2, find_importance, directory):
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[path], expected[path]) for path in expected)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = transformers.AutoTokenizer.from_pretrained(directory)(PROBE_TEXT).input_ids[:MAX_TOKENS]
    squares: dict[str, torch.Tensor] = {}
    for layer in range(SMALL["num_hidden_layers"]):
        for mine, name in MODULES.items():
            module = theirs.get_submodule(f"model.layers.{layer}.{name}")
            path = f"blocks.{layer}.{mine}"
            module.register_forward_hook(
                lambda _, inputs, __, path=path: squares.update({path: inputs[0][0].square().mean(0)})
            )
    with torch.inference_mode():
        theirs(torch.tensor([ids]))
    for path, square in squares.items():
        exponents = (square / square.mean()).log2().clamp(-10, 10)
        assert (expected[path].log2() - exponents).abs().max() <= 0.501


def test_a_model_with_outliers_gives_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = write(tmp_path)
    with caplog.at_level(logging.INFO):
        load(configure(directory, quantize="int4"))
        [(level, text)] = list_probe_lines(caplog)
        assert level == logging.INFO
        assert text.startswith(f"--quantize int4 {TEXT} 0.")
        caplog.clear()
        add_outliers(directory)
        load(configure(directory, quantize="int4"))
        [(level, text)] = list_probe_lines(caplog)
        assert level == logging.WARNING
        figure = float(text.removeprefix(f"--quantize int4 {TEXT} ").split()[0])
        assert figure > USUAL["int4"]
        caplog.clear()
        load(configure(directory, quantize="int4", no_quantize_check=True))
        load(configure(directory))
        assert not list_probe_lines(caplog)


LIMITS = [{"max_step_tokens": 512}, {"max_step_tokens": 3}, {"max_sequence_length": 20}]


@pytest.mark.parametrize("options", [{"quantize": "int8"}, {"quantize": "int4", "activations": "int8"}])
def test_weights_do_not_depend_on_limits_of_steps_and_lengths(
    options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The check of the weights keeps to the limits."""
    directory = write(tmp_path)
    add_outliers(directory)
    answers = []
    with caplog.at_level(logging.INFO):
        for limits in LIMITS:
            runner = load(configure(directory, **options, **limits))
            request = Request(IDS[:9], 9, sampling=GREEDY, details={"logprobs": True})
            Router(runner, whole=True).run([request])
            answers.append((request.generated, request.logprobs))
    assert answers[1:] == answers[:1] * 2
    figures = [text.split(" by ")[1] for _, text in list_probe_lines(caplog)]
    assert len(figures) == 3
    assert figures[0] == figures[1]


def test_every_scheme_has_a_usual_loss() -> None:
    assert USUAL.keys() == SCHEMES.keys() - {"none"}


def test_what_cannot_be_checked_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = write(tmp_path / "model")
    config = stepping.read_config(directory)
    spec = registry.make_spec(config)
    machine = tmp_path / "machine"
    (machine / "proc" / "self").mkdir(parents=True)
    (machine / "proc" / "self" / "cgroup").write_text("")
    (machine / "proc" / "meminfo").write_text("MemAvailable: 20 kB\n")
    chosen = configure(directory, quantize="bitsandbytes-nf4")
    arguments = (chosen, config, spec, stepping.ALONE, torch.float32, CpuKernels())
    assert open_probe(*arguments) is not None
    with caplog.at_level(logging.INFO):
        assert open_probe(*arguments, HostMemory(machine)) is None
        assert "--quantize bitsandbytes-nf4 is not checked: the checkpoint takes 0.0 GiB" in caplog.text
        (directory / "tokenizer.json").write_text("{")
        assert open_probe(*arguments) is None
        assert caplog.text.count("--quantize bitsandbytes-nf4 is not checked: ") == 2
        assert "without smoothing" not in caplog.text
        assert not find_factors(stepping.ALONE, directory)
    assert "activations are rounded to 8 bits without smoothing" in caplog.text
