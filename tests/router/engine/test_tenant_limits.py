"""Checks the limits of tenants per minute: against a closed formula in virtual time, and through the APIs."""

import asyncio
import random
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from tests.support.http_exchange import exchange
from tests.support.router.engine_pair import each_of, open_scene
from tests.support.router.messages import batch, single, stopping
from tests.support.router.served_grpc import ServedGrpc, open_grpc, status_of
from tests.support.router.served_http import open_http
from tgis.router.api.tenants import TenantRules
from tgis.router.engine.handle import SequenceSpec, TenantLimits
from tgis.router.engine.tenant_limits import MIN_PRUNED, Allowance, TenantLimiter
from tgis.router.errors import TenantLimitError
from tgis.router.sequence import Stopping

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
OK = grpc.StatusCode.OK
REQUESTS, TOKENS = (
    "more than {} requests of the tenant in a minute",
    "more than {} tokens of the tenant in a minute",
)


def wait_by_formula(uses: list[tuple[float, int]], per_minute: int, amount: int, now: float) -> float:
    """Return the wait from the uses since each earlier time, in excess of what is allowed since then."""
    excess, total = 0.0, 0
    for at, used in reversed(uses):
        total += used
        excess = max(excess, total - (now - at) * per_minute / 60)
    return max(min(amount, per_minute) - (per_minute - excess), 0.0) * 60 / per_minute


def test_waits_are_those_of_the_formula() -> None:
    r, num_refused = random.Random(0), 0
    for _ in range(60):
        per_minute, now = r.choice([1, 6, 100, 5000]), 1000.0
        allowance, uses = Allowance(per_minute, now), list[tuple[float, int]]()
        for _ in range(40):
            now += r.choice([0.0, 0.01, 1.0, 30.0]) * r.random() * 60 / min(per_minute, 60)
            amount = r.choice([1, 2, r.randint(1, 3 * per_minute)])
            wait_s = allowance.wait_s(amount, now)
            assert wait_s == pytest.approx(wait_by_formula(uses, per_minute, amount, now), abs=1e-6)
            if r.random() < 0.3 or not wait_s:  # tokens are used whatever the wait
                uses.append((now, amount))
                allowance.use(amount)
            num_refused += wait_s > 0
    assert num_refused > 300


def test_unused_tenants_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("tgis.router.engine.tenant_limits.time.monotonic", lambda: now)
    limiter = TenantLimiter()
    busy = TenantLimits("busy", requests_per_minute=60)
    for number in range(20 * MIN_PRUNED):
        now += 0.1
        for limits in (busy, TenantLimits(str(number), requests_per_minute=60, tokens_per_minute=9)):
            try:
                use = limiter.check(limits, 1)
            except TenantLimitError:
                assert limits is busy
            else:
                assert use.requests is not None
                use.requests.use(1)
    assert len(limiter._uses) <= 2 * MIN_PRUNED
    with pytest.raises(TenantLimitError, match="more than 60 requests of the tenant in a minute"):
        limiter.check(busy, 60)


async def test_requests_at_once_and_changed_limits(tmp_path: Path) -> None:
    async with open_scene(tmp_path, False) as scene:
        handle, limits = scene.handle, TenantLimits("a", concurrent_requests=3)
        first = await handle.acquire(2, limits=limits)
        with pytest.raises(TenantLimitError, match="more than 3 requests of the tenant at once"):
            await handle.acquire(2, limits=limits)
        second = await handle.acquire(1, limits=limits)
        handle.release(first)
        handle.release(await handle.acquire(2, limits=limits))
        smaller = limits._replace(concurrent_requests=1, requests_per_minute=6)
        with pytest.raises(TenantLimitError, match="more than 1 requests of the tenant at once"):
            await handle.acquire(1, limits=smaller)
        handle.release(second)
        handle.release(await handle.acquire(1, limits=smaller))
        for _ in range(5):
            handle.release(await handle.acquire(1, limits=smaller))
        with pytest.raises(TenantLimitError, match="more than 6 requests of the tenant in a minute"):
            await handle.acquire(1, limits=smaller)


@pytest.mark.parametrize("is_split", [False, True])
async def test_tokens_are_counted_while_they_are_generated(is_split: bool, tmp_path: Path) -> None:
    """A call is refused while an earlier one still generates, and a call of another tenant is not."""
    limits = TenantLimits("a", tokens_per_minute=30)
    async with open_scene(tmp_path, is_split) as scene:
        handle = scene.handle
        scene.shard.step_s = 0.01
        claim_id = await handle.acquire(1, limits=limits)
        spec = SequenceSpec((21, 22, 23), Stopping(150, min_new_tokens=150))
        events = each_of(handle.events(handle.open(claim_id, spec, None)))
        handle.release(await handle.acquire(1, limits=limits))  # a few tokens
        for _ in range(40):
            await anext(events)
        with pytest.raises(TenantLimitError, match=TOKENS.format(30)) as refused:
            await handle.acquire(1, limits=limits)
        assert 20 <= refused.value.retry_s <= 100  # at least 43 tokens are counted, of 30 per minute
        handle.release(await handle.acquire(1, limits=limits._replace(tenant="b")))
        handle.release(claim_id)
        with pytest.raises(TenantLimitError):
            await handle.acquire(1, limits=limits)
        for _ in range(100):
            if not scene.left():
                break
            await asyncio.sleep(0.02)
        assert not scene.left()


