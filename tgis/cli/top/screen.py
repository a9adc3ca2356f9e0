"""Formats what `tgis top` shows as lines of text; each part begins with its name in the first columns."""

from collections.abc import Sequence

from tgis.cli.top.rates import Window
from tgis.cli.top.scrape import Scrape

NAME_WIDTH = 12  # width of the names' columns, in characters
BAR_WIDTH = 20
NOTHING = "–"
LATENCIES = {
    "first token": "tgi_request_time_to_first_token_duration",
    "next token": "tgi_request_inter_token_duration",
    "queue": "tgi_request_queue_duration",
    "total": "tgi_request_duration",
}
METHODS = ("prefill", "next_token")
STEP, SIZE = "tgi_batch_inference_duration", "tgi_batch_inference_batch_size"
FORWARD, ROUTER = "tgi_batch_inference_forward_duration", "tgi_batch_inference_tokproc_duration"
FIRST_TOKENS, NEXT_TOKENS = (f"{LATENCIES[name]}_count" for name in ("first token", "next token"))


def draw(title: str, clock: str, scrape: Scrape, window: Window | None) -> list[str]:
    """Return the frame's lines; without a window, only values of the one scrape are filled in."""
    parts = [
        _head(title, clock, scrape, window),
        _requests(scrape, window),
        _failures(window),
        _tokens(window),
        _cache(scrape, window),
        _latencies(window),
        _steps(window),
        _shards(scrape),
        _contents(scrape),
    ]
    return [line for part in parts for line in part]


def draw_failure(title: str, clock: str, reason: str) -> list[str]:
    return [
        f"{'tgis top':{NAME_WIDTH}}{title}  no answer  {clock}",
        f"{'':{NAME_WIDTH}}{reason}; is asked again",
    ]


def _head(title: str, clock: str, scrape: Scrape, window: Window | None) -> list[str]:
    state = "ready" if scrape.value("tgi_ready") else "not ready"
    over = f"the last {window.seconds:.0f} s" if window else "first look"
    return [_line("tgis top", f"{title}  {state}  {clock}  {over}")]


def _requests(scrape: Scrape, window: Window | None) -> list[str]:
    states = {
        "queue": "tgi_queue_size",
        "running": "tgi_requests_running",
        "live": "tgi_requests_live",
        "permits": "tgi_permits_used",
    }
    shown = [f"{name} {scrape.value(series):.0f}" for name, series in states.items()]
    rates = {
        "calls": _rate(window, "tgi_request_count_total"),
        "inputs ended": _rate(window, "tgi_request_success_total"),
    }
    return [
        _line("requests", "   ".join(shown) + f" of {scrape.value('tgi_permits_limit'):.0f}"),
        _line("per second", "   ".join(f"{name} {rate}" for name, rate in rates.items())),
    ]


def _failures(window: Window | None) -> list[str]:
    if window is None:
        return [_line("failures", NOTHING)]
    rates = window.rates_by("tgi_request_failure_total", "err")
    return [_line("failures", "   ".join(f"{err} {rate:.2f}/s" for err, rate in rates.items()) or "none")]


def _tokens(window: Window | None) -> list[str]:
    if window is None:
        return [_line("tokens/s", NOTHING)]
    generated = window.rate(FIRST_TOKENS) + window.rate(NEXT_TOKENS)
    prompt = window.rate("tgi_batch_next_tokens_sum")
    return [_line("tokens/s", f"generated {generated:,.0f}   of prompts {prompt:,.0f}")]


def _cache(scrape: Scrape, window: Window | None) -> list[str]:
    used = scrape.value("tgi_kv_cache_usage_ratio")
    bar = ("#" * round(used * BAR_WIDTH)).ljust(BAR_WIDTH, ".")
    hits = window.share("tgi_prefix_cache_hits_total", "tgi_prefix_cache_queries_total") if window else None
    found = NOTHING if hits is None else f"{hits:.0%}"
    text = f"{used:.0%} [{bar}]   prefix hits {found}   put back {_rate(window, 'tgi_preemptions_total')}/s"
    return [_line("cache", text)]


def _latencies(window: Window | None) -> list[str]:
    lines = [_row("latency", ["p50", "p95", "mean", "per s"])]
    for name, series in LATENCIES.items():
        cells = [_quantile(window, 0.5, series), _quantile(window, 0.95, series), _mean_time(window, series)]
        lines.append(_row(f"  {name}", [*cells, _rate(window, f"{series}_count")]))
    return lines


def _steps(window: Window | None) -> list[str]:
    """Format the time of a step, the shards' part of it and the router's work after it."""
    lines = [_row("steps", ["p50", "p95", "shards p50", "shards p95", "router", "per s", "size"])]
    for method in METHODS:
        size = window.mean(SIZE, method=method) if window else None
        cells = [
            _quantile(window, q, series, method=method) for series in (STEP, FORWARD) for q in (0.5, 0.95)
        ]
        cells.append(_mean_time(window, ROUTER, method=method))
        cells.append(_rate(window, "tgi_batch_inference_success_total", method=method))
        lines.append(_row(f"  {method}", [*cells, NOTHING if size is None else f"{size:.1f}"]))
    return lines


def _shards(scrape: Scrape) -> list[str]:
    seconds = scrape.value("tgi_tls_certificate_seconds_left")
    refused = scrape.value("tgi_tls_reload_failure_total")
    certificate = f"{seconds / 86400:.1f} days left" if seconds else "none"
    if refused:
        certificate += f"   changes not taken {refused:.0f}"
    lost = f"lost {scrape.value('tgi_shard_restarts_total'):.0f} times"
    return [_line("shards", lost), _line("certificate", certificate)]


def _contents(scrape: Scrape) -> list[str]:
    shown = [
        f"{kind}s {scrape.value(f'tgi_{kind}_cache_entries'):.0f} "
        f"({_bytes(scrape.value(f'tgi_{kind}_cache_bytes'))})"
        for kind in ("prompt", "adapter")
    ]
    return [_line("loaded", "   ".join(shown))]


def _line(name: str, text: str) -> str:
    return f"{name:{NAME_WIDTH}}{text}"


def _row(name: str, cells: Sequence[str]) -> str:
    return f"{name:{NAME_WIDTH + 2}}" + "".join(f"{cell:>11}" for cell in cells)


def _rate(window: Window | None, name: str, **labels: str) -> str:
    return f"{window.rate(name, **labels):.1f}" if window else NOTHING


def _quantile(window: Window | None, q: float, series: str, **labels: str) -> str:
    return _time(window.quantile(q, series, **labels) if window else None)


def _mean_time(window: Window | None, series: str, **labels: str) -> str:
    return _time(window.mean(series, **labels) if window else None)


def _bytes(value: float) -> str:
    return f"{value / 1e6:,.1f} MB" if value >= 1e6 else f"{value / 1e3:.0f} kB"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return NOTHING
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
