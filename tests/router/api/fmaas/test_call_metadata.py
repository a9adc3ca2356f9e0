"""Tests calls' metadata over a real socket: each key's effect, and that a hostile value causes only a refusal
that names its key."""

import asyncio
import math
import random
import re
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from tests.support.router.fake_shard import EOS, VOCAB_SIZE
from tests.support.router.http2 import Connection, Kind
from tests.support.router.messages import PROMPT, batch, single, stopping
from tests.support.router.served_grpc import LIMITS, ServedGrpc, open_grpc, status_of
from tgis.pb import generation_pb2 as pb
from tgis.pb import shard_pb2
from tgis.router.api.fmaas.call_metadata import KEYS, read_metadata
from tgis.router.api.fmaas.messages import CallSource, read_batch
from tgis.router.api.fmaas.rules import FMAAS
from tgis.router.engine.handle import SequenceSpec
from tgis.router.errors import RequestError
from tgis.router.requests.parameters import Parameters
from tgis.router.requests.validation import check_parameters
from tgis.router.sequence import CacheSalt
from tgis.sampling_parameters import Sampling

on_the_fixtures_loop = pytest.mark.asyncio(loop_scope="module")

INVALID, OK = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OK
Headers = list[tuple[str, str | bytes]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServedGrpc]:
    async with open_grpc(tmp_path_factory.mktemp("served")) as served:
        yield served


def spec_fields(spec: SequenceSpec) -> dict[str, Any]:
    """Return all fields that a key may set, by name."""
    return {
        **vars(spec.sampling),
        "eos_token_ids": spec.stopping.eos_token_ids,
        "cache_salt": spec.cache_salt,
        "priority": spec.priority,
        "input_ids": spec.input_ids,
        "raw": spec.details.raw,
    }


REGEX = {"decoding": pb.DecodingParameters(regex="a+")}
ANY_TEXT = {"decoding": pb.DecodingParameters(format=pb.DecodingParameters.TEXT)}
SAMPLE = {"method": pb.SAMPLE, "sampling": pb.SamplingParameters(seed=3)}
EFFECTS: list[tuple[Headers, dict[str, Any], dict[str, Any]]] = [
    ([("tgis-logit-bias", "17:-100,42:1.5,3:1e-1")], {}, {"logit_bias": ((17, -100), (42, 1.5), (3, 0.1))}),
    ([("tgis-min-p", "0.25")], SAMPLE, {"min_p": 0.25}),
    ([("tgis-min-p", "0.25")], {}, {}),
    ([("tgis-presence-penalty", "-2")], {}, {"presence_penalty": -2}),
    ([("tgis-frequency-penalty", "2E0")], SAMPLE, {"frequency_penalty": 2}),
    ([("tgis-stop-token-ids", "5,6,5")], {}, {"eos_token_ids": {EOS, 5, 6}}),
    ([("tgis-ignore-eos", "true")], {}, {"eos_token_ids": frozenset()}),
    ([("tgis-ignore-eos", "true")], ANY_TEXT, {"eos_token_ids": frozenset()}),
    ([("tgis-ignore-eos", "true")], REGEX, {}),
    ([("tgis-ignore-eos", "false")], {}, {}),
    ([("tgis-ignore-eos", "true"), ("tgis-stop-token-ids", "007")], {}, {"eos_token_ids": {7}}),
    ([("tgis-watermark", "true")], {}, {"watermark_gamma": 0.25, "watermark_delta": 1.5}),
    ([("tgis-watermark", "false")], SAMPLE, {}),
    ([("tgis-cache-salt", "our team")], {}, {"cache_salt": CacheSalt("", b"our team")}),
    ([("tgis-cache-salt-bin", b"\0\xff\n" * 85)], {}, {"cache_salt": CacheSalt("", b"\0\xff\n" * 85)}),
    ([("tgis-priority", "-7")], {}, {"priority": 0}),  # the default floor
    ([("tgis-priority", "12")], {}, {"priority": 12}),
    ([("tgis-priority", "0")], {}, {}),
    ([("tgis-input", "text"), ("tgis-tokens", "text")], {}, {}),
    ([("other", "x"), ("tgi-x", "y"), ("x-tgis-y", "z")], {}, {}),
]


