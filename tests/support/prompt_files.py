"""Valid and invalid directories of soft prompts and adapters, written by the libraries that normally write
them."""

import json
import os
import pickletools
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tgis.prompts.soft_prompt import AdapterRequirements
from tgis.shard.memory.host_limits import release_memory

WIDTH = 8
REQUIRED = AdapterRequirements(
    prompt_width=WIDTH,
    dtype=torch.float32,
    is_encoder_decoder=False,
    max_prompt_tokens=16,
    max_prompt_bytes=1 << 20,
    max_adapter_bytes=1 << 20,
)
HARM = "harm"


class Payload:
    """Hostile payload that runs when it is unpickled."""

    def __init__(self, call: Callable[..., object], *arguments: object) -> None:
        self._made = call, arguments

    def __reduce__(self) -> object:
        return self._made


def random_prompt(num_tokens: int = 4, width: int = WIDTH, seed: int = 0) -> Tensor:
    return torch.randn(num_tokens, width, generator=torch.Generator().manual_seed(seed))


def save_prompt(directory: Path, tensor: object, name: str = "decoder.pt", is_zip: bool = True) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    torch.save(tensor, directory / name, _use_new_zipfile_serialization=is_zip)
    return directory


def save_config(directory: Path, **config: object) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def save_lora(directory: Path, seed: int = 0, rank: int = 2, width: int = WIDTH) -> Path:
    save_config(directory, peft_type="LORA", r=rank, lora_alpha=4)
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    shapes = {"lora_A": (rank, width), "lora_B": (width, rank)}
    tensors = {f"{module}.{name}.weight": random_prompt(*shape, seed=seed) for name, shape in shapes.items()}
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def rewrite_pickle(
    file: Path, change: Callable[[bytes], bytes], compression: int = zipfile.ZIP_STORED
) -> None:
    """Replace the pickle in a file by torch.save, with correct checksums."""
    with zipfile.ZipFile(file) as archive:
        records = {record.filename: archive.read(record) for record in archive.infolist()}
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in records.items():
            archive.writestr(name, change(content) if name.endswith("data.pkl") else content)


def claim_numbers(old: int, new: int) -> Callable[[bytes], bytes]:
    """Return a change of a pickle that replaces the small number `old` by `new` everywhere."""

    def change(content: bytes) -> bytes:
        places = [
            at for operation, result, at in pickletools.genops(content) if result == old and at is not None
        ]
        for at in reversed(places):
            content = content[:at] + b"\x8a\x08" + new.to_bytes(8, "little") + content[at + 2 :]
        return content

    return change


def age(directory: Path) -> Path:
    """Wait until the directory's files are so old that the clock distinguishes later changes."""
    changed = max((os.stat(path).st_ctime for path in directory.iterdir()), default=0.0)
    while time.time() < changed + 0.06:
        time.sleep(0.005)
    return directory


@contextmanager
def bounded_memory(max_growth_bytes: int) -> Iterator[None]:
    """Fail if the process's memory grows by more than that within the context."""
    release_memory()  # otherwise allocations may reuse freed memory and not show
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak to the present
    before = _peak_bytes()
    yield
    assert _peak_bytes() - before < max_growth_bytes


def _peak_bytes() -> int:
    [line] = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
