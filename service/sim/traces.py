"""Traces by name or path: find the file, tell its format, check its digest, read it; and our own format.

Own format, JSON Lines, plain or gzipped: one row a line with the fields of `TraceRow`, those at their default
left out. A first line {"format": "plaserve-trace", "version": 1, "name", "block_tokens", "source"} is needed
where rows have hashes, because a hash means nothing without the tokens it stands for.

Known traces are looked for in the directories of `PLASERVE_TRACES`, then in `shared/traces` beside the
repository, under their path there or their bare file name.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from dataclasses import fields
from hashlib import file_digest
from pathlib import Path
from typing import Any

from service.sim.known_traces import KNOWN_TRACES, KnownTrace
from service.sim.trace_file import Place, TraceFileError, json_lines, needed, open_text
from service.sim.trace_formats import READERS, SIGNATURES, Rows, check_order
from service.sim.workload import Trace, TraceRow

__all__ = [
    "FORMATS",
    "KNOWN_TRACES",
    "KnownTrace",
    "MissingTrace",
    "TraceFileError",
    "detect_format",
    "find_trace",
    "read_trace",
    "write_jsonl",
]

TRACES_VARIABLE = "PLASERVE_TRACES"
_OWN, _OWN_VERSION = "plaserve", 1
_OWN_HEADER = "plaserve-trace"
_BESIDE = Path(__file__).parents[3] / "shared" / "traces"
FORMATS = (*READERS, _OWN)


class MissingTrace(LookupError):  # noqa: N818 - an expected outcome: reported, with `known`, as skipped
    """A known trace that is in none of the trace directories."""

    def __init__(self, known: KnownTrace) -> None:
        super().__init__(
            f"trace {known.name} is not here; put it in a directory of {TRACES_VARIABLE}: {known.where}"
        )
        self.known = known


def find_trace(name: str) -> Path | None:
    """The file of a known trace, None if it is not here. Its content is not looked at."""
    found = _find(_known(name))
    return None if found is None else found[0]


def read_trace(path_or_name: str | Path, format: str | None = None) -> Trace:
    """A known trace by its short name, or any trace file; `format` is one of FORMATS, None: told by content.

    Raises MissingTrace, or TraceFileError (a ValueError) for a file that is damaged, not what its name
    promises, or in a format unknown here.
    """
    if isinstance(path_or_name, str) and path_or_name in KNOWN_TRACES:
        return _read_known(KNOWN_TRACES[path_or_name])
    path = Path(path_or_name)
    format = detect_format(path) if format is None else format
    if format == _OWN:
        return _read_own(path)
    if format not in READERS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
    return _trace(path, path.name.split(".")[0], str(path), READERS[format](path))


def detect_format(path: Path) -> str:
    """The format of a file by the columns or fields of its first line. Raises TraceFileError."""
    with open_text(path) as text:
        first = text.readline()
    if first.lstrip().startswith("{"):
        try:
            found = set(json.loads(first))
        except ValueError as error:
            raise Place(path, 1).error("line", f"is not JSON ({error})") from error
        if "prompt_tokens" in found or "format" in found:
            return _OWN
    else:
        found = set(first.strip().split(","))
    for name, signature in SIGNATURES.items():
        if found.issuperset(signature):
            return name
    raise Place(path, 1).error("line", f"fits none of the formats {', '.join(FORMATS)}; convert it to one")


def write_jsonl(trace: Trace, path: Path) -> None:
    """Write `trace` in the own format, gzipped where the name ends in .gz. Equal traces give equal files."""
    text = "".join(f"{json.dumps(entry, separators=(',', ':'))}\n" for entry in _entries(trace))
    data = text.encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def _entries(trace: Trace) -> Iterator[dict[str, Any]]:
    yield {
        "format": _OWN_HEADER,
        "version": _OWN_VERSION,
        "name": trace.name,
        "block_tokens": trace.block_tokens,
        "source": trace.source,
    }
    for row in trace.rows:
        values = {field.name: getattr(row, field.name) for field in fields(row)}
        yield {name: value for name, value in values.items() if value or name == "arrival_s"}


# --- known traces ---


def _known(name: str) -> KnownTrace:
    if name not in KNOWN_TRACES:
        raise ValueError(f"trace must be one of {', '.join(KNOWN_TRACES)}, got {name!r}")
    return KNOWN_TRACES[name]


def _find(known: KnownTrace) -> tuple[Path, str] | None:
    """The first file that is there, and the digest it must have."""
    listed = [Path(entry) for entry in os.environ.get(TRACES_VARIABLE, "").split(os.pathsep) if entry]
    for directory in (*listed, _BESIDE):
        for file, digest in known.files:
            for path in (directory / file, directory / Path(file).name):
                if path.is_file():
                    return path, digest
    return None


def _read_known(known: KnownTrace) -> Trace:
    found = _find(known)
    if found is None:
        raise MissingTrace(known)
    path, digest = found
    with path.open("rb") as file:
        actual = file_digest(file, "sha256").hexdigest()
    if actual != digest:
        raise TraceFileError(
            f"{path}: sha256 is {actual}, not {digest}, so this is not {known.name}; fetch it again from "
            f"{known.source}, or give its path instead of the name"
        )
    return _trace(path, known.name, known.source, READERS[known.format](path))


def _trace(path: Path, name: str, source: str, content: Rows) -> Trace:
    rows, block_tokens = content
    if not rows:
        raise TraceFileError(f"{path}: holds no request")
    return Trace(name, tuple(rows), block_tokens, source)


# --- the own format ---


def _read_own(path: Path) -> Trace:
    rows: list[TraceRow] = []
    name, block_tokens, source = path.name.split(".")[0], 0, str(path)
    for place, entry in json_lines(path):
        if "format" in entry:
            name, block_tokens, source = _own_header(place, entry, bool(rows))
            continue
        row = _own_row(place, entry, block_tokens)
        check_order(place, "arrival_s", rows, row)
        rows.append(row)
    return _trace(path, name, source, (rows, block_tokens))


def _own_header(place: Place, entry: dict[str, Any], late: bool) -> tuple[str, int, str]:
    if late or entry["format"] != _OWN_HEADER or entry.get("version") != _OWN_VERSION:
        problem = f"must be {_OWN_HEADER!r} with version {_OWN_VERSION}, in the first line only"
        raise place.error("format", problem)
    name, source = entry.get("name", ""), entry.get("source", "")
    if not isinstance(name, str) or not isinstance(source, str):
        raise place.error("name", "and source must be text")
    return name, place.whole("block_tokens", entry.get("block_tokens", 0)), source


def _own_row(place: Place, entry: dict[str, Any], block_tokens: int) -> TraceRow:
    unknown = entry.keys() - {field.name for field in fields(TraceRow)}
    if unknown:
        names = ", ".join(field.name for field in fields(TraceRow))
        raise place.error(sorted(unknown)[0], f"is no field of a row; those are {names}")
    session = entry.get("session", "")
    if not isinstance(session, str):
        raise place.error("session", f"must be text, got {session!r}")
    row = TraceRow(
        place.seconds("arrival_s", entry.get("arrival_s", 0.0)),
        place.whole("prompt_tokens", needed(place, entry, "prompt_tokens"), 1),
        place.whole("output_tokens", needed(place, entry, "output_tokens"), 1),
        tuple(place.hashes("block_hashes", entry.get("block_hashes", []))),
        session,
        place.seconds("think_s", entry.get("think_s", 0.0)),
        place.whole("reused_tokens", entry.get("reused_tokens", 0)),
    )
    if row.reused_tokens >= row.prompt_tokens:
        raise place.error("reused_tokens", f"must be below prompt_tokens, got {row.reused_tokens}")
    if row.block_hashes and not block_tokens:
        raise place.error("block_hashes", 'needs "block_tokens" in a header line; see docs/workloads.md')
    if row.block_hashes and len(row.block_hashes) * block_tokens > row.prompt_tokens + row.output_tokens:
        problem = f"has {len(row.block_hashes)} blocks of {block_tokens}, more than prompt and answer fill"
        raise place.error("block_hashes", problem)
    return row
