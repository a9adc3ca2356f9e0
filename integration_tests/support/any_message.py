"""Strategies for request messages with every field, with valid and hostile values; most messages are nearly
valid, so that every rule is reached."""

import math
from functools import reduce
from typing import TypeVar

from hypothesis import strategies as st

from tgis.pb import generation_pb2 as pb

T = TypeVar("T")

# Ids with a meaning.
PROMPT, ADAPTER = "tuned/eight.v1", "lora"
NUM_VIRTUAL = 8  # of the prompt


def with_values(method: int, *values: tuple[str, object]) -> pb.BatchedGenerationRequest:
    """Return a short request whose named fields have these values."""
    request = pb.BatchedGenerationRequest()
    request.params.method = method  # type: ignore[assignment]
    request.params.stopping.max_new_tokens = 3
    for path, value in values:
        *parents, name = path.split(".")
        message = reduce(getattr, parents, request)
        if isinstance(value, list):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    if not request.requests:
        request.requests.add(text="a girl")
    return request


HOSTILE_TEXTS = [
    "",
    "\0",
    "a\0b",
    "e\u0301\u0301\u0301\u0301",  # combining marks
    "\u202egnirts\u202c",  # written from right to left
    "\ufffd\ufffd",
    "\N{ZERO WIDTH JOINER}" * 9,
    "👩‍👩‍👧",
    "<s></s><s>",
    "line\r\n\x1b[31mforged\x07",
    "%s%n{0}{}",
    "\uffff\U0010ffff",
    "東京" * 40,
    "../../../../etc/passwd",
]
FLOATS = [
    math.nan,
    math.inf,
    -math.inf,
    -0.0,
    0.0,
    1e-45,
    -1e-45,
    1e-38,
    3.4e38,
    -1.0,
    0.04,
    0.05,
    0.5,
    1.0,
    1.01,
]
COUNTS = [0, 1, 2**31 - 1, 2**31, 2**32 - 1]
SEEDS = [0, 1, 2**32, 2**63, 2**64 - 1]
GRAMMARS = ["", "\0", "[", "(a+)+$", "a{1,99999999}", "[a-z]{1,4}", "{", "root ::= root"]
GRAMMARS += ['{"type": "object"}', '{"$ref": "#"}']
STOPS = [
    [""],
    ["a", ""],
    ["x" * 240],
    ["x" * 241],
    ["é" * 120],
    ["é" * 121],
    ["a"] * 6,
    ["a"] * 7,
    ["\0", "\ufffd"],
]
# Each of them alone in an otherwise valid request.
VALUES: dict[str, list[object]] = {
    "params.method": [7, -1, 2**31 - 1],
    "params.sampling.temperature": [*FLOATS],
    "params.sampling.top_k": [*COUNTS],
    "params.sampling.top_p": [*FLOATS],
    "params.sampling.typical_p": [*FLOATS],
    "params.sampling.seed": [*SEEDS],
    "params.stopping.max_new_tokens": [*COUNTS, 198, 199, 200],
    "params.stopping.min_new_tokens": [*COUNTS, 3, 4],
    "params.stopping.time_limit_millis": [*COUNTS],
    "params.stopping.stop_sequences": [*STOPS],
    "params.response.token_logprobs": [True],
    "params.response.token_ranks": [True],
    "params.response.top_n_tokens": [*COUNTS, 10, 11],
    "params.decoding.repetition_penalty": [*FLOATS],
    "params.decoding.length_penalty.start_index": [*COUNTS],
    "params.decoding.length_penalty.decay_factor": [*FLOATS, 10.0, 10.1],
    "params.truncate_input_tokens": [*COUNTS],
    "prefix_id": ["", "nobody", "\ufffd\0", PROMPT, ADAPTER, PROMPT + "/..", "x" * 256, "é" * 129],
    "adapter_id": ["", "nobody", ADAPTER, PROMPT, "é", "x" * 256, "x" * 257],
    "requests": [*([pb.GenerationRequest(text=text)] for text in HOSTILE_TEXTS)],
}
# One per rule, to see which of two is reported.
VIOLATIONS: list[tuple[str, object]] = [
    ("params.sampling.temperature", 0.04),
    ("params.sampling.top_p", 1.01),
    ("params.sampling.typical_p", 1.01),
    ("params.sampling.top_k", 2**31),
    ("params.stopping.max_new_tokens", 2**31),
    ("params.stopping.min_new_tokens", 2**32 - 1),
    ("params.decoding.repetition_penalty", -1.0),
    ("params.decoding.length_penalty.decay_factor", 0.9),
    ("params.stopping.stop_sequences", ["a"] * 7),
    ("params.response.token_ranks", True),
    ("params.response.top_n_tokens", 11),
    ("params.stopping.stop_sequences", [""]),
    ("adapter_id", "nobody"),
    ("prefix_id", "nobody"),
    ("requests", [pb.GenerationRequest(text="fox " * 400)]),
]
UNKNOWN_FIELDS = [
    b"",
    b"\xba\x3e\x03abc",  # 999: bytes
    b"\xf8\x3f\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",  # 1023: the largest varint
    b"\xf9\x3f12345678\xfd\x3f1234",  # 1023: fixed64, fixed32
    b"\xc3\x3e\xc4\x3e",  # 1000: an empty group
]


def rarely(hostile: st.SearchStrategy[T], usual: st.SearchStrategy[T]) -> st.SearchStrategy[T]:
    """One in eight is hostile."""
    return st.integers(0, 7).flatmap(lambda i: hostile if i == 7 else usual)


