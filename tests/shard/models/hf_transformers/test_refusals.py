"""Models that do not run with transformers' code are refused with one line that names the reason."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from tests.support.shard.checkpoints import SMALL, write_model
from tests.support.shard.stepping import ALONE, Stepper, make_layout, read_config
from tgis.shard.attention.interface import Scoring
from tgis.shard.checkpoint.tensors import WeightsError
from tgis.shard.kernels.cpu.attention.attention import CpuAttention
from tgis.shard.memory.kv_cache import KVCache
from tgis.shard.models.hf_transformers import load as hf_transformers
from tgis.shard.models.hf_transformers.attention_hook import AttentionCall, PagedStep, find_window
from tgis.shard.models.interface import Model, UnsupportedModelError
from tgis.shard.models.whole_model import NotServedError

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
MODELS: dict[str, tuple[Callable[[], transformers.PretrainedConfig], str]] = {
    "sinks": (
        lambda: transformers.GptOssConfig(**SMALL, head_dim=8, num_local_experts=2, num_experts_per_tok=1),
        "its attention needs s_aux",
    ),
    "state": (
        lambda: transformers.Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]),
        "layers of kind conv keep a state",
    ),
    "chunked attention": (
        lambda: transformers.Llama4TextConfig(
            **SMALL, head_dim=8, attention_chunk_size=16, num_local_experts=2, intermediate_size_mlp=48
        ),
        "neither causal nor a sliding window",
    ),
    "positions of a cache": (  # whose positions start at 100
        lambda: transformers.Llama4TextConfig(
            **SMALL,
            head_dim=8,
            layer_types=["full_attention"] * 2,
            no_rope_layers=[0, 0],
            floor_scale=100,
            num_local_experts=2,
            intermediate_size_mlp=48,
        ),
        "reads positions from its own cache",
    ),
    "own attention": (
        lambda: transformers.GPTNeoConfig(
            hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global"], 2]], vocab_size=99
        ),
        "does not use the attention interface",
    ),
    "no positions": (
        lambda: transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=99),
        "its code does not accept position_ids",
    ),
    "shifted positions": (
        lambda: transformers.RobertaConfig(**SMALL, is_decoder=True),
        "scores change if sequences are packed and split",
    ),
    "positions of a step": (
        lambda: transformers.LlamaConfig(**SMALL, rope_parameters=DYNAMIC),
        "dynamic, lets sequences of one step affect each other",
    ),
}
CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class EchoConfig(LlamaConfig):
    model_type = "echo"


class EchoForCausalLM(LlamaForCausalLM):
    config_class = EchoConfig

    def __init__(self, config):
        super().__init__(config)
        shift = config.shift
        layer = self.model.layers[1]
        layer.register_forward_pre_hook(lambda _, args: (args[0] + shift * args[0].roll(1, 1), *args[1:]))
"""


def load(directory: Path, trust: bool = False) -> Model:
    spec = hf_transformers.make_spec(directory, read_config(directory), trust)
    return hf_transformers.load(directory, spec, ALONE, torch.float32, trust)


def refusal(directory: Path, trust: bool = False, error: type[Exception] = UnsupportedModelError) -> str:
    with pytest.raises(error) as caught:
        load(directory, trust)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    write_model(tmp_path, transformers.LlamaConfig(**SMALL))
    return tmp_path


