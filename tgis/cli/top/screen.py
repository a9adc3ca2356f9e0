"""Draws the frames of `tgis top`, on a terminal's alternate screen or one after another."""

import signal
import time
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.live import Live
from rich.text import Text

from tgis.cli.top.place import ServicePlace, locate
from tgis.cli.top.rates import History, Window
from tgis.cli.top.scrape import Scrape, ScrapeError, scrape

NAME_WIDTH, CELL_WIDTH = 12, 11  # widths of columns, in characters
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
DRAFTED = "tgi_speculation_drafted_tokens_total"
ACCEPTED = "tgi_speculation_accepted_tokens_total"
FIRST_TOKENS, NEXT_TOKENS = (f"{LATENCIES[name]}_count" for name in ("first token", "next token"))


def print_once(place: ServicePlace, interval: float, window_s: float) -> None:
    """Print one frame, from two scrapes. Raises a ScrapeError that names the target."""
    history = History(window_s)
    shown = place.shown
    try:
        source = locate(place)
        shown = source.target
        history.push(scrape(source))
        time.sleep(interval)
        last = scrape(source)
    except ScrapeError as error:
        raise ScrapeError("; ".join(filter(None, (f"{shown}: {error}", place.hint)))) from error
    _print(draw(source.target, history.push(last) or Window(last, last)))


def print_frames(place: ServicePlace, interval: float, window_s: float) -> None:
    """Print every frame, and each failure that differs from the previous one."""
    previous = ""
    for frame, failure in _frames(place, interval, window_s):
        if not failure:
            _print(frame, end="\n\n")
        elif failure != previous:
            _print(Text(failure))
        previous = failure


