"""Compares speculators with plain models of them over transformers' states, and checks that they change no
output."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.shard.adapted_drafts import check_adapted_outputs, write_adapters
from tests.support.shard.checkpoints import write_model
from tests.support.shard.drafting import draft_on_rank
from tests.support.shard.driver import Request, Router, configure
from tests.support.shard.family_cases.all import CASES as FAMILIES
from tests.support.shard.messages import Steps, integers, open_row
from tests.support.shard.ranks import Ranks
from tests.support.shard.relay import serve
from tests.support.shard.speculator_scene import (
    HEADS,
    VOCAB_SIZE,
    Base,
    Recorder,
    check_outputs,
    check_proposals,
    make_requests,
    write_base,
)
from tests.support.shard.speculators import (
    Heads,
    add_nan,
    make_medusa,
    make_mlp,
    remove,
    set_config,
    spoil,
)
from tgis.shard.collectives import ProcessGroup
from tgis.shard.runner.model_runner import HostModelRunner
from tgis.shard.runner.proposers.graph_stages import GraphStages
from tgis.shard.runner.proposers.speculator import SpeculatorProposer
from tgis.shard.speculators.interface import SpeculatorError
from tgis.shard.startup.load import load
from tgis.shard.startup.prepare import prepare


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return write_base(tmp_path_factory.mktemp("base"))


MAKERS: dict[str, Callable[[Base], Heads]] = {
    **HEADS,
    "medusa_models_head": lambda base: make_medusa(base.texts, VOCAB_SIZE, head=read_head(base)),
    "medusa_vllm": lambda base: make_medusa(base.texts, VOCAB_SIZE, num_layers=1, is_vllm=True),
}
LIKELY = ("mlp", "mlp_tied_scaled", "medusa", "medusa_vllm")


def read_head(base: Base) -> torch.Tensor:
    return load_file(base.directory / "model.safetensors")["lm_head.weight"]


def load_runner(
    base: Base, heads: Heads, directory: Path, group: ProcessGroup | None = None
) -> HostModelRunner:
    speculator = heads.write(directory)
    runner = load(configure(base.directory, speculator=str(speculator)), group)
    assert isinstance(runner, HostModelRunner)
    assert runner.info.max_drafts == heads.num_tokens
    return runner


@pytest.mark.parametrize("kind", MAKERS)
def test_proposals_are_the_plain_models_and_outputs_do_not_change(
    base: Base, kind: str, tmp_path: Path
) -> None:
    heads = MAKERS[kind](base)
    runner = load_runner(base, heads, tmp_path / "speculator")
    recorder = Recorder(runner)
    router = check_outputs(runner, base)
    assert (router.num_right > 30) or kind not in LIKELY
    stages = runner._speculator._run  # type: ignore[union-attr]
    assert stages.find_graph(1, 1) is not None, "proposals are replayed as kernel graphs"
    assert all(proposed or len(known) == 1 for known, proposed in recorder.proposed)
    check_proposals(base, heads, recorder.proposed)


@pytest.mark.parametrize("kind", MAKERS)
def test_replayed_stages_have_the_same_bits(base: Base, kind: str, tmp_path: Path) -> None:
    runner = load_runner(base, MAKERS[kind](base), tmp_path / "speculator")
    proposer = runner._speculator
    assert isinstance(proposer, SpeculatorProposer)
    speculator, replay = proposer._speculator, GraphStages()
    captured = []

    def run(stage: int, compute: Callable[..., Sequence[Tensor]], *inputs: Tensor) -> Sequence[Tensor]:
        expected = [x.clone() for x in compute(*inputs)]
        outputs = replay(stage, compute, *inputs)
        for x, y in zip(outputs, expected, strict=True):
            assert torch.equal(x, y)
        captured.append(replay.find_graph(stage, len(inputs[0])))
        return outputs

    torch.manual_seed(0)
    with torch.inference_mode():
        for count in (1, 3, 1, 2, 3):
            states, ids = torch.randn(count, 64), torch.randint(VOCAB_SIZE, (count,))
            for number in (speculator.num_tokens, 1):
                proposed = speculator.propose(states, ids, number, run)
                assert torch.equal(proposed, speculator.propose(states, ids, number))
    assert captured
    assert None not in captured


@pytest.mark.parametrize("kind", ["mlp", "medusa"])
def test_heads_of_a_quantized_model_are_rounded_and_outputs_do_not_change(
    base: Base, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    requests: list[Request] = [*make_requests()]
    Router(load(configure(base.directory, quantize="int8")), 3).run(list(requests))
    speculator = MAKERS[kind](base).write(tmp_path / "speculator")
    with caplog.at_level("INFO"):
        runner = load(configure(base.directory, speculator=str(speculator), quantize="int8"))
    assert "the weights of the speculator's layers are stored as 8-bit codes" in caplog.messages
    assert isinstance(runner, HostModelRunner)
    assert check_outputs(runner, base._replace(requests=requests)).num_right > 20


def test_wrong_proposals_change_nothing(base: Base, tmp_path: Path) -> None:
    heads = make_mlp(base.texts, VOCAB_SIZE)
    for stage in range(heads.num_tokens):
        heads.tensors[f"speculator.head.{stage}.weight"].neg_()
    router = check_outputs(load_runner(base, heads, tmp_path / "speculator"), base)
    assert router.num_right < 5


def test_a_row_without_a_state_gets_no_drafts(base: Base, tmp_path: Path) -> None:
    runner = load_runner(base, make_medusa(base.texts, VOCAB_SIZE), tmp_path / "speculator")
    assert runner._speculator is not None
    steps = Steps(runner.info.block_size, runner.info.num_blocks)
    runner.launch(steps.step([(0, 0, 3)], [open_row(0, [5, 6, 7], max_new_tokens=12)])).answer()
    runner._speculator.reset()
    response = runner.launch(steps.step([(0, 3, 4)], max_drafts={0: 3})).answer()
    assert (len(integers(response.token_ids)), integers(response.num_drafts)) == (1, [])
    response = runner.launch(steps.step([(0, 4, 5)], max_drafts={0: 2})).answer()
    assert integers(response.num_drafts) == [2]


FAULTS: dict[str, tuple[str, Callable[[Heads], None], str]] = {
    "unknown kind": (
        "mlp",
        set_config(model_type="hydra"),
        "none of these kinds: mlp_speculator, medusa",
    ),
    "vocabulary": ("mlp", set_config(vocab_size=400), "vocab_size 400 differs from the model's 403"),
    "width": ("mlp", set_config(emb_dim=32), "emb_dim 32 differs from the model's 64"),
    "too few stages": ("mlp", set_config(n_predict=4), "emb.3.weight is missing"),
    "no count": ("mlp", set_config(n_predict=None), "n_predict is missing"),
    "not a count": ("mlp", set_config(n_predict=True), "n_predict True"),
    "shape": ("mlp", spoil("speculator.proj.1.weight", lambda x: x[:-1]), "expected [96, 96]"),
    "NaN": (
        "mlp",
        spoil("speculator.head.2.weight", add_nan),
        "head.2.weight has values that are not finite",
    ),
    "NaN of a norm": (
        "mlp",
        spoil("speculator.ln.0.bias", add_nan),
        "ln.0.bias has values that are not finite",
    ),
    "missing": ("mlp", remove("speculator.emb.0.weight"), "emb.0.weight is missing"),
    "infinite": ("medusa", spoil("1.0.linear.bias", lambda x: x / 0), "1.0.linear.bias has values"),
    "heads": ("medusa", set_config(medusa_num_heads=5), "3.0.linear.weight is missing"),
    "layers": ("medusa", set_config(medusa_num_layers=1), "tensor 0.1.linear.bias is not read"),
    "fewer tokens": ("medusa_vllm", set_config(truncated_vocab_size=100), "truncated_vocab_size 100"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_speculator_that_does_not_fit_is_refused(base: Base, fault: str, tmp_path: Path) -> None:
    kind, change, text = FAULTS[fault]
    heads = MAKERS[kind](base)
    change(heads)
    with pytest.raises(SpeculatorError) as error:
        load_runner(base, heads, tmp_path / "speculator")
    assert text in str(error.value)
    assert str(error.value).startswith(f"--speculator {tmp_path / 'speculator'}: ")
    assert "\n" not in str(error.value)


def test_a_directory_without_weights_is_refused(base: Base, tmp_path: Path) -> None:
    heads = MAKERS["medusa"](base)
    directory = heads.write(tmp_path / "speculator")
    (directory / heads.file).unlink()
    with pytest.raises(SpeculatorError, match=r"there is no medusa_lm_head\.safetensors"):
        load(configure(base.directory, speculator=str(directory)))


def test_a_directory_without_a_configuration_is_refused(base: Base, tmp_path: Path) -> None:
    directory = MAKERS["mlp"](base).write(tmp_path / "speculator")
    (directory / "config.json").unlink()
    with pytest.raises(SpeculatorError) as error:
        prepare(configure(base.directory, speculator=str(directory))).check_fit(ProcessGroup(0, 1))
    assert str(error.value) == f"--speculator {directory}: the directory has no config.json"


@pytest.mark.parametrize("kind", ["mlp", "medusa", "draft model", "mtp"])
@pytest.mark.parametrize("served", ["transformers' code", "encoder-decoder"])
def test_a_model_that_has_no_speculators_is_known_before_weights_are_read(
    base: Base, kind: str, served: str, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    if served == "encoder-decoder":
        write_model(directory, FAMILIES["t5"]())
    else:
        shutil.copytree(base.directory, directory)
    name = "mtp"
    if kind == "draft model":
        name = str(base.directory)
    elif kind != "mtp":
        name = str(MAKERS[kind](base).write(tmp_path / "speculator"))
    framework = "tgis_native" if served == "encoder-decoder" else "hf_transformers"
    with pytest.raises(SpeculatorError) as error:
        prepare(configure(directory, speculator=name, deployment_framework=framework))
    text = str(error.value)
    assert text.startswith(f"--speculator {name}: ")
    assert text.endswith(" needs a decoder that the service's own engine runs")


def test_a_damaged_file_is_refused(base: Base, tmp_path: Path) -> None:
    directory = MAKERS["mlp"](base).write(tmp_path / "speculator")
    (directory / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(SpeculatorError, match="damaged"):
        load(configure(base.directory, speculator=str(directory)))


def test_pickled_heads_are_read(base: Base, tmp_path: Path) -> None:
    heads = MAKERS["medusa"](base)
    directory = heads.write(tmp_path / "speculator")
    (directory / heads.file).unlink()
    torch.save(heads.tensors, directory / "medusa_lm_head.pt")
    runner = load(configure(base.directory, speculator=str(directory)))
    assert runner.info.max_drafts == heads.num_tokens


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mlp", "medusa_models_head"])
def test_ranks_propose_the_same(base: Base, kind: str, ranks: Ranks, tmp_path: Path) -> None:
    """Two ranks sum in another order than one, so their outputs are compared with their own."""
    directory = MAKERS[kind](base).write(tmp_path / "speculator")
    [(generated, digests), (_, theirs)] = ranks.run(
        2, draft_on_rank, base.directory, directory, make_requests()
    )
    assert digests == theirs
    [(served, _), _] = ranks.run(2, serve, base.directory, 1, [[*make_requests()]], 16)
    assert generated == [request.generated for request in served[0]]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_rows_with_adapters_and_soft_prompts(base: Base, seed: int, tmp_path: Path) -> None:
    copies, options = write_adapters(base, tmp_path, seed)
    speculator = MAKERS["mlp"](base).write(tmp_path / "speculator")
    runner = load(configure(base.directory, speculator=str(speculator), **options))
    check_adapted_outputs(runner, runner, copies, seed)
