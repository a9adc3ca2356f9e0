"""Builds the plan of a measurement from the options."""

from pathlib import Path

import click

from tgis.cli.bench.options import BenchLoad, BenchOutput, BenchPlace, BenchPrompts
from tgis.load.apis.catalogue import Endpoint, choose_api
from tgis.load.apis.features import WITHOUT_MINIMUM, check_features
from tgis.load.apis.interface import LoadTarget
from tgis.load.campaign import BenchPlan, Level
from tgis.load.errors import LoadError
from tgis.load.figures import parse_objectives
from tgis.load.workload.arrivals import read_trace
from tgis.load.workload.constraints import parse_shares
from tgis.load.workload.conversations import Workload
from tgis.load.workload.lengths import parse_lengths

DEFAULT_DURATION_S = 30.0
SATURATING = 64
MAX_CHANNELS = 16


def make_plan(place: BenchPlace, load: BenchLoad, prompts: BenchPrompts, output: BenchOutput) -> BenchPlan:
    """Return the plan. Raises LoadError and click.UsageError."""
    levels = make_levels(load)
    endpoint = make_endpoint(place, max((level.concurrency for level in levels), default=0) or SATURATING)
    no_limit = load.requests is not None or all(level.trace for level in levels)
    return BenchPlan(
        endpoint=endpoint,
        workload=make_workload(prompts, endpoint.api),
        levels=levels,
        is_sweep=load.sweep,
        num_requests=load.requests,
        duration_s=load.duration or (None if no_limit else DEFAULT_DURATION_S),
        warm_up=load.warm_up,
        num_repeats=max(load.repeats, 2) if load.precision else load.repeats,
        max_repeats=load.max_repeats,
        precision=load.precision,
        num_processes=load.processes,
        timeout_s=place.timeout,
        error_pause_s=load.error_pause,
        objectives=parse_objectives(output.slo),
    )


def make_endpoint(place: BenchPlace, concurrency: int) -> Endpoint:
    if (place.cert is None) != (place.key is None):
        raise click.UsageError("--cert and --key must be given together")
    credentials = LoadTarget(
        address="",
        is_tls=place.tls or place.ca_cert is not None or place.cert is not None,
        ca_cert=place.ca_cert,
        cert=place.cert,
        key=place.key,
        token=place.token,
        model=place.model,
        num_channels=min(concurrency, MAX_CHANNELS),
        calls_per_connection=place.calls_per_connection,
    )
    return choose_api(place.target, place.api, credentials)


def make_levels(load: BenchLoad) -> tuple[Level, ...]:
    """Return the loads in the order of their kinds: closed loops, open loops, the trace."""
    given = load.concurrency or (str(SATURATING) if load.sweep else None)
    if given is None and load.rate is None and load.trace is None:
        given = "1"
    levels = [Level(f"concurrency {one:g}", concurrency=int(one)) for one in _numbers(given, "--concurrency")]
    if any(
        level.concurrency != one for level, one in zip(levels, _numbers(given, "--concurrency"), strict=True)
    ):
        raise click.UsageError("--concurrency needs whole numbers")
    levels += [
        Level(f"rate {rate:g}", rate=rate, process="poisson" if load.arrivals == "poisson" else "constant")
        for rate in _numbers(load.rate, "--rate")
    ]
    if load.trace is not None:
        times = tuple(read_trace(Path(load.trace), load.trace_scale))
        levels.append(Level(f"trace {Path(load.trace).name}", trace=times))
    return tuple(levels)


def _numbers(text: str | None, flag: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")] if text else []
    except ValueError as error:
        raise click.UsageError(f"{flag} needs numbers, separated by commas") from error
    if any(not 0 < number < 1e9 for number in numbers):
        raise click.UsageError(f"{flag} needs positive numbers")
    return numbers


def make_workload(prompts: BenchPrompts, api: str) -> Workload:
    _check_prompts(prompts)
    for text in (prompts.input_tokens, prompts.output_tokens, prompts.batch):
        parse_lengths(text)
    workload = Workload(
        seed=prompts.seed,
        input_tokens=prompts.input_tokens,
        output_tokens=prompts.output_tokens,
        prompt_file=prompts.prompts,
        cuts_prompts=prompts.exact_input,
        prefix_tokens=prompts.shared_prefix,
        num_prefixes=prompts.num_prefixes,
        turns=prompts.turns,
        adapter_ids=_ids(prompts.adapters),
        adapter_share=prompts.adapter_share,
        soft_prompt_ids=_ids(prompts.soft_prompts),
        soft_prompt_share=prompts.soft_prompt_share,
        constraints=parse_shares(prompts.constraints),
        num_distinct=prompts.distinct,
        repeat_share=prompts.repeat_share,
        temperature=prompts.temperature,
        sampled_share=prompts.sampled_share,
        top_k=prompts.top_k,
        top_p=prompts.top_p,
        repetition_penalty=prompts.repetition_penalty,
        batch=prompts.batch,
        unary_share=prompts.unary_share,
        cancel_share=prompts.cancel_share,
        has_token_details=prompts.token_details,
        may_end_early=prompts.may_end_early or api in WITHOUT_MINIMUM,
    )
    check_features(api, workload)
    return workload


def _check_prompts(prompts: BenchPrompts) -> None:
    if prompts.exact_input and (prompts.prompts or prompts.shared_prefix or prompts.turns != 1):
        raise LoadError("--exact-input cuts random prompts: no --prompts, --shared-prefix or --turns")
    if prompts.batch != "1" and prompts.turns != 1:
        raise LoadError("a call of several prompts (--batch) is no conversation (--turns)")
    if prompts.distinct and prompts.repeat_share:
        raise LoadError("--distinct and --repeat-share exclude each other")
    if prompts.temperature is None and (prompts.top_k or prompts.top_p):
        raise LoadError("--top-k and --top-p need --temperature")


def _ids(text: str | None) -> tuple[str, ...]:
    return tuple(filter(None, (part.strip() for part in (text or "").split(","))))