def show_frames(place: ServicePlace, interval: float, window_s: float) -> None:
    """Show frames on the alternate screen, and leave it when the process ends, also by SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with Live(screen=True, auto_refresh=False) as live:
        for frame, _ in _frames(place, interval, window_s):
            live.update(frame, refresh=True)


def _print(frame: Text, end: str = "\n") -> None:
    Console().print(frame, end=end, soft_wrap=True)  # lines are never wrapped to the terminal's width


def _frames(place: ServicePlace, interval: float, window_s: float) -> Iterator[tuple[Text, str]]:
    """Yield a frame and a line about its failure, which is empty if there is none, once per interval."""
    history = History(window_s)
    source = None
    due = time.monotonic()
    while True:
        shown = place.shown
        try:
            source = source or locate(place)
            shown = source.target
            now = scrape(source)
            yield draw(shown, history.push(now) or Window(now, now)), ""
        except ScrapeError as error:
            history.forget()
            source = None  # a service that starts in the meantime may have another port
            lines = [f"{error}; retrying", *filter(None, (place.hint,))]
            yield draw_failure(shown, lines), f"{shown}: {'; '.join(lines)}"
        # A scrape that took longer than the interval delays the next ones; missed intervals are skipped.
        now_s = time.monotonic()
        due = max(due + interval, now_s)
        time.sleep(due - now_s)


def draw(title: str, window: Window) -> Text:
    """Return a frame. In a window of a single scrape, rates and latencies are missing."""
    scrape = window.end
    lines = [
        _head(title, scrape, window),
        *_requests(scrape, window),
        _failures(window),
        _tokens(window),
        _cache(scrape, window),
        *_drafts(scrape, window),
        *_latencies(window),
        *_steps(window),
        *_shards(scrape),
        _loaded(scrape),
    ]
    return _join(lines)


def draw_failure(title: str, reasons: Sequence[str]) -> Text:
    head = _line("tgis top", f"{title}  ", ("no response", "bold red"), f"  {_clock()}")
    return _join([head, *(_line("", reason) for reason in reasons)])


def _head(title: str, scrape: Scrape, window: Window) -> Text:
    state = "ready" if scrape.value("tgi_ready") else ("not ready", "bold red")
    over = f"the last {window.seconds:.0f} s" if window.seconds else "first scrape"
    return _line("tgis top", f"{title}  ", state, f"  {_clock()}  {over}")


def _requests(scrape: Scrape, window: Window) -> list[Text]:
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


def _failures(window: Window) -> Text:
    rates = window.rates_by("tgi_request_failure_total", "err")
    shown = "   ".join(f"{err} {rate:.2f}/s" for err, rate in rates.items())
    return _line("failures", shown or ("none" if window.seconds else NOTHING))


def _tokens(window: Window) -> Text:
    generated = _number(window.rate(FIRST_TOKENS, NEXT_TOKENS), ",.0f")
    prompt = _number(window.rate("tgi_batch_next_tokens_sum"), ",.0f")
    return _line("tokens/s", f"generated {generated}   of prompts {prompt}")


def _cache(scrape: Scrape, window: Window) -> Text:
    used = scrape.value("tgi_kv_cache_usage_ratio")
    bar = ("#" * round(used * BAR_WIDTH)).ljust(BAR_WIDTH, ".")
    hits = _number(window.share("tgi_prefix_cache_hits_total", "tgi_prefix_cache_queries_total"), ".0%")
    preempted = _rate(window, "tgi_preemptions_total")
    return _line("cache", f"{used:.0%} [{bar}]   prefix hits {hits}   preempted {preempted}/s")


def _drafts(scrape: Scrape, window: Window) -> list[Text]:
    """Return a line about drafts, if there have been any."""
    if not scrape.value(DRAFTED):
        return []
    accepted = _number(window.share(ACCEPTED, DRAFTED), ".0%")
    return [_line("drafts", f"{_rate(window, DRAFTED)}/s   accepted {accepted}")]


def _latencies(window: Window) -> Iterator[Text]:
    yield _row("latency", ["p50", "p95", "mean", "per s"])
    for name, series in LATENCIES.items():
        times = (window.quantile(0.5, series), window.quantile(0.95, series), window.mean(series))
        yield _row(f"  {name}", [*map(_time, times), _rate(window, f"{series}_count")])


def _steps(window: Window) -> Iterator[Text]:
    """Yield the rows for the time of a step, the shards' part of it and the router's work after it."""
    yield _row("steps", ["p50", "p95", "shards p50", "shards p95", "router", "per s", "size"])
    for method in METHODS:
        times = [window.quantile(q, series, method=method) for series in (STEP, FORWARD) for q in (0.5, 0.95)]
        times.append(window.mean(ROUTER, method=method))
        rate = _rate(window, "tgi_batch_inference_success_total", method=method)
        size = _number(window.mean(SIZE, method=method), ".1f")
        yield _row(f"  {method}", [*map(_time, times), rate, size])


def _shards(scrape: Scrape) -> list[Text]:
    seconds = scrape.value("tgi_tls_certificate_seconds_left")
    refused = scrape.value("tgi_tls_reload_failure_total")
    certificate = f"{seconds / 86400:.1f} days left" if seconds else "none"
    if refused:
        certificate += f"   failed reloads {refused:.0f}"
    lost = f"lost {scrape.value('tgi_shard_restarts_total'):.0f} times"
    return [_line("shards", lost), _line("certificate", certificate)]


def _loaded(scrape: Scrape) -> Text:
    shown = [
        f"{kind}s {scrape.value(f'tgi_{kind}_cache_entries'):.0f} "
        f"({_bytes(scrape.value(f'tgi_{kind}_cache_bytes'))})"
        for kind in ("prompt", "adapter")
    ]
    return _line("loaded", "   ".join(shown))


def _join(lines: Sequence[Text]) -> Text:
    return Text("\n", no_wrap=True, overflow="crop").join(lines)


def _line(name: str, *parts: str | tuple[str, str]) -> Text:
    return Text.assemble((f"{name:{NAME_WIDTH}}", "bold"), *parts)


def _row(name: str, cells: Sequence[str]) -> Text:
    style = "" if name.startswith(" ") else "bold"
    return Text.assemble((f"{name:{NAME_WIDTH + 2}}", style), *(f"{cell:>{CELL_WIDTH}}" for cell in cells))


def _clock() -> str:
    return time.strftime("%H:%M:%S")


def _rate(window: Window, name: str, **labels: str) -> str:
    return _number(window.rate(name, **labels), ".1f")


def _number(value: float | None, form: str) -> str:
    return NOTHING if value is None else format(value, form)


def _time(seconds: float | None) -> str:
    if seconds is None:
        return NOTHING
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _bytes(value: float) -> str:
    return f"{value / 1e6:,.1f} MB" if value >= 1e6 else f"{value / 1e3:.0f} kB"