@pytest.mark.parametrize(("headers", "params", "effect"), EFFECTS)
@on_the_fixtures_loop
async def test_a_key_has_its_effect_and_no_other(
    served: ServedGrpc, headers: Headers, params: dict[str, Any], effect: dict[str, Any]
) -> None:
    request = batch(PROMPT, "b", stopping=stopping(2), **params)
    await served.stub.Generate(request)
    plain = [spec_fields(spec) for spec in served.take_specs()]
    await served.stub.Generate(request, metadata=headers)
    assert [spec_fields(spec) for spec in served.take_specs()] == [each | effect for each in plain]
    [header, *_] = [part async for part in served.stub.GenerateStream(single(**params), metadata=headers)]
    assert header.input_token_count
    [spec] = served.take_specs()
    assert spec_fields(spec) == plain[0] | effect


def test_every_key_has_an_effect_here() -> None:
    """`tgis-input: ids` and `tgis-tokens: ids` are covered by test_token_ids."""
    keys = {key for headers, _, effect in EFFECTS for key, _ in headers if effect}
    assert keys | {"tgis-min-p", "tgis-input", "tgis-tokens"} == set(KEYS)


@on_the_fixtures_loop
async def test_a_stop_token_ends_a_text_and_is_not_in_it(served: ServedGrpc) -> None:
    options = {"response": pb.ResponseOptions(generated_tokens=True)}
    request = batch(PROMPT, stopping=stopping(6), **options)
    [whole] = (await served.stub.Generate(request, metadata=[("tgis-tokens", "ids")])).responses
    ids = [token.text for token in whole.tokens]
    assert len(set(ids)) == 6
    [cut] = (
        await served.stub.Generate(request, metadata=[("tgis-stop-token-ids", f"399,{ids[3]}")])
    ).responses
    assert (cut.stop_reason, cut.generated_token_count) == (pb.EOS_TOKEN, 4)
    [before] = (await served.stub.Generate(batch(PROMPT, stopping=stopping(3)))).responses
    assert cut.text == before.text
    request.params.stopping.min_new_tokens = 5
    [later] = (await served.stub.Generate(request, metadata=[("tgis-stop-token-ids", ids[3])])).responses
    assert later.generated_token_count >= 5


@on_the_fixtures_loop
async def test_an_ignored_end_of_sequence_ends_nothing(tmp_path: Any, served: ServedGrpc) -> None:
    ids = [("tgis-tokens", "ids")]
    options = {"stopping": stopping(6), "response": pb.ResponseOptions(generated_tokens=True)}
    [whole] = (await served.stub.Generate(batch(PROMPT, **options), metadata=ids)).responses
    end = int(whole.tokens[2].text)
    async with open_grpc(tmp_path, info=shard_pb2.InfoResponse(eos_token_ids=[end])) as other:
        [short] = (await other.stub.Generate(batch(PROMPT, **options), metadata=ids)).responses
        assert (short.stop_reason, short.tokens) == (pb.EOS_TOKEN, whole.tokens[:3])
        headers = [*ids, ("tgis-ignore-eos", "true")]
        [ignored] = (await other.stub.Generate(batch(PROMPT, **options), metadata=headers)).responses
        assert ignored == whole


