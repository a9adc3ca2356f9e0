"""Runs a measurement: its levels one after the other, each repeated until its intervals are narrow."""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tgis import __version__
from tgis.load.apis.catalogue import Endpoint
from tgis.load.errors import LoadError
from tgis.load.figures import Figures, measure_rates, summarize_level, window_of
from tgis.load.job import LoadJob
from tgis.load.processes import LoadProcesses, RunRecord
from tgis.load.report.files import FORM
from tgis.load.statistics import relative_half_width
from tgis.load.workload.arrivals import Process, arrival_times
from tgis.load.workload.conversations import WORDS, TokenScale, Workload

RUN_DISTANCE = 1_000_000  # between the conversation numbers of two runs, so that no prompt is cached
PROBE_TOKENS, PROBE_WORDS = 2, 14
SWEEP_SHARES = (0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1)
"""Rates of a sweep, as shares of the rate of the saturated service."""


@dataclass(frozen=True)
class Level:
    """Load of a run."""

    label: str
    concurrency: int = 0
    """0: open loop."""
    rate: float | None = None
    """Open loop: requests per second; None: those of the trace."""
    process: Process = "poisson"
    trace: tuple[float, ...] = ()


PROBE = Level("probe", concurrency=1)


@dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """Settings of a measurement."""

    endpoint: Endpoint
    workload: Workload
    levels: tuple[Level, ...]
    is_sweep: bool = False
    """True to add levels of an open loop, up to and beyond the rate of the last level."""
    num_requests: int | None = None
    """Number of conversations per run; None: as many as the duration allows."""
    duration_s: float | None = 30.0
    warm_up: int = 4
    num_repeats: int = 1
    max_repeats: int = 1
    precision: float | None = None
    """Half width of the 95 % interval of the rates, as a share, at which repeats end; None: never."""
    num_processes: int = 1
    timeout_s: float = 600.0
    error_pause_s: float = 0.0
    """Closed loops: time for which a client waits after a failure."""
    objectives: dict[str, float] = field(default_factory=dict)


class CampaignListener:
    """Receiver of what happens in a measurement; it does nothing."""

    def begin(self, level: Level, repeat: int) -> None: ...

    def progress(self, fields: dict[str, Any]) -> None: ...

    def end(self, level: Level, figures: Figures) -> None: ...


