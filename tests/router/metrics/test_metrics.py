"""Check a live scrape against the metrics that TGIS's dashboards use, and when every series changes."""

import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.support.router.fake_shard import ShardServer
from tests.support.router.router_process import MAX_SEQUENCE_LENGTH, Setup, start_router, stop_router
from tgis.pb import generation_pb2 as pb
from tgis.pb import shard_pb2 as shard_pb

MAX_BATCH_SIZE = 16
MAX_NEW_TOKENS = MAX_SEQUENCE_LENGTH - 1
PROMPT = "The quick brown fox"

# Name: kind, labels. The kind is from the TYPE line; counters are looked up under both names.
TGIS = {
    "tgi_request_count": ("counter", {"kind"}),
    "tgi_request_input_count": ("counter", set()),
    "tgi_request_failure": ("counter", {"err"}),
    "tgi_request_success": ("counter", {"stop_reason", "kind"}),
    "tgi_request_raw_input_length": ("summary", set()),
    "tgi_request_input_length": ("histogram", set()),
    "tgi_request_max_new_tokens": ("histogram", set()),
    "tgi_request_validation_duration": ("histogram", set()),
    "tgi_request_queue_duration": ("histogram", set()),
    "tgi_request_inference_duration": ("histogram", set()),
    "tgi_request_mean_time_per_token_duration": ("histogram", set()),
    "tgi_request_duration": ("histogram", set()),
    "tgi_request_generated_tokens": ("histogram", set()),
    "tgi_request_total_tokens": ("histogram", set()),
    "tgi_batch_inference_count": ("counter", {"method"}),
    "tgi_batch_inference_success": ("counter", {"method"}),
    "tgi_batch_inference_failure": ("counter", {"method", "reason"}),
    "tgi_batch_inference_batch_size": ("histogram", {"method"}),
    "tgi_batch_inference_duration": ("histogram", {"method", "makeup"}),
    "tgi_batch_inference_forward_duration": ("histogram", {"method", "makeup"}),
    "tgi_batch_inference_tokproc_duration": ("histogram", {"method", "makeup"}),
    "tgi_batch_next_tokens": ("summary", set()),
    "tgi_batch_concatenation_count": ("counter", set()),
    "tgi_batch_current_size": ("gauge", set()),
    "tgi_batch_input_tokens": ("gauge", set()),
    "tgi_batch_max_remaining_tokens": ("gauge", set()),
    "tgi_queue_size": ("gauge", set()),
    "tgi_queue_jump": ("counter", set()),
    "tgi_granular_batch_addition": ("counter", set()),
    "tgi_prefill_weight_limit_exceeded": ("counter", set()),
    "tgi_prefill_padding_limit_exceeded": ("counter", set()),
    "tgi_prompt_load_duration": ("histogram", set()),
    "tgi_prompt_load_failure": ("counter", set()),
    "tgi_tokenize_request_count": ("counter", set()),
    "tgi_tokenize_request_input_count": ("counter", set()),
    "tgi_tokenize_request_tokens": ("histogram", set()),
    "tgi_tokenize_request_duration": ("histogram", set()),
}
OURS = {
    "tgi_request_time_to_first_token_duration": ("histogram", set()),
    "tgi_request_inter_token_duration": ("histogram", set()),
    "tgi_request_parameter_count": ("counter", {"parameter"}),
    "tgi_request_cached_tokens": ("histogram", set()),
    "tgi_requests_running": ("gauge", set()),
    "tgi_permits_limit": ("gauge", set()),
    "tgi_ready": ("gauge", set()),
    "tgi_kv_cache_usage_ratio": ("gauge", set()),
    "tgi_prefix_cache_hit_ratio": ("gauge", set()),
    "tgi_generation_throughput": ("gauge", set()),
    "tgi_queue_uncached_tokens": ("gauge", set()),
    "tgi_prefix_cache_queries": ("counter", set()),
    "tgi_prefix_cache_hits": ("counter", set()),
    "tgi_preemptions": ("counter", set()),
    "tgi_steps_by_path": ("counter", {"path"}),
    "tgi_replaced_kernels": ("gauge", {"kernel"}),
    "tgi_speculation_drafted_tokens": ("counter", set()),
    "tgi_speculation_accepted_tokens": ("counter", set()),
    "tgi_speculation_drafts": ("counter", set()),
    "tgi_speculation_accepted_tokens_by_position": ("counter", {"position"}),
    "tgi_speculator_active": ("gauge", set()),
    "tgi_resources_created": ("counter", {"kind"}),
    "tgi_resources_released": ("counter", {"kind"}),
    "tgi_open_descriptors": ("gauge", set()),
    "tgi_router_workers": ("gauge", set()),
    "tgi_process_restarts": ("counter", {"process"}),
    "tgi_adapter_load_duration": ("histogram", set()),
    "tgi_adapter_load_failure": ("counter", set()),
    **{
        f"tgi_{kind}_cache_{name}": (type_name, set())
        for kind in ("prompt", "adapter")
        for name, type_name in (
            ("entries", "gauge"),
            ("bytes", "gauge"),
            ("hits", "counter"),
            ("misses", "counter"),
            ("evictions", "counter"),
        )
    },
}
# Labels of series that a service without an HTTP API lacks.
OF_HTTP = {
    "tgi_http_api_request_count": ("counter", {"api", "route", "code"}),
    "tgi_chat_template_failure": ("counter", {"err"}),
    "tgi_chat_template_duration": ("histogram", set()),
}
LENGTHS = [MAX_SEQUENCE_LENGTH * i / 64 for i in range(1, 65)]
OUTPUTS = [MAX_NEW_TOKENS * i / 64 for i in range(1, 65)]
BOUNDS = {
    "tgi_tokenize_request_tokens": [2.0**k for k in range(6, 20)],
    "tgi_request_input_length": LENGTHS,
    "tgi_request_cached_tokens": LENGTHS,
    "tgi_request_total_tokens": LENGTHS,
    "tgi_request_generated_tokens": OUTPUTS,
    "tgi_request_max_new_tokens": OUTPUTS,
    "tgi_batch_inference_batch_size": [float(i) for i in range(1, MAX_BATCH_SIZE + 1)],
}


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    """A separate router, whose shards the test may stop."""
    flags = ["--max-batch-size", str(MAX_BATCH_SIZE), "--max-concurrent-requests", "20"]
    info = shard_pb.InfoResponse(replaced_kernels=["gate"])
    setup = start_router(tmp_path_factory.mktemp("lost"), 1, *flags, info=info)
    yield setup
    assert stop_router(setup) == 0, setup.service.output


