"""Tests the series under vLLM's names in a scrape after requests of every kind.
They are compared with vLLM's definitions, the answers, and TGIS's series."""

import http.client
import json
import random
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field

import grpc
import prometheus_client
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.support.router.messages import batch, single, stopping
from tests.support.router.model_of_contents import Library, adapter
from tests.support.router.router_process import Setup, start_router, stop_router
from tgis.pb import generation_pb2 as pb
from tgis.pb import shard_pb2
from tgis.router.api.vllm.series import HistogramView, VllmSeries
from tgis.router.events import Timings
from tgis.router.metrics.metric_types import Histogram
from tgis.router.metrics.metrics import MetricLimits, Metrics
from tgis.router.metrics.storage import MemoryStorage

MODEL, ADAPTER = "small/model", "german"
NUM_BLOCKS, BLOCK_SIZE = 30, 8  # room for a little more than one long input
LONG = 150
OF_MODEL = {"model_name", "engine"}
TTFT = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80]
TTFT += [160, 640, 2560]
TPOT = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80]
LATENCY = [0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680]
LENGTHS = [1, 2, 5, 10, 20, 50, 100, 200]  # up to the maximum sequence length
STEP = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
# vLLM's metrics without the prefix: type, labels, buckets.
KNOWN: dict[str, tuple[str, set[str], list[float]]] = {
    "num_requests_running": ("gauge", OF_MODEL, []),
    "num_requests_waiting": ("gauge", OF_MODEL, []),
    "kv_cache_usage_perc": ("gauge", OF_MODEL, []),
    "gpu_cache_usage_perc": ("gauge", OF_MODEL, []),
    "prefix_cache_queries": ("counter", OF_MODEL, []),
    "prefix_cache_hits": ("counter", OF_MODEL, []),
    "gpu_prefix_cache_queries": ("counter", OF_MODEL, []),
    "gpu_prefix_cache_hits": ("counter", OF_MODEL, []),
    "num_preemptions": ("counter", OF_MODEL, []),
    "spec_decode_num_drafts": ("counter", OF_MODEL, []),
    "spec_decode_num_draft_tokens": ("counter", OF_MODEL, []),
    "spec_decode_num_accepted_tokens": ("counter", OF_MODEL, []),
    "spec_decode_num_accepted_tokens_per_pos": ("counter", OF_MODEL | {"position"}, []),
    "prompt_tokens": ("counter", OF_MODEL, []),
    "generation_tokens": ("counter", OF_MODEL, []),
    "request_success": ("counter", OF_MODEL | {"finished_reason"}, []),
    "request_prompt_tokens": ("histogram", OF_MODEL, LENGTHS),
    "request_generation_tokens": ("histogram", OF_MODEL, LENGTHS),
    "request_params_n": ("histogram", OF_MODEL, [1, 2, 5, 10, 20]),
    "request_params_max_tokens": ("histogram", OF_MODEL, LENGTHS),
    "request_max_num_generation_tokens": ("histogram", OF_MODEL, LENGTHS),
    "iteration_tokens_total": ("histogram", OF_MODEL, STEP),
    "time_to_first_token_seconds": ("histogram", OF_MODEL, TTFT),
    "inter_token_latency_seconds": ("histogram", OF_MODEL, TPOT),
    "time_per_output_token_seconds": ("histogram", OF_MODEL, TPOT),
    "request_time_per_output_token_seconds": ("histogram", OF_MODEL, TPOT),
    "e2e_request_latency_seconds": ("histogram", OF_MODEL, LATENCY),
    "request_queue_time_seconds": ("histogram", OF_MODEL, LATENCY),
    "request_inference_time_seconds": ("histogram", OF_MODEL, LATENCY),
    "request_prefill_time_seconds": ("histogram", OF_MODEL, LATENCY),
    "request_decode_time_seconds": ("histogram", OF_MODEL, LATENCY),
    "lora_requests_info": (
        "gauge",
        {"max_lora", "running_lora_adapters", "waiting_lora_adapters"},
        [],
    ),
    "cache_config_info": (
        "gauge",
        OF_MODEL | {"block_size", "num_gpu_blocks", "enable_prefix_caching"},
        [],
    ),
}
SAME = {
    "time_to_first_token_seconds": "tgi_request_time_to_first_token_duration",
    "inter_token_latency_seconds": "tgi_request_inter_token_duration",
    "time_per_output_token_seconds": "tgi_request_inter_token_duration",
    "e2e_request_latency_seconds": "tgi_request_duration",
    "request_queue_time_seconds": "tgi_request_queue_duration",
    "request_inference_time_seconds": "tgi_request_inference_duration",
    "request_generation_tokens": "tgi_request_generated_tokens",
    "request_params_max_tokens": "tgi_request_max_new_tokens",
}
"""Pairs of histograms with the same observations."""


