"""`tgis client` against a service with canned responses on a real port."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner, Result

from tests.support.canned_service import WORDS, CannedService, serve
from tests.support.scripted_service import Failed, ScriptedService
from tgis.cli.client.command import command as client
from tgis.pb import generation_pb2 as pb


@pytest.fixture
def service() -> CannedService:
    return CannedService()


@pytest.fixture
def target(service: CannedService) -> Iterator[str]:
    with serve(service) as address:
        yield address


def run(target: str, *arguments: str) -> Result:
    return CliRunner().invoke(client, [*arguments, "--target", target])


def test_generate_prints_the_answer_alone(target: str) -> None:
    result = run(target, "generate", "count")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "count: one two three\n", "")


def test_several_inputs_are_answered_in_order_under_their_text(target: str) -> None:
    result = run(target, "generate", "a\x1b", "b")
    assert result.stdout.splitlines() == ["--- a\\x1b", "a\x1b: one two three", "--- b", "b: one two three"]


def test_nothing_is_asked_that_was_not_given(service: CannedService, target: str) -> None:
    run(target, "generate", "count")
    (request,) = service.asked
    bare = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text="count")])
    assert not request.HasField("prefix_id")
    assert not request.HasField("adapter_id")
    assert not request.params.sampling.HasField("temperature")
    assert not request.params.sampling.HasField("seed")
    assert request.params.decoding.WhichOneof("guided") is None
    assert "authorization" not in service.metadata[0]
    request.ClearField("params")
    assert request == bare


SAMPLING = {
    ("--temperature", "0.5"): pb.SamplingParameters(temperature=0.5),
    ("--temperature", "0"): pb.SamplingParameters(temperature=0.0),
    ("--top-k", "5"): pb.SamplingParameters(top_k=5),
    ("--top-p", "0.5"): pb.SamplingParameters(top_p=0.5),
    ("--min-p", "0.0"): pb.SamplingParameters(),
    ("--typical-p", "0.5"): pb.SamplingParameters(typical_p=0.5),
    ("--seed", "0"): pb.SamplingParameters(seed=0),
    ("--seed", str(2**64 - 1)): pb.SamplingParameters(seed=2**64 - 1),
}


@pytest.mark.parametrize(("given", "expected"), SAMPLING.items())
def test_any_sampling_option_samples(
    service: CannedService, target: str, given: tuple[str, str], expected: pb.SamplingParameters
) -> None:
    run(target, "generate", "count", *given)
    params = service.asked[0].params
    assert (params.method, params.sampling) == (pb.SAMPLE, expected)


def test_limits_and_ids_reach_the_service(service: CannedService, target: str) -> None:
    limits = ["--max-new-tokens", "9", "--min-new-tokens", "3", "--stop", "a", "--stop", "b"]
    limits += ["--truncate-input-tokens", "7"]
    assert run(target, "generate", "x", *limits, "--prefix-id", "p", "--adapter-id", "q").exit_code == 0
    assert run(target, "stream", "x", *limits, "--prefix-id", "p", "--adapter-id", "q").exit_code == 0
    stopping = pb.StoppingCriteria(max_new_tokens=9, min_new_tokens=3, stop_sequences=["a", "b"])
    for request in service.asked:
        assert (request.params.method, request.params.stopping) == (pb.GREEDY, stopping)
        assert (request.prefix_id, request.adapter_id) == ("p", "q")
        assert request.params.truncate_input_tokens == 7


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("--regex", "a+"), pb.DecodingParameters(regex="a+")),
        (("--json-schema", "{}"), pb.DecodingParameters(json_schema="{}")),
        (("--grammar", 'start: "a"'), pb.DecodingParameters(grammar='start: "a"')),
        (
            ("--choice", "a b", "--choice", "c"),
            pb.DecodingParameters(choice=pb.DecodingParameters.StringChoices(choices=["a b", "c"])),
        ),
        ((), pb.DecodingParameters()),
    ],
)
def test_constraints_reach_the_service(
    service: CannedService, target: str, given: tuple[str, ...], expected: pb.DecodingParameters
) -> None:
    run(target, "generate", "x", *given)
    assert service.asked[0].params.decoding == expected


METADATA: dict[tuple[str, ...], dict[str, str | bytes]] = {
    (): {},
    ("--logit-bias", "17:-100", "--logit-bias", "42:1.5"): {"tgis-logit-bias": "17:-100.0,42:1.5"},
    ("--min-p", "0.05"): {"tgis-min-p": "0.05"},
    ("--min-p", "0"): {"tgis-min-p": "0.0"},
    ("--presence-penalty", "-0.5"): {"tgis-presence-penalty": "-0.5"},
    ("--frequency-penalty", "2"): {"tgis-frequency-penalty": "2.0"},
    ("--stop-token-id", "6", "--stop-token-id", "5"): {"tgis-stop-token-ids": "6,5"},
    ("--ignore-eos",): {"tgis-ignore-eos": "true"},
    ("--watermark",): {"tgis-watermark": "true"},
    ("--cache-salt", "é\n"): {"tgis-cache-salt-bin": b"\xc3\xa9\n"},
    ("--cache-salt", ""): {"tgis-cache-salt-bin": b""},
    ("--priority", "-3"): {"tgis-priority": "-3"},
    ("--input-ids",): {"tgis-input": "ids"},
    ("--token-ids",): {"tgis-tokens": "ids"},
    ("--min-p", "0.5", "--ignore-eos", "--token-ids"): {
        "tgis-min-p": "0.5",
        "tgis-ignore-eos": "true",
        "tgis-tokens": "ids",
    },
}


def ours(metadata: dict[str, str | bytes]) -> dict[str, str | bytes]:
    return {key: value for key, value in metadata.items() if key.startswith("tgis-")}


@pytest.mark.parametrize("command", ["generate", "stream"])
@pytest.mark.parametrize(("given", "expected"), METADATA.items())
def test_options_without_a_message_field_are_metadata(
    service: CannedService,
    target: str,
    command: str,
    given: tuple[str, ...],
    expected: dict[str, str | bytes],
) -> None:
    result = run(target, command, "5", *given, "--token", "t")
    assert result.exit_code == 0
    assert ours(service.metadata[0]) == expected
    assert service.metadata[0]["authorization"] == "Bearer t"
    method = pb.SAMPLE if "--min-p" in given else pb.GREEDY
    assert service.asked[0].params.method == method


OPTIONS: dict[tuple[str, ...], pb.Parameters] = {
    ("--repetition-penalty", "1.5"): pb.Parameters(decoding=pb.DecodingParameters(repetition_penalty=1.5)),
    ("--length-penalty", "20:1.25"): pb.Parameters(
        decoding=pb.DecodingParameters(
            length_penalty=pb.DecodingParameters.LengthPenalty(start_index=20, decay_factor=1.25)
        )
    ),
    ("--json-object",): pb.Parameters(decoding=pb.DecodingParameters(format=pb.DecodingParameters.JSON)),
    ("--time-limit-millis", "700"): pb.Parameters(stopping=pb.StoppingCriteria(time_limit_millis=700)),
    ("--include-stop",): pb.Parameters(stopping=pb.StoppingCriteria(include_stop_sequence=True)),
    ("--input-text",): pb.Parameters(response=pb.ResponseOptions(input_text=True)),
}


@pytest.mark.parametrize(("given", "expected"), OPTIONS.items())
def test_other_options_reach_the_service(
    service: CannedService, target: str, given: tuple[str, ...], expected: pb.Parameters
) -> None:
    run(target, "generate", "x", *given)
    bare = pb.Parameters(
        sampling=pb.SamplingParameters(),
        stopping=pb.StoppingCriteria(),
        response=pb.ResponseOptions(),
        decoding=pb.DecodingParameters(),
    )
    bare.MergeFrom(expected)
    assert service.asked[0].params == bare


def test_it_waits_for_a_service_that_starts() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        result = run(f"127.0.0.1:{free.getsockname()[1]}", "info", "--wait", "0.2")
    assert result.exit_code == 1
    assert result.stderr == "error: UNAVAILABLE: the service did not become healthy within 0.2 s\n"


def test_calls_are_sent_again_as_often_as_allowed() -> None:
    for retries, exit_code in (("1", 0), ("0", 1)):
        service = ScriptedService([Failed(grpc.StatusCode.UNAVAILABLE)])
        with serve(service) as address:
            assert run(address, "generate", "x", "--retries", retries).exit_code == exit_code


CONSTRAINTS = [("--regex", "a"), ("--json-schema", "{}"), ("--grammar", "g"), ("--choice", "a")]


@pytest.mark.parametrize("both", [*itertools.combinations(CONSTRAINTS, 2)], ids=str)
def test_constraints_exclude_each_other(
    service: CannedService, target: str, both: tuple[tuple[str, str], tuple[str, str]]
) -> None:
    result = run(target, "generate", "x", *both[0], *both[1])
    assert (result.exit_code, service.asked) == (2, [])
    assert "exclude each other" in result.stderr


COMMANDS = [["generate", "x"], ["stream", "x"], ["tokenize", "x"], ["info"]]


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_every_call_brings_the_token(
    service: CannedService, target: str, command: list[str], tmp_path: Path
) -> None:
    """The first line of a file is used, as in the service's own file of tokens."""
    file = tmp_path / "tokens"
    file.write_text("from-file\nanother\n")
    run(target, *command, "--token", "from-flag")
    run(target, *command, "--token-path", str(file))
    variable = {"TGIS_TOKEN": "from-variable"}
    CliRunner().invoke(client, [*command, "--target", target], env=variable)
    CliRunner().invoke(client, [*command, "--target", target, "--token-path", str(file)], env=variable)
    sources = ("from-flag", "from-file", "from-variable", "from-file")
    assert [one["authorization"] for one in service.metadata] == [f"Bearer {source}" for source in sources]