def scrape(setup: Setup) -> dict[str, Metric]:
    """Return the families by the name in their TYPE line, which the parser strips from counters."""
    with urllib.request.urlopen(setup.http + "/metrics", timeout=10) as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = response.read().decode()
    families = text_string_to_metric_families(text)
    return {family.name + ("_total" if family.type == "counter" else ""): family for family in families}


def values(setup: Setup) -> dict[str, float]:
    """Return the samples as `name{label="value"}`, with labels in order."""
    samples = [sample for family in scrape(setup).values() for sample in family.samples]
    return {
        sample.name
        + "{"
        + ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items()))
        + "}": sample.value
        for sample in samples
    }


def settle(setup: Setup) -> None:
    """Wait until the steps of cancelled requests are answered."""
    deadline = time.monotonic() + 30
    while True:
        seen = values(setup)
        sent, answered, failed = (
            sum(value for key, value in seen.items() if key.startswith(f"tgi_batch_inference_{name}{{"))
            for name in ("count", "success", "failure")
        )
        if sent == answered + failed:
            return
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_until(is_so: Callable[[], bool], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Difference:
    """The change of a series since this object was created."""

    def __init__(self, setup: Setup) -> None:
        settle(setup)
        self.setup, self.before = setup, values(setup)

    def of(self, name: str, **labels: str) -> float:
        key = name + "{" + ",".join(f'{k}="{v}"' for k, v in sorted(labels.items())) + "}"
        return values(self.setup).get(key, 0.0) - self.before.get(key, 0.0)


def generate(setup: Setup, *texts: str, **params: object) -> pb.BatchedGenerationResponse:
    requests = [pb.GenerationRequest(text=text) for text in texts]
    return setup.stub.Generate(pb.BatchedGenerationRequest(requests=requests, params=pb.Parameters(**params)))


def fail(setup: Setup, *texts: str, **params: object) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        generate(setup, *texts, **params)
    return caught.value.code()


def exercise(setup: Setup) -> None:
    """Use every label that TGIS's own clients would use, and the label of metadata."""
    request = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text="a")])
    setup.stub.Generate(request, metadata=[("tgis-watermark", "true")])
    generate(setup, "a", "b")
    list(setup.stub.GenerateStream(pb.SingleGenerationRequest(request=pb.GenerationRequest(text="a"))))
    setup.stub.Tokenize(pb.BatchedTokenizeRequest(requests=[pb.TokenizeRequest(text="a b")]))
    fail(setup, "a", stopping=pb.StoppingCriteria(min_new_tokens=21))
    setup.shards[0].path = shard_pb.STEP_PATH_GRAPH
    generate(setup, "a")
    setup.shards[0].path = shard_pb.STEP_PATH_UNSPECIFIED


