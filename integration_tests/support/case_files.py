"""The cases of `cases/*.yaml`: requests in protobuf's JSON form, what must come back, and tags for what
hangs on a tokenizer or a model, or is long. A case is asked of the models that it or its file names, of
`bytes` by default; `decoder_only` keeps it from the encoder-decoder.

    !repeat [text, times]
    !inputs 3                         so many inputs
    !tokens 199                       a text of so many tokens, special ones included
    !from_output {token: 3, chars: 2, drop: 1, add: x}
        of what the model generates for the first input, without stop sequences: the text after so many
        tokens, less `drop` characters; the last `chars` of these; then `add`
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message

from integration_tests.support.oracle import Oracle
from tests.support import plain_text
from tgis.pb import generation_pb2 as pb

DIRECTORY = Path(__file__).parents[1] / "cases"
REQUESTS: dict[str, type[Message]] = {
    "Generate": pb.BatchedGenerationRequest,
    "GenerateStream": pb.SingleGenerationRequest,
    "Tokenize": pb.BatchedTokenizeRequest,
    "ModelInfo": pb.ModelInfoRequest,
}
FIELDS = {"name", "model", "rpc", "request", "expect", "differs"}
ALSO = "encoder_decoder"
"""The model that is asked all that `bytes` is asked, except where a case says `decoder_only`."""


@dataclass(frozen=True)
class Case:
    name: str
    topic: str
    model: str
    rpc: str
    request: dict[str, Any]
    expect: Any
    """`oracle`, or {error: {code, message}}, or {exactly: message}, or {responses: [fields of each]}, or
    {time_limit: least tokens}; all but the first are held against the oracle too."""
    differs: str = ""
    """Where TGIS is left on purpose: the decision."""

    def __str__(self) -> str:
        return f"{self.topic}-{self.model}-{self.name}"

    def is_streamable(self) -> bool:
        return self.rpc == "Generate" and len(self.request.get("requests", [])) == 1


@dataclass(frozen=True)
class Directive:
    resolve: Callable[[Oracle, dict[str, Any]], str]
    """From the oracle and the request it stands in."""


def load_cases() -> list[Case]:
    cases = [case for path in sorted(DIRECTORY.glob("*.yaml")) for case in _load(path)]
    names = [str(case) for case in cases]
    assert len(set(names)) == len(names), "two cases have one name"
    return cases


def _load(path: Path) -> list[Case]:
    content = _Loader(path.read_text(encoding="utf-8")).get_single_data()
    cases = []
    for entry in content["cases"]:
        assert not (unknown := set(entry) - FIELDS - {"models", "decoder_only"}), f"{path.name}: {unknown}"
        given = {"rpc": "Generate", "model": content.get("model", "bytes"), "expect": "oracle", **entry}
        models = given.pop("models", [given["model"]])
        if not given.pop("decoder_only", False) and "bytes" in models:
            models = [*models, ALSO]
        cases += [Case(**{**given, "topic": path.stem, "model": model}) for model in models]
    return cases


def request_of(case: Case, oracle: Oracle) -> Message:
    return ParseDict(_resolve(case.request, oracle, case.request), REQUESTS[case.rpc]())


def as_single(request: pb.BatchedGenerationRequest) -> pb.SingleGenerationRequest:
    single = pb.SingleGenerationRequest(model_id=request.model_id, request=request.requests[0])
    if request.HasField("params"):
        single.params.CopyFrom(request.params)
    for name in ("prefix_id", "adapter_id"):
        if request.HasField(name):
            setattr(single, name, getattr(request, name))
    return single


def _resolve(value: Any, oracle: Oracle, request: dict[str, Any]) -> Any:
    match value:
        case dict():
            return {key: _resolve(item, oracle, request) for key, item in value.items()}
        case list():
            return [_resolve(item, oracle, request) for item in value]
        case Directive():
            return value.resolve(oracle, request)
        case _:
            return value


def _text_of(oracle: Oracle, num_tokens: int) -> str:
    """Characters that no merge joins, in a changing order."""
    characters = itertools.cycle("7$9%84=6")
    text = "".join(itertools.islice(characters, num_tokens))
    while (excess := len(oracle.input_ids(text, 0)) - num_tokens) > 0:
        text = text[:-excess]
    assert len(oracle.input_ids(text, 0)) == num_tokens
    return text


def _from_output(
    oracle: Oracle, request: dict[str, Any], token: int, chars: int, drop: int = 0, add: str = ""
) -> str:
    params = dict(request.get("params", {}))
    params["stopping"] = {k: v for k, v in params.get("stopping", {}).items() if k != "stop_sequences"}
    plain = ParseDict(_resolve({**request, "params": params}, oracle, request), pb.BatchedGenerationRequest())
    seed, tuned = plain.params.sampling.seed, oracle.tuned(plain)
    ids = oracle.generate(plain.requests[0].text, plain.params, seed, tuned).ids
    assert len(ids) >= token, f"only {len(ids)} tokens are generated"
    skip = not oracle.served.output_special_tokens
    text = plain_text.text(oracle.tokenizer, ids[:token], skip, begins=oracle.is_encoder_decoder)
    text = text[: len(text) - drop][-chars:]
    assert len(text) == chars, f"there are only {len(text)} characters"
    return text + add


class _Loader(yaml.CSafeLoader):
    """Knows the tags."""


def _repeat(loader: yaml.CSafeLoader, node: yaml.Node) -> str:
    text, times = loader.construct_sequence(node)
    repeated: str = text * times
    return repeated


def _inputs(loader: yaml.CSafeLoader, node: yaml.Node) -> list[dict[str, str]]:
    return [{"text": "fox"}] * int(loader.construct_scalar(node))


def _tokens(loader: yaml.CSafeLoader, node: yaml.Node) -> Directive:
    num_tokens = int(loader.construct_scalar(node))
    return Directive(lambda oracle, request: _text_of(oracle, num_tokens))


def _output(loader: yaml.CSafeLoader, node: yaml.Node) -> Directive:
    where = loader.construct_mapping(node)
    return Directive(lambda oracle, request: _from_output(oracle, request, **where))


_Loader.add_constructor("!repeat", _repeat)
_Loader.add_constructor("!inputs", _inputs)
_Loader.add_constructor("!tokens", _tokens)
_Loader.add_constructor("!from_output", _output)
