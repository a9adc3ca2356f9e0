"""Limits against counting one by one, contests between contenders of known speed, and their tables."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench import contest, limits, options, report, sections, targets
from bench.contest import Case, Sample, Spread
from bench.interruption import find_gaps
from bench.limits import Rates
from bench.service import BenchError
from bench.shapes import SHAPES, Shape
from bench.targets import Figure
from tgis.load.records import AnswerRecord
from tgis.shard.memory.kv_cache import KVCache

# Benches are no part of the service: make test-all runs their tests.
pytestmark = pytest.mark.slow

TIED = Shape(2, 48, 4, 2, 8, 80, 600)
UNTIED = Shape(2, 48, 4, 2, 8, 80, 600, tie_embeddings=False)
RATES = Rates(read=1e9, gemm=1e12)


def count_operations(shape: Shape, first: int, last: int, with_head: bool) -> int:
    """Count the operations of the tokens [first, last) one by one: two for every multiplied weight of
    transformers' model, four for every channel of every position that a head attends to."""
    config = LlamaConfig(
        num_hidden_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        vocab_size=shape.vocab_size,
        tie_word_embeddings=shape.tie_embeddings,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    weights = sum(p.numel() for name, p in model.model.named_parameters() if "embed" not in name)
    weights += model.lm_head.weight.numel() if with_head else 0
    seen = sum(position + 1 for position in range(first, last))
    return 2 * weights * (last - first) + 4 * shape.num_layers * shape.num_heads * shape.head_dim * seen


@pytest.mark.parametrize("shape", [TIED, UNTIED])
def test_operations_are_those_of_the_model(shape: Shape) -> None:
    assert limits.prefill_operations(shape, 7) == count_operations(shape, 0, 7, with_head=False)
    # 5 prompt tokens produce the first new one, 3 steps at positions 5, 6 and 7 the other three.
    assert limits.decode_operations(shape, 5, 4) == count_operations(shape, 5, 8, with_head=True)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_long_sequence_is_limited_by_reading_weights_and_cache(dtype: str) -> None:
    cache = KVCache(TIED.num_layers, 10, 16, TIED.num_kv_heads, TIED.head_dim, getattr(torch, dtype))
    size = cache.keys.nbytes + cache.values.nbytes
    assert limits.count_cache_bytes(TIED, dtype, 160) == size
    weights = limits.count_step_weights(TIED) * cache.dtype.itemsize
    assert limits.long_decode_limit(TIED, dtype, 160, RATES) == pytest.approx(1e9 / (weights + size))


def test_one_sequence_is_limited_by_reading_and_many_by_multiplying() -> None:
    shape, rates = SHAPES["135m"], Rates(read=32e9, gemm=195e9)
    one = limits.decode_limit(shape, "float16", 1, 128, 64, rates)
    assert one == pytest.approx(32e9 / (2 * 115.7e6), rel=1e-2)
    many = limits.decode_limit(shape, "float16", 32, 128, 64, rates)
    per_token = count_operations(shape, 128, 191, with_head=True) / 63
    assert many == pytest.approx(195e9 / per_token)
    assert limits.decode_limit(shape, "int8", 1, 128, 64, rates) == pytest.approx(2 * one)


def test_the_table_of_an_untied_model_is_not_read() -> None:
    assert limits.count_step_weights(TIED) == limits.count_step_weights(UNTIED)


@dataclass
class Steady:
    """Contender that takes this many seconds per prompt token and per step."""

    name: str
    per_prompt_token: float
    per_step: float
    asked: list[tuple[int, int, int, int]] = field(default_factory=list)

    def generate(self, batch: int, input_tokens: int, new_tokens: int, seed: int) -> float:
        self.asked.append((batch, input_tokens, new_tokens, seed))
        return batch * input_tokens * self.per_prompt_token + (new_tokens - 1) * self.per_step


def climbing() -> Callable[[], Rates]:
    """Machine that is faster at every measurement."""
    count = iter(range(1, 1000))
    return lambda: Rates(float(next(count)), 1.0)


DECODE, PREFILL = Case("decode", 8, 128, 64), Case("prefill", 1, 512, 1)


def test_a_contest_finds_the_rates() -> None:
    fast, slow = Steady("fast", 0.001, 0.01), Steady("slow", 0.002, 0.04)
    samples = contest.play([(DECODE, [fast, slow]), (PREFILL, [fast])], climbing(), 3, lambda _: None)
    assert contest.rates_of(samples, "fast", "decode 8") == Spread(*[pytest.approx(800.0)] * 3, 3)
    assert contest.rates_of(samples, "fast", "prefill 512") == Spread(*[pytest.approx(1000.0)] * 3, 3)
    assert contest.rates_of(samples, "slow", "prefill 512") is None
    ratio = contest.ratios_of(samples, ("fast", "decode 8"), ("slow", "decode 8"))
    assert ratio == Spread(*[pytest.approx(4.0)] * 3, 3)


def test_a_rate_below_zero_is_no_figure() -> None:
    with pytest.raises(BenchError, match="whole answers took"):
        contest.play([(DECODE, [Steady("backward", 0.001, -0.01)])], climbing(), 1, lambda _: None)


def test_contenders_take_turns_with_new_prompts_and_a_look_at_the_machine_between() -> None:
    one, other = Steady("one", 0.001, 0.01), Steady("other", 0.001, 0.01)
    samples = contest.play([(DECODE, [one, other])], climbing(), 2, lambda _: None)
    assert [(sample.round, sample.contender) for sample in samples] == [
        (0, "one"),
        (0, "other"),
        (1, "other"),
        (1, "one"),
    ]
    assert [sample.rates.read for sample in samples] == [2, 3, 4, 5], "the better of before and after"
    measured = one.asked[1:]
    assert len({seed for *_, seed in measured}) == len(measured)
    assert [asked[:3] for asked in measured] == [(8, 128, 1), (8, 128, 64)] * 2


def test_prompts_that_shall_be_cached_are_always_the_same() -> None:
    one = Steady("one", 0.001, 0.01)
    contest.play([(Case("decode", 4, 1024, 64, is_cached=True), [one])], climbing(), 2, lambda _: None)
    assert {(size, seed) for _, size, _, seed in one.asked} == {(1024, 0)}


def make_sample(rate: float, read: float, number: int = 0) -> Sample:
    return Sample("decode 1", "ours", number, 0.1, 1.0, rate, (Rates(read, 1.0), Rates(read - 1, 0.5)))


def test_a_share_is_of_the_limit_at_its_time() -> None:
    samples = [make_sample(50, 100, 0), make_sample(80, 100, 1), make_sample(30, 50, 2)]
    share = contest.shares_of(samples, "ours", "decode 1", lambda rates: rates.read)
    assert share == Spread(0.6, 0.5, 0.8, 3)


def test_targets_are_judged_by_shape() -> None:
    by_key = {target.key: target for target in targets.TARGETS}
    assert len(by_key) == len(targets.TARGETS)
    assert by_key["decode 1"].is_met(0.8, "135m")
    assert not by_key["decode 1"].is_met(0.8, "1b")
    assert by_key["startup"].is_met(4.9, "135m")
    assert not by_key["startup"].is_met(5.1, "135m")
    assert by_key["int8 1"].is_met(1.0, "135m") is None


def test_the_table_shows_the_targets_met() -> None:
    spread = Spread(0.8, 0.7, 0.9, 5)
    figures = [Figure("decode 1", spread, "80 of 100"), Figure("else", Spread(2, 2, 2, 1), "detail")]
    rows = report.format_targets(figures, {"router": "no such thing"}, "135m").splitlines()[2:]
    assert rows == [
        "| decode, 1 client, float16 | of the limit | 0.8 | ≥ 0.75 | pass | 0.7 to 0.9 in 5 | 80 of 100 |",
        "| router's step, 256 sequences | ms | – | ≤ 2 | no such thing |  |  |",
        "| else |  | 2 | – | – | one run | detail |",
    ]
    assert "| **miss** |" in report.format_targets(figures, {}, "1b")


def test_gaps_count_while_the_prompt_is_computed() -> None:
    first = AnswerRecord(0, 0, 0.0, 0.0, 5, [1.0, 2.0, 4.0, 7.0, 11.0], [1, 2, 3, 4, 5])
    assert find_gaps([first], 2.5, 6.0) == [2.0, 3.0]
    assert find_gaps([first, first], 0.0, 1.5) == [1.0, 1.0]


def test_a_section_that_fails_says_so_and_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sections, "MODULES", {"prefix": "bench.no_such_module", "router": "bench.machine"})
    chosen = options.parse_options(["--only", "prefix,router", "--cache", str(tmp_path)])
    outcomes, failures = sections.run_sections(chosen, tmp_path)
    assert outcomes == {}
    assert failures == {
        "prefix": "there is no bench.no_such_module",
        "router": "failed: AttributeError",
    }
    assert "has no attribute 'run'" in capsys.readouterr().err


def test_peers_that_were_not_measured_are_named(tmp_path: Path) -> None:
    chosen = options.parse_options(["--only", "decode", "--cache", str(tmp_path)])
    spread = {"median": 1.5, "low": 1.4, "high": 1.6, "count": 2}
    figures = [{"key": "openvino-default 1", "spread": spread, "detail": "3 to 2"}]
    kept = {"started": "today", "figures": [*figures, {**figures[0], "key": "no target"}]}
    sections.peers_file(chosen.cache, chosen.shape).write_text(json.dumps(kept))
    outcome = sections.recall_peers(chosen)
    assert [(figure.key, figure.spread.median) for figure in outcome.figures] == [("openvino-default 1", 1.5)]
    assert outcome.failures == {"peers": "not in the run of today: make bench-peers"}


def test_every_target_belongs_to_a_section() -> None:
    assert {target.section for target in targets.TARGETS} <= {*options.SECTIONS, "peers"}
    chosen = options.parse_options(["--only", "prefill,decode"]).only
    assert chosen == ["decode", "prefill"]
    assert "transformers" in options.parse_options([]).only
    assert "transformers" not in options.parse_options(["--shape", "1b"]).only
    with pytest.raises(SystemExit):
        options.parse_options(["--only", "nothing"])