LONG = "9" * 3000
HOSTILE_NUMBERS = [
    *[
        "",
        " ",
        "nan",
        "NaN",
        "inf",
        "-inf",
        "Infinity",
        "0x1",
        "1_0",
        "1,5",
        "0,5",
        "--1",
        "+1",
        "1e",
        "e5",
        ".",
    ],
    *["1.", ".5", "1e9999", "1 ", " 1", "1e1.5", "true", "1/2", "0" * 99, f"0.{LONG}", f"-{LONG}"],
]
HOSTILE: list[tuple[str, str | bytes]] = [
    *(("tgis-min-p", value) for value in [*HOSTILE_NUMBERS, "-0.1", "1.01", "-1e-9", "1e300"]),
    *(("tgis-presence-penalty", value) for value in [*HOSTILE_NUMBERS, "2.01", "-2.5", "1e400"]),
    *(("tgis-frequency-penalty", value) for value in [*HOSTILE_NUMBERS, "2.01", "-2.5", "-1e400"]),
    *(("tgis-logit-bias", f"5:{value}") for value in [*HOSTILE_NUMBERS, "100.5", "-101", "1e99"]),
    *(
        ("tgis-logit-bias", value)
        for value in [
            "",
            ":",
            "5",
            "5:",
            ":5",
            "5:1,",
            ",5:1",
            "5:1,5:2",
            "5:1,05:1",
            "-5:1",
            "5.0:1",
            "5:1 6:1",
        ]
    ),
    *(("tgis-logit-bias", value) for value in ["5: 1", "5 :1", "5:1, 6:1", f"{LONG}:1", "5:1;6:1", "5=1"]),
    ("tgis-logit-bias", f"{VOCAB_SIZE}:1"),
    ("tgis-logit-bias", f"3:1,{2**31 - 1}:1"),
    ("tgis-logit-bias", f"{2**32 + 5}:1"),
    ("tgis-logit-bias", ",".join(f"{i}:1" for i in range(1025))),
    *(
        ("tgis-stop-token-ids", value)
        for value in ["", ",", "5,", ",5", "-5", "5.0", "5, 6", "5 6", "x", LONG]
    ),
    ("tgis-stop-token-ids", str(VOCAB_SIZE)),
    ("tgis-stop-token-ids", f"3,{2**32 + 3}"),
    ("tgis-stop-token-ids", ",".join(["3"] * 65)),
    *(
        (f"tgis-{name}", value)
        for name in ("ignore-eos", "watermark")
        for value in ["", "True", "TRUE", "1", "yes", "true ", "truefalse", "on", LONG]
    ),
    *(
        (f"tgis-{name}", value)
        for name in ("input", "tokens")
        for value in ["", "IDS", "id", "ids ", "ids,text", "true", "pieces", LONG]
    ),
    ("tgis-priority", ""),
    ("tgis-priority", "1.5"),
    ("tgis-priority", "+1"),
    ("tgis-priority", "2147483648"),
    ("tgis-cache-salt", ""),
    ("tgis-cache-salt", "x" * 257),
    ("tgis-cache-salt-bin", b""),
    ("tgis-cache-salt-bin", b"x" * 257),
]


@pytest.mark.parametrize(("key", "value"), HOSTILE)
@on_the_fixtures_loop
async def test_a_hostile_value_is_refused_by_its_key(
    served: ServedGrpc, key: str, value: str | bytes
) -> None:
    headers, stub = [("tgis-tokens", "ids"), (key, value)], served.stub
    if key == "tgis-tokens":
        headers = headers[1:]
    served.take_specs()
    failures = served.num_failures("validation")
    calls = [
        stub.Generate(batch("a", "b"), metadata=headers),
        stub.GenerateStream(single(), metadata=headers),
    ]
    statuses = [await status_of(call) for call in calls]
    assert served.num_failures("validation") == failures + 2
    name = KEYS[key].field
    for code, text in statuses:
        assert code is INVALID
        assert text.startswith((f"{key} must be ", f"{key}: ", f"{name}: "))
        assert LONG not in text
        assert len(text) < 200
    assert statuses[0] == statuses[1]
    assert not served.take_specs()


@on_the_fixtures_loop
async def test_no_random_value_gets_further_than_a_refusal(served: ServedGrpc) -> None:
    """Random values are refused, or read as plain Python reads them."""
    r = random.Random(20)
    pieces = [
        *"0123456789",
        *"0123456789",
        *".,:-+eE_ \t",
        "true",
        "false",
        "ids",
        "text",
        "1e5",
        "5:1",
        "nan",
        "é",
    ]
    for _ in range(3000):
        key, text = r.choice(list(KEYS)), "".join(r.choices(pieces, k=r.randint(0, 9)))
        value = text.encode() if key.endswith("-bin") else text
        metadata = read_metadata([(key, value)])
        assert bool(metadata.refusal) != (key in metadata.values)
        assert not metadata.refusal or metadata.refusal.startswith((f"{key}: ", f"{key} must be "))
        if key in ("tgis-min-p", "tgis-presence-penalty") and not metadata.refusal:
            assert metadata.values[key] == float(text)
            assert re.fullmatch("[-+.eE0-9]+", text)
        if key == "tgis-stop-token-ids" and not metadata.refusal:
            assert ",".join(map(str, metadata.values[key])) == re.sub(r"\b0+(?=\d)", "", text)
        if r.random() < 0.05 and text.isascii() and text.isprintable():
            code, details = await status_of(
                served.stub.Generate(batch("5", stopping=stopping(1)), metadata=[(key, value)])
            )
            assert (code, details) == ((INVALID, metadata.refusal) if metadata.refusal else (OK, ""))