def test_every_series_has_the_name_kind_and_labels_of_the_list(lost: Setup) -> None:
    exercise(lost)
    families = scrape(lost)
    for name, (kind, labels) in (TGIS | OURS).items():
        shown = [(name, "unknown"), (name + "_total", kind)] if kind == "counter" else [(name, kind)]
        if name.startswith("tgi_speculation_"):
            assert name not in families
            shown = shown[1:]
        for shown_name, type_name in shown:
            family = families[shown_name]
            assert family.type == type_name, name
            results = [set(sample.labels) - {"le", "quantile"} for sample in family.samples]
            assert all(names == labels for names in results), name
            assert results or name == "tgi_batch_inference_failure", name


def test_without_an_alias_no_series_has_vllms_name(lost: Setup) -> None:
    assert not [key for key in values(lost) if not key.startswith("tgi_")]


def test_buckets(lost: Setup) -> None:
    exercise(lost)
    durations = {name for name, (kind, _) in (TGIS | OURS).items() if name.endswith("duration")}
    families = scrape(lost)
    for name in durations | set(BOUNDS):
        samples = [sample for sample in families[name].samples if sample.name.endswith("_bucket")]
        first = {key: value for key, value in samples[0].labels.items() if key != "le"}
        bounds = [float(s.labels["le"]) for s in samples if first.items() <= s.labels.items()]
        expected = BOUNDS.get(name, [0.0001 * 1.5**k for k in range(1, 36)])
        assert bounds == pytest.approx([*expected, float("inf")]), name
    quantiles = [s.labels["quantile"] for s in families["tgi_batch_next_tokens"].samples if s.labels]
    assert quantiles == ["0", "0.5", "0.9", "0.95", "0.99", "0.999", "1"]


def test_counters_agree_under_both_names(lost: Setup) -> None:
    exercise(lost)
    seen = values(lost)
    for name, (kind, _) in (TGIS | OURS).items():
        if kind == "counter":
            bare = {key: value for key, value in seen.items() if key.startswith(name + "{")}
            assert all(seen[key.replace("{", "_total{", 1)] == value for key, value in bare.items())


def test_kinds_of_calls(lost: Setup) -> None:
    changed = Difference(lost)
    assert not generate(lost).responses
    assert changed.of("tgi_request_count", kind="batch") == 1
    assert changed.of("tgi_request_input_count") == 0
    generate(lost, "a", "b", "c")
    generate(lost, "a")
    list(lost.stub.GenerateStream(pb.SingleGenerationRequest(request=pb.GenerationRequest(text="a"))))
    counts = [changed.of("tgi_request_count", kind=kind) for kind in ("single", "batch", "stream")]
    assert counts == [1, 2, 1]
    assert changed.of("tgi_request_input_count") == 5