@dataclass
class Watched:
    """A router with vLLM's series, and the answers of its clients."""

    setup: Setup
    num_input: list[int] = field(default_factory=list)
    """Number of tokens in each finished text."""
    num_generated: list[int] = field(default_factory=list)
    num_cancelled_input: int = 0
    families: dict[str, Metric] = field(default_factory=dict)
    """A scrape after all requests."""

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of the samples with these labels."""
        results = [
            sample.value
            for family in self.families.values()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert results, name
        return sum(results)

    def take(self, answers: list[pb.GenerationResponse]) -> None:
        self.num_input += [one.input_token_count for one in answers]
        self.num_generated += [one.generated_token_count for one in answers]

    def generate(self, *texts: str, num_tokens: int, **more: str) -> None:
        request = batch(*texts, stopping=stopping(num_tokens, min_new_tokens=num_tokens))
        request.MergeFrom(pb.BatchedGenerationRequest(**more))
        self.take(list(self.setup.stub.Generate(request).responses))


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    flags = ["--metrics-alias", "vllm", "--served-model-name", f"{MODEL},other", "--http-api", "openai"]
    library = Library()
    library.put(adapter("a1", 1 << 18), ADAPTER)
    info = shard_pb2.InfoResponse(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, adapter_cache_bytes=1 << 20)
    directory = tmp_path_factory.mktemp("watched")
    setup = start_router(directory, 1, *flags, "--max-batch-size", "6", info=info, library=library)
    one = Watched(setup)
    exercise(one)
    yield one
    assert stop_router(setup) == 0, setup.service.output


def exercise(watched: Watched) -> None:
    """Send requests of every kind, with every kind of end."""
    watched.generate("a", num_tokens=1)
    watched.generate("a", "a b c d", num_tokens=30, adapter_id=ADAPTER)
    # Preempts, because three do not fit into the cache.
    watched.generate("one", "two", "three", num_tokens=LONG)
    stream = single("a b", stopping=stopping(20, min_new_tokens=20))
    head, *_, last = watched.setup.stub.GenerateStream(stream)
    watched.num_input.append(head.input_token_count)
    watched.num_generated.append(last.generated_token_count)
    complete(watched, n=3)
    watched.num_cancelled_input = cancel(watched.setup)
    fail(watched.setup)
    watched.families = settled(watched.setup)


def complete(watched: Watched, n: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", watched.setup.service.http_port, timeout=10)
    body = {"prompt": "a b", "max_tokens": 4, "ignore_eos": True, "n": n, "seed": 1, "temperature": 1}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body))
        usage = json.load(connection.getresponse())["usage"]
    finally:
        connection.close()
    assert usage["completion_tokens"] == 4 * n
    watched.num_input += [usage["prompt_tokens"]] * n
    watched.num_generated += [4] * n


def cancel(setup: Setup) -> int:
    """Cancel a running stream and return its number of input tokens."""
    setup.shards[0].step_s = 0.02
    stream = setup.stub.GenerateStream(single("a b", stopping=stopping(LONG, min_new_tokens=LONG)))
    num_input: int = next(stream).input_token_count
    next(stream)
    stream.cancel()
    wait_for(setup, 'tgi_request_failure{err="cancelled"} 1.0')
    setup.shards[0].step_s = 0.001
    return num_input


def fail(setup: Setup) -> None:
    """Fail with a server error and with a client error. vLLM's series do not count the client error."""
    model = setup.shards[0].model
    model.refuses = lambda message: True
    with pytest.raises(grpc.RpcError):
        setup.stub.Generate(batch("refused"))
    model.refuses = lambda message: False
    with pytest.raises(grpc.RpcError):
        setup.stub.Generate(batch("a", stopping=stopping(5, min_new_tokens=6)))


def scrape(setup: Setup) -> str:
    with urllib.request.urlopen(f"{setup.http}/metrics", timeout=10) as response:
        return str(response.read().decode())


def wait_for(setup: Setup, text: str) -> str:
    deadline = time.monotonic() + 30
    while text not in (shown := scrape(setup)):
        assert time.monotonic() < deadline, f"{text}\n{shown}"
        time.sleep(0.02)
    return shown