def change(directory: Path, **changes: Any) -> None:
    config = read_config(directory) | changes
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", MODELS)
def test_unsupported_code(name: str, tmp_path: Path) -> None:
    make, why = MODELS[name]
    config = make()
    write_model(tmp_path, config)
    text = refusal(tmp_path)
    assert text.startswith(f"model type '{config.model_type}' cannot be served through transformers: ")
    assert why in text


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model_type": "clock"}, "transformers does not know this type"),
        ({"model_type": "t5"}, "it is an encoder-decoder"),
        ({"model_type": "vit"}, "no causal language model"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized checkpoints"),
        ({"num_hidden_layers": "many"}, "its code failed with "),
    ],
)
def test_configurations(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    transformers.LlamaConfig(**SMALL).save_pretrained(tmp_path)
    change(tmp_path, **changes)
    assert why in refusal(tmp_path)


def test_weights_that_cannot_be_used(llama: Path) -> None:
    file = llama / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({key: value for key, value in tensors.items() if key != name}, file, {"format": "pt"})
    assert refusal(llama, error=WeightsError) == f"{llama}: tensor {name} is missing"
    save_file(tensors | {name: tensors[name][:-1].clone()}, file, {"format": "pt"})
    wrong = f"{llama}: tensor {name} has shape [47, 32], expected [48, 32]"
    assert refusal(llama, error=WeightsError) == wrong
    file.write_bytes(file.read_bytes()[:-5])
    assert str(file) in refusal(llama, error=WeightsError)
    file.unlink()
    assert "no weights" in refusal(llama, error=WeightsError)


@pytest.fixture
def modules(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Return the directory to which transformers copies code, which would be the user's cache."""
    directory = str(tmp_path_factory.mktemp("modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", directory)


@pytest.mark.usefixtures("modules")
def test_code_of_the_checkpoint_runs_only_where_it_is_trusted(llama: Path) -> None:
    expected = Stepper(load(llama)).step({0: ([5, 6, 7], 0)})[0]
    files = {"AutoConfig": "EchoConfig", "AutoModelForCausalLM": "EchoForCausalLM"}
    auto_map = {key: f"echo.{name}" for key, name in files.items()}
    change(llama, model_type="echo", architectures=["EchoForCausalLM"], auto_map=auto_map, shift=0.0)
    (llama / "echo.py").write_text('raise SystemExit("it was run")')
    assert "TRUST_REMOTE_CODE=true" in refusal(llama)
    (llama / "echo.py").write_text(CODE)
    assert torch.equal(Stepper(load(llama, trust=True)).step({0: ([5, 6, 7], 0)})[0], expected)
    # Its layers read the previous token, even if it belongs to another sequence.
    change(llama, shift=0.01)
    assert "scores change if sequences are packed and split" in refusal(llama, trust=True)
    (llama / "echo.py").write_text("import nothing_that_there_is")
    assert "nothing_that_there_is" in refusal(llama, trust=True)


def test_calls_that_differ_from_step_to_step() -> None:
    calls = [
        AttentionCall(nn.Identity(), 1, 1, 4, 4, Scoring(scale=1.0)),
        AttentionCall(nn.Identity(), 1, 1, 4, 4, Scoring(scale=1.0)),
    ]
    attention = CpuAttention(KVCache(2, 1, 4, 1, 4, torch.float32))
    x = torch.ones(1, 1, 3, 4)
    plan = attention.plan(make_layout([(0, 3)], [[0]]), "self")
    for *modules, last in ([1], [0, 0], [0, 1, 1]):
        step = PagedStep(calls, attention, plan)
        for i in modules:
            step.attend(calls[i].module, x, x, x, None, {})
        with pytest.raises(NotServedError, match="order of its layers changes"):
            step.attend(calls[last].module, x, x, x, None, {})
    step = PagedStep(calls, attention, plan)
    step.attend(calls[0].module, x, x, x, None, {})
    with pytest.raises(NotServedError, match="number of its layers changes"):
        step.check_complete()


def test_windows_are_inferred_from_mask_functions() -> None:
    causal = lambda b, h, q, k: k <= q  # noqa: E731
    assert find_window(causal, 100) is None
    assert find_window(lambda b, h, q, k: (k <= q) & (k > q - 7), 100) == 7
    assert find_window(lambda b, h, q, k: (k <= q) & (k > q - 200), 100) is None
    for rule in (
        lambda b, h, q, k: (k <= q) & (k // 32 == q // 32),
        lambda b, h, q, k: k <= q + 1,
        lambda b, h, q, k: (k <= q) & ((k > q - 7) | (k < 4)),
        lambda b, h, q, k: torch.tensor(True),
        lambda b, h, q, k: torch.zeros(3)[q],
    ):
        with pytest.raises(NotServedError):
            find_window(rule, 100)
