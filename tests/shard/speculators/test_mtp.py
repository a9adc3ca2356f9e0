"""Compares heads for multi-token prediction with transformers' layers, and checks that they change no
output."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.shard.draft_models import change_config
from tests.support.shard.drafting import draft_on_rank
from tests.support.shard.driver import Request, Router, configure
from tests.support.shard.mtp_heads import CONFIGS, write_mtp
from tests.support.shard.ranks import Ranks
from tests.support.shard.relay import serve
from tests.support.shard.speculator_scene import Base, Recorder, check_outputs, make_requests
from tgis.shard.runner.model_runner import HostModelRunner
from tgis.shard.speculators.interface import SpeculatorError
from tgis.shard.startup.load import load

FAST = ("mimo", "qwen3_next")
CASES = [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in FAST)) for kind in CONFIGS]


@pytest.mark.parametrize("kind", CASES)
def test_proposals_are_those_of_transformers_and_outputs_do_not_change(kind: str, tmp_path: Path) -> None:
    plain = write_mtp(tmp_path, kind)
    requests: list[Request] = [*make_requests()]
    Router(load(configure(tmp_path)), 3).run(list(requests))
    runner = load(configure(tmp_path, speculator="mtp"))
    assert isinstance(runner, HostModelRunner)
    assert runner.info.max_drafts == 3
    recorder = Recorder(runner)
    check_outputs(runner, Base(tmp_path, requests, []))
    assert all(proposed or len(known) == 1 for known, proposed in recorder.proposed)
    plain.check(recorder.proposed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAST)
def test_ranks_propose_the_same(kind: str, ranks: Ranks, tmp_path: Path) -> None:
    """Two ranks sum in another order than one, so their outputs are compared with their own."""
    write_mtp(tmp_path, kind)
    [(generated, digests), (_, theirs)] = ranks.run(2, draft_on_rank, tmp_path, Path("mtp"), make_requests())
    assert digests == theirs
    [(served, _), _] = ranks.run(2, serve, tmp_path, 1, [[*make_requests()]], 16)
    assert generated == [request.generated for request in served[0]]


def change_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        changed = change(tensors.pop(f"model.mtp_layers.0.{name}.weight"))
        if changed is not None:
            tensors[f"model.mtp_layers.0.{name}.weight"] = changed
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})

    return write


def add_tensor(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["model.mtp_layers.0.gate.weight"] = torch.ones(3)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def set_values(**values: Any) -> Callable[[Path], None]:
    return lambda directory: change_config(directory, **values)


ABSENT = "the checkpoint has no heads for multi-token prediction: "
NONE, NONE_QWEN = f"{ABSENT}num_nextn_predict_layers is ", f"{ABSENT}mtp_num_hidden_layers is "
FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "none": (set_values(num_nextn_predict_layers=0), f"{NONE}0"),
    "no number": (set_values(num_nextn_predict_layers=None), f"{NONE}None"),
    "several": (set_values(num_nextn_predict_layers=2), "num_nextn_predict_layers 2 of the configuration"),
    "family": (
        set_values(model_type="qwen2"),
        "of qwen2 are not supported; supported are: mimo, deepseek",
    ),
    "missing": (change_tensor("hidden_layernorm", lambda x: None), "hidden_layernorm.weight is missing"),
    "shape": (change_tensor("input_proj", lambda x: x[:, 1:].clone()), "expected [32, 64]"),
    "NaN": (
        change_tensor("mlp.up_proj", lambda x: x / 0),
        "up_proj.weight has values that are not finite",
    ),
    "more": (add_tensor, "tensor model.mtp_layers.0.gate.weight is not read"),
}


def test_heads_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    write_mtp(tmp_path, "mimo")
    config = (tmp_path / "config.json").read_text()
    tensors = load_file(tmp_path / "model.safetensors")
    for change, text in FAULTS.values():
        (tmp_path / "config.json").write_text(config)
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        change(tmp_path)
        with pytest.raises(SpeculatorError) as error:
            load(configure(tmp_path, speculator="mtp"))
        assert text in str(error.value)
        assert str(error.value).startswith("--speculator mtp: ")


def drop_heads(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    kept = {name: x for name, x in tensors.items() if not name.startswith("mtp.")}
    save_file(kept, directory / "model.safetensors", {"format": "pt"})


QWEN_FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "none": (set_values(mtp_num_hidden_layers=0), f"{NONE_QWEN}0"),
    "several": (set_values(mtp_num_hidden_layers=2), "mtp_num_hidden_layers 2 of the configuration"),
    "embedding": (
        set_values(mtp_use_dedicated_embeddings=True),
        "mtp_use_dedicated_embeddings True of the configuration is not supported",
    ),
    "missing": (drop_heads, "mtp.pre_fc_norm_embedding.weight is missing"),
}


@pytest.mark.parametrize("fault", QWEN_FAULTS)
def test_heads_of_qwen_that_cannot_be_used_are_refused(fault: str, tmp_path: Path) -> None:
    change, text = QWEN_FAULTS[fault]
    write_mtp(tmp_path, "qwen3_5_text")
    change(tmp_path)
    with pytest.raises(SpeculatorError) as error:
        load(configure(tmp_path, speculator="mtp"))
    assert text in str(error.value)
