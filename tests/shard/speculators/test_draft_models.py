"""Compares draft models with transformers, and checks that they change no output."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers
from safetensors.torch import load_file, save_file

from tests.support.shard.checkpoints import write_llama
from tests.support.shard.draft_models import AlwaysDrafts, Oracle, change_config, write_neox
from tests.support.shard.drafting import draft_on_rank
from tests.support.shard.driver import configure
from tests.support.shard.quantized_files import KINDS, write_quantized
from tests.support.shard.ranks import Ranks
from tests.support.shard.relay import serve
from tests.support.shard.scheduled import Service, draw_ids, greedy
from tests.support.shard.speculator_scene import (
    VOCAB_SIZE,
    Base,
    Recorder,
    check_outputs,
    make_requests,
    write_base,
)
from tgis.shard.runner.model_runner import HostModelRunner
from tgis.shard.runner.proposers.draft_model import DraftModelProposer
from tgis.shard.speculators.interface import SpeculatorError
from tgis.shard.startup.load import load


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return write_base(tmp_path_factory.mktemp("base"))


def copy_base(base: Base, directory: Path) -> Path:
    shutil.copytree(base.directory, directory)
    return directory


def write_other(base: Base, directory: Path) -> Path:
    """Write a model that knows fewer token ids than the served one."""
    write_neox(directory, VOCAB_SIZE - 3)
    shutil.copy(base.directory / "tokenizer.json", directory)
    return directory


MAKERS: dict[str, Callable[[Base, Path], Path]] = {"copy": copy_base, "other": write_other}


def load_runner(base: Base, draft: Path, **options: int) -> HostModelRunner:
    runner = load(configure(base.directory, speculator=str(draft), **options))
    assert isinstance(runner, HostModelRunner)
    assert runner.info.max_drafts == 8
    return runner


@pytest.mark.parametrize("kind", MAKERS)
def test_proposals_are_those_of_transformers_and_outputs_do_not_change(
    base: Base, kind: str, tmp_path: Path
) -> None:
    directory = MAKERS[kind](base, tmp_path / "draft")
    runner = load_runner(base, directory)
    recorder = Recorder(runner)
    router = check_outputs(runner, base)
    assert (router.num_right > 60) == (kind == "copy")
    oracle = Oracle(directory, VOCAB_SIZE)
    assert all(proposed for _, proposed in recorder.proposed)
    for known, proposed in recorder.proposed:
        oracle.check([min(token_id, oracle.vocab_size - 1) for token_id in known], proposed)


@pytest.mark.slow
def test_a_quantized_copy_of_the_model_is_a_draft(base: Base, tmp_path: Path) -> None:
    rounded = copy_base(base, tmp_path / "rounded")  # its numbers become those of the quantized copy
    write_quantized(rounded, tmp_path / "draft", KINDS["nf4"])
    router = check_outputs(load_runner(base, tmp_path / "draft"), base)
    assert router.num_right > 30


class Counted:
    """Forward pass that counts tokens."""

    def __init__(self, proposer: DraftModelProposer) -> None:
        self._forward = proposer._forward
        self.num_tokens = 0
        proposer._forward = self  # type: ignore[assignment]

    def __call__(self, batch: object) -> object:
        self.num_tokens += len(batch.inputs.token_ids)  # type: ignore[attr-defined]
        return self._forward(batch)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_blocks", [60, 14])
def test_shared_and_preempted_sequences(base: Base, num_blocks: int) -> None:
    """Check proposals of sequences that share a prefix, also when blocks are few and sequences begin anew."""
    runner = load_runner(base, base.directory, block_size=8)
    recorder = Recorder(runner)
    assert isinstance(runner._speculator, DraftModelProposer)
    counted = Counted(runner._speculator)
    prefix = draw_ids(1, 40)
    truth = [greedy(prefix + draw_ids(seed, 5), 24) for seed in range(6)]
    Service(runner, 60, 0, 1, max_prompt_tokens=64).run(truth)
    assert not recorder.proposed
    num_plain = counted.num_tokens
    # The first prompt is computed once, and of the others only what differs.
    assert num_plain <= 45 + 5 * 5
    runner.reset()
    service = Service(runner, num_blocks, 0, 1, max_prompt_tokens=64, proposer=AlwaysDrafts())
    drafted = [greedy(prefix + draw_ids(seed, 5), 24) for seed in range(6)]
    service.run(drafted)
    assert [each.token_ids for each in drafted] == [each.token_ids for each in truth]
    assert service.scheduler.num_accepted_drafts > 60
    assert (service.scheduler.num_preemptions > 0) == (num_blocks == 14)
    oracle = Oracle(base.directory, VOCAB_SIZE)
    for known, proposed in recorder.proposed:
        if proposed:
            oracle.check(known, proposed)
    if num_blocks == 60:
        # Of each draft, one token is computed, and after drafts that are all right the last one, too.
        assert counted.num_tokens - num_plain <= 45 + 5 * 5 + 6 * 24 * 2


def test_a_row_without_its_prompt_gets_drafts_later(base: Base) -> None:
    """A step does not draft for a row of which the draft model lacks many tokens, but computes them."""
    runner = load_runner(base, base.directory)
    recorder = Recorder(runner)
    never_follows = AlwaysDrafts(is_following=False)
    service = Service(runner, 12, 0, 1, max_prompt_tokens=64, proposer=never_follows)
    service.run([greedy(draw_ids(3, 30), 20)])
    assert [bool(proposed) for _, proposed in recorder.proposed[:3]] == [False, True, True]


def spoil_head(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"][3, 3] = float("nan")
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def change_tokens(directory: Path) -> None:
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["unknown to the model"] = 401
    path.write_text(json.dumps(content))


T5 = {"model_type": "t5", "d_model": 8, "d_kv": 2, "d_ff": 8, "num_layers": 1, "num_heads": 4}
FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "values": (spoil_head, "lm_head.weight has values that are not finite"),
    "tokens": (change_tokens, "the draft model's tokenizer has other tokens than the model's"),
    "shapes": (lambda path: change_config(path, num_attention_heads=8), "expected ["),
    "layers": (lambda path: change_config(path, num_hidden_layers=9), "is missing"),
    "family": (lambda path: change_config(path, model_type="t5x"), "eagle, a causal language model"),
    "encoder": (
        lambda path: change_config(
            path, model_type="t5", d_model=8, d_kv=2, d_ff=8, num_layers=1, num_heads=4
        ),
        "a draft model must be a decoder",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_draft_model_that_does_not_fit_is_refused(base: Base, fault: str, tmp_path: Path) -> None:
    directory = copy_base(base, tmp_path / "draft")
    change, text = FAULTS[fault]
    change(directory)
    with pytest.raises(SpeculatorError) as error:
        load_runner(base, directory)
    assert text in str(error.value)
    assert str(error.value).startswith(f"--speculator {directory}: ")


def test_a_draft_model_without_a_tokenizer_has_the_models_number_of_tokens(
    base: Base, tmp_path: Path
) -> None:
    write_llama(tmp_path, vocab_size=VOCAB_SIZE + 1)
    with pytest.raises(SpeculatorError, match="vocab_size 404 differs from the model's 403"):
        load_runner(base, tmp_path)


def test_a_draft_model_has_enough_positions(base: Base, tmp_path: Path) -> None:
    config = transformers.GPT2Config(
        vocab_size=VOCAB_SIZE, n_positions=64, n_embd=32, n_layer=1, n_head=4, eos_token_id=2
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(SpeculatorError, match="192 exceeds the draft model's 64 positions"):
        load_runner(base, tmp_path)


@pytest.mark.slow
def test_ranks_propose_the_same(base: Base, ranks: Ranks) -> None:
    """Two ranks sum in another order than one, so their outputs are compared with their own."""
    [(generated, digests), (_, theirs)] = ranks.run(
        2, draft_on_rank, base.directory, base.directory, make_requests()
    )
    assert digests == theirs
    [(served, _), _] = ranks.run(2, serve, base.directory, 1, [[*make_requests()]], 16)
    assert generated == [request.generated for request in served[0]]
