"""Families other than Llama in the whole service: on two ranks, beyond the length at which positions scale,
and with transformers' code; and refusals as an operator sees them."""

import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from integration_tests.support.compare import differences
from integration_tests.support.oracle import Oracle, UncertainError
from integration_tests.support.served_models import FLAGS, VOCAB_SIZE, Served
from integration_tests.support.service import Client, launch
from tests.support.greedy import generate
from tests.support.shard.checkpoints import SMALL, write_model
from tests.support.shard.family_cases.hybrids import mamba2
from tests.support.shard.family_cases.llamas import delta_net, hybrid, long_rope
from tests.support.tokenizers.trained import write_byte_level
from tgis.pb import generation_pb2 as pb

SIZES = {**SMALL, "vocab_size": VOCAB_SIZE, "bos_token_id": 0, "eos_token_id": 1}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
SWITCH_LEN = 20
CHUNKS = ["--block-size", "8", "--max-step-tokens", "24"]
THROUGH_TRANSFORMERS = {"DEPLOYMENT_FRAMEWORK": "hf_transformers"}


@dataclass(frozen=True)
class Kind:
    """Served model with its options."""

    config: Callable[[], transformers.PretrainedConfig]
    flags: Sequence[str] = ()
    env: dict[str, str] = field(default_factory=dict)


def phi3() -> transformers.Phi3Config:
    return transformers.Phi3Config(**SIZES, pad_token_id=0, **long_rope(SWITCH_LEN))


def granite_4() -> transformers.GraniteMoeHybridConfig:
    return transformers.GraniteMoeHybridConfig(**{**hybrid(num_local_experts=0), **SIZES})


def qwen_3_5() -> transformers.Qwen3_5TextConfig:
    return transformers.Qwen3_5TextConfig(**{**delta_net(), **SIZES})


# Run by `make test-all`; the others include a similar one each.
SLOW = {
    "qwen3, two shards",
    "mixtral, two shards",
    "granite 4, two shards",
    "qwen 3.5, two shards",
    "mamba 2",
    "phi3",
    "truncated",
    "incomplete",
    "short",
    "uncut",
}
KINDS = {
    "qwen3, two shards": Kind(lambda: transformers.Qwen3Config(**SIZES, head_dim=12), ["--num-shard", "2"]),
    "mixtral, two shards": Kind(lambda: transformers.MixtralConfig(**SIZES, **EXPERTS), ["--num-shard", "2"]),
    "granite 4, two shards": Kind(granite_4, ["--num-shard", "2"]),
    "qwen 3.5, two shards": Kind(qwen_3_5, ["--num-shard", "2"]),
    "mamba 2": Kind(lambda: transformers.Mamba2Config(**{**mamba2(), **SIZES})),
    "phi3": Kind(phi3),
    "stablelm": Kind(lambda: transformers.StableLmConfig(**SIZES), env=THROUGH_TRANSFORMERS),
}
# No two have an equal second token: the oracle's results for one say nothing about another.
PROMPTS = [
    "the quick",
    "a little girl had no",
    "7",
    "who",
    "fox jumps",
    "dog",
    "brown bread",
    "lazy",
    "Once upon",
]


def write(directory: Path, config: transformers.PretrainedConfig) -> Served:
    write_model(directory, config)
    return Served(directory, write_byte_level(directory), (1,))


@dataclass(frozen=True)
class Running:
    client: Client
    oracle: Oracle


@pytest.fixture(scope="module")
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Running]]:
    """Start all services of the selected tests simultaneously."""
    root = tmp_path_factory.mktemp("families")
    items = [item for item in request.session.items if item.module is request.module]
    names = {item.callspec.params["name"] for item in items if "running" in item.fixturenames}
    models = {name: write(root / name.split(",")[0], KINDS[name].config()) for name in names}
    services = {
        name: launch(served.directory, *FLAGS, *CHUNKS, *KINDS[name].flags, env=KINDS[name].env)
        for name, served in models.items()
    }
    started: dict[str, Running] = {}
    try:
        for name, service in services.items():
            started[name] = Running(Client(service.wait_until_serving()), Oracle(models[name]))
        yield started
    finally:
        for each in started.values():
            each.client.channel.close()
        codes = [service.end() for service in services.values()]
    assert set(codes) == {0}, "\n".join(service.output for service in services.values())


