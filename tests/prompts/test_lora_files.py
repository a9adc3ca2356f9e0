"""PEFT's directories of LoRA adapters: content of valid ones, and refusals of invalid ones."""

import json
import os
import re
import time
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.utils.other import get_pattern_key
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.support.prompt_files import HARM, Payload, random_prompt
from tgis.prompts import lora_files
from tgis.prompts.errors import AdapterError, TooLargeError
from tgis.prompts.lora_files import (
    MAX_HEADER_BYTES,
    UnsupportedTypeError,
    parse_config,
    read_adapter_files,
    split_name,
)

Q = "model.layers.0.self_attn.q_proj"
MAX_BYTES = 1 << 16


def tensors(**changes: Tensor | None) -> dict[str, Tensor]:
    """Write an adapter of one module with PEFT's names; changes are to A and B, or by the end of a name."""
    root = f"base_model.model.{Q}."
    made = {"lora_A.weight": torch.randn(2, 8), "lora_B.weight": torch.randn(6, 2)}
    for end, tensor in changes.items():
        name = {"A": "lora_A.weight", "B": "lora_B.weight"}.get(end, end.replace("__", "."))
        made.pop(name, None)
        if tensor is not None:
            made[name] = tensor
    return {root + name: tensor.contiguous() for name, tensor in made.items()}


def save(directory: Path, weights: dict[str, Any] | None = None, **config: object) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    known = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, **config}
    (directory / "adapter_config.json").write_text(json.dumps(known))
    save_file(tensors() if weights is None else weights, directory / "adapter_model.safetensors")
    return directory


def read(directory: Path) -> tuple[dict[str, Tensor], dict[str, float]]:
    return read_adapter_files(directory, MAX_BYTES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_stored_weights_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    stored = {name: tensor.to(dtype) for name, tensor in tensors().items()}
    weights, scales = read(save(tmp_path, stored))
    assert weights.keys() == {f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"}
    for name, tensor in weights.items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, stored[f"base_model.model.{name}"])
    assert scales == {Q: 1.5}


def test_pickles_are_read_where_there_is_nothing_else(tmp_path: Path) -> None:
    save(tmp_path)
    expected, _ = read(tmp_path)
    torch.save({f"base_model.model.{name}": tensor for name, tensor in expected.items()}, tmp_path / "pickle")
    (tmp_path / "adapter_model.safetensors").unlink()
    (tmp_path / "pickle").rename(tmp_path / "adapter_model.bin")
    weights, scales = read(tmp_path)
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    assert (weights.keys(), scales) == (expected.keys(), {Q: 1.5})


def test_names_with_an_adapters_name_and_copies_of_the_models_tables(tmp_path: Path) -> None:
    stored = {
        "base_model.model.lm_head.lora_A.default.weight": torch.randn(2, 8),
        "base_model.model.lm_head.lora_B.default.weight": torch.randn(9, 2),
        "base_model.model.lm_head.base_layer.weight": torch.randn(9, 8),
        "base_model.model.model.embed_tokens.lora_embedding_A": torch.randn(2, 9),
        "base_model.model.model.embed_tokens.lora_embedding_B": torch.randn(8, 2),
        "base_model.model.model.embed_tokens.weight": torch.randn(9, 8),
    }
    weights, scales = read(save(tmp_path, stored))
    names = [split_name(name) for name in weights]
    assert sorted(names) == [
        ("lm_head", "base"),
        ("lm_head", "lora_A.weight"),
        ("lm_head", "lora_B.weight"),
        ("model.embed_tokens", "base"),
        ("model.embed_tokens", "lora_embedding_A"),
        ("model.embed_tokens", "lora_embedding_B"),
    ]
    assert scales == {"lm_head": 1.5, "model.embed_tokens": 1.5}


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"q": nn.Linear(4, 4), "up": nn.Linear(4, 6)}) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("uses_square_root", [False, True])
def test_scales_are_those_of_peft(tmp_path: Path, uses_square_root: bool) -> None:
    config = peft.LoraConfig(
        r=2,
        lora_alpha=3,
        target_modules=["q", "up"],
        rank_pattern={"layers.0.q": 4, r"layers\.[12]\.up": 5, "up": 6},
        alpha_pattern={"^layers.1.q": 7, "ayers.2.q": 70, "q": 11, "layers.2.*": 13},
        use_rslora=uses_square_root,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.get_peft_model(Layers(), config).save_pretrained(tmp_path)
        model = peft.PeftModel.from_pretrained(Layers(), tmp_path)  # the file keeps the order of the patterns
    _, scales = read(tmp_path)
    expected = {
        name.removeprefix("base_model.model."): module.scaling["default"]
        for name, module in model.named_modules()
        if isinstance(module, peft.tuners.lora.Linear)
    }
    assert scales == pytest.approx(expected)
    assert len(set(scales.values())) > 4


@pytest.mark.parametrize("patterns", [["q"], ["x", "a.b", "b"], ["a|b", "c.*"], ["a..", ".*"], ["", "c"]])
@pytest.mark.parametrize("name", ["q", "a.q", "aq", "a.b", "xa.b", "c.d.e", "a.b.c", ""])
def test_patterns_match_as_in_peft(patterns: list[str], name: str) -> None:
    numbers = {pattern: number for number, pattern in enumerate(patterns, 20)}
    text = json.dumps({"peft_type": "LORA", "r": 2, "rank_pattern": numbers})
    assert parse_config(text.encode()).ranks.find(name) == numbers.get(get_pattern_key(patterns, name), 2)


def test_as_many_patterns_as_modules() -> None:
    """Methods that choose ranks themselves leave more patterns than a library caches."""
    numbers = {f"model.layers.{i}.self_attn.q_proj": 1 + i for i in range(600)}
    text = json.dumps({"peft_type": "LORA", "rank_pattern": numbers, "alpha_pattern": numbers}).encode()
    began = time.thread_time()
    config = parse_config(text)
    for key in [*numbers][::20]:
        assert config.ranks.find(key) == numbers[key]
        assert config.scale_of(key, config.ranks.find(key)) == 1
    assert time.thread_time() - began < 3
    too_many = dict.fromkeys(map(str, range(4097)), 2)
    with pytest.raises(AdapterError, match=r"alpha_pattern of adapter_config.json is not valid"):
        parse_config(json.dumps({"peft_type": "LORA", "alpha_pattern": too_many}).encode())


MISSING = "invalid adapter: no adapter_config.json found"


def test_a_directory_without_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=re.escape(MISSING)):
        read(tmp_path)
    with pytest.raises(AdapterError, match=re.escape(MISSING)):
        read(tmp_path / "vanished")


