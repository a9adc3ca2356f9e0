"""Checks that ids which look like log records stay values of one field of one record, in both log formats."""

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from tests.support.log_lines import HOSTILE_TEXTS, parse
from tests.support.router.messages import batch, stopping
from tests.support.router.router_process import Setup, start_router, stop_router

RECORD = json.dumps({"level": "ERROR", "message": "forged", "logger": "root"})
FORGED = [
    f"x\n{RECORD}",
    f'x"}}\n{RECORD}\n{{"a": "',
    'x", "level": "ERROR", "forged": "',
    "x\n2026-01-01T00:00:00.000Z ERROR root: forged",
    "x\r2026-01-01T00:00:00.000Z ERROR root: forged\x1b[2K\x1b[1A",
    'x code=OK request_id="forged"',
    *HOSTILE_TEXTS,
]
SENT = [text for text in FORGED if text and text.isprintable() and text.isascii()]  # valid as headers


PREFIX = re.compile(r"^Router \d: ")  # prefix if there are several workers
ABOUT = ("ERROR", "tgis.router.requests.request_log")


@pytest.fixture(params=["json", "text"], scope="module")
def form(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory, form: str) -> Iterator[Setup]:
    setup = start_router(tmp_path_factory.mktemp("router"), 1, *(["--json-output"] if form == "json" else []))
    yield setup
    assert stop_router(setup) == 0


def ask(setup: Setup, id: str, correlation_id: str) -> grpc.StatusCode:
    request = batch("a", stopping=stopping(2))
    request.model_id = request.prefix_id = id
    try:
        setup.stub.Generate(request, metadata=[("x-correlation-id", correlation_id)], timeout=20)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def read(line: str, form: str) -> dict[str, object]:
    if form == "json":
        record = json.loads(line)
        assert (record["level"], record["logger"]) == ABOUT
        return record
    message, fields = parse(PREFIX.sub("", line), ABOUT)
    return {"message": message, **fields}


def test_every_line_is_one_record(setup: Setup, form: str) -> None:
    asked = [(id, SENT[i % len(SENT)]) for i, id in enumerate(FORGED) if encodable(id)]
    before = len(setup.service.lines)
    assert {ask(setup, *ids) for ids in asked} == {grpc.StatusCode.INVALID_ARGUMENT}
    deadline = time.monotonic() + 30
    while len(setup.service.lines) < before + len(asked):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    lines = setup.service.lines[before:]
    assert len(lines) == len(asked)
    for line, (id, correlation_id) in zip(lines, asked, strict=True):
        record = read(line, form)
        assert (record["prefix_id"], record["correlation_id"]) == (id[:128], correlation_id[:128])
        assert str(record["message"]).startswith(
            "Request failed with INVALID_ARGUMENT: can't retrieve prompt"
        )
        assert record["code"] == "INVALID_ARGUMENT"
        assert "forged" not in record


def encodable(text: str) -> bool:
    """Return True if a message can contain the id. An empty id is excluded, as the service accepts it."""
    return bool(text) and not any("\ud800" <= one <= "\udfff" for one in text)


def test_equal_correlation_ids_are_no_keys(setup: Setup) -> None:
    """Send concurrent calls with one long id. The log shortens it, and each call has its own request id."""
    metadata = [("x-correlation-id", "the same " * 500)]
    request = batch("girl", stopping=stopping(20, min_new_tokens=20))
    expected = setup.stub.Generate(request, metadata=metadata).responses
    with ThreadPoolExecutor(8) as threads:
        calls = list(
            threads.map(lambda _: setup.stub.Generate(request, metadata=metadata).responses, range(8))
        )
    assert all(answer == expected for answer in calls)
    deadline = time.monotonic() + 30
    while len(matching := [line for line in setup.service.lines if "the same" in line]) < 9:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert len({line.split("request_id")[1][:22] for line in matching}) == 9
    assert "the same " * 15 not in setup.service.output
