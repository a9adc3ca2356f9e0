"""Encoder-decoder models in the engine: long inputs, shared inputs, inputs that cannot be served, and
variants of checkpoints. `test_every_family` tests the configurations of families."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.t5.modeling_t5 import T5Attention

from tests.support.shard.checkpoints import write_model
from tests.support.shard.driver import Request, Router, configure, opening
from tests.support.shard.family_cases.encoder_decoders import CASES
from tests.support.shard.messages import SAMPLE, Steps, floats, integers
from tgis.shard.attention.interface import StepLayout
from tgis.shard.kernels.cpu.attention.plan import QUERY_TILE, CpuPlan
from tgis.shard.models import registry
from tgis.shard.models.interface import UnsupportedModelError
from tgis.shard.models.parts.relative_bias import find_buckets
from tgis.shard.models.spec import RelativeBias
from tgis.shard.startup.load import load

START = 2
DETAILS = {"logprobs": True}


class Served:
    """Engine of a case, and the same checkpoint in transformers."""

    def __init__(self, directory: Path) -> None:
        self.runner = load(configure(directory, max_sequence_length=224, kv_cache_tokens=2048))
        options = {"dtype": torch.float32, "attn_implementation": "eager"}
        self.oracle = transformers.AutoModelForSeq2SeqLM.from_pretrained(directory, **options).eval()

    @torch.inference_mode()
    def expected(self, request: Request) -> Tensor:
        """Return the logprobs after each token but the last, float32 [len(generated), vocab_size]."""
        decoder_ids = request.prompt + request.generated[:-1]
        out = self.oracle(
            input_ids=torch.tensor([request.encoder_token_ids]), decoder_input_ids=torch.tensor([decoder_ids])
        )
        return out.logits[0, len(request.prompt) - 1 :].log_softmax(-1)

    def check(self, request: Request) -> None:
        """Check that greedy tokens have the highest logprobs, or equal ones within the tolerance."""
        expected = self.expected(request)
        chosen = expected.gather(1, torch.tensor(request.generated)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(request.logprobs), chosen, rtol=1e-4, atol=1e-4)
        assert (expected.max(-1).values - chosen < 1e-4).all()


@pytest.fixture(scope="module")
def find(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("encoder_decoders")

    def find(case: str) -> Path:
        if not (root / case).exists():
            write_model(root / case, CASES[case]())
        return root / case

    return find


@pytest.fixture(scope="module", params=["t5", "bart"])
def loaded(request: pytest.FixtureRequest, find: Callable[[str], Path]) -> Served:
    return Served(find(request.param))


@pytest.fixture
def served(loaded: Served) -> Served:
    loaded.runner.reset()
    return loaded


def draw(seed: int, lengths: list[int]) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 99) for _ in range(length)] for length in lengths]


def make_requests(seed: int, sampling: dict[str, Any] | None = None) -> list[Request]:
    """Return requests with inputs below and above the reach of a relative bias, and smaller than blocks and
    tiles; one occurs twice. The decoder of a short input is ahead of its encoder when it is recomputed."""
    inputs = draw(seed, [200, 1, 16, 129, 17, 40])
    options = {"details": DETAILS} | ({} if sampling is None else {"sampling": sampling})
    requests = [Request([START], 4 + 3 * i, encoder_token_ids=ids, **options) for i, ids in enumerate(inputs)]
    again = Request([START], 6, encoder_token_ids=inputs[0], **options)
    ahead = Request([START, *draw(seed, [30])[0]], 6, encoder_token_ids=inputs[4][:2], **options)
    return [*requests[:3], again, *requests[3:], ahead]


def test_bits_in_a_batch_and_alone(served: Served) -> None:
    together = make_requests(1)
    Router(served.runner, seed=3).run(list(together))
    assert any(request.is_encoded for request in together), "an input was shared"
    for request, alone in zip(together, make_requests(1), strict=True):
        served.check(request)
        Router(served.runner, depth=1, whole=True).run([alone])
        assert (alone.generated, alone.logprobs) == (request.generated, request.logprobs)


def test_sampled_tokens_survive_an_interruption(served: Served) -> None:
    together, stopped = (make_requests(2, {**SAMPLE, "seed": 5, "repetition_penalty": 1.3}) for _ in "12")
    Router(served.runner, seed=1).run(list(together))
    Router(served.runner, seed=2).run(list(stopped), stop_after=6)
    assert {0 < len(request.generated) < request.max_new_tokens for request in stopped} == {True, False}
    served.runner.reset()
    Router(served.runner, seed=4).run([request for request in stopped if not request.ended])
    assert [request.generated for request in stopped] == [request.generated for request in together]


def test_cached_inputs_are_not_encoded_again(served: Served) -> None:
    """A row with the blocks of another input reads that input."""
    runner = served.runner
    first, other = draw(4, [50, 50])
    steps = Steps(runner.info.block_size, runner.info.num_blocks)
    blocks = [steps.free.pop() for _ in range(-(-50 // runner.info.block_size))]
    shared = {"cross_blocks": blocks, "details": DETAILS}
    requests = [
        Request([START], 9, encoder_token_ids=first, row=0, **shared),
        Request([START, 7], 9, encoder_token_ids=other, row=1, is_encoded=True, **shared),
        Request([START], 9, encoder_token_ids=other, row=2, **shared),
    ]
    for request in requests:
        work = (request.row, 0, len(request.prompt))
        response = runner.launch(steps.step([work], [opening(request)])).answer()
        request.generated, request.logprobs = integers(response.token_ids), floats(response.logprobs)
    requests[1].encoder_token_ids = first
    for request in requests:
        served.check(request)


def test_an_input_that_cannot_be_served_fails_alone(served: Served) -> None:
    runner = served.runner
    steps = Steps(runner.info.block_size, runner.info.num_blocks)
    good = Request([START], 5, encoder_token_ids=[5, 6, 7], row=1, cross_blocks=[100], details=DETAILS)
    bad = [
        Request([START], 5, encoder_token_ids=[5, 99], row=0, cross_blocks=[101]),
        Request([START], 5, row=2),
        Request([START], 0, encoder_token_ids=[5], row=3, cross_blocks=[100]),
    ]
    work = [(row, 0, 1) for row in range(4)]
    response = runner.launch(steps.step(work, [opening(request) for request in [good, *bad]])).answer()
    assert [(error.row, error.message) for error in response.errors] == [
        (0, "a token id for the encoder is not below the model's vocabulary size 99"),
        (2, "it has no token ids for the encoder"),
    ]
    assert integers(response.rows) == [1]
    good.generated, good.logprobs = integers(response.token_ids), floats(response.logprobs)
    served.check(good)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20), (64, 300), (12, 7)])
def test_buckets_are_those_of_transformers(num_buckets: int, max_distance: int, causal: bool) -> None:
    reach = max(num_buckets, max_distance)
    distance = torch.arange(-4 * reach, 4 * reach + 1)
    actual = find_buckets(distance, RelativeBias(num_buckets, max_distance), causal)
    expected = T5Attention._relative_position_bucket(distance, not causal, num_buckets, max_distance)
    assert actual.tolist() == expected.tolist()
    assert (actual[distance <= -reach] == actual[0]).all(), "the reach is far enough"
    assert (actual[distance >= reach] == actual[-1]).all()


def rename_for_safetensors_bot(tensors: dict[str, Tensor]) -> None:
    tensors["encoder.embed_tokens.weight"] = tensors.pop("shared.weight")


def untie(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["shared.weight"].flip(0).contiguous()


def drop_prefix(tensors: dict[str, Tensor]) -> None:
    for name in list(tensors):
        tensors[name.removeprefix("model.")] = tensors.pop(name)
    del tensors["final_logits_bias"]


def add_head_bias(tensors: dict[str, Tensor]) -> None:
    tensors["final_logits_bias"] = torch.linspace(-3, 3, 99)[None]


@pytest.mark.parametrize(
    ("case", "change", "settings"),
    [
        ("t5", rename_for_safetensors_bot, {}),
        ("flan_t5", untie, {"tie_word_embeddings": False, "scale_decoder_outputs": None}),
        ("mt5", untie, {"tie_word_embeddings": False}),
        ("bart", drop_prefix, {}),
        ("bart", add_head_bias, {}),
    ],
)
def test_checkpoints_as_they_are_published(
    case: str,
    change: Callable[[dict[str, Tensor]], None],
    settings: dict[str, Any],
    find: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    config = {**json.loads((find(case) / "config.json").read_text()), **settings}
    config = {key: value for key, value in config.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(find(case) / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    served = Served(tmp_path)
    request = Request([START], 4, encoder_token_ids=draw(5, [20])[0], details=DETAILS)
    Router(served.runner).run([request])
    served.check(request)


REFUSED = {
    "feed_forward_proj 'wide-gelu' is not supported": ("t5", {"feed_forward_proj": "wide-gelu"}),
    "activation 'tanh' is not supported; supported are: .*": ("t5", {"feed_forward_proj": "gated-tanh"}),
    "32 buckets for distances up to 16 are not supported": ("t5", {"relative_attention_max_distance": 16}),
    "6 buckets for distances up to 128 are not supported": ("t5", {"relative_attention_num_buckets": 6}),
    "d_kv is missing in the model's configuration": ("mt5", {"d_kv": None}),
    "2 attention heads in the encoder and 4 in the decoder are not supported": (
        "bart",
        {"encoder_attention_heads": 2},
    ),
    "5 attention heads do not divide 32 channels": ("mbart", {"decoder_attention_heads": 5}),
}


@pytest.mark.parametrize("text", REFUSED)
def test_refuses_in_one_line(text: str) -> None:
    case, changes = REFUSED[text]
    with pytest.raises(UnsupportedModelError, match=f"^{text}$"):
        registry.make_spec({**CASES[case]().to_dict(), **changes})


def test_tiles_of_cross_attention() -> None:
    """Every token is in exactly one tile. Tiles with the most keys come first."""
    counts, lengths = [3, 40, 1], [7, 5, 300]
    layout = StepLayout(
        torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
        torch.zeros(sum(counts), dtype=torch.int64),
        torch.tensor(lengths, dtype=torch.int32),
        torch.zeros(3, 20, dtype=torch.int32),
    )
    tiles = [item[:4] for item in CpuPlan(layout, 16, is_cross=True).items.tolist()]
    assert {position for *_, position in tiles} == {0}
    tokens = [(sequence, first + i) for sequence, first, count, _ in tiles for i in range(count)]
    expected = [0] * 3 + [1] * 40 + [2]
    assert sorted(tokens) == [(sequence, token) for token, sequence in enumerate(expected)]
    costs = [lengths[sequence] * count for sequence, _, count, _ in tiles]
    assert costs == sorted(costs, reverse=True)
    assert max(count for _, _, count, _ in tiles) == QUERY_TILE