def test_metrics_of_a_finished_input(lost: Setup) -> None:
    changed = Difference(lost)
    num_inputs = len(lost.tokenizer.encode(PROMPT).ids)
    criteria = pb.StoppingCriteria(max_new_tokens=100, min_new_tokens=30)
    [response] = generate(lost, PROMPT, stopping=criteria, truncate_input_tokens=3).responses
    num_tokens = response.generated_token_count
    assert changed.of("tgi_request_raw_input_length_sum") == num_inputs
    assert changed.of("tgi_request_input_length_sum") == 3
    assert changed.of("tgi_request_max_new_tokens_sum") == criteria.max_new_tokens
    assert changed.of("tgi_request_generated_tokens_sum") == num_tokens
    assert changed.of("tgi_request_total_tokens_sum") == 3 + num_tokens
    reason = pb.StopReason.Name(response.stop_reason)
    assert changed.of("tgi_request_success", stop_reason=reason, kind="single") == 1
    for name in ("validation", "queue", "inference", "mean_time_per_token", "time_to_first_token"):
        assert changed.of(f"tgi_request_{name}_duration_count") == 1, name
    for name in ("duration", "cached_tokens"):
        assert changed.of(f"tgi_request_{name}_count") == 1, name
    assert changed.of("tgi_request_inter_token_duration_count") == num_tokens - 1
    whole, queue, inference = (
        changed.of(f"tgi_request_{name}duration_sum") for name in ("", "queue_", "inference_")
    )
    assert whole > queue + inference > 0
    assert changed.of("tgi_request_mean_time_per_token_duration_sum") == pytest.approx(inference / num_tokens)


def test_tokens_that_the_prefix_cache_had(lost: Setup) -> None:
    for _ in range(2):
        changed = Difference(lost)
        generate(lost, f"{PROMPT}, {PROMPT}, {PROMPT}, {PROMPT}")
    assert changed.of("tgi_request_cached_tokens_sum") == changed.of("tgi_prefix_cache_hits") > 0
    assert changed.of("tgi_request_cached_tokens_count") == 1


def test_failures_by_label(lost: Setup) -> None:
    changed = Difference(lost)
    assert fail(lost, "a", "b", stopping=pb.StoppingCriteria(min_new_tokens=21)) is (
        grpc.StatusCode.INVALID_ARGUMENT
    )
    fail(lost, "fox " * 300)
    assert changed.of("tgi_request_failure", err="validation") == 2  # once per call
    assert changed.of("tgi_request_raw_input_length_count") == 1  # for tokenized texts, refused or not
    assert changed.of("tgi_request_input_length_count") == 0
    assert fail(lost, *["a"] * 21) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert changed.of("tgi_request_failure", err="conc_limit") == 1
    with pytest.raises(grpc.RpcError):
        list(lost.stub.GenerateStream(pb.SingleGenerationRequest()))
    assert changed.of("tgi_request_failure", err="validation") == 2  # `missing request` is not counted
    request = pb.BatchedGenerationRequest(prefix_id="nobody", requests=[pb.GenerationRequest(text="a")])
    with pytest.raises(grpc.RpcError):
        lost.stub.Generate(request)
    assert changed.of("tgi_prompt_load_failure") == 1
    assert changed.of("tgi_prompt_load_duration_count") == 0


def test_cancelled_inputs_are_counted_once_each(lost: Setup) -> None:
    changed = Difference(lost)
    lost.shards[0].step_s = 0.05
    criteria = pb.StoppingCriteria(max_new_tokens=190, min_new_tokens=190)
    try:
        requests = [pb.GenerationRequest(text=text) for text in ("a", "b", "c")]
        params = pb.Parameters(stopping=criteria)
        call = lost.stub.Generate.future(pb.BatchedGenerationRequest(requests=requests, params=params))
        wait_until(lambda: values(lost)["tgi_requests_running{}"] == 3)
        call.cancel()
        deadline = time.monotonic() + 30
        while changed.of("tgi_request_failure", err="cancelled") < 3:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        lost.shards[0].step_s = 0.001
    assert changed.of("tgi_request_failure", err="cancelled") == 3


