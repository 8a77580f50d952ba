"""A log of what the core heard and answered, and its replay.

One JSON line an event or poll: the clock, the type name and the fields. Replaying the events of a live run
through a fresh scheduler with the same policy and settings must give the same commands; that they do is a
test, and the way to take a field report apart.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TextIO, get_args

from pydantic import TypeAdapter

from service.core.scheduler import PrefillScheduler
from service.core.types import Command, Event

_TYPES: dict[str, type] = {cls.__name__: cls for union in (Event, Command) for cls in get_args(union)}


@cache
def _adapter(type_name: str) -> TypeAdapter[Any]:
    return TypeAdapter(_TYPES[type_name])


def _encode(value: Event | Command) -> dict[str, Any]:
    name = type(value).__name__
    return {"type": name, "fields": _adapter(name).dump_python(value, mode="json")}


def _decode(data: dict[str, Any]) -> Any:
    return _adapter(data["type"]).validate_python(data["fields"])


class EventLog:
    """Writes to a file, line-buffered; `close` when done."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("w", buffering=1, encoding="utf-8")

    def event(self, now_s: float, event: Event) -> None:
        self._write({"now_s": now_s, "event": _encode(event)})

    def poll(self, now_s: float, commands: Sequence[Command]) -> None:
        self._write({"now_s": now_s, "commands": [_encode(command) for command in commands]})

    def close(self) -> None:
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")


@dataclass(frozen=True, slots=True)
class Difference:
    """The first poll whose commands differ; `line` counts from 1."""

    line: int
    now_s: float
    recorded: tuple[Command, ...]
    replayed: tuple[Command, ...]


def replay(path: Path, scheduler: PrefillScheduler) -> tuple[int, Difference | None]:
    """Feed a recorded log to a fresh `scheduler`: (polls compared, the first difference or None)."""
    polls = 0
    for number, line in enumerate(_lines(path), start=1):
        now_s = line["now_s"]
        if "event" in line:
            scheduler.on_event(_decode(line["event"]), now_s)
            continue
        polls += 1
        recorded = tuple(_decode(command) for command in line["commands"])
        replayed = scheduler.poll(now_s)
        if recorded != replayed:
            return polls, Difference(number, now_s, recorded, replayed)
    return polls, None


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for text in file:
            yield json.loads(text)
