"""Readers of public trace formats. Each gives rows in order of arrival, and what a block hash stands for.

Tables (Azure 2023, the normalised CSV, prefill/decode counts, APEX+) have sizes, with or without times.

Mooncake rows name the 512-token blocks of their prompt. The last name may stand for a block that is not full;
an engine reuses full blocks only, so it is dropped. The conversation trace is recorded on a grid of about
3 s. The rows of one tick are spread over it: uniform draws from a generator of fixed seed, in file order.

kv_cache_tester has sessions of a coding agent. Its times mean something inside a session only, so its rows
have no arrival; `think_s` is as recorded, and how long a turn takes is left to the service. Its table has no
block names, but says how much of a prompt was new: the rest is taken as shared with the turn before (of
49,334 turns 9 shared more than that with an older one). A sub-agent is a session of its own, which starts
cold. Turns recorded without an answer get one token: a request produces at least one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

import numpy as np

from service.sim.trace_file import Place, csv_lines, json_lines, needed
from service.sim.workload import TraceRow

MOONCAKE_BLOCK_TOKENS = 512
_SPREAD_SEED = 512

Rows = tuple[list[TraceRow], int]  # and the tokens of a block, 0 where rows have no hashes


@dataclass(frozen=True, slots=True)
class Table:
    """Columns of a CSV. arrival: "" where there is none; `seconds` reads it."""

    arrival: str
    prompt: str
    output: str
    seconds: Callable[[Place, str, str], float] = Place.seconds

    def columns(self) -> tuple[str, ...]:
        return (*((self.arrival,) if self.arrival else ()), self.prompt, self.output)

    def read(self, path: Path) -> Rows:
        rows: list[TraceRow] = []
        first: float | None = None
        timed: bool | None = None
        for place, (*arrival, prompt, output) in csv_lines(path, self.columns()):
            has_time = bool(arrival and arrival[0])
            if timed not in (None, has_time):
                raise place.error(self.arrival, "is empty in some rows only; fill it in all or in none")
            timed = has_time
            arrival_s = self.seconds(place, self.arrival, arrival[0]) if has_time else 0.0
            first = arrival_s if first is None else first
            row = TraceRow(
                arrival_s - first,
                place.whole(self.prompt, prompt, 1),
                place.whole(self.output, output, 1),
            )
            check_order(place, self.arrival, rows, row)
            rows.append(row)
        return rows, 0


def check_order(place: Place, field: str, rows: list[TraceRow], row: TraceRow) -> None:
    if row.arrival_s < (rows[-1].arrival_s if rows else 0.0):
        raise place.error(field, "is earlier than in the row before; sort the file by it")


_NEAR = datetime(2020, 1, 1)  # noqa: DTZ001 - only differences count; near, so that a float keeps microseconds


def _wall_clock_s(place: Place, field: str, value: str) -> float:
    """Seconds from a fixed date; digits beyond microseconds are cut off."""
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        raise place.error(field, f"must be a date and time, got {value!r}") from None
    return (moment.replace(tzinfo=None) - _NEAR).total_seconds()


def _nanoseconds_s(place: Place, field: str, value: str) -> float:
    return place.whole(field, value) / 1e9


def read_mooncake(path: Path) -> Rows:
    rows: list[TraceRow] = []
    for place, entry in json_lines(path):
        get = partial(needed, place, entry)
        prompt_tokens = place.whole("input_length", get("input_length"), 1)
        hashes = place.hashes("hash_ids", get("hash_ids"))
        if len(hashes) != -(-prompt_tokens // MOONCAKE_BLOCK_TOKENS):
            problem = f"has {len(hashes)} blocks of {MOONCAKE_BLOCK_TOKENS} for {prompt_tokens} tokens"
            raise place.error("hash_ids", problem)
        row = TraceRow(
            place.seconds("timestamp", get("timestamp")) / 1000.0,
            prompt_tokens,
            place.whole("output_length", get("output_length"), 1),
            tuple(hashes[: prompt_tokens // MOONCAKE_BLOCK_TOKENS]),
        )
        check_order(place, "timestamp", rows, row)
        rows.append(row)
    return _spread(rows), MOONCAKE_BLOCK_TOKENS


def _spread(rows: list[TraceRow]) -> list[TraceRow]:
    """Rows whose times are on a grid (two and more a tick on average), spread over their ticks."""
    times_s = np.array([row.arrival_s for row in rows])
    ticks, where, counts = np.unique(times_s, return_inverse=True, return_counts=True)
    if len(ticks) < 2 or counts.mean() < 2.0:
        return rows
    tick_s = float(np.median(np.diff(ticks)))
    room_s = np.minimum(np.diff(ticks, append=ticks[-1] + tick_s), tick_s)
    shift = np.random.default_rng(_SPREAD_SEED).random(len(rows))
    spread_s = np.sort(times_s + shift * room_s[where])  # ticks do not overlap: only rows of one tick swap
    spread_s -= spread_s[0]
    return [
        TraceRow(time_s, row.prompt_tokens, row.output_tokens, row.block_hashes)
        for time_s, row in zip(spread_s.tolist(), rows, strict=True)
    ]


_TURN_COLUMNS = (
    "trace",
    "subagent",
    "input_tokens",
    "new_input_tokens",
    "output_tokens",
    "think_time_s",
)


def read_agent_turns(path: Path) -> Rows:
    """kv_cache_tester's table of turns, `request_lengths`."""
    rows: list[TraceRow] = []
    for place, (trace, agent, prompt, new, output, think) in csv_lines(path, _TURN_COLUMNS):
        prompt_tokens = place.whole("input_tokens", prompt, 1)
        new_tokens = place.whole("new_input_tokens", new, 1)
        if new_tokens > prompt_tokens:
            raise place.error("new_input_tokens", f"is {new_tokens}, more than all {prompt_tokens}")
        rows.append(
            TraceRow(
                0.0,
                prompt_tokens,
                max(1, place.whole("output_tokens", output)),
                session=f"{trace}/{agent}" if agent else trace,
                think_s=place.seconds("think_time_s", think or "0"),
                reused_tokens=prompt_tokens - new_tokens,
            )
        )
    return rows, 0


TABLES: dict[str, Table] = {
    "azure": Table("TIMESTAMP", "ContextTokens", "GeneratedTokens", _wall_clock_s),
    "normalized": Table("arrival_s", "input_tokens", "output_tokens"),
    "token_counts": Table("", "num_prefill_tokens", "num_decode_tokens"),
    "apex": Table("StartTimeOffset_ns", "ContextTokens", "GeneratedTokens", _nanoseconds_s),
}
READERS: dict[str, Callable[[Path], Rows]] = {
    **{name: table.read for name, table in TABLES.items()},
    "mooncake": read_mooncake,
    "agent_turns": read_agent_turns,
}
# Columns of a header, or fields of a first line, that tell a format.
SIGNATURES: dict[str, tuple[str, ...]] = {
    **{name: table.columns() for name, table in TABLES.items()},
    "mooncake": ("timestamp", "input_length", "hash_ids"),
    "agent_turns": _TURN_COLUMNS,
}
