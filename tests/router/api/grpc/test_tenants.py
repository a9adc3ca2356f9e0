"""Tests tenants over real sockets: names in tokens and certificates reach the cache salt."""

import asyncio
import hashlib
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from tests.support.http_exchange import exchange
from tests.support.lacks import no_descriptor_left
from tests.support.router.messages import batch, single, stopping
from tests.support.router.served_grpc import ServedGrpc, open_channel, open_grpc, status_of
from tests.support.router.served_http import open_http
from tests.support.tls_files import Files, credentials
from tgis.config.checks import Setting, SettingsError, check
from tgis.router.api import bearer_tokens
from tgis.router.api.bearer_tokens import CHECK_INTERVAL_S, BearerTokens
from tgis.router.api.tenants import TenantRules, TokenHolder
from tgis.router.errors import StartupError
from tgis.router.sequence import CacheSalt

on_the_fixtures_loop = pytest.mark.asyncio(loop_scope="module")

TOKENS = "tenant acme t-1\n\n  tenant acme t-2\ntenant globex t-3\nplain-1\nplain-2\ntenant\n"
REFUSED = grpc.StatusCode.UNAUTHENTICATED
ONE = {"stopping": stopping(1)}


@pytest.fixture(scope="module")
def tokens_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "tokens"
    path.write_text(TOKENS)
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(
    tmp_path_factory: pytest.TempPathFactory, tokens_path: Path, files: Files
) -> AsyncIterator[ServedGrpc]:
    """Yield a service that requires tokens and certificates."""
    async with open_grpc(tmp_path_factory.mktemp("served"), tokens_path, files) as served:
        yield served


async def tenant(
    served: ServedGrpc, own: grpc.ChannelCredentials | None, token: str = "", salt: str = ""
) -> set[CacheSalt]:
    """Return the cache salts of a unary call and a stream."""
    headers = [("authorization", f"Bearer {token}")] if token else []
    headers += [("tgis-cache-salt", salt)] if salt else []
    async with open_channel(served, own) as stub:
        await stub.Generate(batch("a", "b", **ONE), metadata=headers)
        async for _ in stub.GenerateStream(single("c", **ONE), metadata=headers):
            pass
    specs = served.take_specs()
    assert len(specs) == 3
    return {spec.cache_salt for spec in specs}


NAMES = {"t-1": "acme", "t-2": "acme", "t-3": "globex"}


@on_the_fixtures_loop
async def test_a_token_s_name_wins_over_a_certificate_s(served: ServedGrpc, files: Files) -> None:
    for token, name in NAMES.items():
        assert await tenant(served, files.client(), token) == {CacheSalt(name)}
        assert await tenant(served, files.client(), token, "x") == {CacheSalt(name, b"x")}
    for token in ("plain-1", "plain-2", "tenant"):
        assert await tenant(served, files.client(), token) == {CacheSalt("client@example.com")}


@on_the_fixtures_loop
async def test_calls_on_one_connection_keep_their_own_tenants(served: ServedGrpc, files: Files) -> None:
    async with open_channel(served, files.client()) as stub:

        async def ask(token: str, text: str) -> None:
            headers = [("authorization", f"Bearer {token}"), ("tgis-cache-salt", token)]
            await stub.Generate(batch(text, **ONE), metadata=headers)

        await asyncio.gather(*(ask(token, "a") for _ in range(20) for token in (*NAMES, "plain-1")))
    salts = [spec.cache_salt for spec in served.take_specs()]
    assert len(salts) == 80
    for each in salts:
        assert each.tenant == NAMES.get(each.salt.decode(), "client@example.com")


@on_the_fixtures_loop
async def test_without_tokens_certificates_name_the_tenants(tmp_path: Path, files: Files) -> None:
    issue, long = files.authority.issue_cert, "x" * 60 + ".example.com"
    certificates = {
        "first.example.com": issue("first.example.com", "second.example.com", common_name="third"),
        "a common name": issue(common_name="a common name"),
        "plain-name": issue(common_name="plain-name"),
        long: issue(long),
    }
    async with open_grpc(tmp_path, None, files) as served:
        tenants = {}
        for name, own in certificates.items():
            [salt] = await tenant(served, credentials(files.authority, own))
            tenants[name] = salt.tenant
    assert tenants["first.example.com"] == "first.example.com"
    assert tenants["plain-name"] == "plain-name"
    assert tenants[long] == long
    assert len(tenants["a common name"]) == 64, "the digest of a name that cannot be shown as it is"


async def test_without_either_there_is_no_tenant(tmp_path: Path) -> None:
    async with open_grpc(tmp_path) as served:
        assert await tenant(served, None) == {CacheSalt()}
        assert await tenant(served, None, "t-1", "x") == {CacheSalt("", b"x")}