def parameters(i: int, max_new_tokens: int = 24) -> pb.Parameters:
    """Request all details; of three requests, one is greedy, one sampled, one has penalties."""
    params = pb.Parameters(
        response=pb.ResponseOptions(
            input_text=True,
            generated_tokens=True,
            input_tokens=True,
            token_logprobs=True,
            token_ranks=True,
            top_n_tokens=2,
        ),
        stopping=pb.StoppingCriteria(max_new_tokens=max_new_tokens, min_new_tokens=max_new_tokens),
    )
    if i % 3:
        params.method, params.sampling.seed = pb.SAMPLE, 50 + i
    if i % 3 == 2:
        params.decoding.repetition_penalty = 1.4
    return params


def ask(client: Client, text: str, params: pb.Parameters) -> pb.GenerationResponse:
    request = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text=text)], params=params)
    [response] = client.stub.Generate(request).responses
    return response


def read(client: Client, text: str, params: pb.Parameters) -> list[pb.GenerationResponse]:
    request = pb.SingleGenerationRequest(request=pb.GenerationRequest(text=text), params=params)
    return list(client.stub.GenerateStream(request))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in KINDS]
)
def test_answers_alone_in_a_crowd_and_streamed(name: str, running: dict[str, Running]) -> None:
    client, oracle = running[name].client, running[name].oracle
    asks = [(text, parameters(i)) for i, text in enumerate(PROMPTS)]
    assert len({oracle.input_ids(text, 0)[1] for text in PROMPTS}) == len(PROMPTS)
    with ThreadPoolExecutor(2 * len(asks)) as threads:
        unary = [threads.submit(ask, client, *item) for item in asks]
        streamed = [threads.submit(read, client, *item) for item in asks]
    num_certain = 0
    for i, (text, params) in enumerate(asks):
        try:
            expected = oracle.unary(text, params, params.sampling.seed)
            parts = oracle.stream(text, params, params.sampling.seed, streamed[i].result())
        except UncertainError:
            continue
        num_certain += 1
        answers = [unary[i].result(), *([ask(client, text, params)] if i < 3 else [])]
        for answer in answers:
            assert not list(differences(expected, answer))
        assert len(parts) == len(streamed[i].result())
        for part, got in zip(parts, streamed[i].result(), strict=True):
            assert not list(differences(part, got))
    assert num_certain > len(asks) - 3


@pytest.mark.slow  # covered by the tests of the scheduler and of the family
@pytest.mark.parametrize("name", ["phi3"])
def test_positions_that_turn_differently_past_a_length(name: str, running: dict[str, Running]) -> None:
    """Prompts on either side of the length, and outputs across it, equal transformers'."""
    client, oracle = running[name].client, running[name].oracle
    params = parameters(0, 40)
    crossed = set()
    at_the_length, one_more = ("$9%84=6" * 3)[: SWITCH_LEN - 1], ("9$%84=6" * 3)[:SWITCH_LEN]
    assert len(oracle.input_ids(at_the_length, 0)) == SWITCH_LEN == len(oracle.input_ids(one_more, 0)) - 1
    for text in [*PROMPTS[:2], at_the_length, one_more, "quick " * 30]:
        ids = oracle.input_ids(text, 0)
        generated, _ = generate(oracle.model, ids, max_new_tokens=40, min_new_tokens=40)
        crossed.add(len(ids) <= SWITCH_LEN)
        answer = ask(client, text, params)
        certain = first_uncertain(oracle, ids, generated)
        pieces = [oracle.piece(token_id) for token_id in generated]
        assert [token.text for token in answer.tokens][:certain] == pieces[:certain]
        assert certain > SWITCH_LEN or len(ids) > SWITCH_LEN
    assert crossed == {True, False}
    ids = oracle.input_ids(PROMPTS[0], 0)
    generated, _ = generate(oracle.model, ids, max_new_tokens=40, min_new_tokens=40)
    stale = generate_with_stale_keys(oracle, ids, 40)
    num_same = SWITCH_LEN - len(ids) + 1  # the last of them makes the sequence a long one
    assert generated[:num_same] == stale[:num_same]
    assert generated != stale