def test_an_input_that_expires_in_the_queue_is_a_timeout_and_a_success(lost: Setup) -> None:
    changed = Difference(lost)
    lost.shards[0].step_s = 0.1
    busy = [pb.GenerationRequest(text="a") for _ in range(MAX_BATCH_SIZE)]
    long = pb.Parameters(stopping=pb.StoppingCriteria(max_new_tokens=190, min_new_tokens=190))
    call = lost.stub.Generate.future(pb.BatchedGenerationRequest(requests=busy, params=long))
    try:
        wait_until(lambda: values(lost)["tgi_batch_current_size{}"] == MAX_BATCH_SIZE)
        criteria = pb.StoppingCriteria(time_limit_millis=200)
        [response] = generate(lost, "b", stopping=criteria).responses
    finally:
        call.cancel()
        lost.shards[0].step_s = 0.001
    assert (response.stop_reason, response.generated_token_count) == (pb.TIME_LIMIT, 0)
    assert changed.of("tgi_request_failure", err="timeout") == 1
    assert changed.of("tgi_request_success", stop_reason="TIME_LIMIT", kind="single") == 1


def test_steps_in_terms_of_prefill_and_next_token(lost: Setup) -> None:
    changed = Difference(lost)
    num_inputs = len(lost.tokenizer.encode(PROMPT + "!").ids)
    criteria = pb.StoppingCriteria(max_new_tokens=10, min_new_tokens=10)
    generate(lost, PROMPT + "!", stopping=criteria)
    for name in ("count", "success"):
        assert changed.of(f"tgi_batch_inference_{name}", method="prefill") == 1
        assert changed.of(f"tgi_batch_inference_{name}", method="next_token") == 9
    assert changed.of("tgi_batch_inference_batch_size_sum", method="prefill") == 1
    assert changed.of("tgi_batch_inference_batch_size_sum", method="next_token") == 9
    assert changed.of("tgi_batch_concatenation_count") == 0
    hits = changed.of("tgi_prefix_cache_hits")
    assert changed.of("tgi_batch_next_tokens_sum") == num_inputs - hits
    assert changed.of("tgi_prefix_cache_queries") == num_inputs
    for name in ("", "forward_", "tokproc_"):
        series = f"tgi_batch_inference_{name}duration_count"
        assert changed.of(series, method="next_token", makeup="single_only") == 9, series
        assert changed.of(series, method="prefill", makeup="single_only") == 1, series


def test_steps_of_gpus_by_path(lost: Setup) -> None:
    changed = Difference(lost)
    criteria = pb.StoppingCriteria(max_new_tokens=3, min_new_tokens=3)
    for lost.shards[0].path in shard_pb.StepPath.values():
        generate(lost, PROMPT, stopping=criteria)
    lost.shards[0].path = shard_pb.STEP_PATH_UNSPECIFIED
    paths = "graph prompt size model adapter details drafts lists unspecified".split()
    counts = [changed.of("tgi_steps_by_path", path=path) for path in paths]
    assert counts == [3] * 8 + [0]


def test_a_mixed_step_is_one_of_each(lost: Setup) -> None:
    changed = Difference(lost)
    lost.shards[0].step_s = 0.05
    criteria = pb.StoppingCriteria(max_new_tokens=40, min_new_tokens=40)
    try:
        stream = lost.stub.GenerateStream(
            pb.SingleGenerationRequest(
                request=pb.GenerationRequest(text="a"), params=pb.Parameters(stopping=criteria)
            )
        )
        next(stream), next(stream)  # a header and a token
        generate(lost, "b", stopping=pb.StoppingCriteria(max_new_tokens=1))
        assert len(list(stream)) > 1
    finally:
        lost.shards[0].step_s = 0.001
    assert changed.of("tgi_batch_concatenation_count") == 1
    assert changed.of("tgi_batch_inference_count", method="prefill") == 2
    assert changed.of("tgi_batch_inference_count", method="next_token") == 39
    series = "tgi_batch_inference_duration_count"
    assert changed.of(series, method="prefill", makeup="single_only") == 2
    assert changed.of(series, method="next_token", makeup="single_only") == 38