@on_the_fixtures_loop
async def test_whatever_the_method_a_key_is_known_and_given_once(served: ServedGrpc) -> None:
    stub = served.stub
    ask = pb.BatchedTokenizeRequest(requests=[pb.TokenizeRequest(text="a")])
    calls = {
        "Generate": lambda metadata: stub.Generate(batch("a"), metadata=metadata),
        "no inputs": lambda metadata: stub.Generate(batch(), metadata=metadata),
        "GenerateStream": lambda metadata: stub.GenerateStream(single(), metadata=metadata),
        "Tokenize": lambda metadata: stub.Tokenize(ask, metadata=metadata),
        "ModelInfo": lambda metadata: stub.ModelInfo(pb.ModelInfoRequest(), metadata=metadata),
    }
    known = f"the known ones are {', '.join(KEYS)}"
    cases: list[tuple[Headers, str]] = [
        ([("tgis-top-p", "0.5")], f"tgis-top-p: unknown metadata key; {known}"),
        ([("tgis-", "")], f"tgis-: unknown metadata key; {known}"),
        ([("tgis-input-bin", b"ids")], f"tgis-input-bin: unknown metadata key; {known}"),
        ([(f"tgis-{'x' * 5000}", "")], f"tgis-{'x' * 59}: unknown metadata key; {known}"),
        ([("tgis-min-p", "0"), ("tgis-min-p", "0")], "tgis-min-p: given twice"),
        (
            [("tgis-cache-salt", "a"), ("tgis-cache-salt-bin", b"a")],
            "tgis-cache-salt-bin: tgis-cache-salt is given too",
        ),
    ]
    for name, call in calls.items():
        for headers, text in cases:
            failures = served.num_failures("validation")
            assert await status_of(call(headers)) == (INVALID, text), name
            assert served.num_failures("validation") == failures + 1
        everything: Headers = [
            ("tgis-watermark", "true"),
            ("tgis-min-p", "0.5"),
            ("tgis-stop-token-ids", "3"),
        ]
        assert await status_of(call(everything)) == (OK, "")


@on_the_fixtures_loop
async def test_refusals_come_in_the_order_of_tgis(served: ServedGrpc) -> None:
    unknown, beyond = ("tgis-x", "1"), ("tgis-stop-token-ids", "999")
    crowd = batch(*["a"] * 129)
    code, _ = await status_of(served.stub.Generate(crowd, metadata=[unknown]))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    empty = served.stub.GenerateStream(pb.SingleGenerationRequest(), metadata=[unknown])
    assert await status_of(empty) == (INVALID, "missing request")
    wrong = batch("a", stopping=pb.StoppingCriteria(stop_sequences=[""]))
    _, text = await status_of(served.stub.Generate(wrong, metadata=[beyond]))
    assert text.startswith("can specify at most 6")
    details = "stop_token_ids: token id 999 is beyond the model's vocabulary of 400 tokens"
    assert await status_of(served.stub.Generate(batch("x" * 9999), metadata=[beyond])) == (INVALID, details)


async def test_as_many_biases_as_are_allowed_fit_the_default_limit(tmp_path: Any) -> None:
    """The ids have six digits, and float32 distinguishes the values."""
    r = random.Random(0)
    biases = {i: float(f"{r.uniform(-100, 100):.9g}") for i in range(199_000, 199_000 + 1024)}
    text = ",".join(f"{token_id}:{bias!r}" for token_id, bias in biases.items())
    assert len(text) > 18_000
    async with open_grpc(tmp_path, info=shard_pb2.InfoResponse(vocab_size=200_024)) as served:
        headers = [("tgis-logit-bias", text), ("tgis-cache-salt-bin", bytes(256))]
        assert await status_of(served.stub.Generate(batch("a", stopping=stopping(1)), metadata=headers)) == (
            OK,
            "",
        )
        [spec] = served.take_specs()
        assert dict(spec.sampling.logit_bias) == biases