def settled(setup: Setup) -> dict[str, Metric]:
    """Return the families by the name in their TYPE line, once nothing runs."""
    text = wait_for(setup, "tgi_requests_live 0.0")
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_names_types_labels_and_buckets_are_vllms(watched: Watched) -> None:
    shown = {name.removeprefix("vllm:") for name in watched.families if name.startswith("vllm:")}
    assert shown == KNOWN.keys()
    for name, (kind, labels, bounds) in KNOWN.items():
        family = watched.families[f"vllm:{name}"]
        assert family.type == kind, name
        assert family.samples, name
        suffixes = {"counter": {"_total"}, "gauge": {""}, "histogram": {"_bucket", "_count", "_sum"}}
        assert {each.name for each in family.samples} == {f"vllm:{name}{end}" for end in suffixes[kind]}
        assert all(set(each.labels) - {"le"} == labels for each in family.samples), name
        models = {each.labels.get("model_name", MODEL) for each in family.samples}
        assert models == {MODEL}, name
        ends = [float(each.labels["le"]) for each in family.samples if "le" in each.labels]
        assert ends == ([*bounds, float("inf")] if bounds else []), name


def test_types_are_written_as_prometheus_client_writes_them(watched: Watched) -> None:
    """Check lines that some consumers parse."""
    text = scrape(watched.setup)
    assert "# TYPE vllm:prompt_tokens_total counter\n" in text
    assert "# TYPE vllm:iteration_tokens_total histogram\n" in text
    assert f'vllm:num_requests_running{{engine="0",model_name="{MODEL}"}} 0.0\n' in text


@pytest.mark.parametrize(("name", "source"), SAME.items())
def test_histograms_agree_with_those_of_tgis(watched: Watched, name: str, source: str) -> None:
    for part in ("_count", "_sum"):
        assert watched.value(f"vllm:{name}{part}") == watched.value(f"{source}{part}") > 0
    for end in (*KNOWN[name][2], float("inf")):
        below = watched.value(f"vllm:{name}_bucket", le=prometheus_client.utils.floatToGoString(end))
        buckets = watched.families[source].samples
        ours = [(float(each.labels["le"]), each.value) for each in buckets if "le" in each.labels]
        assert max((count for le, count in ours if le <= end), default=0) <= below
        assert below <= min(count for le, count in ours if le >= end)


def test_lengths_are_those_of_the_answers(watched: Watched) -> None:
    finished = len(watched.num_generated)
    for name, expected in (
        ("request_prompt_tokens", watched.num_input),
        ("request_generation_tokens", watched.num_generated),
    ):
        assert watched.value(f"vllm:{name}_sum") == sum(expected)
        for end in LENGTHS:
            below = watched.value(f"vllm:{name}_bucket", le=f"{end}.0")
            assert below == sum(number <= end for number in expected), (name, end)
    total = watched.value("tgi_request_total_tokens_sum")
    assert total == sum(watched.num_input) + sum(watched.num_generated)
    # One more was cancelled, after at least one token.
    begun = sum(watched.num_input) + watched.num_cancelled_input
    assert watched.value("vllm:prompt_tokens_total") == begun
    assert watched.value("vllm:generation_tokens_total") > sum(watched.num_generated)
    assert watched.value("vllm:time_to_first_token_seconds_count") == finished + 1


def test_texts_of_one_prompt_are_one_request(watched: Watched) -> None:
    texts = len(watched.num_generated)
    assert watched.value("vllm:request_params_n_sum") == texts
    assert watched.value("vllm:request_params_n_count") == texts - 2
    assert watched.value("vllm:request_params_n_bucket", le="2.0") == texts - 3
    longest = watched.value("vllm:request_max_num_generation_tokens_sum")
    assert longest == sum(watched.num_generated) - 2 * 4


def test_the_longest_text_of_an_input_counts() -> None:
    """Check that texts may end in any order, and that an input with an unfinished text is not counted."""
    vllm = VllmSeries(MODEL, 64, Metrics(MetricLimits(64, 32, 4)), MemoryStorage())
    call = vllm.call(3)
    for index, length in ((4, 9), (0, 4), (2, 7), (6, 30), (3, 12), (1, 2), (5, 1), (7, 31)):
        call.finish(index, 5, length, Timings(0.0, 0.1, 0.2))
    buckets, total = vllm.request_max_num_generation_tokens.read((5, 10, 20))
    assert buckets == [("5.0", 0), ("10.0", 1), ("20.0", 2), ("+Inf", 2)]
    assert total == 7 + 12
    assert vllm.request_prompt_tokens.count == 8