@pytest.mark.parametrize("command", ["generate", "stream"])
def test_details_are_a_table(service: CannedService, target: str, command: str) -> None:
    result = run(target, command, "count", "--details", "--top-n", "2")
    *_, reason, head, first, second, third = result.stdout.splitlines()
    seed = 7 if command == "stream" else 0
    assert reason == f"MAX_TOKENS: 4 input tokens, 3 generated, seed {seed}"
    assert head == "token   logprob  rank  likeliest"
    assert first == "one     -0.5000  1     one -0.5000  \\n -2.2500"
    assert second == " two    -1.0000  2      two -0.5000  \\n -2.2500"
    assert third.startswith(" three  -1.5000  3 ")
    wanted = pb.ResponseOptions(generated_tokens=True, token_logprobs=True, token_ranks=True, top_n_tokens=2)
    assert service.asked[0].params.response == wanted


TRAILERS = (
    ("tgis-total-ms", "104.2"),
    ("tgis-queue-ms", "0.512"),
    ("tgis-cached-tokens", "16"),
    ("tgis-unknown", "7"),
    ("tgis-first-token-ms", "21.3"),
)


@pytest.mark.parametrize("command", [["generate", "a", "b"], ["stream", "a"]], ids=str)
def test_details_end_with_the_times_of_the_call(command: list[str]) -> None:
    with serve(CannedService(trailers=TRAILERS)) as address:
        detailed = run(address, *command, "--details").stdout
        assert "cached" not in run(address, *command).stdout
        output = run(address, *command, "--details", "--json").stdout
    line = "0.512 ms in the queue, first token after 21.3 ms, 104.2 ms in total, 16 cached input tokens\n"
    assert detailed.endswith(f"\n\n{line}")
    assert detailed.count("cached") == 1
    assert all(json.loads(each) for each in output.splitlines())


