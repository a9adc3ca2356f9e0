"""The cases, sent to a launched service all at once; every response is compared as a whole with the oracle
and the case, unary and streamed."""

import random
import time
import urllib.request
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message

from integration_tests.support.case_files import Case, as_single, load_cases, request_of
from integration_tests.support.compare import differences
from integration_tests.support.first_error import is_greedy
from integration_tests.support.oracle import Oracle, UncertainError
from integration_tests.support.served_models import FLAGS, WRITERS
from integration_tests.support.service import launch
from tests.support.processes import Service
from tests.support.streams import join_stream
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

CASES = load_cases()
TIMEOUT_S = 60
TIME_LIMIT_S = 0.04  # of the case that is sent again alone
NUM_HURRIED = 25  # times that the case with the shortest time limit is sent again


@dataclass(frozen=True)
class Ask:
    """Call of a case: its own, or the same as a stream."""

    case: Case
    rpc: str
    request: Any


@dataclass(frozen=True)
class Answer:
    messages: list[Any]
    error: tuple[str, str] | None = None
    """(code, text)"""


@dataclass
class Run:
    """Service and all its responses."""

    oracle: Oracle
    asks: list[Ask]
    unusable: dict[str, str] = field(default_factory=dict)
    """Cases that this model cannot have, with the reasons."""
    answers: dict[tuple[str, str], Answer] = field(default_factory=dict)
    timed: list[tuple[Ask, Answer, float]] = field(default_factory=list)
    """Responses to requests sent alone afterwards, with their seconds."""
    hurried: list[Answer] = field(default_factory=list)
    """Responses to the requests sent afterwards, one by one, with the shortest time limit."""
    metrics_status: int = 0

    def send_all(self, service: Service) -> None:
        random.Random(0).shuffle(self.asks)
        with service.channel() as channel, ThreadPoolExecutor(len(self.asks)) as threads:
            stub = GenerationServiceStub(channel)
            for ask, answer in zip(self.asks, threads.map(lambda a: send(stub, a), self.asks), strict=True):
                self.answers[str(ask.case), ask.rpc] = answer
            for ask in [ask for ask in self.asks if ask.case.name == "a time limit of some tokens"]:
                started = time.monotonic()
                self.timed.append((ask, send(stub, ask), time.monotonic() - started))
            for ask in [ask for ask in self.asks if ask.case.name == "a time limit of a millisecond"]:
                self.hurried += [send(stub, ask) for _ in range(NUM_HURRIED)]
        with urllib.request.urlopen(f"{service.http}/metrics", timeout=10) as response:
            self.metrics_status = response.status