def test_ends_by_reason(watched: Watched) -> None:
    def ended(reason: str) -> float:
        return watched.value("vllm:request_success_total", finished_reason=reason)

    finished = watched.value("tgi_request_success_total")
    assert ended("stop") + ended("length") == finished == len(watched.num_generated)
    assert ended("stop") == 0
    assert (ended("abort"), ended("error")) == (1, 1)


def test_times_of_a_request_add_up(watched: Watched) -> None:
    prefill, decode, inference = (
        watched.value(f"vllm:request_{name}_time_seconds_sum") for name in ("prefill", "decode", "inference")
    )
    assert prefill + decode == pytest.approx(inference)
    assert 0 < prefill < decode
    several = sum(number > 1 for number in watched.num_generated)
    assert watched.value("vllm:request_time_per_output_token_seconds_count") == several
    mean = watched.value("vllm:request_time_per_output_token_seconds_sum") / several
    assert 0 < mean < decode / several


def test_steps_have_as_many_tokens_as_were_computed(watched: Watched) -> None:
    prompts = watched.value("tgi_batch_next_tokens_sum")
    decodes = watched.value("tgi_batch_inference_batch_size_sum", method="next_token")
    assert watched.value("vllm:iteration_tokens_total_sum") == prompts + decodes
    steps = watched.value("tgi_batch_inference_duration_count")
    assert watched.value("vllm:iteration_tokens_total_count") == steps


def test_counts_of_the_cache(watched: Watched) -> None:
    assert watched.value("vllm:num_preemptions_total") == watched.value("tgi_preemptions_total") > 0
    for prefix in ("", "gpu_"):
        for name in ("queries", "hits"):
            same = watched.value(f"tgi_prefix_cache_{name}_total")
            assert watched.value(f"vllm:{prefix}prefix_cache_{name}_total") == same > 0
    [shape] = watched.families["vllm:cache_config_info"].samples
    expected = {"block_size": str(BLOCK_SIZE), "num_gpu_blocks": str(NUM_BLOCKS), "engine": "0"}
    assert shape.value == 1
    assert expected.items() <= shape.labels.items()


def test_running_and_waiting_requests_and_their_adapters(watched: Watched) -> None:
    """Check seven long inputs of one adapter with six rows."""
    setup = watched.setup
    [idle] = watched.families["vllm:lora_requests_info"].samples
    assert idle.labels == {"max_lora": "4", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    setup.shards[0].step_s = 0.02
    request = batch(*"abcdefg", stopping=stopping(25, min_new_tokens=25))
    request.adapter_id = ADAPTER
    call = setup.stub.Generate.future(request)
    text = wait_for(setup, f'num_requests_waiting{{engine="0",model_name="{MODEL}"}} 1.0')
    setup.shards[0].step_s = 0.001
    assert len(call.result().responses) == 7
    families = {family.name: family for family in text_string_to_metric_families(text)}
    [adapters] = families["vllm:lora_requests_info"].samples
    assert adapters.labels == {
        "max_lora": "4",
        "running_lora_adapters": ADAPTER,
        "waiting_lora_adapters": ADAPTER,
    }
    assert abs(adapters.value - time.time()) < 60
    running, usage, old = (
        families[f"vllm:{name}"].samples[0].value
        for name in ("num_requests_running", "kv_cache_usage_perc", "gpu_cache_usage_perc")
    )
    assert running == 6
    assert 0 < usage == old <= 1


def test_a_view_counts_as_prometheus_client_does() -> None:
    """Check random values, and values at a bucket's bound in either histogram."""
    r, registry = random.Random(5), prometheus_client.CollectorRegistry()
    ours, theirs = [0.1 * 1.5**k for k in range(12)], [0.15, 0.3, 1, 2.5, 10]
    expected = [
        prometheus_client.Histogram(name, "", buckets=bounds, registry=registry)
        for name, bounds in (("first", ours), ("second", theirs))
    ]
    source = Histogram("first", "", ours)
    view = HistogramView("second", "", source, theirs, ("model", "0"))
    for value in [*ours, *theirs, *(r.uniform(0, 12) for _ in range(500))]:
        source.observe(value)
        for one in expected:
            one.observe(value)
    for shown, reference in zip((source, view), expected, strict=True):
        [actual], [reference_family] = shown.collect(), reference.collect()
        samples = [(each.name, each.labels.get("le"), each.value) for each in actual.samples]
        wanted_samples = [
            (each.name, each.labels.get("le"), each.value)
            for each in reference_family.samples
            if not each.name.endswith("_created")
        ]
        assert samples == wanted_samples
