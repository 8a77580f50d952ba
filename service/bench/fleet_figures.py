"""From what clients saw of a fleet to figures over time, by phase and after each kill; and books.

Every request counts at the moment it was *due*, whatever became of it when: a miss shows when it was asked
for. A refused, failed or unsent request is a miss. The window slides over the last `WINDOW_S` of due times,
centred, so that a dip is neither early nor late, only wider by half a window on each side.

Books. Each planned request has exactly one end. Answered means whole: as many tokens as asked. Anything else
has a gRPC status. A front end that lived to the end must agree with its clients (`books`); one that was
killed must not have completed more than its clients saw or lost, nor less than they saw by its last word.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from service.bench.books import ServiceBooks, balance
from service.bench.fleet_plan import Phase
from service.bench.fleet_watch import Life
from service.bench.loadgen import Ending, Observation
from service.bench.stats import Quantiles
from service.bench.workload import Label, PlannedRequest

WINDOW_S, STEP_S = 5.0, 1.0
GOOD = 0.95  # of requests in time
STALL_S, STALL_GAP_S = 0.25, 2.0  # so late is a stall; lateness so far apart is another one
DOUBT_S = 0.5  # between two clocks' words on one request
NOTHING = ServiceBooks(0, {}, 0, 0)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened. kind: kill, back, phase or stall."""

    at_s: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Figures:
    """Of some requests. attainment, quantiles: NaN where there is nothing to take them of."""

    requests: int
    met: int
    endings: dict[str, int]  # by the name of the ending, and of the gRPC status where there is one
    ttft_s: Quantiles

    @classmethod
    def of(cls, seen: Sequence[Observation]) -> Figures:
        ttft_s = [each.ttft_s for each in seen if each.ttft_s is not None]
        return cls(len(seen), sum(each.met for each in seen), dict(endings_of(seen)), Quantiles.of(ttft_s))

    @property
    def attainment(self) -> float:
        return self.met / self.requests if self.requests else math.nan


@dataclass(frozen=True, slots=True)
class Moment:
    """A window: all requests, and by lane."""

    at_s: float
    every: Figures
    lanes: dict[Label, Figures]


@dataclass(frozen=True, slots=True)
class Aftermath:
    """What followed an event, until the next one or the end of the load.

    figures: of what was due then; bad: refused and failed that ended then, whenever they were due.
    below_s: time with attainment below `GOOD`; back_s: its last moment, after the event; None: never. For
    both the windows count that reach into this time and not into the next.
    """

    event: Event
    until_s: float
    below_s: float
    back_s: float | None
    lowest: float
    figures: Figures
    bad: dict[str, int]


def status_of(seen: Observation) -> str:
    """The name of its gRPC status, empty without one."""
    name, colon, _ = seen.error.partition(": ")
    return name if colon and name.isupper() else ""


def endings_of(seen: Sequence[Observation]) -> Counter[str]:
    return Counter(f"{each.ending} {status_of(each)}".strip() for each in seen)


def timeline(seen: Sequence[Observation], seconds: float) -> list[Moment]:
    moments: list[Moment] = []
    for step in range(round(seconds / STEP_S) + 1):
        at_s = step * STEP_S
        inside = [each for each in seen if abs(each.send_s - at_s) <= WINDOW_S / 2.0]
        lanes = {label: Figures.of([each for each in inside if each.label is label]) for label in Label}
        moments.append(Moment(at_s, Figures.of(inside), lanes))
    return moments


def by_phase(seen: Sequence[Observation], phases: Sequence[Phase]) -> dict[str, dict[str, Figures]]:
    """Phase -> `all` and each lane -> figures."""
    found: dict[str, dict[str, Figures]] = {}
    for phase in phases:
        inside = [each for each in seen if phase.start_s <= each.send_s < phase.end_s]
        found[phase.name] = {"all": Figures.of(inside)} | {
            label.value: Figures.of([each for each in inside if each.label is label]) for label in Label
        }
    return found


def aftermaths(
    seen: Sequence[Observation], moments: Sequence[Moment], events: Sequence[Event], seconds: float
) -> list[Aftermath]:
    """Of every kill and every flip of the load."""
    marks = [event for event in events if event.kind in ("kill", "phase")]
    found: list[Aftermath] = []
    for event, until_s in zip(marks, [*(mark.at_s for mark in marks[1:]), seconds], strict=True):
        last = until_s == seconds
        end_s = math.inf if last else until_s - WINDOW_S / 2.0
        inside = [moment for moment in moments if event.at_s - WINDOW_S / 2.0 <= moment.at_s < end_s]
        below = [moment for moment in inside if moment.every.attainment < GOOD]
        after = Figures.of([each for each in seen if event.at_s <= each.send_s < until_s])
        # What is still under way at the very end counts too.
        ended = [each for each in seen if each.end_s >= event.at_s and (last or each.end_s < until_s)]
        bad = endings_of([each for each in ended if each.ending is not Ending.COMPLETED])
        lowest = min((m.every.attainment for m in inside if m.every.requests), default=math.nan)
        back_s = max(0.0, below[-1].at_s - event.at_s) if below else None
        found.append(Aftermath(event, until_s, STEP_S * len(below), back_s, lowest, after, dict(bad)))
    return found


