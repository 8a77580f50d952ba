"""Reading trace files strictly: whatever is wrong is reported with file, line, field and what to do.

Text with or without gzip, told apart by its first bytes and not by its name.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

_GZIP_MAGIC = b"\x1f\x8b"


class TraceFileError(ValueError):
    """A trace file that can't be used; the text names file, line, field and remedy."""


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """`path` as UTF-8 text, unpacked if need be. Raises TraceFileError for damaged or missing files."""
    try:
        with path.open("rb") as file:
            packed = file.read(2) == _GZIP_MAGIC
        with gzip.open(path, "rt", encoding="utf-8") if packed else path.open(encoding="utf-8") as text:
            yield text
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise TraceFileError(f"{path}: can't be read ({error}); fetch it again") from error


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a file, and the checks of what stands there."""

    path: Path
    line: int

    def error(self, field: str, problem: str) -> TraceFileError:
        return TraceFileError(f"{self.path}:{self.line}: {field} {problem}")

    def whole(self, field: str, value: Any, low: int = 0) -> int:
        """An integer of at least `low`, from JSON or from text."""
        try:
            number = int(value) if isinstance(value, str) else value
        except ValueError:
            number = None
        if type(number) is not int or number < low:
            raise self.error(field, f"must be a whole number of at least {low}, got {value!r}")
        return number

    def seconds(self, field: str, value: Any) -> float:
        """Finite, not negative."""
        try:
            number = float(value) if isinstance(value, (str, int, float)) else math.nan
        except ValueError:
            number = math.nan
        if isinstance(value, bool) or not (math.isfinite(number) and number >= 0.0):
            raise self.error(field, f"must be a finite number of at least 0, got {value!r}")
        return number

    def hashes(self, field: str, value: Any) -> list[int]:
        if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
            raise self.error(field, "must be a list of whole numbers of at least 0")
        return value


def csv_lines(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[Place, list[str]]]:
    """The cells of `columns` in each line after the header. Raises TraceFileError where one is missing."""
    with open_text(path) as text:
        lines = csv.reader(text)
        header = next(lines, [])
        missing = [name for name in columns if name not in header]
        if missing:
            raise Place(path, 1).error(missing[0], f"is not among the columns {header}")
        indices = [header.index(name) for name in columns]
        for cells in lines:
            if len(cells) != len(header):
                problem = f"has {len(cells)} cells where the header has {len(header)}"
                raise Place(path, lines.line_num).error("line", problem)
            yield Place(path, lines.line_num), [cells[index] for index in indices]


def json_lines(path: Path) -> Iterator[tuple[Place, dict[str, Any]]]:
    """The object of each line; blank lines are passed over."""
    with open_text(path) as text:
        for number, line in enumerate(text, 1):
            if not line.strip():
                continue
            place = Place(path, number)
            try:
                value = json.loads(line)
            except ValueError as error:
                raise place.error("line", f"is not JSON ({error})") from error
            if not isinstance(value, dict):
                raise place.error("line", f"must be a JSON object, got {type(value).__name__}")
            yield place, value


def needed(place: Place, entry: dict[str, Any], field: str) -> Any:
    """The value of a field that must be there."""
    if field not in entry:
        raise place.error(field, f"is missing; there are {sorted(entry)}")
    return entry[field]
