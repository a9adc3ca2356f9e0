"""Figures of the service's other precisions from samples of known rates, the choice of matches, and the rates
of instructions."""

from argparse import Namespace
from dataclasses import replace

import pytest
import torch

from bench import limits, options, probe, rates, targets, variants
from bench.contest import Asked, Sample
from bench.instructions import LANES, PAIRS, QUADS, SUMS, Instruction, make_operands
from bench.limits import Rates
from bench.machine import Limits
from bench.shapes import SHAPES
from bench.worker import Worker

# Benches are no part of the service: make test-all runs their tests.
pytestmark = pytest.mark.slow

SHAPE = SHAPES["500m"]
MACHINE = Rates(read=30e9, gemm=200e9, bfloat16=400e9, int8=800e9)


def make_sample(case: str, contender: str, rate: float, machine: Rates = MACHINE) -> Sample:
    return Sample(case, contender, 0, 0.1, 1.0, rate, (machine, machine))


def find(samples: list[Sample]) -> dict[str, float]:
    figures = rates.find_figures(samples, SHAPE, options.parse_options(["--shape", "500m"]))
    assert len({figure.key for figure in figures}) == len(figures)
    return {figure.key: figure.spread.median for figure in figures}


def test_other_ways_to_compute_are_compared_with_each_other() -> None:
    decoded = {"ours": 100.0, "ours int8": 180.0, "ours int4": 240.0, "ours w4a8": 270.0}
    samples = [make_sample("decode 1", name, rate) for name, rate in decoded.items()]
    figures = find(samples)
    figures.pop("decode 1")
    assert figures == {
        "int8 1": 1.8,
        "int4 1": 2.4,
        "int4 to int8 1": pytest.approx(4 / 3),
        "w4a8 1": 2.7,
        "w4a8 to int8 1": 1.5,
    }
    samples = [sample for sample in samples if sample.contender != "ours int8"]
    assert find(samples).keys() == {"decode 1", "int4 1", "w4a8 1"}


def test_a_narrow_cache_is_compared_at_the_long_context() -> None:
    case = "decode 32 at 1024"
    figures = find([make_sample(case, "ours", 100.0), make_sample(case, "ours fp8 cache", 130.0)])
    assert figures == {"fp8-cache at 1024": 1.3}


def test_a_prompt_is_measured_by_the_instructions_that_compute_it() -> None:
    """At 512 tokens, products take 512 * 2 operations per weight."""
    attention = 4 * 24 * 20 * 64 * 512 * 513 // 2
    products = limits.prefill_operations(SHAPE, 512) - attention
    samples = [make_sample("prefill 512", name, 100.0) for name in ("ours bfloat16", "ours int8")]
    assert find(samples) == {
        "bfloat16 prefill limit": pytest.approx(100 * (products + attention) / 400e9 / 512),
        "int8 prefill limit": pytest.approx(100 * (products + attention) / 800e9 / 512),
        "int8 prefill limit, attention in float32": pytest.approx(
            100 * (products / 800e9 + attention / 200e9) / 512
        ),
    }


def test_without_the_instructions_there_is_no_share() -> None:
    machine = replace(MACHINE, bfloat16=None, int8=None)
    names = ("ours", "ours bfloat16", "ours int8")
    samples = [make_sample("prefill 512", name, 100.0, machine) for name in names]
    assert find(samples).keys() == {"prefill 512", "bfloat16 prefill", "int8 prefill"}
    assert rates.find_unmeasured(MACHINE) == {}
    assert rates.find_unmeasured(machine) == {
        "bfloat16": "unmeasured: the processor has no AVX512_BF16",
        "int8": "unmeasured: the processor has no AVX512_VNNI",
    }
    assert [name for name in names if rates.is_emulated(name, machine)] == ["ours bfloat16"]
    assert not any(rates.is_emulated(name, MACHINE) for name in names)


def test_the_better_look_is_of_every_kind() -> None:
    first, second = Rates(1, 8, None, 3), Rates(2, 7, None, 4)
    assert probe.highest(first, second) == Rates(2, 8, None, 4)
    assert probe.highest(first, replace(second, bfloat16=1.0)).bfloat16 is None


def make_matches(only: str, *names: str) -> dict[str, list[str]]:
    """Return the names of the measured contenders by case, if these contenders can be started."""
    chosen: Namespace = options.parse_options(["--only", only, "--clients", "8"])
    process: Worker = object.__new__(Worker)  # it is not called
    ours, *others = (Asked(name, process) for name in ("ours", *names))
    matches = rates.make_matches(chosen, ours, {other.name: other for other in others})
    return {case.name: [contender.name for contender in contenders] for case, contenders in matches}


def test_only_required_contenders_are_measured() -> None:
    assert make_matches("fp8-cache", "ours fp8 cache") == {"decode 32 at 1024": ["ours", "ours fp8 cache"]}
    assert make_matches("int4", "ours int8", "ours int4") == {
        "decode 8": ["ours", "ours int8", "ours int4"],
        "prefill 512": ["ours", "ours int8", "ours int4"],
    }
    assert make_matches("int4") == {}, "nothing could be started"
    assert make_matches("context") == {"decode 32 at 128": ["ours"], "decode 32 at 1024": ["ours"]}


def test_sections_include_their_comparisons() -> None:
    wanted = {each.name: formats for each, formats in variants.find_wanted(["int4", "bfloat16"]).items()}
    assert wanted == {"ours int8": ["int4"], "ours bfloat16": ["bfloat16"], "ours int4": ["int4"]}


def test_every_target_has_a_figure_of_its_key() -> None:
    cases = ["decode 1", "decode 8", "decode 32", "prefill 512", "decode 32 at 1024"]
    names = ["ours", *(variant.name for variant in variants.VARIANTS)]
    figures = find([make_sample(case, name, 100.0) for case in cases for name in names])
    wanted = {target.key for target in targets.TARGETS if target.section in variants.SECTIONS}
    assert wanted <= figures.keys()


@pytest.mark.parametrize("instruction", [PAIRS, QUADS], ids=["pairs", "quads"])
def test_registers_hold_every_product(instruction: Instruction) -> None:
    """Each of the steps' products is computed, so none was merged with another."""
    if not instruction.is_supported:
        assert Limits(1 << 12, 8).multiply(instruction, 0.01) is None
        return
    units, steps, operands = 3, 10, make_operands()
    kind = torch.float32 if instruction is PAIRS else torch.int32
    begin = torch.arange(SUMS * LANES).view(SUMS, LANES).to(kind)  # [SUMS, LANES]
    operands[2:] = begin.view(torch.int8)
    out = torch.zeros(units, SUMS, LANES, dtype=kind)
    instruction.kernel.parallel(units, steps, operands.data_ptr(), out.data_ptr())
    factors = operands[:2].view(torch.bfloat16 if instruction is PAIRS else torch.int8).double()
    per_lane = (factors[0] * factors[1]).view(LANES, -1).sum(1)  # [LANES]
    assert instruction.operations == 2 * factors.shape[1]
    expected = begin.double() + steps * per_lane
    torch.testing.assert_close(out.double(), expected.expand(units, -1, -1), rtol=1e-5, atol=0)