def test_a_directory_without_tensors(tmp_path: Path) -> None:
    (save(tmp_path) / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterError, match=r"neither adapter_model.safetensors nor adapter_model.bin found"):
        read(tmp_path)


@pytest.mark.parametrize("kind", ["PROMPT_TUNING", "ADALORA", "x" * 5000])
def test_other_types(tmp_path: Path, kind: str) -> None:
    with pytest.raises(UnsupportedTypeError) as caught:
        read(save(tmp_path, peft_type=kind))
    assert str(caught.value).startswith(f"adapter type {kind[:200]}")
    assert str(caught.value).endswith(" is not currently supported")
    assert len(str(caught.value)) < 400


CONFIGURATIONS: list[tuple[dict[str, object], str]] = [
    ({"peft_type": None}, "no peft_type"),
    ({"peft_type": ["LORA"]}, "no peft_type"),
    ({"use_dora": True}, "DoRA"),
    ({"bias": "all"}, "biases"),
    ({"bias": "lora_only"}, "biases"),
    ({"lora_bias": True}, "bias of lora_B"),
    ({"modules_to_save": ["lm_head"]}, "a module saved as a whole (modules_to_save) is not"),
    ({"trainable_token_indices": [1]}, "training of single tokens (trainable_token_indices) is not"),
    ({"layer_replication": [[0, 1]]}, "replication of layers (layer_replication) is not"),
    ({"alora_invocation_tokens": [1]}, "activated LoRA"),
    ({"use_qalora": True}, "quantization-aware"),
    ({"use_bdlora": {"nblocks": 2}}, "block-diagonal"),
    ({"arrow_config": {"top_k": 2}}, "routing"),
    ({"kasa_config": {"beta": 1.0}}, "KaSA"),
    ({"monteclora_config": {"num_samples": 2}}, "Monte Carlo"),
    *(
        ({"init_lora_weights": init}, "changes the model's own weights")
        for init in ("pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga", "unheard of", 1, [True])
    ),
    ({"r": 0}, "r of adapter_config.json"),
    ({"r": -1}, "r of adapter_config.json"),
    ({"r": 2.0}, "r of adapter_config.json"),
    ({"r": True}, "r of adapter_config.json"),
    ({"r": "2"}, "r of adapter_config.json"),
    ({"r": None}, "r of adapter_config.json"),
    ({"r": 10**400}, "r of adapter_config.json"),
    ({"r": 3}, "expected rank 3"),
    ({"lora_alpha": float("nan")}, "lora_alpha"),
    ({"lora_alpha": float("inf")}, "lora_alpha"),
    ({"lora_alpha": 10**400}, "lora_alpha"),
    ({"lora_alpha": "3"}, "lora_alpha"),
    ({"lora_alpha": True}, "lora_alpha"),
    ({"use_rslora": "yes"}, "use_rslora"),
    ({"rank_pattern": {"q_proj": 0}}, "rank_pattern"),
    ({"rank_pattern": {"q_proj": 3}}, "expected rank 3"),
    ({"rank_pattern": ["q_proj"]}, "rank_pattern"),
    ({"rank_pattern": {"(": 2}}, "is not valid"),
    ({"rank_pattern": {r"((.|..)+)+\d{3}": 2}}, "is not valid"),
    ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern"),
    ({"target_modules": r"((.|..)+)+\d{3}"}, "target_modules"),
    ({"target_modules": "("}, "target_modules"),
    ({"target_modules": 3}, "target_modules"),
    ({"target_modules": ["q_proj", 3]}, "target_modules"),
    ({"exclude_modules": r"((.|..)+)+\d{3}"}, "exclude_modules"),
    ({"target_parameters": "experts.down_proj"}, "target_parameters"),
    ({"target_parameters": [1]}, "target_parameters"),
]