async def test_a_gateway_names_the_tenant(tmp_path: Path, tokens_path: Path) -> None:
    """Its name replaces that of its token. Several values are one name of their own."""
    async with open_grpc(tmp_path, tokens_path, trusted_key="x-tenant") as served:
        for values, expected in (
            ([], "acme"),
            ([""], "acme"),
            (["initech"], "initech"),
            (["initech", "globex"], "initech,globex"),
            (["a name"], hashlib.sha256(b"a name").hexdigest()),
        ):
            metadata = [("authorization", "Bearer t-1"), *(("x-tenant", value) for value in values)]
            await served.stub.Generate(batch("a", **ONE), metadata=metadata)
            assert [spec.cache_salt.tenant for spec in served.take_specs()] == [expected]
        call = served.stub.Generate(batch("a", **ONE), metadata=[("x-tenant", "initech")])
        assert (await status_of(call))[0] is REFUSED, "a name is no token"


@pytest.mark.parametrize(
    "key", ["", "X-Tenant", "x tenant", "tgis-tenant", "grpc-x", "x-bin", "authorization", "host", "te"]
)
def test_keys_that_a_gateway_cannot_use(key: str) -> None:
    assert check({"trust_metadata": Setting("x-tenant")}, (), ()) == []
    with pytest.raises(SettingsError, match="trust_metadata: "):
        check({"trust_metadata": Setting(key)}, (), ())


async def test_a_gateway_names_the_tenant_over_http(tmp_path: Path, tokens_path: Path) -> None:
    options = {"trust_metadata": "x-tenant"}
    async with open_http(tmp_path, tokens=tokens_path, port_options=options) as served:
        for headers, expected in (({}, "acme"), ({"X-Tenant": "initech"}, "initech")):
            headers |= {"authorization": "Bearer t-1"}
            body = {"model": "alias", "prompt": "a", "max_tokens": 1}
            await asyncio.to_thread(exchange, served.url + "/v1/completions", body, headers)
            assert [spec.cache_salt.tenant for spec in served.handle.specs] == [expected]
            served.handle.specs.clear()


async def test_names_change_with_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tgis.router.api.bearer_tokens.CHECK_INTERVAL_S", 0.0)
    path = tmp_path / "tokens"
    path.write_text("tenant acme t-1\nplain\n")
    async with open_grpc(tmp_path / "served", path) as served:
        assert await tenant(served, None, "t-1") == {CacheSalt("acme")}
        replace(path, "tenant globex t-1\ntenant acme plain\n")
        assert await tenant(served, None, "t-1") == {CacheSalt("globex")}
        assert await tenant(served, None, "plain") == {CacheSalt("acme")}
        with caplog.at_level(logging.ERROR):
            replace(path, "new-token\ntenant acme secret too-much\n")
            assert await tenant(served, None, "t-1") == {CacheSalt("globex")}
        assert "line 2 of the file of bearer tokens" in caplog.text
        assert "secret" not in caplog.text
        metadata = [("authorization", "Bearer new-token")]
        code, _ = await status_of(served.stub.Generate(batch("a"), metadata=metadata))
        assert code is REFUSED
        replace(path, "new-token\n")
        assert await tenant(served, None, "new-token") == {CacheSalt()}
        code, _ = await status_of(
            served.stub.Generate(batch("a"), metadata=[("authorization", "Bearer t-1")])
        )
        assert code is REFUSED
    assert CHECK_INTERVAL_S > 0


def replace(path: Path, text: str) -> None:
    path.with_suffix(".new").write_text(text)
    os.replace(path.with_suffix(".new"), path)


FORM = (
    "must be TOKEN, `operator TOKEN` or `tenant NAME TOKEN` with a name of at most 128 characters of "
    "printable ASCII"
)
LIMITS = (
    "must be `limits NAME` once per tenant, with values of priority-floor, requests-per-minute, "
    "tokens-per-minute, concurrent-requests, as KEY=NUMBER"
)
TWICE = "has a token that another line gives to another tenant or to an operator"


