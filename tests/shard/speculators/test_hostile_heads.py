"""Checks that hostile speculators of every kind are refused at the start, or change no output."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.shard.draft_heads import States
from tests.support.shard.draft_models import SwitchedDrafts, write_neox
from tests.support.shard.driver import Request, Router, configure
from tests.support.shard.eagle3_heads import make_eagle3
from tests.support.shard.eagle_heads import make_eagle
from tests.support.shard.mtp_heads import write_mtp
from tests.support.shard.scheduled import Service, draw_ids, greedy
from tests.support.shard.speculator_scene import (
    VOCAB_SIZE,
    Base,
    Recorder,
    check_outputs,
    make_requests,
    write_base,
)
from tests.support.shard.speculators import make_medusa, make_mlp
from tgis.hub.model_files import read_json
from tgis.shard.checkpoint.tensors import Stored
from tgis.shard.quant.interface import MatrixRole, Rounder
from tgis.shard.quant.schemes.int8 import Int8
from tgis.shard.quant.schemes.portable_rounder import PORTABLE
from tgis.shard.runner.model_runner import HostModelRunner
from tgis.shard.speculators.interface import Served, SpeculatorError
from tgis.shard.speculators.registry import DraftCache, count_bytes, find_cache, load_speculator
from tgis.shard.startup.load import load
from tgis.shard.startup.prepare import prepare

Tensors = dict[str, torch.Tensor]
KINDS = ("mlp", "medusa", "eagle", "eagle3", "mtp", "draft model")
FAST = ("eagle3",)
CASES = [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in FAST)) for kind in KINDS]
# Tensors of served models of these kinds are read before those of the speculator.
OWN = {"mtp": "model.mtp_layers."}
FAR = torch.iinfo(torch.int64).max


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return write_base(tmp_path_factory.mktemp("base"), num_hidden_layers=4)


def write(kind: str, base: Base, directory: Path) -> tuple[Base, str, Path]:
    """Write a speculator. Return the served model, the name of the speculator and the file of its
    tensors."""
    if kind == "mtp":
        write_mtp(directory, "mimo")
        requests: list[Request] = [*make_requests()]
        Router(load(configure(directory)), 3).run(list(requests))
        return Base(directory, requests, []), "mtp", directory / "model.safetensors"
    if kind == "draft model":
        write_neox(directory, VOCAB_SIZE)
        return base, str(directory), directory / "model.safetensors"
    if kind in ("mlp", "medusa"):
        heads = {"mlp": make_mlp, "medusa": make_medusa}[kind](base.texts, VOCAB_SIZE)
    else:
        make: Callable[..., Any] = {"eagle": make_eagle, "eagle3": make_eagle3}[kind]
        options = {"layers": [1, 2, 3]} if kind == "eagle3" else {}
        texts = [text.token_ids for text in base.texts]
        heads, _ = make(States.load(base.directory), texts, **options)
    heads.write(directory)
    return base, str(directory), directory / heads.file


def change(file: Path, names: list[str], to: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = load_file(file)
    changed = {name: to(tensors[name]).contiguous() for name in names}
    save_file(tensors | changed, file, {"format": "pt"})


def list_own(kind: str, file: Path) -> list[str]:
    return [name for name in load_file(file) if name.startswith(OWN.get(kind, ""))]


def spoil_one(x: torch.Tensor) -> torch.Tensor:
    x.view(-1)[-1] = torch.nan
    return x


def overflow_one(x: torch.Tensor) -> torch.Tensor:
    x.view(-1)[0] = -torch.inf
    return x


def shift_ids(to: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def shift(x: torch.Tensor) -> torch.Tensor:
        x[-1] = to
        return x

    return shift


def list_faults(x: torch.Tensor) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    longer = [lambda x: torch.cat((x, x[:1])), lambda x: x[:-1], lambda x: x[None]]
    if x.dtype == torch.int64:
        return [*longer, shift_ids(VOCAB_SIZE), shift_ids(-VOCAB_SIZE), shift_ids(FAR), shift_ids(-FAR)]
    return longer if x.dtype == torch.bool else [*longer, spoil_one, overflow_one]


@pytest.mark.parametrize("kind", CASES)
def test_each_damaged_tensor_ends_the_start_with_one_line(base: Base, kind: str, tmp_path: Path) -> None:
    """Check wrong shapes, values that are not finite, and tokens that the model does not have."""
    served_base, name, file = write(kind, base, tmp_path / "heads")
    directory = served_base.directory
    model = load(configure(directory)).model
    served = Served(directory, read_json(directory, "config.json"), directory, 192)
    original = load_file(file)
    for tensor in list_own(kind, file):
        for fault in list_faults(original[tensor]):
            save_file(original | {tensor: fault(original[tensor].clone()).contiguous()}, file)
            with pytest.raises(SpeculatorError) as error:
                load_speculator(name, model, served, torch.float32)
            text = str(error.value)
            assert text.startswith(f"--speculator {name}: "), tensor
            assert "\n" not in text


@pytest.mark.parametrize("kind", CASES)
def test_the_cache_is_known_before_weights_are_read(base: Base, kind: str, tmp_path: Path) -> None:
    served_base, name, _ = write(kind, base, tmp_path / "heads")
    directory = served_base.directory
    plan = prepare(configure(directory, speculator=name, block_size=8))
    cache = find_cache(name, plan.choice.spec)
    model = load(configure(directory)).model
    served = Served(directory, read_json(directory, "config.json"), directory, 192)
    assert cache == DraftCache.of(load_speculator(name, model, served, torch.float32))
    if kind in ("mlp", "medusa"):
        assert cache is None
        return
    assert cache is not None
    spec, state_bytes = cache.spec, 4 * (0 if kind == "draft model" else model.spec.hidden_size)
    num_elements = 2 * spec.num_layers * 8 * spec.num_kv_heads * spec.head_dim
    assert cache.count_bytes(8, torch.float32) == 4 * num_elements + state_bytes


class CountingScheme(Int8):
    """Scheme that counts the bytes of the matrices, of which those that are not rounded take 2 each."""

    def __init__(self) -> None:
        self.num_bytes = 0.0

    def encode(
        self,
        role: MatrixRole,
        stored: Stored,
        rounder: Rounder = PORTABLE,
        importance: torch.Tensor | None = None,
    ) -> Stored:
        encoded = super().encode(role, stored, rounder, importance)
        layout = encoded.layout()
        num_elements = encoded.shape[0] * encoded.shape[1]
        self.num_bytes += num_elements * (2 if layout is None else layout.bytes_per_weight)
        return encoded


@pytest.mark.parametrize("kind", ["mlp", "medusa", "eagle", "eagle3"])
def test_rounded_heads_are_counted_at_their_stored_size(base: Base, kind: str, tmp_path: Path) -> None:
    _, name, _ = write(kind, base, tmp_path / "heads")
    model = load(configure(base.directory)).model
    served = Served(base.directory, read_json(base.directory, "config.json"), base.directory, 192)
    scheme = CountingScheme()
    load_speculator(name, model, served, torch.bfloat16, scheme)
    # The matrix that projects several states is read once for each of them.
    fc = load_file(tmp_path / "heads" / "model.safetensors")["fc.weight"].numel() if kind == "eagle3" else 0
    assert count_bytes(name, 2, scheme) == int(scheme.num_bytes) - 2 * 2 * fc
    assert count_bytes(name, 2) > count_bytes(name, 2, scheme)


def test_the_start_reports_kind_drafts_and_size(
    base: Base, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, name, _ = write("eagle3", base, tmp_path / "heads")
    with caplog.at_level("INFO"):
        load(configure(base.directory, speculator=name))
    (line,) = (each for each in caplog.messages if each.startswith("loaded the speculator"))
    assert f"{name} (eagle3): it drafts at most 5 tokens, its weights take " in line


def negate(x: torch.Tensor) -> torch.Tensor:
    return -x


def enlarge(x: torch.Tensor) -> torch.Tensor:
    """Return finite weights whose products are not finite."""
    return x.sign() * 1e37


HEADS = {"mlp": "head", "medusa": ".2.", "eagle": "fc", "eagle3": "lm_head", "mtp": "input_proj"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("values", [negate, enlarge])
def test_wrong_and_overflowing_heads_change_nothing(
    base: Base, kind: str, values: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    served_base, name, file = write(kind, base, tmp_path / "heads")
    names = [each for each in list_own(kind, file) if load_file(file)[each].dtype == torch.float32]
    change(
        file, [each for each in names if values is enlarge or HEADS.get(kind, "embed_out") in each], values
    )
    runner = load(configure(served_base.directory, speculator=name))
    assert isinstance(runner, HostModelRunner)
    assert check_outputs(runner, served_base).num_right < 10


def test_a_speculator_that_is_switched_off_and_on_proposes_the_same(base: Base, tmp_path: Path) -> None:
    """Check sequences that share a prefix, of which some are followed, some are not and some no longer. Those
    that are followed get the proposals that they get alone. Outputs are bit-equal to those without drafts."""
    heads, plain = make_eagle3(
        States.load(base.directory), [text.token_ids for text in base.texts], layers=[1, 2, 3]
    )
    runner = load(configure(base.directory, speculator=str(heads.write(tmp_path)), block_size=8))
    assert isinstance(runner, HostModelRunner)
    prefix = draw_ids(1, 40)
    texts = [(prefix if seed % 2 else prefix[:37]) + draw_ids(seed, 5) for seed in range(12)]
    truth = [greedy(text, 24) for text in texts]
    service = Service(runner, 60, 0, 1, max_prompt_tokens=64)
    service.run(truth)
    expected = [(each.token_ids, service.logprobs[each]) for each in truth]
    runner.reset()
    recorder = Recorder(runner)
    proposer = SwitchedDrafts(seed=2)
    service = Service(runner, 60, 0, 1, max_prompt_tokens=64, proposer=proposer)
    for _ in range(2):
        drafted = [greedy(text, 24) for text in texts]
        service.run(drafted)
        assert [(each.token_ids, service.logprobs[each]) for each in drafted] == expected
    assert proposer.num_stopped > 3
    assert proposer.num_unfollowed > 3
    assert service.scheduler.num_cache_hits > 100
    assert len(recorder.proposed) > 50
    assert all(proposed for _, proposed in recorder.proposed)
    plain.check(recorder.proposed)