def test_the_log_omits_secret_and_long_keys() -> None:
    headers: Headers = [
        ("x", "y"),
        ("tgis-logit-bias", "17:-100,42:1.5"),
        ("tgis-min-p", "0.123456789"),
        ("tgis-cache-salt", "hush"),
        ("tgis-stop-token-ids", "5"),
        ("tgis-ignore-eos", "false"),
        ("tgis-input", "ids"),
    ]
    assert read_batch(batch("a"), CallSource(read_metadata(headers))).describe_parameters() == (
        "method=GREEDY, tgis-logit-bias=2, tgis-min-p=0.123457, tgis-cache-salt=4 bytes, "
        "tgis-stop-token-ids=1, tgis-ignore-eos=false, tgis-input=ids"
    )


RULES = [
    ({"min_p": 1.5}, "min_p must be >= 0.0 and <= 1.0"),
    ({"min_p": math.nan}, "min_p must be >= 0.0 and <= 1.0"),
    ({"presence_penalty": -2.1}, "presence_penalty must be >= -2.0 and <= 2.0"),
    ({"frequency_penalty": math.inf}, "frequency_penalty must be >= -2.0 and <= 2.0"),
    ({"logit_bias": ((3, math.nan),)}, "logit_bias must have at most 1024 token ids, each once, with values"),
    ({"logit_bias": ((3, 1), (3, 2))}, "logit_bias must have at most 1024 token ids, each once, with values"),
    ({"logit_bias": ((-1, 1.0),)}, "logit_bias: token id -1 is beyond the model's vocabulary of 50 tokens"),
    ({"stop_token_ids": (50,)}, "stop_token_ids: token id 50 is beyond the model's vocabulary of 50 tokens"),
    ({"stop_token_ids": (1,) * 65}, "stop_token_ids must have at most 64 token ids"),
    ({"cache_salt": bytes(257)}, "cache_salt must have at most 256 bytes"),
]


@pytest.mark.parametrize(("params", "text"), RULES)
def test_rules_hold_for_every_api(params: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestError, match=f"^{re.escape(text)}"):
        check_parameters(Parameters(**params), FMAAS, LIMITS, frozenset({1}), 50)


def test_parameters_unset_by_an_api_are_off() -> None:
    checked = check_parameters(Parameters(), FMAAS, LIMITS, frozenset({1}), 50).spec
    assert checked.sampling == Sampling()
    assert checked.stopping.eos_token_ids == {1}
    params = Parameters(raw_details=True, generated_tokens=True)
    raw = check_parameters(params, FMAAS, LIMITS, frozenset({1}), 50).spec
    assert (checked.details.raw, raw.details.raw) == (False, True)


RAW = [
    ("tgis-cache-salt", "\xff\xfe"),
    ("tgis-cache-salt", "a\tb"),
    ("tgis-cache-salt-bin", "!"),
    ("tgis-min-p", "0.5\t"),
    ("tgis-min-p", "\xb2"),
    ("tgis-stop-token-ids", "5,6\x7f"),
    ("tgis-MIN-P", "0.5"),
    ("tgis-\xe9", "0.5"),
    ("tgis-\t", "0.5"),
]


@on_the_fixtures_loop
async def test_metadata_that_no_client_library_sends(served: ServedGrpc) -> None:
    """The library refuses some of these headers. The others reach the service, which refuses them by key."""
    data, port = batch("a", stopping=stopping(1)).SerializeToString(), int(served.target.split(":")[1])
    failures = {kind: served.num_failures(kind) for kind in ("validation", "generate")}
    served.take_specs()

    def send() -> None:
        for header in RAW:
            with Connection("localhost", port) as connection:
                connection.call(1, "/fmaas.GenerationService/Generate", data, header)
                for frame in connection.frames():
                    if frame.stream == 1 and frame.kind in (Kind.HEADERS, Kind.RST_STREAM):
                        break

    await asyncio.to_thread(send)
    assert not served.take_specs()
    assert served.num_failures("generate") == failures["generate"]
    assert served.num_failures("validation") > failures["validation"]
