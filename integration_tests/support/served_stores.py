"""Creates the soft prompts and adapters of the served models, valid and invalid ones."""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from integration_tests.support.first_error import Names
from integration_tests.support.tuned_files import (
    LINEAR,
    SoftPrompt,
    edit_adapter,
    embeddings,
    write_adapter,
    write_misfit,
    write_peft_prompt,
    write_prompt,
)

T5_LINEAR = ["q", "k", "v", "o", "wi_0", "wi_1", "wo"]
NOT_FINITE = "Prefix contains non-finite elements"
WRONG_WIDTH = "Prefix embedding tensor dim 40 does not match model (32)"
WRONG_LENGTH = "Invalid prefix embedding length of {}"


@dataclass(frozen=True)
class Store:
    """Content of the store, for the oracle, with the reasons for refusals."""

    flags: tuple[str, ...] = ()
    prompts: dict[str, SoftPrompt] = field(default_factory=dict)
    adapters: dict[str, Path] = field(default_factory=dict)
    names: Names = field(default_factory=Names)


def write_decoder_store(model: Path) -> Store:
    """Adapters are in their own directory; one of them is among the prompts."""
    root, cache = (model.parent / f"{model.name}-{kind}" for kind in ("prompts", "adapters"))
    prompts = {
        "eight": write_prompt(root / "eight", SoftPrompt(embeddings(8, 1))),
        "one": write_prompt(root / "one", SoftPrompt(embeddings(1, 2))),
        "hundred": write_prompt(root / "hundred", SoftPrompt(embeddings(100, 3))),
        "half": write_prompt(root / "half", SoftPrompt(embeddings(5, 4)), torch.bfloat16),
        "peft.v1": write_peft_prompt(root / "peft.v1", model, 6, 5),
        "peft/raw": write_peft_prompt(root / "peft" / "raw", model, 7, 6, safe=False),
    }
    (root / "nested").mkdir()
    (root / "nested" / "path").symlink_to("../eight")
    prompts["nested/path"] = prompts["eight"]
    causes = write_bad_prompts(root)
    adapters = {"mlp": cache / "mlp", "nested/all.v2": cache / "nested" / "all.v2", "lora": root / "lora"}
    write_adapter(adapters["mlp"], model, 1, LINEAR[4:], use_rslora=True)
    write_adapter(adapters["nested/all.v2"], model, 2, [*LINEAR, "embed_tokens", "lm_head"], r=3)
    write_adapter(adapters["lora"], model, 3, LINEAR[:4])
    errors = write_bad_adapters(cache, model)
    names = Names(
        {name: len(prompt.decoder) for name, prompt in prompts.items()},
        adapters,
        ["lora"],
        causes,
        errors,
    )
    return Store(("--prefix-store-path", str(root), "--adapter-cache", str(cache)), prompts, adapters, names)


def write_bad_prompts(root: Path) -> dict[str, str]:
    """Return the reasons for refusals, by id; not all ids exist."""
    nan = embeddings(4, 7)
    nan[3, 31] = torch.nan
    bad = {
        "nan": (nan, NOT_FINITE),
        "wide": (embeddings(4, 8, width=40), WRONG_WIDTH),
        "cube": (embeddings(4, 9)[None], "Invalid prefix embedding tensor"),
        "long": (embeddings(101, 10), WRONG_LENGTH.format(101)),
        "empty": (embeddings(0, 11), WRONG_LENGTH.format(0)),
        "large": (
            torch.full((2, 32), 1e39, dtype=torch.float64),
            f"{NOT_FINITE} after conversion from torch.float64 to torch.float32",
        ),
    }
    for name, (tensor, _) in bad.items():
        (root / name).mkdir(parents=True)
        torch.save(tensor, root / name / "decoder.pt")
    return {name: cause for name, (_, cause) in bad.items()}


def write_bad_adapters(root: Path, model: Path) -> dict[str, str]:
    """Return the errors, by id."""
    write_peft_prompt(root / "tuned", model, 3, 0)
    write_adapter(root / "dora", model, 0, ["q_proj"], use_dora=True)
    write_misfit(root / "misfit", model)
    write_adapter(root / "other", model, 0, ["q_proj"])
    edit_adapter(root / "other", peft_type="IA3")
    (root / "bare").mkdir()
    return {
        "tuned": "adapter type PROMPT_TUNING is not currently supported",
        "other": "adapter type IA3 is not currently supported",
        "bare": "can't retrieve adapter with id 'bare': invalid adapter: no adapter_config.json found",
    }


def write_encoder_decoder_store(model: Path) -> Store:
    """One directory for everything."""
    root = model.parent / f"{model.name}-store"
    six, four = embeddings(6, 21), embeddings(4, 22)
    prompts = {
        "both": write_prompt(root / "both", SoftPrompt(four, six)),
        "encoder_only": write_prompt(root / "encoder_only", SoftPrompt(encoder=six)),
        "decoder_only": write_prompt(root / "decoder_only", SoftPrompt(decoder=four)),
    }
    write_prompt(root / "odd", SoftPrompt(encoder=six, decoder=embeddings(3, 23)))
    (root / "peft").mkdir()
    torch.save({"prompt_embeddings": six}, root / "peft" / "adapter_model.bin")
    causes = {
        "odd": "Encoder/decoder prefix tensor must be of even length",
        "peft": "encoder-decoder architectures not supported for peft models",
    }
    adapters = {"lora": root / "lora"}
    write_adapter(adapters["lora"], model, 4, T5_LINEAR)
    # A decoder's prompt precedes its start token, which then counts too.
    lengths = {"both": 6 + 4 + 1, "encoder_only": 6, "decoder_only": 4 + 1}
    return Store(
        ("--prefix-store-path", str(root)), prompts, adapters, Names(lengths, adapters, adapters, causes)
    )
