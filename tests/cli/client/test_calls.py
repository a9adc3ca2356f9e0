"""`tgis client` with a real router, which refuses unknown metadata."""

import re
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result

from tests.support.router.router_process import Setup, start_router, stop_router
from tgis.cli.client.command import command as client


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    setup = start_router(tmp_path_factory.mktemp("router"), 1)
    yield setup
    assert stop_router(setup) == 0


def run(router: Setup, *arguments: str) -> Result:
    target = f"127.0.0.1:{router.service.grpc_port}"
    return CliRunner().invoke(client, [*arguments, "--target", target])


@pytest.mark.parametrize("command", ["generate", "stream"])
@pytest.mark.parametrize(
    "given",
    [
        ["--logit-bias", "17:-100", "--logit-bias", "42:1e-3"],
        ["--min-p", "0.05"],
        ["--presence-penalty", "-0.5", "--frequency-penalty", "2"],
        ["--stop-token-id", "6", "--stop-token-id", "5"],
        ["--ignore-eos"],
        ["--watermark"],
        ["--cache-salt", "é"],
        ["--token-ids", "--details"],
        ["--input-ids"],
    ],
    ids=" ".join,
)
def test_the_service_takes_every_option(router: Setup, command: str, given: list[str]) -> None:
    result = run(router, command, "5 6 7", "--max-new-tokens", "3", *given)
    assert (result.exit_code, result.stderr) == (0, "")


def test_ids_in_and_out_and_the_times_of_a_call(router: Setup) -> None:
    text = "The quick brown fox " * 5
    ids = router.tokenizer.encode(text).ids
    usual, *_ = run(router, "generate", text, "--seed", "1").stdout.splitlines()
    given = [" ".join(map(str, ids)), "--input-ids", "--token-ids", "--details", "--seed", "1"]
    for command in ("generate", "stream"):
        answer = run(router, command, *given).stdout
        assert answer.startswith(f"{usual}\n")
        rows = answer.split("likeliest\n")[1].split("\n\n")[0].splitlines()
        assert len(rows) == 20
        assert all(row.split()[0].isdecimal() for row in rows)
        match = re.search(r"ms in the queue, first token after .* ms in total, (\d+) cached", answer)
        assert match is not None
        assert 0 < int(match[1]) < len(ids)
    tokens = run(router, "tokenize", text, "--token-ids").stdout.splitlines()
    assert [int(row.split()[0]) for row in tokens[1:]] == ids


def test_tokenize_takes_ids(router: Setup) -> None:
    for given in (["--input-ids"], ["--token-ids"]):
        result = run(router, "tokenize", "5 6 7", *given)
        assert (result.exit_code, result.stderr) == (0, "")
