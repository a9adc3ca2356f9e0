"""Soft prompts written by torch and PEFT are read unchanged; for every other file the error is TGIS's, in
TGIS's order of checks."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.support.prompt_files import REQUIRED, WIDTH, random_prompt, save_config, save_prompt
from tgis.prompts.errors import AdapterError, AdapterNotFoundError, TooLargeError
from tgis.prompts.soft_prompt import AdapterRequirements, read_peft_type, read_prompt

SEQ2SEQ = replace(REQUIRED, is_encoder_decoder=True)
HALF = replace(REQUIRED, dtype=torch.float16)
NO_TENSOR = "Invalid prefix embedding tensor"
ODD = "Encoder/decoder prefix tensor must be of even length"
NOT_FINITE = "Prefix contains non-finite elements"


def fail(directory: Path, required: AdapterRequirements | None = REQUIRED) -> str:
    with pytest.raises(AdapterError) as caught:
        read_prompt(directory, required)
    assert str(directory) not in str(caught.value)
    return str(caught.value)


def check(
    directory: Path,
    decoder: Tensor | None,
    encoder: Tensor | None = None,
    required: AdapterRequirements | None = REQUIRED,
) -> None:
    prompt = read_prompt(directory, required)
    for tensor, expected in ((prompt.decoder, decoder), (prompt.encoder, encoder)):
        if expected is None:
            assert tensor is None
        else:
            assert tensor is not None
            assert tensor.dtype == (required.dtype if required else expected.dtype)
            assert tensor.is_contiguous()
            assert not tensor.requires_grad
            assert torch.equal(tensor, expected.detach().to(tensor.dtype))


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_reads_every_type(dtype: torch.dtype, is_zip: bool, tmp_path: Path) -> None:
    tensor = random_prompt().to(dtype)
    save_prompt(tmp_path, tensor, is_zip=is_zip)
    check(tmp_path, tensor)
    check(tmp_path, tensor, required=HALF)
    check(tmp_path, tensor, required=None)


@pytest.mark.parametrize(
    "tensor",
    [
        nn.Parameter(random_prompt()),
        random_prompt(WIDTH, 4).T,
        random_prompt(100)[50:54],
        random_prompt(1).expand(4, WIDTH),
        random_prompt(4, 2 * WIDTH)[:, ::2],
        random_prompt().requires_grad_() * 2,
    ],
    ids=["parameter", "transposed", "part", "expanded", "strided", "of a graph"],
)
def test_reads_any_view(tensor: Tensor, tmp_path: Path) -> None:
    save_prompt(tmp_path, tensor.detach() if not tensor.is_leaf else tensor)
    check(tmp_path, tensor)


@pytest.mark.parametrize("is_safe", [True, False])
def test_reads_prompts_written_by_peft(is_safe: bool, tmp_path: Path) -> None:
    from peft import PromptTuningConfig, TaskType, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8, hidden_size=WIDTH, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    tuning = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=6)
    model = get_peft_model(LlamaForCausalLM(config), tuning)
    model.save_pretrained(tmp_path, safe_serialization=is_safe)
    assert (tmp_path / "adapter_model.safetensors").exists() is is_safe
    expected = model.get_prompt(batch_size=1)[0]
    check(tmp_path, expected)
    save_prompt(tmp_path, random_prompt(3))
    check(tmp_path, expected)
    assert read_peft_type(tmp_path) == "PROMPT_TUNING"
    assert fail(tmp_path, SEQ2SEQ) == "encoder-decoder architectures not supported for peft models"


def test_safetensors_go_first_and_need_no_config(tmp_path: Path) -> None:
    save_prompt(tmp_path, {"prompt_embeddings": random_prompt(3)}, "adapter_model.bin")
    check(tmp_path, random_prompt(3))
    save_file(
        {"prompt_embeddings": random_prompt(5), "more": torch.ones(2)}, tmp_path / "adapter_model.safetensors"
    )
    check(tmp_path, random_prompt(5))
    (tmp_path / "adapter_config.json").write_text("[" * 100_000)
    check(tmp_path, random_prompt(5))


@pytest.mark.parametrize("kind", ["PREFIX_TUNING", "MULTITASK_PROMPT_TUNING", "LORA", "A\nB"])
def test_refuses_other_kinds(kind: str, tmp_path: Path) -> None:
    save_config(tmp_path, peft_type=kind)
    save_file({"prompt_embeddings": random_prompt()}, tmp_path / "adapter_model.safetensors")
    shown = kind.replace("\n", r"\n")
    assert fail(tmp_path) == f"adapter type {shown} is not currently supported"


def test_a_decoder_needs_its_own(tmp_path: Path) -> None:
    save_prompt(tmp_path, random_prompt(2), "encoder.pt")
    with pytest.raises(AdapterNotFoundError):
        read_prompt(tmp_path, REQUIRED)
    save_prompt(tmp_path, random_prompt(4))
    (tmp_path / "encoder.pt").write_bytes(b"nobody reads it")
    check(tmp_path, random_prompt(4))


def test_encoder_decoder_needs_one_of_both(tmp_path: Path) -> None:
    encoder, decoder = random_prompt(4), random_prompt(2)
    check(save_prompt(tmp_path / "e", encoder, "encoder.pt"), None, encoder, SEQ2SEQ)
    check(save_prompt(tmp_path / "d", decoder), decoder, None, SEQ2SEQ)
    check(save_prompt(tmp_path / "e", decoder), decoder, encoder, SEQ2SEQ)
    for name in ("encoder.pt", "decoder.pt"):
        save_prompt(tmp_path / name, decoder, "decoder.pt")
        save_prompt(tmp_path / name, encoder, "encoder.pt")
        save_prompt(tmp_path / name, random_prompt(3), name)
        assert fail(tmp_path / name, SEQ2SEQ) == ODD


@pytest.mark.parametrize("names", [[], ["decoder.pt.swp", ".decoder.pt.swp", "decoder.pt.part", "decoder"]])
def test_finds_nothing(names: list[str], tmp_path: Path) -> None:
    for name in names:
        save_prompt(tmp_path, random_prompt(), name)
    for required in (REQUIRED, SEQ2SEQ, None):
        with pytest.raises(AdapterNotFoundError):
            read_prompt(tmp_path, required)
    with pytest.raises(AdapterNotFoundError):
        read_prompt(tmp_path / "none", REQUIRED)


def test_other_files_of_pefts_hide_ours(tmp_path: Path) -> None:
    save_prompt(tmp_path, random_prompt())
    for name in (
        "adapter_model.swp",
        "adapter_model.tmp",
        "adapter_model.safetensors.part",
        "my_adapter_model.bin",
    ):
        (tmp_path / name).touch()
        check(tmp_path, random_prompt())
    (tmp_path / "adapter_model.h5").touch()
    with pytest.raises(AdapterNotFoundError):
        read_prompt(tmp_path, REQUIRED)


WIDE = f"Prefix embedding tensor dim 9 does not match model ({WIDTH})"
CAUSES: list[tuple[object, AdapterRequirements, str]] = [
    ([random_prompt()], REQUIRED, NO_TENSOR),
    ({"decoder": random_prompt()}, REQUIRED, NO_TENSOR),
    (None, REQUIRED, NO_TENSOR),
    ("text", REQUIRED, NO_TENSOR),
    (torch.ones(WIDTH), REQUIRED, NO_TENSOR),
    (torch.ones(1, 4, WIDTH), REQUIRED, NO_TENSOR),
    (torch.tensor(1.0), REQUIRED, NO_TENSOR),
    (torch.ones(4, WIDTH, dtype=torch.int64), REQUIRED, NO_TENSOR),
    (torch.ones(4, WIDTH, dtype=torch.bool), REQUIRED, NO_TENSOR),
    (torch.ones(4, WIDTH, dtype=torch.complex64), REQUIRED, NO_TENSOR),
    (torch.ones(4, WIDTH, dtype=torch.float8_e4m3fn), REQUIRED, NO_TENSOR),
    (torch.ones(4, WIDTH, device="meta"), REQUIRED, NO_TENSOR),
    (torch.eye(4, WIDTH).to_sparse(), REQUIRED, NO_TENSOR),
    (torch.ones(0, WIDTH), REQUIRED, "Invalid prefix embedding length of 0"),
    (torch.ones(17, WIDTH), REQUIRED, "Invalid prefix embedding length of 17"),
    (torch.ones(1, 9).expand(10**9, 9), REQUIRED, "Invalid prefix embedding length of 1000000000"),
    (torch.ones(3, WIDTH), SEQ2SEQ, ODD),
    (torch.ones(4, 9), REQUIRED, WIDE),
    (torch.ones(4, 0), REQUIRED, f"Prefix embedding tensor dim 0 does not match model ({WIDTH})"),
    (torch.full((4, WIDTH), torch.nan), REQUIRED, NOT_FINITE),
    (torch.full((4, WIDTH), -torch.inf), HALF, NOT_FINITE),
    (torch.full((4, WIDTH), 1e5), HALF, f"{NOT_FINITE} after conversion from torch.float32 to torch.float16"),
    (
        torch.full((4, WIDTH), 1e300, dtype=torch.float64),
        REQUIRED,
        f"{NOT_FINITE} after conversion from torch.float64 to torch.float32",
    ),
    # The first of several is used.
    (torch.full((17, 9), torch.nan), SEQ2SEQ, "Invalid prefix embedding length of 17"),
    (torch.full((3, 9), torch.nan), SEQ2SEQ, ODD),
    (torch.full((4, 9), torch.nan), SEQ2SEQ, WIDE),
]


@pytest.mark.parametrize(("content", "required", "text"), CAUSES)
def test_errors_name_the_fault(
    content: object, required: AdapterRequirements, text: str, tmp_path: Path
) -> None:
    assert fail(save_prompt(tmp_path, content), required) == text
    if not required.is_encoder_decoder:
        peft = save_prompt(tmp_path / "peft", {"prompt_embeddings": content}, "adapter_model.bin")
        assert fail(peft, required) == text


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_refuses_quantized_and_nested(tmp_path: Path) -> None:
    for tensor in (
        torch.quantize_per_tensor(torch.ones(4, WIDTH), 0.1, 0, torch.quint8),
        torch.nested.nested_tensor([torch.ones(WIDTH), torch.ones(WIDTH)]),
    ):
        assert fail(save_prompt(tmp_path, tensor)) == NO_TENSOR


def test_without_a_model_checks_the_rest(tmp_path: Path) -> None:
    check(save_prompt(tmp_path, random_prompt(1001, 3)), random_prompt(1001, 3), required=None)
    for tensor, text in (
        (torch.ones(4), NO_TENSOR),
        (torch.ones(0, 4), "Invalid prefix embedding length of 0"),
        (torch.ones(4, 0), "Prefix embedding tensor dim 0 does not match model (1 or more)"),
        (torch.full((4, 4), torch.inf), NOT_FINITE),
    ):
        assert fail(save_prompt(tmp_path, tensor), None) == text
    save_prompt(tmp_path, torch.ones(1, 1).expand(10**6, 10**6))
    with pytest.raises(TooLargeError):
        read_prompt(tmp_path, None)


def test_safetensors_must_hold_embeddings(tmp_path: Path) -> None:
    file = tmp_path / "adapter_model.safetensors"
    for tensors in (
        {"embeddings": torch.ones(4, WIDTH)},
        {"prompt_embeddings": torch.ones(4)},
        {"prompt_embeddings": torch.ones(4, WIDTH, dtype=torch.int8)},
        {"prompt_embeddings": torch.ones(4, WIDTH, dtype=torch.float8_e5m2)},
    ):
        save_file(tensors, file)
        assert fail(tmp_path) == NO_TENSOR
    save_file({"prompt_embeddings": torch.ones(4, 9)}, file)
    assert fail(tmp_path) == WIDE
    assert load_file(file)