def test_a_missing_time_is_left_out() -> None:
    with serve(CannedService(trailers=(("tgis-cached-tokens", "0"),))) as address:
        assert run(address, "stream", "a", "--details").stdout.endswith("\n\n0 cached input tokens\n")


def test_json_is_a_message_a_line(target: str) -> None:
    result = run(target, "generate", "é", "b", "--json")
    first, second = (json.loads(line) for line in result.stdout.splitlines())
    assert (first["text"], second["text"]) == ("é: one two three", "b: one two three")
    assert (first["generated_token_count"], first["stop_reason"]) == (3, "MAX_TOKENS")
    streamed = [json.loads(line)["text"] for line in run(target, "stream", "x", "--json").stdout.splitlines()]
    assert streamed == ["", *WORDS]


def test_stream_prints_the_words(target: str) -> None:
    assert run(target, "stream", "count").stdout == "one two three\n"


def test_stream_prints_a_word_before_the_next_is_there() -> None:
    code = "from tgis.cli.client.command import command; command()"
    with serve(CannedService(delay=1.0)) as address:
        command = [sys.executable, "-c", code, "stream", "count", "--target", address]
        # Buffered, like Python's stdout for pipes of other programs.
        environment = {**os.environ, "PYTHONUNBUFFERED": ""}
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
            assert process.stdout is not None
            assert process.stdout.read(1) == b"o"
            assert process.poll() is None
            assert process.stdout.read() == b"ne two three\n"
        assert process.returncode == 0