@pytest.mark.parametrize(("config", "cause"), CONFIGURATIONS, ids=str)
def test_configurations_that_are_refused(
    tmp_path: Path, config: dict[str, object], cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora_files, "_PATTERNS_TIMEOUT_S", 0.1)
    with pytest.raises(AdapterError, match=re.escape(cause)) as caught:
        read(save(tmp_path, **config))
    assert not isinstance(caught.value, UnsupportedTypeError)


def test_modules_in_each_form(tmp_path: Path) -> None:
    for modules in (None, [], ["q_proj"], "all-linear", r".*\.q_proj", r"none"):
        read(save(tmp_path, target_modules=modules, exclude_modules=modules))


@pytest.mark.parametrize(
    "config",
    [
        {"init_lora_weights": init, "lora_alpha": alpha, "bias": bias}
        for init, alpha, bias in [(True, 0, "none"), ("gaussian", -2.5, None), (False, 3, "none")]
    ],
    ids=str,
)
def test_configurations_that_are_taken(tmp_path: Path, config: dict[str, object]) -> None:
    assert read(save(tmp_path, **config))[1] == {Q: config["lora_alpha"] / 2}  # type: ignore[operator]


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"r":' + b"9" * 9999])
def test_invalid_configurations(tmp_path: Path, text: bytes) -> None:
    (save(tmp_path) / "adapter_config.json").write_bytes(text)
    with pytest.raises(AdapterError, match=r"adapter_config.json is not"):
        read(tmp_path)


def test_a_huge_configuration(tmp_path: Path) -> None:
    with (save(tmp_path) / "adapter_config.json").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(TooLargeError):
        read(tmp_path)