def first_uncertain(oracle: Oracle, ids: Sequence[int], generated: Sequence[int]) -> int:
    """Return the number of unambiguous tokens, computed without a cache, which must not make a difference."""
    for i, token_id in enumerate(generated):
        logits = list(oracle.logits((*ids, *generated[:i])))
        logits[1] = -torch.inf  # the end-of-sequence token, which the minimum suppresses
        second, best = sorted(logits)[-2:]
        if best - second < 1e-4:
            return i
        assert logits[token_id] == best
    return len(generated)


@torch.inference_mode()
def generate_with_stale_keys(oracle: Oracle, ids: Sequence[int], length: int) -> list[int]:
    """Return the result of computing the sequence without recomputation when it exceeds the length."""
    cache, new, generated = None, list(ids), list[int]()
    for _ in range(length):
        out = oracle.model(torch.tensor([new]), past_key_values=cache, use_cache=True)
        logits, cache = out.logits[0, -1], out.past_key_values
        logits[1] = -torch.inf
        new = [int(logits.argmax())]
        generated += new
    return generated


@pytest.mark.parametrize("name", ["stablelm"])
def test_guided_through_transformers(name: str, running: dict[str, Running]) -> None:
    client, pattern = running[name].client, r"[a-c]{2,5}-[0-9]{3}"
    params = pb.Parameters(
        decoding=pb.DecodingParameters(regex=pattern), stopping=pb.StoppingCriteria(max_new_tokens=40)
    )
    for text in PROMPTS[:3]:
        answer = ask(client, text, params)
        assert re.fullmatch(pattern, answer.text)
        assert "".join(part.text for part in read(client, text, params)) == answer.text


def write_truncated(directory: Path) -> None:
    write(directory, phi3())
    content = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(content[: len(content) // 2])


def write_incomplete(directory: Path) -> None:
    write(directory, phi3())
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def write_short(directory: Path) -> None:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    tokens = {"vocab_size": VOCAB_SIZE, "bos_token_id": 0, "eos_token_id": 1}
    write(directory, transformers.GPT2Config(**sizes, **tokens))


def write_foreign(directory: Path) -> None:
    write(directory, transformers.StableLmConfig(**SIZES))


def write_uncut(directory: Path) -> None:
    write(directory, phi3())


@dataclass(frozen=True)
class Refusal:
    write: Callable[[Path], None]
    line: str
    flags: Sequence[str] = ()
    env: dict[str, str] = field(default_factory=dict)


REFUSALS = {
    "truncated": Refusal(write_truncated, r".*truncated/model\.safetensors.*"),
    "foreign": Refusal(
        write_foreign,
        "model type 'stablelm' is not supported; supported are: .*",
        env={"DEPLOYMENT_FRAMEWORK": "tgis_native"},
    ),
    "incomplete": Refusal(
        write_incomplete, r".*incomplete: tensor model\.layers\.1\.mlp\.down_proj\.weight is missing"
    ),
    "short": Refusal(
        write_short,
        "--max-sequence-length 65 exceeds the model's 64 positions",
        ["--max-sequence-length", "65"],
    ),
    "uncut": Refusal(
        write_uncut,
        "the model cannot be split over 3 shards: it has 4 .*",
        ["--num-shard", "3"],
    ),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in REFUSALS],
)
def test_refusals_are_one_line(name: str, tmp_path: Path) -> None:
    refusal = REFUSALS[name]
    refusal.write(tmp_path / name)
    service = launch(tmp_path / name, *refusal.flags, env=refusal.env)
    code = service.process.wait(60)
    assert service.end() == code == 1
    assert re.fullmatch(rf"error: shard \d: {refusal.line}", service.lines[-1])
    assert "Traceback" not in service.output
