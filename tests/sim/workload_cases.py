"""Workloads to try, and a small server that ends every request after a random time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from heapq import heappop, heappush

import numpy as np
from hypothesis import strategies as st

from service.core.types import Request
from service.sim.sources import Burst, Flip, Targets, WorkloadSpec, make_source
from service.sim.workload import Arrival, Source, Trace, TraceRow

TARGETS = Targets(lambda new, history: 1e-4 * new + 1e-6 * history)
LMSYS = WorkloadSpec((("lmsys_chat_1m", 1.0),))
MIXED = WorkloadSpec((("lmsys_chat_1m", 0.9), ("rag", 0.1)))
CLOSED = WorkloadSpec((("lmsys_chat_1m", 1.0),), arrivals="closed", concurrency=5)
AGENTS = WorkloadSpec((("agent", 1.0),), arrivals="sessions")

BLOCK = 16
# Rows 1 and 3 begin like row 0, row 4 like row 3; the hash of a full block of an answer is known for row 0.
PREFIXES = Trace(
    "prefixes",
    (
        TraceRow(0.0, 40, 20, (1, 2, 3)),
        TraceRow(1.0, 48, 4, (1, 2, 3)),
        TraceRow(1.5, 600, 1, tuple(range(100, 137))),
        TraceRow(4.0, 32, 1, (1, 2)),
        TraceRow(6.0, 33, 9, (1, 2)),
    ),
    BLOCK,
)
SESSIONS = Trace(
    "sessions",
    (
        TraceRow(0.0, 100, 10, session="a"),
        TraceRow(0.0, 50, 10, session="b"),
        TraceRow(0.0, 200, 10, session="a", think_s=2.0, reused_tokens=96),
        TraceRow(0.0, 150, 10, session="a", think_s=500.0, reused_tokens=64),
    ),
)


def source_of(spec: WorkloadSpec, seed: int = 0, count: int = 200, rate: float | None = 10.0) -> Source:
    return make_source(
        spec,
        rate_per_s=None if spec.concurrency else rate,
        seed=seed,
        targets=TARGETS,
        requests_max=count,
        trace={"prefixes": PREFIXES, "sessions": SESSIONS}.get(spec.parts[0][0]),
    )


def served(source: Source, seed: int = 0, mean_s: float = 0.3) -> Iterator[tuple[float, Arrival, bool]]:
    """(time, arrival, whether it ended): every request ends after a random time, in order of time."""
    rng = np.random.default_rng(seed)
    due: list[tuple[float, int, Arrival, bool]] = []
    pushed = 0

    def push(time_s: float, arrival: Arrival, ended: bool) -> None:
        nonlocal pushed
        heappush(due, (time_s, pushed, arrival, ended))
        pushed += 1

    planned = source.next_arrival()
    while due or planned is not None:
        while planned is not None and (not due or planned.request.arrival_s <= due[0][0]):
            push(planned.request.arrival_s, planned, False)
            planned = source.next_arrival()
        now_s, _, arrival, ended = heappop(due)
        yield now_s, arrival, ended
        if not ended:
            push(now_s + rng.exponential(mean_s), arrival, True)
            continue
        for more in source.ended(arrival.request, now_s):
            push(more.request.arrival_s, more, False)


def arrived(source: Source, seed: int = 0) -> list[Arrival]:
    return [arrival for _, arrival, ended in served(source, seed) if not ended]


specs = st.sampled_from(
    [
        LMSYS,
        MIXED,
        replace(MIXED, flips=(Flip(3.0, (0.1, 0.9)),), bursts=(Burst(2.0, 4.0, 3.0),)),
        replace(LMSYS, arrivals="gamma", cv=3.0),
        CLOSED,
        replace(MIXED, arrivals="closed", concurrency=3),
        AGENTS,
        replace(AGENTS, concurrency=4, output_tokens=40, turns_mean=2.0),
        WorkloadSpec((("prefixes", 1.0),), arrivals="recorded"),
        WorkloadSpec((("prefixes", 1.0), ("rag", 1.0)), output_tokens=3),
        WorkloadSpec((("prefixes", 1.0),), arrivals="closed", concurrency=2, output_tokens=None),
        WorkloadSpec((("sessions", 1.0),), arrivals="sessions", block_tokens=16),
    ]
)


def turns_of(arrivals: list[Arrival]) -> dict[str, list[Request]]:
    sessions: dict[str, list[Request]] = {}
    for arrival in arrivals:
        sessions.setdefault(arrival.request.session, []).append(arrival.request)
    return sessions