A, B = random_prompt(2, 8), random_prompt(6, 2)
TENSORS: list[tuple[dict[str, Tensor | None], str]] = [
    ({"A": None}, "lora_A.weight is missing"),
    ({"B": None}, "lora_B.weight is missing"),
    ({"A": None, "B": None}, "no LoRA tensors"),
    ({"A": None, "B": None, "weight": A}, "no LoRA tensors"),
    ({"A": None, "lora_embedding_A": A}, "lora_A.weight is missing"),
    ({"A": A.flatten()}, "has shape [16]"),
    ({"A": A[None]}, "has shape [1, 2, 8]"),
    ({"A": torch.empty(0, 8), "B": torch.empty(6, 0)}, "has shape"),
    ({"A": A[:1]}, "expected rank 2"),
    ({"B": B[:, :1]}, "expected rank 2"),
    ({"A": random_prompt(4, 8), "B": random_prompt(6, 4)}, "expected rank 2"),
    ({"A": A.long()}, "is of type int64"),
    ({"A": A.double()}, "is of type float64"),
    ({"A": A.to(torch.float8_e4m3fn)}, "is of type float8_e4m3fn"),
    ({"A": A.clone().index_fill_(1, torch.tensor([3]), torch.nan)}, "not finite"),
    ({"B": B.clone().index_fill_(0, torch.tensor([5]), -torch.inf)}, "not finite"),
    ({"lora_B__bias": torch.ones(6)}, "bias of lora_B is not supported"),
    ({"lora_magnitude_vector": torch.ones(6)}, "DoRA"),
    ({"lora_diag": torch.ones(2)}, "lora_diag is not a LoRA tensor"),
    ({"bias": torch.ones(6)}, "q_proj.bias is not a LoRA tensor"),
    ({"lora_A__other__weight": A}, "is not a LoRA tensor"),
    ({"lora_A__default__weight": A}, "twice"),
    ({"n" * 9000: A}, "is not a LoRA tensor"),
    ({"\n\x1b[2J": A}, "is not a LoRA tensor"),
]


@pytest.mark.parametrize(("changes", "cause"), TENSORS, ids=lambda value: str(value)[:40])
def test_tensors_that_are_refused(tmp_path: Path, changes: dict[str, Tensor | None], cause: str) -> None:
    with pytest.raises(AdapterError, match=re.escape(cause)) as caught:
        read(save(tmp_path, tensors(**changes)))
    assert len(str(caught.value)) < 500
    assert str(caught.value).isprintable()


def test_more_tensors_than_any_model_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lora_files.MAX_TENSORS == 131_072
    monkeypatch.setattr(lora_files, "MAX_TENSORS", 2)
    read(save(tmp_path))
    odd = {f"{number}": torch.ones(1) for number in range(3)}  # each of which would be refused on its own
    with pytest.raises(AdapterError, match=r"^invalid adapter: it has 3 tensors, more than 2$"):
        read(save(tmp_path, odd))


def test_tied_embeddings_are_refused(tmp_path: Path) -> None:
    name = "base_model.model.model.embed_tokens.lora_embedding_"
    weights = {f"{name}A": torch.randn(2, 9), f"{name}B": torch.randn(8, 2)}
    with pytest.raises(AdapterError, match="tied"):
        read(save(tmp_path, weights, ensure_weight_tying=True))