def test_gauges_while_something_runs_and_after(lost: Setup) -> None:
    lost.shards[0].step_s = 0.02
    criteria = pb.StoppingCriteria(max_new_tokens=50, min_new_tokens=50)
    try:
        stream = lost.stub.GenerateStream(
            pb.SingleGenerationRequest(
                request=pb.GenerationRequest(text=PROMPT), params=pb.Parameters(stopping=criteria)
            )
        )
        num_inputs = next(stream).input_token_count
        next(stream)
        seen = values(lost)
        list(stream)
    finally:
        lost.shards[0].step_s = 0.001
    assert (seen["tgi_ready{}"], seen["tgi_permits_used{}"], seen["tgi_permits_limit{}"]) == (1, 1, 20)
    assert seen["tgi_batch_current_size{}"] == seen["tgi_requests_running{}"] == 1
    total = seen["tgi_batch_input_tokens{}"] + seen["tgi_batch_max_remaining_tokens{}"]
    assert total == num_inputs + 50
    assert 0 < seen["tgi_kv_cache_usage_ratio{}"] < 1
    after = values(lost)
    for name in ("batch_current_size", "batch_input_tokens", "batch_max_remaining_tokens", "queue_size"):
        assert after[f"tgi_{name}{{}}"] == 0, name


def list_replaced(setup: Setup) -> dict[str, float]:
    return {name: value for name, value in values(setup).items() if "replaced" in name}


def test_lost_steps(lost: Setup) -> None:
    changed = Difference(lost)
    lost.shards[0].step_s = 0.05
    criteria = pb.StoppingCriteria(max_new_tokens=30, min_new_tokens=30)
    params = pb.Parameters(stopping=criteria)
    stream = lost.stub.GenerateStream(
        pb.SingleGenerationRequest(request=pb.GenerationRequest(text="a"), params=params)
    )
    next(stream)
    next(stream)
    lost.servers.pop().stop()
    wait_until(lambda: values(lost)["tgi_ready{}"] == 0)
    lost.shards[0].step_s = 0.001
    assert list_replaced(lost) == {'tgi_replaced_kernels{kernel="gate"}': 1}
    lost.shards[0].info.replaced_kernels[:] = ["norm", "sample"]
    lost.servers.append(ShardServer(lost.shards[0], lost.uds_path))
    assert list(stream)[-1].generated_token_count == 30
    assert list_replaced(lost) == {
        f'tgi_replaced_kernels{{kernel="{name}"}}': 1 for name in ("norm", "sample")
    }
    assert changed.of("tgi_shard_restarts") == 1
    assert changed.of("tgi_batch_inference_failure", method="next_token", reason="connection") >= 1
    count, success = (
        changed.of(f"tgi_batch_inference_{name}", method="next_token") for name in ("count", "success")
    )
    assert count - success == changed.of(
        "tgi_batch_inference_failure", method="next_token", reason="connection"
    )


def test_the_page_lists_every_series_and_no_other(lost: Setup) -> None:
    exercise(lost)
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    documented = re.findall(r"^\| `(tgi_\w+)` \| (\w+) \| (.*?) \|", page, re.MULTILINE)
    shown = {name.removesuffix("_total"): family for name, family in scrape(lost).items()}
    assert {name for name, _, _ in documented} == set(shown)
    for name, kind, labels in documented:
        assert (kind, set(re.findall(r"`(\w+)`", labels))) == (TGIS | OURS | OF_HTTP).get(
            name, (kind, set())
        ), name