def send(stub: GenerationServiceStub, ask: Ask) -> Answer:
    messages: list[Any] = []
    try:
        answer = getattr(stub, ask.rpc)(ask.request, timeout=TIMEOUT_S)
        messages.extend(answer if ask.rpc == "GenerateStream" else [answer])
    except grpc.RpcError as error:
        return Answer(messages, (error.code().name, error.details()))
    return Answer(messages)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Start the services of all models that a selected test needs, simultaneously, and send all cases."""
    cases = selected_cases(request.session.items)
    models = sorted({case.model for case in cases})
    served = {name: WRITERS[name](tmp_path_factory.mktemp("models") / name) for name in models}
    with ExitStack() as stack:
        services = {name: launch(each.directory, *FLAGS, *each.flags) for name, each in served.items()}
        for service in services.values():
            stack.callback(service.process.kill)  # an error of one must not leave the others
        by_name = {name: prepare(Oracle(each), cases, name) for name, each in served.items()}
        for name, run in by_name.items():
            run.send_all(services[name].wait_until_serving())
        codes = {name: service.end() for name, service in services.items()}
    assert set(codes.values()) == {0}, "\n".join(service.output for service in services.values())
    return by_name


def selected_cases(items: list[pytest.Item]) -> list[Case]:
    """Return all models if a test about all of them is selected."""
    if any(item.name.startswith("test_afterwards") for item in items):
        return CASES
    parameters = [item.callspec.params for item in items if hasattr(item, "callspec")]
    return list({str(p["case"]): p["case"] for p in parameters if "case" in p}.values())


def prepare(oracle: Oracle, cases: Collection[Case], model: str) -> Run:
    run = Run(oracle, [])
    for case in cases:
        if case.model == model:
            try:
                message = request_of(case, oracle)
            except (AssertionError, UncertainError) as error:
                run.unusable[str(case)] = str(error)
                continue
            run.asks.append(Ask(case, case.rpc, message))
            if case.is_streamable():
                run.asks.append(Ask(case, "GenerateStream", as_single(message)))
    return run


@dataclass(frozen=True)
class Asked:
    """Call and its response."""

    oracle: Oracle
    ask: Ask
    answer: Answer

    @property
    def params(self) -> pb.Parameters:
        return self.ask.request.params

    @property
    def texts(self) -> list[str]:
        request = self.ask.request
        inputs = [request.request] if self.ask.rpc == "GenerateStream" else request.requests
        return [item.text for item in inputs]

    @property
    def draws_seed(self) -> bool:
        return not is_greedy(self.params) and not self.params.sampling.HasField("seed")

    def responses(self) -> list[pb.GenerationResponse]:
        """Return one response per input; a stream is joined."""
        if self.ask.rpc == "Generate":
            return list(self.answer.messages[0].responses)
        whole = join_stream(self.answer.messages)
        whole.input_token_count = self.answer.messages[0].input_token_count  # later ones count virtual tokens
        return [whole]


@pytest.mark.parametrize(
    ("case", "rpc"),
    [
        pytest.param(case, rpc, id=f"{case}-{rpc}")
        for case in CASES
        for rpc in ([case.rpc, "GenerateStream"] if case.is_streamable() else [case.rpc])
    ],
)
def test_case(case: Case, rpc: str, runs: dict[str, Run]) -> None:
    run = runs[case.model]
    assert str(case) not in run.unusable, run.unusable[str(case)]
    [ask] = [ask for ask in run.asks if (ask.case, ask.rpc) == (case, rpc)]
    asked = Asked(run.oracle, ask, run.answers[str(case), rpc])
    if isinstance(case.expect, dict) and "error" in case.expect:
        check_error(asked)
        return
    assert asked.answer.error is None
    if isinstance(case.expect, dict) and "time_limit" in case.expect:
        check_time_limit(asked, case.expect["time_limit"])
    elif rpc == "GenerateStream":
        check_stream(asked)
    elif rpc == "Generate":
        check_unary(asked)
    else:
        check_other(asked)


@pytest.mark.parametrize("model_name", WRITERS)
def test_afterwards_metrics_are_served(model_name: str, runs: dict[str, Run]) -> None:
    assert runs[model_name].metrics_status == 200


@pytest.mark.parametrize("model_name", WRITERS)
def test_afterwards_nothing_has_been_missed(model_name: str, runs: dict[str, Run]) -> None:
    """Otherwise the cases would not cover their subjects: every stop reason, ties that make lists longer than
    requested, messages left out of a stream, counts with gaps."""
    run = runs[model_name]
    answered = [Asked(run.oracle, ask, run.answers[str(ask.case), ask.rpc]) for ask in run.asks]
    answered = [asked for asked in answered if asked.ask.rpc.startswith("Gen") and not asked.answer.error]
    reasons = {response.stop_reason for asked in answered for response in asked.responses()}
    assert reasons >= {pb.MAX_TOKENS, pb.EOS_TOKEN, pb.STOP_SEQUENCE, pb.TOKEN_LIMIT}
    if model_name == "bytes":
        assert pb.TIME_LIMIT in reasons
    if model_name == "special":
        asked_ten = [asked for asked in answered if asked.params.response.top_n_tokens == 10]
        tokens = [t for asked in asked_ten for r in asked.responses() for t in (*r.tokens, *r.input_tokens)]
        assert max(len(token.top_tokens) for token in tokens) > 10
    streams = [asked.answer.messages for asked in answered if asked.ask.rpc == "GenerateStream"]
    jumps = [b.generated_token_count - a.generated_token_count for s in streams for a, b in pairwise(s)]
    assert max(jumps) > 1


@pytest.mark.parametrize("rpc", ["Generate", "GenerateStream"])
def test_afterwards_a_time_limit_alone(rpc: str, runs: dict[str, Run]) -> None:
    """A time limit ends the text slightly after the limit; a slow machine is late, but never early."""
    [(answer, elapsed)] = [(a, s) for ask, a, s in runs["bytes"].timed if ask.rpc == rpc]
    assert answer.error is None
    messages = answer.messages[0].responses if rpc == "Generate" else answer.messages
    assert messages[-1].stop_reason == pb.TIME_LIMIT
    assert 1 <= messages[-1].generated_token_count < 169
    assert elapsed >= TIME_LIMIT_S


def test_afterwards_a_millisecond_is_enough_for_a_token(runs: dict[str, Run]) -> None:
    """No other request runs, so the limit is reached even by a fast model."""
    answers = runs["bytes"].hurried
    assert len(answers) == 2 * NUM_HURRIED
    for answer in answers:
        assert answer.error is None
        last = answer.messages[-1]
        [last] = last.responses if isinstance(last, pb.BatchedGenerationResponse) else [last]
        assert last.stop_reason == pb.TIME_LIMIT
        assert 1 <= last.generated_token_count < 169


def check_error(asked: Asked) -> None:
    expected = asked.ask.case.expect["error"]
    assert asked.answer == Answer([], (expected["code"], expected["message"]))
    if expected["message"] not in ("missing request", "Model is overloaded"):
        assert asked.oracle.error(asked.ask.request) == expected["message"], "the oracle disagrees"


def check_unary(asked: Asked) -> None:
    [answer] = asked.answer.messages
    seeds = [response.seed for response in answer.responses]
    check_seeds(asked, seeds)
    assert asked.oracle.error(asked.ask.request) is None or not asked.texts
    try:
        pairs = zip(asked.texts, seeds, strict=True)
        tuned = asked.oracle.tuned(asked.ask.request)
        responses = [asked.oracle.unary(text, asked.params, seed, tuned) for text, seed in pairs]
    except UncertainError:
        assert asked.draws_seed
        return
    check_given_fields(asked, responses)
    same(pb.BatchedGenerationResponse(responses=responses), answer)


def check_stream(asked: Asked) -> None:
    messages = asked.answer.messages
    assert len(messages) >= 2
    check_seeds(asked, [messages[0].seed])
    try:
        tuned = asked.oracle.tuned(asked.ask.request)
        expected = asked.oracle.stream(asked.texts[0], asked.params, messages[0].seed, messages, tuned)
    except UncertainError:
        assert asked.draws_seed
        return
    assert [m.text for m in messages] == [m.text for m in expected]
    *others, _ = messages[1:]
    assert all(m.text or m.tokens or m.input_tokens for m in others)
    assert len(messages) == len(expected)
    for wanted, got in zip(expected, messages, strict=True):
        same(wanted, got)
    check_given_fields(asked, asked.responses())


def check_seeds(asked: Asked, seeds: list[int]) -> None:
    if asked.draws_seed:
        assert all(0 <= seed < 2**32 for seed in seeds)
        assert len(set(seeds)) == len(seeds)
    elif is_greedy(asked.params):
        assert set(seeds) <= {0}
    else:
        assert set(seeds) == {asked.params.sampling.seed}


def check_given_fields(asked: Asked, responses: list[pb.GenerationResponse]) -> None:
    """Results fixed by the rules are compared with responses that the service must give too."""
    expect = asked.ask.case.expect
    if isinstance(expect, dict):
        assert len(expect["responses"]) == len(responses)
        for fields, response in zip(expect["responses"], responses, strict=True):
            wanted = ParseDict(fields, pb.GenerationResponse())
            for name in fields:
                assert getattr(response, name) == getattr(wanted, name), name


def check_time_limit(asked: Asked, least: int) -> None:
    """The text equals the one without a limit, up to its end."""
    [got] = asked.responses()
    number, params = got.generated_token_count, pb.Parameters()
    assert number >= least
    if number == 0:  # it expired in the queue
        length = len(asked.oracle.input_ids(asked.texts[0], asked.params.truncate_input_tokens))
        same(pb.GenerationResponse(input_token_count=length, stop_reason=pb.TIME_LIMIT), got)
        return
    params.CopyFrom(asked.params)
    params.stopping.max_new_tokens = params.stopping.min_new_tokens = number
    expected = asked.oracle.unary(asked.texts[0], params, got.seed)
    expected.stop_reason = pb.TIME_LIMIT
    same(expected, got)


def check_other(asked: Asked) -> None:
    [answer] = asked.answer.messages
    if asked.ask.rpc == "Tokenize":
        expected: Message = asked.oracle.tokenize(asked.ask.request)
    else:
        expected = asked.oracle.model_info()
    if isinstance(asked.ask.case.expect, dict):
        same(ParseDict(asked.ask.case.expect["exactly"], type(expected)()), expected)
    same(expected, answer)


def same(expected: Message, got: Message) -> None:
    different = list(differences(expected, got))
    assert not different, "\n".join(different)