async def test_a_sequence_that_never_starts_uses_no_tokens(tmp_path: Path) -> None:
    limits, spec = TenantLimits("a", tokens_per_minute=5), SequenceSpec(tuple(range(100)), Stopping(90))
    async with open_scene(tmp_path, False, max_batch_size=1) as scene:
        handle = scene.handle
        scene.shard.step_s = 0.05
        other = await handle.acquire(1)
        await anext(each_of(handle.events(handle.open(other, spec, None))))
        for _ in range(3):
            claim_id = await handle.acquire(1, limits=limits)
            handle.open(claim_id, spec, None)
            await asyncio.sleep(0.02)
            handle.release(claim_id)
        handle.release(other)
        claim_id = await handle.acquire(1, limits=limits)
        await anext(each_of(handle.events(handle.open(claim_id, spec, None))))
        handle.release(claim_id)
        with pytest.raises(TenantLimitError):
            await handle.acquire(1, limits=limits)


@pytest.mark.parametrize("is_split", [False, True])
async def test_calls_that_end_in_any_way_leave_the_whole_limit(is_split: bool, tmp_path: Path) -> None:
    r, limits = random.Random(0), TenantLimits("a", concurrent_requests=6)
    async with open_scene(tmp_path, is_split, max_batch_size=2, max_queue_time=0.02) as scene:
        handle = scene.handle

        async def call(count: int) -> None:
            claim_id = await asyncio.wait_for(handle.acquire(count, limits=limits), r.choice([0.0, 5.0]))
            specs = [SequenceSpec((21, r.randrange(9)), Stopping(9, min_new_tokens=9)) for _ in range(count)]
            ids = [handle.open(claim_id, spec, None) for spec in specs]
            await asyncio.sleep(r.random() * 0.03)
            for sequence_id in ids:
                if r.random() < 0.3:
                    handle.cancel(sequence_id)
            handle.release(claim_id)

        results = [
            result
            for _ in range(30)
            for result in await asyncio.gather(
                *(call(r.choice([1, 2, 4])) for _ in range(4)), return_exceptions=True
            )
        ]
        kinds = {type(result) for result in results}
        assert kinds == {type(None), TimeoutError, TenantLimitError}
        await asyncio.sleep(0.1)
        handle.release(await handle.acquire(6, limits=limits))


async def retry_s(call: grpc.aio.Call) -> int:
    """Return the time in the status's details, which must be the one of the pushback."""
    trailing = dict(await call.trailing_metadata() or ())
    status = status_pb2.Status.FromString(trailing["grpc-status-details-bin"])
    [detail] = status.details
    retry = error_details_pb2.RetryInfo()
    assert detail.Unpack(retry)
    seconds: int = retry.retry_delay.seconds
    assert trailing["grpc-retry-pushback-ms"] == str(1000 * seconds)
    return seconds


async def ask(served: ServedGrpc, token: str, *texts: str) -> tuple[grpc.StatusCode, str]:
    metadata = [("authorization", f"Bearer {token}")]
    return await status_of(served.stub.Generate(batch(*texts, stopping=stopping(1)), metadata=metadata))


async def test_requests_over_grpc(tmp_path: Path) -> None:
    """The tenant of the file has its own limit, all others the option's."""
    tokens = tmp_path / "tokens"
    tokens.write_text(
        "tenant acme t-1\ntenant acme t-2\ntenant globex t-3\nlimits acme requests-per-minute=2\n"
    )
    async with open_grpc(tmp_path, tokens, rules=TenantRules(requests_per_minute=5)) as served:
        assert [await ask(served, token, "a") for token in ("t-1", "t-2")] == [(OK, "")] * 2
        assert await ask(served, "t-1", "a") == (EXHAUSTED, REQUESTS.format(2))
        assert await ask(served, "t-3", *"abc") == (OK, "")
        assert await ask(served, "t-3", *"abc") == (EXHAUSTED, REQUESTS.format(5))
        assert await ask(served, "t-3", *"ab") == (OK, "")
        assert served.num_failures("tenant_limit") == 2
        call = served.stub.GenerateStream(single(), metadata=[("authorization", "Bearer t-1")])
        assert (await status_of(call))[0] is EXHAUSTED
        assert 28 <= await retry_s(call) <= 30


async def test_tokens_over_http(tmp_path: Path) -> None:
    async with open_http(tmp_path, rules=TenantRules(tokens_per_minute=10)) as served:
        body = {"model": "alias", "prompt": [5] * 9, "max_tokens": 11, "ignore_eos": True}
        replies = [await asyncio.to_thread(exchange, served.url + "/v1/completions", body) for _ in range(2)]
        assert [reply.status for reply in replies] == [200, 429]
        error = replies[1].json["error"]
        assert (error["message"], error["type"]) == (TOKENS.format(10), "rate_limit_error")
        assert 55 <= int(replies[1].headers["retry-after"]) <= 66  # 10 tokens above, and one more


async def test_the_floor_of_a_tenant(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("tenant acme t-1\nplain\nlimits acme priority-floor=-10\n")
    async with open_grpc(tmp_path, tokens, rules=TenantRules(priority_floor=3)) as served:
        for token, given, expected in (("t-1", -12, -10), ("t-1", 4, 4), ("plain", -12, 3), ("plain", 4, 4)):
            metadata = [("authorization", f"Bearer {token}"), ("tgis-priority", str(given))]
            await served.stub.Generate(batch("a", stopping=stopping(1)), metadata=metadata)
            assert [spec.priority for spec in served.take_specs()] == [expected]