def test_an_interrupt_is_one_line() -> None:
    with serve(CannedService(delay=2.0)) as address:
        command = [sys.executable, "-m", "tgis", "client", "stream", "count", "--target", address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.read(3) == "one"
            process.send_signal(signal.SIGINT)
            _, text = process.communicate(timeout=20)
    assert (process.returncode, text) == (1, "error: interrupted by SIGINT\n")


def test_tokenize_lists_tokens_and_bytes(target: str) -> None:
    result = run(target, "tokenize", "aé\n")
    assert result.stdout.splitlines() == ["3 tokens", "a   0  1", "é   1  3", "\\n  3  4"]
    assert json.loads(run(target, "tokenize", "é", "--json").stdout)["offsets"] == [{"start": 0, "end": 2}]


def test_tokenize_in_ids_and_of_ids(service: CannedService, target: str) -> None:
    assert run(target, "tokenize", "57", "--input-ids").stdout.splitlines() == ["2 tokens", "5", "7"]
    run(target, "tokenize", "12", "--token-ids")
    run(target, "tokenize", "ab")
    assert [each.return_offsets for each in service.asked] == [False, True, True]
    assert list(map(ours, service.metadata)) == [{"tgis-input": "ids"}, {"tgis-tokens": "ids"}, {}]


def test_info_names_kind_and_limits(target: str) -> None:
    lines = run(target, "info").stdout.split()
    assert lines == ["model_kind", "DECODER_ONLY", "max_sequence_length", "512", "max_new_tokens", "128"]
    assert json.loads(run(target, "info", "--json").stdout)["max_sequence_length"] == 512


FAILURES = {
    ("generate", "fail"): ("", "error: INVALID_ARGUMENT: input refused in two lines\n"),
    ("stream", "fail"): ("one\n", "error: UNAVAILABLE: worker lost\n"),
}


@pytest.mark.parametrize(("arguments", "expected"), FAILURES.items())
def test_an_error_is_one_line(target: str, arguments: tuple[str, ...], expected: tuple[str, str]) -> None:
    result = run(target, *arguments)
    assert (result.exit_code, (result.stdout, result.stderr)) == (1, expected)


def test_a_call_ends_at_its_timeout() -> None:
    with serve(CannedService(delay=2.0)) as address:
        result = run(address, "generate", "count", "--timeout", "0.2")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: DEADLINE_EXCEEDED: ")


@pytest.mark.parametrize("arguments", COMMANDS)
def test_a_refused_connection_is_one_line(arguments: list[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{free.getsockname()[1]}"
        result = run(target, *arguments, "--retries", "0")
    assert (result.exit_code, result.stdout.strip()) == (1, "")
    assert result.stderr.startswith("error: UNAVAILABLE: ")
    assert result.stderr.endswith(f"; start the service at {target}, or set --target\n")
    assert result.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Create a self-signed certificate and key of localhost."""
    directory = tmp_path_factory.mktemp("tls")
    cert, key = directory / "cert.pem", directory / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    command += ["-keyout", key, "-out", cert, "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost"]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


def test_tls_with_a_client_certificate(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    credentials = grpc.ssl_server_credentials(
        [(key.read_bytes(), cert.read_bytes())], cert.read_bytes(), require_client_auth=True
    )
    with serve(CannedService(), credentials) as address:
        once = ("info", "--retries", "0")
        trusted = run(address, *once, "--ca-cert", str(cert), "--cert", str(cert), "--key", str(key))
        anonymous = run(address, *once, "--ca-cert", str(cert))
        plain = run(address, *once)
        unknown = run(address, *once, "--tls")
    assert trusted.exit_code == 0
    assert [result.exit_code for result in (anonymous, plain, unknown)] == [1, 1, 1]
    assert all(result.stderr.startswith("error: UNAVAILABLE: ") for result in (anonymous, plain, unknown))


WRONG = [
    ["generate"],
    ["info", "--cert", "c.pem"],
    ["info", "--ca-cert", "/does/not/exist"],
    ["info", "--token", ""],
    ["info", "--token", "two\nlines"],
    ["info", "--token-path", "/dev/null"],
    ["info", "--token-path", "/does/not/exist"],
    ["generate", "x", "--max-new-tokens", "-1"],
    ["generate", "x", "--seed", str(2**64)],
    ["generate", "x", "--logit-bias", "17"],
    ["generate", "x", "--logit-bias", "a:1"],
    ["generate", "x", "--logit-bias", "1:b"],
    ["stream", "x", "--logit-bias", "1:2,3:4"],
    ["generate", "x", "--stop-token-id", "-1"],
    ["generate", "x", "--min-p", "a"],
    ["tokenize", "x", "--min-p", "0.5"],
    ["tokenize", "5 x", "--input-ids"],
    ["generate", "x", "--length-penalty", "20"],
    ["generate", "x", "--json-object", "--regex", "a"],
    ["info", "--retries", "-1"],
]


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_arguments_never_reach_the_service(
    service: CannedService, target: str, arguments: list[str]
) -> None:
    result = run(target, *arguments)
    assert result.exit_code in (1, 2)
    assert isinstance(result.exception, SystemExit)
    assert service.asked == []
