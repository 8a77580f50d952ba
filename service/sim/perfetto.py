"""A run as a Chrome trace, to be opened in Perfetto (ui.perfetto.dev) or chrome://tracing.

One track for each instance with its passes (T, requests by lane, the reason, the prediction), one for the
arrivals, counters of what waits by lane and of W and D, and a flow from the arrival of a request to its first
pass. Times are those of the front end, in whole microseconds as far as the format asks for them.

The file is bounded: by a number of passes, and by a range of time. It is made from the log of a run.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engines.types import PassKind, PassResult
from service.core.types import (
    Command,
    Dispatch,
    Event,
    InstanceDown,
    InstanceUp,
    Lane,
    PassFailed,
    PassFinished,
    PassRevoked,
    PassStarted,
    Reject,
    Submit,
)
from service.sim.result import SimRecord, SimResult

PASSES_MAX = 20_000  # about 20 MB of JSON
_REQUESTS, _INSTANCES, _QUEUE = 1, 2, 3  # process ids
_ARRIVALS = 1  # thread id

Row = dict[str, Any]


def chrome_trace(
    result: SimResult, *, passes_max: int = PASSES_MAX, from_s: float = 0.0, to_s: float = math.inf
) -> dict[str, Any]:
    """The trace of the passes that start in [from_s, to_s), the first `passes_max` of them, as JSON data.

    Raises ValueError where the run kept no log or no records.
    """
    if not result.log or not result.records:
        raise ValueError("result: a trace needs the log and the records; run with keep_log and keep_records")
    if passes_max < 1:
        raise ValueError(f"passes_max must be at least 1, got {passes_max}")
    drawn = _Drawn(result.records, from_s, _end_s(result, passes_max, from_s, to_s))
    for now_s, entry in result.log:
        drawn.see(now_s, entry)
    rows = sorted(drawn.finished(result.end_s), key=lambda row: (row["ts"], -row.get("dur", 0.0)))
    return {"traceEvents": [*drawn.names(), *rows], "displayTimeUnit": "ms"}


def write_trace(
    result: SimResult,
    path: Path,
    *,
    passes_max: int = PASSES_MAX,
    from_s: float = 0.0,
    to_s: float = math.inf,
) -> None:
    """`chrome_trace` to a file, packed where its name ends in .gz. Equal runs give equal files."""
    text = json.dumps(
        chrome_trace(result, passes_max=passes_max, from_s=from_s, to_s=to_s), separators=(",", ":")
    )
    packed = gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text.encode()
    path.write_bytes(packed)


def _end_s(result: SimResult, passes_max: int, from_s: float, to_s: float) -> float:
    """`to_s`, or when the first pass too many starts."""
    starts = (t for t, e in result.log if isinstance(e, PassStarted) and from_s <= t < to_s)
    return next((t for number, t in enumerate(starts) if number == passes_max), to_s)


@dataclass(slots=True)
class _Running:
    start_s: float
    dispatch: Dispatch


@dataclass(slots=True)
class _Drawn:
    """Reads the log once. Everything outside the range is followed, but leaves no row."""

    records: Mapping[str, SimRecord]
    from_s: float
    to_s: float
    rows: list[Row] = field(default_factory=list)
    threads: dict[str, int] = field(default_factory=dict)  # instance -> thread
    sent: dict[int, Dispatch] = field(default_factory=dict)  # by pass id
    running: dict[str, _Running] = field(default_factory=dict)  # by instance
    waiting: dict[str, Lane] = field(default_factory=dict)
    arrived: set[str] = field(default_factory=set)  # in the range, without a pass so far
    counts: dict[Lane, int] = field(default_factory=lambda: dict.fromkeys(Lane, 0))

    def see(self, now_s: float, entry: Event | Command) -> None:
        match entry:
            case InstanceUp(spec):
                self.threads.setdefault(spec.instance_id, len(self.threads) + 1)
            case Submit(request):
                self._arrival(now_s, request.request_id)
            case Dispatch():
                self.sent[entry.pass_.pass_id] = entry
                self._window(now_s, entry)
            case PassStarted(instance_id, pass_id):
                self._start(now_s, instance_id, self.sent.pop(pass_id))
            case PassRevoked(_, pass_id):
                self.sent.pop(pass_id, None)
            case PassFinished(instance_id, result):
                self._over(now_s, instance_id, result)
            case PassFailed(instance_id, _, _, error) | InstanceDown(instance_id, error):
                self._over(now_s, instance_id, error)
            case Reject(request_id):
                self._leaves(now_s, request_id)
            case _:
                pass

    def finished(self, end_s: float) -> list[Row]:
        """All rows; passes that still run when the run ended are closed there."""
        for instance_id in list(self.running):
            self._over(end_s, instance_id, "the run ended")
        return self.rows

    def names(self) -> Iterator[Row]:
        """What the tracks are called."""
        for pid, name in ((_REQUESTS, "requests"), (_INSTANCES, "instances"), (_QUEUE, "queue")):
            yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        yield _thread_name(_REQUESTS, _ARRIVALS, "arrivals")
        for instance_id, thread in self.threads.items():
            yield _thread_name(_INSTANCES, thread, instance_id)

    # --- requests ---

    def _arrival(self, now_s: float, request_id: str) -> None:
        record = self.records[request_id]
        self.waiting[request_id] = record.lane
        self._count(now_s, record.lane, 1)
        if not self._in_range(now_s):
            return
        self.arrived.add(request_id)
        self.rows.append(
            {
                "ph": "X",
                "name": f"{record.lane} {request_id}",
                "cat": "arrival",
                "ts": math.floor(now_s * 1e6),  # whole: equal or apart, so that they nest
                "dur": 1,
                "pid": _REQUESTS,
                "tid": _ARRIVALS,
                "args": {"prompt_tokens": record.request.prompt_tokens},
            }
        )

    def _leaves(self, now_s: float, request_id: str) -> None:
        """`request_id` waits for its first pass no longer."""
        lane = self.waiting.pop(request_id, None)
        if lane is not None:
            self._count(now_s, lane, -1)

    def _count(self, now_s: float, lane: Lane, change: int) -> None:
        self.counts[lane] += change
        if self._in_range(now_s):
            waiting = {str(lane): count for lane, count in self.counts.items()}
            self._counter(now_s, "requests waiting", waiting)

    # --- passes ---

    def _start(self, now_s: float, instance_id: str, dispatch: Dispatch) -> None:
        self.running[instance_id] = _Running(now_s, dispatch)
        for item in dispatch.pass_.items:
            self._leaves(now_s, item.request_id)
            if item.request_id in self.arrived:
                self.arrived.remove(item.request_id)
                if self._in_range(now_s):
                    self._flow(item.request_id, now_s, instance_id)

    def _flow(self, request_id: str, start_s: float, instance_id: str) -> None:
        arrival_us = math.floor(self.records[request_id].request.arrival_s * 1e6)
        flow = {"name": "first pass", "cat": "flow", "id": request_id}
        self.rows.append({"ph": "s", **flow, "ts": arrival_us, "pid": _REQUESTS, "tid": _ARRIVALS})
        end = {"ts": _us(start_s), "pid": _INSTANCES, "tid": self.threads[instance_id]}
        self.rows.append({"ph": "f", "bp": "e", **flow, **end})

    def _over(self, now_s: float, instance_id: str, outcome: PassResult | str) -> None:
        running = self.running.pop(instance_id, None)
        if running is None or not self._in_range(running.start_s):
            return
        pass_, numbers = running.dispatch.pass_, running.dispatch.numbers
        lanes = [self.records[item.request_id].lane for item in pass_.items]
        short = sum(lane is Lane.SHORT for lane in lanes)
        args: Row = {
            "pass": pass_.pass_id,
            "tokens": pass_.tokens,
            "history": sum(item.history for item in pass_.items),
            "short": short,
            "long": len(lanes) - short,
            "reason": str(running.dispatch.reason),
            "staged": running.dispatch.staged,
            "predicted_ms": numbers.predicted_s * 1e3,
            "requests": [item.request_id for item in pass_.items],
        }
        if numbers.slack_s_min is not None:
            args["slack_ms_min"] = numbers.slack_s_min * 1e3
        if pass_.layer_blocks > 1:
            args["layers"] = f"{pass_.layer_block + 1} of {pass_.layer_blocks}"
        if isinstance(outcome, str):
            args["error"] = outcome
        else:
            args["executed_tokens"] = outcome.executed_tokens
        mix = f"{short} short, {len(lanes) - short} long" if pass_.kind is PassKind.PREFILL else len(lanes)
        self.rows.append(
            {
                "ph": "X",
                "name": f"{pass_.kind} T={pass_.tokens} ({mix})",
                "cat": str(pass_.kind) if not isinstance(outcome, str) else "failed",
                "ts": _us(running.start_s),
                "dur": _us(now_s) - _us(running.start_s),
                "pid": _INSTANCES,
                "tid": self.threads[instance_id],
                "args": args,
            }
        )

    def _window(self, now_s: float, dispatch: Dispatch) -> None:
        """W, D and the queued tokens, as they were at a dispatch."""
        if dispatch.pass_.kind is not PassKind.PREFILL or not self._in_range(now_s):
            return
        numbers = dispatch.numbers
        self._counter(now_s, "W (ms)", {"W": numbers.window_s * 1e3})
        self._counter(now_s, "D (tokens)", {"D": numbers.depth_tokens})
        queued = {"short": numbers.queued_short_tokens, "long": numbers.queued_long_tokens}
        self._counter(now_s, "tokens waiting", queued)

    def _counter(self, now_s: float, name: str, values: Mapping[str, float]) -> None:
        self.rows.append(
            {"ph": "C", "name": name, "ts": _us(now_s), "pid": _QUEUE, "tid": 0, "args": dict(values)}
        )

    def _in_range(self, now_s: float) -> bool:
        return self.from_s <= now_s < self.to_s


def _us(time_s: float) -> float:
    """Microseconds, to the nanosecond that the viewer keeps: a pass ends where the next one begins."""
    return round(time_s * 1e9) / 1e3


def _thread_name(pid: int, tid: int, name: str) -> Row:
    return {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
