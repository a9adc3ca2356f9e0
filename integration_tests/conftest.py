"""A launched service on a tiny random checkpoint, and transformers' own answers for the same checkpoint."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForSeq2SeqLM, LlamaForCausalLM, PreTrainedModel

from integration_tests import oracle
from integration_tests.served_models import FLAGS, Served, write_fallback, write_t5, write_t5_tokenizer
from integration_tests.tuned_files import LINEAR, write_adapter
from tests.support.greedy import count_certain, generate
from tests.support.processes import Service
from tests.support.shard.checkpoints import write_llama
from tests.support.tokenizers.trained import write_byte_level
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

VOCAB_SIZE = 403  # cannot be cut evenly for two ranks
MAX_SEQUENCE_LENGTH = 256
WORDS = (
    "girl bread fox dog time once upon little quick brown lazy café 東京 🙂 def return naïve argument"
).split(" ")


@dataclass(frozen=True)
class Expected:
    """Transformers' greedy answer to one prompt."""

    prompt: str
    max_new_tokens: int
    input_pieces: list[str]
    input_logprobs: list[float]
    """Of the tokens after the first; NaN for an encoder's."""
    pieces: list[str]
    logprobs: list[float]
    certain: int
    """Tokens before the first whose two best scores are too close to tell which one must be chosen."""


class Oracle:
    """transformers, in float32, one prompt at a time."""

    def __init__(self, model: PreTrainedModel, tokenizer: Tokenizer) -> None:
        self.model, self.tokenizer = model.eval(), tokenizer

    @torch.inference_mode()
    def answer(self, prompt: str, max_new_tokens: int) -> Expected:
        ids = self.tokenizer.encode(prompt).ids
        tokens, steps = generate(self.model, ids, max_new_tokens=max_new_tokens)
        return Expected(
            prompt,
            max_new_tokens,
            [self.tokenizer.id_to_token(token) for token in ids],
            self._input_logprobs(ids),
            [self.tokenizer.id_to_token(token) or "" for token in tokens],
            [float(steps[i, token]) for i, token in enumerate(tokens)],
            count_certain(steps),
        )

    def _input_logprobs(self, ids: list[int]) -> list[float]:
        if self.model.config.is_encoder_decoder:
            return [math.nan] * (len(ids) - 1)
        inputs = self.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        return [float(inputs[i, token]) for i, token in enumerate(ids[1:])]


@dataclass(frozen=True)
class Model:
    directory: Path
    expected: list[Expected]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Two would wait for each other, and the services for both."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_llama(directory, vocab_size=VOCAB_SIZE, max_position_embeddings=MAX_SEQUENCE_LENGTH, eos_token_id=1)
    tokenizer = write_byte_level(directory, 400)
    oracle = Oracle(LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32), tokenizer)
    return Model(directory, answer_prompts(oracle))


@pytest.fixture(scope="session")
def encoder_decoder(tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory = tmp_path_factory.mktemp("models") / "t5"
    tokenizer = write_t5_tokenizer(directory)
    write_t5(directory, {})
    oracle = Oracle(AutoModelForSeq2SeqLM.from_pretrained(directory, dtype=torch.float32), tokenizer)
    return Model(directory, answer_prompts(oracle))


def answer_prompts(oracle: Oracle) -> list[Expected]:
    """The last seven have their beginning in common."""
    r = random.Random(0)
    shared = " ".join(r.choices(WORDS, k=12))
    prompts = [" ".join(r.choices(WORDS, k=r.randint(1, 30))) for _ in range(14)]
    prompts += [f"{shared} {' '.join(r.choices(WORDS, k=r.randint(1, 8)))}" for _ in range(7)]
    return [oracle.answer(prompt, r.randint(10, 60)) for prompt in prompts]


class Client:
    """Stubs of a running service."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.channel = service.channel()
        self.stub = GenerationServiceStub(self.channel)


@dataclass(frozen=True)
class Tuned:
    """A service on two ranks with soft prompts and adapters, few of which it may hold loaded at a time."""

    client: Client
    served: Served
    oracle: oracle.Oracle

    @property
    def prompts(self) -> Path:
        return Path(self.served.flags[1])

    @property
    def adapters(self) -> Path:
        return Path(self.served.flags[3])


@pytest.fixture(scope="session")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tuned]:
    """Whose cache is small, too, so that inputs are cut and preempted. One adapter, `kept`, has its name and
    its place from the command line."""
    served = write_fallback(tmp_path_factory.mktemp("models") / "tuned")
    kept = tmp_path_factory.mktemp("adapters") / "kept"
    write_adapter(kept, served.directory, 9, LINEAR)
    served.store.adapters["kept"] = kept
    tight = ["--block-size", "8", "--kv-cache-tokens", "640", "--max-step-tokens", "64"]
    contents = ["--prompt-cache-size-mb", "1", "--adapter-cache-size-mb", "1"]
    contents += ["--lora-adapters", f"kept={kept}"]
    flags = [*FLAGS, *served.flags, *tight, *contents, "--num-shard", "2"]
    for client in serve(served.directory, *flags):
        yield Tuned(client, served, oracle.Oracle(served))


def launch(directory: Path, *flags: str, env: dict[str, str] | None = None) -> Service:
    ports = ["--bind", "127.0.0.1", "--port", "0", "--grpc-port", "0"]
    termination_log = ["--termination-log", str(directory / "termination-log")]
    return Service(["launcher", "--model-name", str(directory), *ports, *termination_log, *flags], env)


def serve(directory: Path, *flags: str) -> Iterator[Client]:
    client = Client(launch(directory, *flags).wait_until_serving())
    try:
        yield client
    finally:
        client.channel.close()
        code = client.service.end()
    assert code == 0, client.service.output


def request(expected: Expected, **more: object) -> dict[str, object]:
    """Parameters that ask for everything there is to compare."""
    return {
        "stopping": pb.StoppingCriteria(max_new_tokens=expected.max_new_tokens),
        "response": pb.ResponseOptions(
            generated_tokens=True, input_tokens=True, token_logprobs=True, token_ranks=True, top_n_tokens=2
        ),
        **more,
    }


def check(expected: Expected, response: pb.GenerationResponse) -> None:
    """Tokens equal, log-probabilities within 1e-4, absolute or relative."""
    pieces = [token.text for token in response.tokens]
    num = expected.certain
    assert pieces[:num] == expected.pieces[:num]
    if num == len(expected.pieces):
        assert len(pieces) == num
    logprobs = [token.logprob for token in response.tokens]
    assert logprobs[:num] == pytest.approx(expected.logprobs[:num], rel=1e-4, abs=1e-4)
    assert all(token.rank == 1 for token in response.tokens)
    assert [token.text for token in response.input_tokens] == expected.input_pieces
    given = [token.logprob for token in response.input_tokens]
    wanted = [math.nan, *expected.input_logprobs]
    assert given == pytest.approx(wanted, rel=1e-4, abs=1e-4, nan_ok=True)