def maybe(values: st.SearchStrategy[T]) -> st.SearchStrategy[T | None]:
    """Absent half of the time: a message's constructor accepts None for that."""
    return st.none() | values


words = st.sampled_from("girl bread fox the quick brown café 東京 🙂 return".split())
usual_texts = st.lists(words, max_size=12).map(" ".join) | st.text(max_size=20)
long_texts = st.sampled_from([1 << 10, 1 << 16]).flatmap(
    lambda size: st.sampled_from(["a", "fox ", "🙂", "\0", "\u0301"]).map(
        lambda piece: piece * (size // len(piece.encode()))
    )
)
texts = rarely(st.sampled_from(HOSTILE_TEXTS) | long_texts, usual_texts)
ids = st.sampled_from(["", "nobody", "a.b/c", *HOSTILE_TEXTS])
counts = st.sampled_from(COUNTS) | st.integers(0, 2**32 - 1)


def floats(*usual: float) -> st.SearchStrategy[float]:
    return rarely(st.sampled_from(FLOATS) | st.floats(width=32), st.sampled_from(usual))


samplings = st.builds(
    pb.SamplingParameters,
    temperature=maybe(floats(0.0, 0.05, 0.7, 1.0, 100.0)),
    top_k=rarely(counts, st.integers(0, 50)),
    top_p=floats(0.0, 0.5, 1.0),
    typical_p=floats(0.0, 0.5, 1.0, -3.0),
    seed=maybe(st.sampled_from(SEEDS)),
)
stop_sequences = rarely(
    st.sampled_from(
        ["", "x" * 240, "x" * 241, "é" * 120, "é" * 121, "🙂" * 61, "x" * 70_000, "\0", "\ufffd"]
    ),
    st.text(min_size=1, max_size=3) | st.sampled_from(["e", " ", "the", "a"]),
)
stoppings = st.builds(
    pb.StoppingCriteria,
    max_new_tokens=rarely(counts | st.integers(150, 300), st.integers(0, 30)),
    min_new_tokens=rarely(counts, st.integers(0, 12)),
    time_limit_millis=rarely(counts, st.sampled_from([0, 0, 0, 60_000, 1])),
    stop_sequences=rarely(st.lists(stop_sequences, max_size=9), st.lists(stop_sequences, max_size=3)),
    include_stop_sequence=maybe(st.booleans()),
)
responses = st.builds(
    pb.ResponseOptions,
    input_text=st.booleans(),
    generated_tokens=rarely(st.just(False), st.booleans()),
    input_tokens=st.booleans(),
    token_logprobs=rarely(st.just(True), st.booleans()),
    token_ranks=st.booleans(),
    top_n_tokens=rarely(counts, st.integers(0, 10)),
)
length_penalties = st.builds(
    pb.DecodingParameters.LengthPenalty, start_index=counts, decay_factor=floats(1.0, 1.5, 10.0)
)
guides = st.sampled_from(
    [
        {"format": 0},
        {"format": 1},
        {"format": 2**31 - 1},
        {"format": -1},
        *(
            {"choice": {"choices": choices}}
            for choices in ([], ["a"], ["a", "b"], ["", "a"], ["\0", "🙂" * 99])
        ),
        *({kind: text} for kind in ("json_schema", "regex", "grammar") for text in GRAMMARS),
    ]
)


@st.composite
def decodings(draw: st.DrawFn, guided: bool) -> pb.DecodingParameters:
    guide = draw(rarely(guides, st.just({}))) if guided else {}
    return pb.DecodingParameters(
        repetition_penalty=draw(floats(0.0, 1.0, 1.3, 100.0)),
        length_penalty=draw(rarely(length_penalties, st.none())),
        **guide,
    )


@st.composite
def parameters(draw: st.DrawFn, guided: bool = True) -> pb.Parameters:
    return pb.Parameters(
        method=draw(rarely(st.sampled_from([7, -1, 2**31 - 1, -(2**31)]), st.sampled_from([0, 1]))),
        sampling=draw(maybe(samplings)),
        stopping=draw(maybe(stoppings)),
        response=draw(maybe(responses)),
        decoding=draw(maybe(decodings(guided))),
        truncate_input_tokens=draw(rarely(counts, st.integers(0, 20))),
    )


names = {
    "prefix_id": rarely(ids, st.sampled_from([None, None, None, PROMPT, PROMPT, ADAPTER])),
    "adapter_id": rarely(ids, st.sampled_from([None, None, None, ADAPTER])),
}
batches = st.builds(
    pb.BatchedGenerationRequest,
    model_id=texts,
    requests=rarely(
        st.integers(0, 600).map(lambda n: [pb.GenerationRequest(text=f"{n}")] * n),
        st.lists(st.builds(pb.GenerationRequest, text=texts), min_size=1, max_size=4),
    ),
    params=parameters() | rarely(st.none(), parameters()),
    **names,
)
singles = st.builds(
    pb.SingleGenerationRequest,
    model_id=texts,
    request=rarely(st.none(), st.builds(pb.GenerationRequest, text=texts)),
    params=parameters(),
    **names,
)
tokenizations = st.builds(
    pb.BatchedTokenizeRequest,
    model_id=texts,
    requests=st.lists(st.builds(pb.TokenizeRequest, text=texts), max_size=5),
    return_tokens=st.booleans(),
    return_offsets=st.booleans(),
    truncate_input_tokens=rarely(counts, st.integers(0, 20)),
    prefix_id=maybe(ids),
    adapter_id=maybe(ids),
)
unknown_fields = rarely(st.sampled_from(UNKNOWN_FIELDS), st.just(b""))