class Campaign:
    """One measurement."""

    def __init__(self, plan: BenchPlan, processes: LoadProcesses, listener: CampaignListener) -> None:
        self._plan = plan
        self._processes = processes
        self._listener = listener
        self._scale = TokenScale()
        self._num_runs = 0

    async def run(self) -> dict[str, Any]:
        """Return the report. Raises LoadError."""
        began = time.time()
        self._scale = await self._probe_scale()
        levels = [await self._measure(level) for level in self._plan.levels]
        if self._plan.is_sweep:
            rate = levels[-1]["requests_per_s"]
            if not rate:
                raise LoadError("no request of the saturating level succeeded")
            levels += [await self._measure(level) for level in sweep_levels(rate)]
        return {
            "form": FORM,
            "version": __version__,
            "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
            "settings": describe_plan(self._plan),
            "tokens_per_word": self._scale.per_word,
            "levels": levels,
        }

    async def _probe_scale(self) -> TokenScale:
        """Return how the service counts tokens: those of every word once, and those of an empty prompt."""
        first, *others = [WORDS[start : start + PROBE_WORDS] for start in range(0, len(WORDS), PROBE_WORDS)]
        once, twice = await self._count_tokens(first), await self._count_tokens(first * 2)
        overhead = max(0, 2 * once - twice)
        counts = [once, *[await self._count_tokens(words) for words in others]]
        if not all(counts):
            return TokenScale()
        return TokenScale((sum(counts) - len(counts) * overhead) / len(WORDS), overhead)

    async def _count_tokens(self, words: Sequence[str]) -> int:
        """Return the service's count for a prompt of these words; 0 if it reports none."""
        text = " ".join(words)
        seed = self._plan.workload.seed
        workload = Workload(
            seed=seed,
            texts=(text,),
            output_tokens=str(PROBE_TOKENS),
            may_end_early=True,
            counts_inputs=True,
        )
        job = replace(self._job(PROBE), workload=workload, num_conversations=1, warm_up=0)
        [record] = (await self._processes.run([job], _ignore)).records
        if record.error is not None:
            raise LoadError(f"the first request failed: {record.error}")
        return record.input_tokens

    async def _measure(self, level: Level) -> Figures:
        """Run a level until it has been repeated often enough."""
        plan = self._plan
        runs = list[RunRecord]()
        while True:
            self._listener.begin(level, len(runs))
            runs.append(await self._processes.run(self._split(level), self._listener.progress))
            if self._is_enough(runs):
                break
        figures = {
            "label": level.label,
            "concurrency": level.concurrency,
            "rate": level.rate,
            **summarize_level(runs, self._window_limit, plan.objectives),
        }
        self._listener.end(level, figures)
        return figures

    @property
    def _window_limit(self) -> float | None:
        return None if self._plan.num_requests is not None else self._plan.duration_s

    def _is_enough(self, runs: Sequence[RunRecord]) -> bool:
        plan = self._plan
        if plan.precision is None or len(runs) < plan.num_repeats:
            return len(runs) >= plan.num_repeats
        if len(runs) >= plan.max_repeats:
            return True
        limit = self._window_limit
        rates = [measure_rates(run.records, window_of(run, limit), plan.objectives) for run in runs]
        widths = (
            relative_half_width([rate[name] for rate in rates])
            for name in ("requests_per_s", "output_tokens_per_s")
        )
        return max(widths) <= plan.precision

    def _job(self, level: Level) -> LoadJob:
        plan = self._plan
        return LoadJob(
            api=plan.endpoint.api,
            target=plan.endpoint.target,
            workload=plan.workload,
            scale=self._scale,
            first_index=self._num_runs * RUN_DISTANCE,
            step=1,
            warm_up=plan.warm_up,
            concurrency=level.concurrency,
            num_conversations=plan.num_requests,
            duration_s=plan.duration_s,
            timeout_s=plan.timeout_s,
            error_pause_s=plan.error_pause_s,
            keeps_texts=plan.workload.repeat_share > 0 or plan.workload.num_distinct > 0,
        )

    def _split(self, level: Level) -> list[LoadJob]:
        """Return the jobs of a run's processes."""
        whole = self._job(level)
        self._num_runs += 1
        schedule = () if level.concurrency else self._schedule(level)
        num_jobs = self._plan.num_processes
        num_jobs = min(num_jobs, level.concurrency or len(schedule)) or 1
        if not level.concurrency and not schedule:
            raise LoadError(f"no request falls into the duration at {level.label}")
        return [
            replace(
                whole,
                first_index=whole.first_index + number,
                step=num_jobs,
                warm_up=_share(whole.warm_up, number, num_jobs),
                concurrency=_share(level.concurrency, number, num_jobs),
                num_conversations=None
                if whole.num_conversations is None
                else _share(whole.num_conversations, number, num_jobs),
                schedule=schedule[number::num_jobs],
            )
            for number in range(num_jobs)
        ]

    def _schedule(self, level: Level) -> tuple[float, ...]:
        plan = self._plan
        duration_s = plan.duration_s if plan.duration_s is not None else math.inf
        if level.rate is None:
            return tuple(time for time in level.trace if time < duration_s)[: plan.num_requests]
        seed = plan.workload.seed + self._num_runs
        return tuple(arrival_times(level.process, level.rate, duration_s, plan.num_requests, seed))


def sweep_levels(rate: float) -> list[Level]:
    """Return the levels of an open loop around the rate of a saturated service."""
    return [Level(f"rate {rate * share:.3g}", rate=rate * share) for share in SWEEP_SHARES]


def describe_plan(plan: BenchPlan) -> dict[str, Any]:
    """Return the settings of the report, without credentials."""
    target = plan.endpoint.target
    return {
        "api": plan.endpoint.api,
        "target": target.address + target.path,
        "model": target.model,
        "workload": asdict(plan.workload),
        "duration_s": plan.duration_s,
        "requests": plan.num_requests,
        "processes": plan.num_processes,
        "objectives": plan.objectives,
    }


def _share(whole: int, number: int, count: int) -> int:
    """Return part `number` of a count of things that `count` processes share."""
    return whole // count + (number < whole % count)


def _ignore(fields: dict[str, Any]) -> None:
    """Take progress that nobody watches."""


async def run_campaign(plan: BenchPlan, listener: CampaignListener) -> dict[str, Any]:
    """Run a measurement, and return its report. Raises LoadError."""
    async with LoadProcesses(plan.num_processes) as processes:
        return await Campaign(plan, processes, listener).run()