def test_too_many_bytes(tmp_path: Path) -> None:
    save(tmp_path, tensors(A=torch.randn(2, MAX_BYTES // 8)))
    with pytest.raises(TooLargeError):
        read(tmp_path)


def test_a_pickle_that_calls_few_bytes_many(tmp_path: Path) -> None:
    (save(tmp_path) / "adapter_model.safetensors").unlink()
    torch.save(
        tensors(A=None) | {"x": torch.zeros(1, 1).expand(1 << 20, 1 << 20)}, tmp_path / "adapter_model.bin"
    )
    with pytest.raises(AdapterError):
        read(tmp_path)


@pytest.mark.parametrize("kept", [0, 7, 8, 60, -1])
def test_truncated_safetensors(tmp_path: Path, kept: int) -> None:
    file = save(tmp_path) / "adapter_model.safetensors"
    os.truncate(file, kept % file.stat().st_size)
    with pytest.raises(AdapterError, match=r"truncated or damaged"):
        read(tmp_path)


@pytest.mark.parametrize("size", [MAX_HEADER_BYTES + 1, 1 << 62])
def test_a_huge_header(tmp_path: Path, size: int) -> None:
    (save(tmp_path) / "adapter_model.safetensors").write_bytes(size.to_bytes(8, "little") + b"{" * 999)
    with pytest.raises(AdapterError, match=r"adapter_model.safetensors has a header that is too large"):
        read(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        b"{}",
        b"[]",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 8]}}',
        b"\xff\xfe",
    ],
)
def test_odd_headers(tmp_path: Path, header: bytes) -> None:
    content = len(header).to_bytes(8, "little") + header
    (save(tmp_path) / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(AdapterError, match=r"truncated or damaged|no LoRA tensors"):
        read(tmp_path)


def test_a_pickle_with_a_payload_is_not_run(tmp_path: Path) -> None:
    harm = tmp_path / HARM
    (save(tmp_path / "adapter") / "adapter_model.safetensors").unlink()
    torch.save({"x": Payload(os.mkdir, str(harm))}, tmp_path / "adapter" / "adapter_model.bin")
    with pytest.raises(AdapterError, match=r"invalid adapter: adapter_model.bin ") as caught:
        read(tmp_path / "adapter")
    assert not harm.exists()
    assert str(tmp_path) not in str(caught.value)


@pytest.mark.parametrize("kept", [0, 10, 100, -1])
def test_truncated_pickles(tmp_path: Path, kept: int) -> None:
    (save(tmp_path) / "adapter_model.safetensors").unlink()
    file = tmp_path / "adapter_model.bin"
    torch.save(tensors(), file)
    os.truncate(file, kept % file.stat().st_size)
    with pytest.raises(AdapterError, match=r"truncated or damaged|not a pickle") as caught:
        read(tmp_path)
    assert str(tmp_path) not in str(caught.value)


@pytest.mark.parametrize(
    "value", [[A, B], {1: A}, {"a": 1}, {"a": A.to_sparse()}], ids=["list", "key", "int", "sparse"]
)
def test_pickles_of_other_things(tmp_path: Path, value: object) -> None:
    (save(tmp_path) / "adapter_model.safetensors").unlink()
    torch.save(value, tmp_path / "adapter_model.bin")
    with pytest.raises(AdapterError, match=r"invalid adapter: adapter_model.bin"):
        read(tmp_path)


def fused(up: bool = True, down: bool = True) -> dict[str, Tensor]:
    """Create an adapter of four experts, rank 2 each, nested as in PEFT."""
    module, root = "model.layers.0.mlp.experts", "base_model.model."
    names = {"up": f"{root}{module}{'.base_layer' * down}", "down": f"{root}{module}"}
    made = {}
    for kind in ["up"] * up + ["down"] * down:
        made[f"{names[kind]}.lora_A.weight"] = torch.randn(8, 5 if kind == "up" else 3)
        made[f"{names[kind]}.lora_B.weight"] = torch.randn(6 if kind == "up" else 5, 8)
    return made


@pytest.mark.parametrize("kinds", [("up", "down"), ("up",), ("down",)])
def test_parameters_of_all_experts(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    weights = fused("up" in kinds, "down" in kinds)
    names = {"up": "gate_up_proj", "down": "down_proj"}
    config = {"target_parameters": [f"experts.{names[kind]}" for kind in kinds], "rank_pattern": {}}
    config |= {"alpha_pattern": {r".*\.gate_up_proj": 8}}
    read_tensors, scales = read(save(tmp_path, weights, **config))
    module = "model.layers.0.mlp.experts"
    assert scales == {f"{module}.{names[kind]}": 4.0 if kind == "up" else 1.5 for kind in kinds}
    widths = {"up": (5, 6), "down": (3, 5)}
    for kind in kinds:
        a, b = (read_tensors[f"{module}.{names[kind]}.lora_{x}.weight"] for x in "AB")
        assert (a.shape[1], b.shape[0]) == widths[kind]


def test_parameters_of_another_rank(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="expected rank 3"):
        read(save(tmp_path, fused(), target_parameters=["gate_up_proj", "down_proj"], r=3))


def test_a_routers_parameter_has_its_own_pattern(tmp_path: Path) -> None:
    root = "base_model.model.model.layers.0.mlp.gate.lora_"
    weights = {f"{root}A.weight": torch.randn(2, 8), f"{root}B.weight": torch.randn(4, 2)}
    config = {"target_parameters": ["gate.weight"], "alpha_pattern": {"gate.weight": 10, "gate": 30}}
    assert read(save(tmp_path, weights, **config))[1] == {"model.layers.0.mlp.gate": 5.0}
