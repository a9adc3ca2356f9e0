"""The recording of a killed shard as a picture: the answer above, the kill and the log below."""

import re
from collections.abc import Iterator
from pathlib import Path

from scripts.screenshots.animated_terminal import Piece, draw
from scripts.screenshots.recovery_recording import Output, Recording, command

COLUMNS, ANSWER_LINES, LOG_LINES = 100, 11, 7
HOLD_S = 5.0  # the last frame stays for so long
MERGE_S = 0.05  # texts that come within it appear together
TITLE = "A shard is killed with kill -9 while an answer is streamed, and the answer goes on"
TIMESTAMP = re.compile(r"^\S*\d{2}:\d{2}:\d{2}\S*\s+")


def draw_recovery(recording: Recording, picture: Path) -> None:
    end_s = recording.answer[-1].at_s
    pieces = [
        Piece(0, 0, 0, f"$ {command()}", "command"),
        *_answer(recording),
        *_below(recording, end_s),
    ]
    lines = ANSWER_LINES + LOG_LINES
    picture.write_text(draw(pieces, COLUMNS, lines, end_s + HOLD_S, TITLE))


def _answer(recording: Recording) -> Iterator[Piece]:
    line, column, resumed_at_s = 1, 0, recording.pause[1]
    for each in _merge(recording.answer):
        kind = "after" if each.at_s >= resumed_at_s else ""
        for part in re.findall(r"\n|[^\S\n]*\S+|[^\S\n]+", each.text):
            if part == "\n" or column + len(part) > COLUMNS:
                line, column = line + 1, 0
                part = part.strip()
            if part and line < ANSWER_LINES:
                yield Piece(each.at_s, line, column, part, kind)
            column += len(part)


def _below(recording: Recording, end_s: float) -> Iterator[Piece]:
    first = ANSWER_LINES
    yield Piece(0, first, 0, "─" * COLUMNS, "dim")
    killed_at_s = recording.killed_at_s
    yield Piece(killed_at_s, first + 1, 0, f"$ kill -9 {recording.killed_pid}    # the shard", "bad")
    log = recording.log[: LOG_LINES - 3]
    for i, each in enumerate(log):
        text = TIMESTAMP.sub("", each.text)
        yield Piece(
            each.at_s, first + 2 + i, 0, text if len(text) <= COLUMNS else text[: COLUMNS - 1] + "…", "dim"
        )
    begin_s, resumed_s = recording.pause
    result = f"# pause of {resumed_s - begin_s:.1f} s; the answer equals that of a run without the kill"
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
