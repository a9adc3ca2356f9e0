"""The recording of a killed shard as a picture: the answer above, the kill and the log below."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from scripts.screenshots.animated_terminal import Piece, draw
from scripts.screenshots.recovery_recording import Output, Recording, command

COLUMNS, ANSWER_LINES, LOG_LINES = 100, 11, 7
LEAD_S, HOLD_S = 1.0, 5.0  # before the first text, and after the last one
MAX_PAUSE_S = 5.0  # a longer pause is shown in this time
MERGE_S = 0.05  # texts that come within it appear together
TITLE = "A shard is killed with kill -9 while an answer is streamed, and the answer goes on"
# Lines of the launcher and of the router's engine; those of the shards have their rank in front.
LOG_LINE = re.compile(r"\S+Z? (\w+) tgis\.(?:launcher|router\.engine)\.[\w.]+: (.*)")


def draw_recovery(recording: Recording, picture: Path) -> None:
    shown_at = _timeline(recording)
    end_s = shown_at(recording.answer[-1].at_s)
    pieces = [
        Piece(0, 0, 0, f"$ {command()}", "command"),
        *_answer(recording, shown_at),
        *_below(recording, shown_at, end_s),
    ]
    picture.write_text(draw(pieces, COLUMNS, ANSWER_LINES + LOG_LINES, end_s + HOLD_S, TITLE))


def _timeline(recording: Recording) -> Callable[[float], float]:
    """Return the function from a time of the recording to that of the picture, whose pause may be shorter."""
    first_s = recording.answer[0].at_s - LEAD_S
    begin_s, end_s = recording.pause
    scale = min(1.0, MAX_PAUSE_S / (end_s - begin_s))

    def shown_at(at_s: float) -> float:
        in_pause = min(max(at_s - begin_s, 0.0), end_s - begin_s)
        return at_s - first_s - in_pause * (1 - scale)

    return shown_at


def _answer(recording: Recording, shown_at: Callable[[float], float]) -> Iterator[Piece]:
    line, column, resumed_at_s = 1, 0, recording.pause[1]
    for each in _merge(recording.answer):
        kind = "after" if each.at_s >= resumed_at_s else ""
        for part in re.findall(r"\n|[^\S\n]*\S+|[^\S\n]+", each.text):
            if part == "\n" or column + len(part) > COLUMNS:
                line, column = line + 1, 0
                part = part.strip()
            if part and line < ANSWER_LINES:
                yield Piece(shown_at(each.at_s), line, column, part, kind)
            column += len(part)


def _below(recording: Recording, shown_at: Callable[[float], float], end_s: float) -> Iterator[Piece]:
    first = ANSWER_LINES
    yield Piece(0, first, 0, "─" * COLUMNS, "dim")
    killed_at_s = shown_at(recording.killed_at_s)
    yield Piece(killed_at_s, first + 1, 0, f"$ kill -9 {recording.killed_pid}  # the shard", "bad")
    matches = [(each.at_s, match) for each in recording.log if (match := LOG_LINE.match(each.text))]
    for i, (at_s, match) in enumerate(matches[: LOG_LINES - 3]):
        text = f"{match[1]} {match[2]}"
        shown = text if len(text) <= COLUMNS else text[: COLUMNS - 1] + "…"
        yield Piece(shown_at(at_s), first + 2 + i, 0, shown, "dim")
    begin_s, resumed_s = recording.pause
    shortened = ", shown in less" if resumed_s - begin_s > MAX_PAUSE_S else ""
    result = (
        f"# pause of {resumed_s - begin_s:.1f} s{shortened}; the answer equals that of a run without the kill"
    )
    yield Piece(end_s, first + LOG_LINES - 1, 0, result, "after")


def _merge(outputs: list[Output]) -> Iterator[Output]:
    """Yield one text for those that come within `MERGE_S`, so that the picture stays small."""
    waiting: list[Output] = []
    for each in outputs:
        if waiting and each.at_s - waiting[0].at_s > MERGE_S:
            yield Output(waiting[0].at_s, "".join(one.text for one in waiting))
            waiting = []
        waiting.append(each)
    if waiting:
        yield Output(waiting[0].at_s, "".join(one.text for one in waiting))