def stalls(seen: Sequence[Observation]) -> list[Event]:
    """When the clients themselves sent late: their process, or the machine, stood still. Misses around it
    are not the fleet's."""
    found: list[Event] = []
    last_s = -math.inf
    for each in sorted(seen, key=lambda each: each.send_s):
        if each.lag_s < STALL_S:
            continue
        if each.send_s - last_s > STALL_GAP_S:
            found.append(Event(each.send_s, "stall", f"clients {each.lag_s:.1f} s late"))
        last_s = each.send_s
    return found


# --- books ---


def client_faults(
    plan: Sequence[PlannedRequest], seen: Sequence[Observation], ends: Counter[str]
) -> list[str]:
    """Requests without exactly one end, or with a bad one. ends: how often each id was reported ended."""
    faults: list[str] = []
    by_id = Counter(each.request_id for each in seen)
    for request in plan:
        number = by_id[request.request_id]
        if number != 1:
            faults.append(f"{request.request_id}: {number} ends instead of one")
    faults += [f"{name}: ended {number} times" for name, number in ends.items() if number != 1]
    asked = {request.request_id: request.max_tokens for request in plan}
    for each in seen:
        name, tokens = each.request_id, each.output_tokens
        if name not in asked:
            faults.append(f"{name}: ended and was never planned")
        elif each.ending is Ending.COMPLETED and tokens != asked[name]:
            faults.append(f"{name}: answered with {tokens} tokens, asked for {asked[name]}")
        elif tokens > asked[name]:
            faults.append(f"{name}: {tokens} tokens, asked for {asked[name]}")
        elif each.ending is Ending.NOT_SENT:
            faults.append(f"{name}: not sent, {each.error}")
        elif each.ending is not Ending.COMPLETED and not status_of(each):
            faults.append(f"{name}: {each.ending} without a gRPC status: {each.error}")
    return faults


def life_faults(
    lives: Mapping[tuple[str, int], Life],
    addresses: Mapping[str, str],
    spans: Mapping[tuple[str, int], tuple[float, float | None]],
    seen: Sequence[Observation],
) -> list[str]:
    """Front ends against their clients. addresses: of front ends. spans: life -> (start, kill or None)."""
    faults: list[str] = []
    for (name, number), (start_s, killed_s) in spans.items():
        if name not in addresses:
            continue
        life = lives.get((name, number))
        if life is None:
            faults.append(f"{name}, life {number}: never told its books")
            continue
        end_s = math.inf if killed_s is None else killed_s
        theirs = [
            each
            for each in seen
            if each.address == addresses[name] and start_s <= each.send_s + each.lag_s < end_s
        ]
        told = _against(life, theirs) if killed_s is None else _against_killed(life, theirs)
        faults += [f"{name}, life {number}: {fault}" for fault in told]
    return faults


def scheduler_faults(lives: Mapping[tuple[str, int], Life], name: str) -> list[str]:
    """The active one at the end holds nothing."""
    last = [life for (owner, _), life in lives.items() if owner == name]
    if not last:
        return [f"scheduler {name or '(none)'}: never told its books"]
    books = last[-1].books
    if books.queued or books.running:
        return [f"scheduler {name} still holds {books.queued} queued and {books.running} running"]
    return []


def _against(life: Life, seen: Sequence[Observation]) -> list[str]:
    """A refusal as UNAVAILABLE may be either in the books: by a front end that drains, or for want of a
    scheduler or worker, which counts as a failure there."""
    doubtful = [each for each in seen if each.ending is Ending.REFUSED and status_of(each) == "UNAVAILABLE"]
    sure = [each for each in seen if each not in doubtful]
    as_failed = [replace(each, ending=Ending.FAILED) for each in doubtful]
    return list(balance([*sure, *as_failed], NOTHING, life.books).faults)


def _against_killed(life: Life, seen: Sequence[Observation]) -> list[str]:
    completed = [each for each in seen if each.ending is Ending.COMPLETED]
    low = sum(each.end_s < life.at_s - DOUBT_S for each in completed)
    high = len(completed) + sum(each.ending is Ending.FAILED for each in seen)
    if low <= life.books.completed <= high:
        return []
    return [f"it counted {life.books.completed} completed in its last word, the clients {low} to {high}"]