@pytest.mark.parametrize(
    ("text", "number", "reason"),
    [
        ("a\nsecret b\n", 2, FORM),
        ("tenant secret\n", 1, FORM),
        ("a\n\ntenant acme secret b\n", 3, FORM),
        ("Tenant acme secret\n", 1, FORM),
        ("tenant é secret\n", 1, FORM),
        ("tenant a\x07 secret\n", 1, FORM),
        (f"tenant {'x' * 129} secret\n", 1, FORM),
        ("tenant a secret\ntenant b secret\n", 2, TWICE),
        ("secret\n\n\ntenant b secret\n", 4, TWICE),
        ("tenant b secret\nsecret\n", 2, TWICE),
        ("secret\noperator secret\n", 2, TWICE),
        ("operator acme secret\n", 1, FORM),
        ("limits acme\n", 1, FORM),
        ("limits é priority-floor=1\n", 1, FORM),
        ("limits acme priority-floor\n", 1, LIMITS),
        ("limits acme secret=1\n", 1, LIMITS),
        ("limits acme priority-floor=-2147483649\n", 1, LIMITS),
        ("limits acme requests-per-minute=0\n", 1, LIMITS),
        ("limits acme tokens-per-minute=1.5\n", 1, LIMITS),
        ("limits acme tokens-per-minute=1 tokens-per-minute=1\n", 1, LIMITS),
        ("limits a priority-floor=1\nlimits a priority-floor=1\n", 2, LIMITS),
        ("t1\n\0\0", 2, "contains U+0000"),  # what a loss of power leaves of some files
    ],
)
def test_a_line_that_is_neither_form_is_refused_by_its_number(
    tmp_path: Path, text: str, number: int, reason: str
) -> None:
    path = tmp_path / "tokens"
    path.write_text(text)
    with pytest.raises(StartupError) as refused:
        BearerTokens(str(path))
    assert str(refused.value) == f"line {number} of the file of bearer tokens {path} {reason}"
    assert "secret" not in str(refused.value)


def test_allowed_forms_of_token_lines(tmp_path: Path) -> None:
    path, long = tmp_path / "tokens", "x" * 128
    path.write_text(
        f"\r\n tenant a!~ t1 \r\n\ttenant\t{long}\tt2\n\ntenant a!~ t1\ntenant\nt3\noperator\t t5\noperator"
    )
    tokens = BearerTokens(str(path))
    holders = {token: tokens.holder_of(token) for token in ("t1", "t2", "t3", "tenant", "t5", "operator")}
    assert holders == {
        "t1": TokenHolder("a!~"),
        "t2": TokenHolder(long),
        "t3": TokenHolder(),
        "tenant": TokenHolder(),
        "t5": TokenHolder(is_operator=True),
        "operator": TokenHolder(),
    }
    path.write_text("limits\nlimits a tokens-per-minute=7 priority-floor=-3\n")
    tokens = BearerTokens(str(path))
    assert tokens.holder_of("limits") == TokenHolder()
    default = TenantRules(1, 2, 3)
    assert tokens.rules_of("a", default) == TenantRules(-3, 2, 7)
    assert tokens.rules_of("", default) == default


def test_a_changed_file_is_read_again_after_a_lack_of_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, a token that the operator has removed would stay valid."""
    monkeypatch.setattr(bearer_tokens, "CHECK_INTERVAL_S", 0.0)
    path = tmp_path / "tokens"
    path.write_text("old\n")
    tokens = BearerTokens(str(path))
    path.write_text("newer\n")
    with no_descriptor_left():
        assert tokens.holder_of("newer") is None
    assert tokens.holder_of("newer") == TokenHolder()
    assert tokens.holder_of("old") is None


def test_unknown_tokens(tmp_path: Path) -> None:
    path, long = tmp_path / "tokens", "x" * 128
    path.write_text(f"\r\n tenant a!~ t1 \r\n\ttenant\t{long}\tt2\n")
    tokens = BearerTokens(str(path))
    assert {tokens.holder_of(token) for token in ("t4", "a!~", long, "", "tenant a!~ t1")} == {None}


def test_only_spaces_and_tabs_surround_a_token(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("\t t1 \t\r\nt2\N{NO-BREAK SPACE}\ntenant acme\N{NO-BREAK SPACE}t3\n", encoding="utf-8")
    with pytest.raises(StartupError):
        BearerTokens(str(path))
    path.write_text("\t t1 \t\r\nt2\N{NO-BREAK SPACE}\n", encoding="utf-8")
    tokens = BearerTokens(str(path))
    for header in ("Bearer t1", "bearer  t1\t", "Bearer t2\N{NO-BREAK SPACE}"):
        assert tokens.holder_of_header(header) == TokenHolder(), header
    spaces = ("\N{NO-BREAK SPACE}", "\x85", "\x0b", "\x0c", "\x1c", "\N{EN QUAD}", "\N{LINE SEPARATOR}")
    for header in ("Bearer t2", *(f"Bearer t1{space}" for space in spaces), f"Bearer {spaces[0]}t1"):
        assert tokens.holder_of_header(header) is None, ascii(header)
