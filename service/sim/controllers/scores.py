"""What a run says of the rule that moved its instances.

violations   of a lane: measured requests that arrived and did not meet their target
moves        changes of the pool of an instance that has one; giving a newcomer its first pool is none
overshoot    a move taken back: the pools pass the size that they end at and return, so a move is followed by
             one the other way within `TURN_PERIODS` periods. Each such turn counts once
recovery     of a change of the load or the fleet: periods until attainment is over 95 % again, for good: the
             last moment before the next change at which a lane attains less over the `SEEN_PERIODS` periods
             around it, and on past the next change while that lasts. 0: at no moment. None: until the end of
             the window
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from service.core.reconcile import MoveReason, RoleMove
from service.core.types import Lane
from service.sim.case import Case
from service.sim.figures import Window
from service.sim.metric import met
from service.sim.result import SimRecord, SimResult

TURN_PERIODS = 10
SEEN_PERIODS = 10
GOOD = 0.95
LANE_SEEN_MIN = 20  # a lane with fewer requests around a moment is not judged there

Moves = Sequence[tuple[float, RoleMove]]


@dataclass(frozen=True, slots=True)
class Path:
    """A run over time, a value a period: instances in the short pool, in the long one, mixed; share of each
    lane that arrived around then and met its target (None: too few to tell)."""

    time_s: tuple[float, ...]
    sp: tuple[int, ...]
    lp: tuple[int, ...]
    mixed: tuple[int, ...]
    attainment: Mapping[Lane, tuple[float | None, ...]]


@dataclass(frozen=True, slots=True)
class Recovery:
    """periods: see the module text."""

    change_s: float
    what: str
    periods: float | None


@dataclass(frozen=True, slots=True)
class RunScore:
    """Of one run. moves, overshoots: of all of it, warm-up too; the others of the window."""

    seed: int
    rate_per_s: float
    arrived: Mapping[Lane, int]
    missed: Mapping[Lane, int]
    in_time_per_s: float
    moves: int
    overshoots: int
    recoveries: tuple[Recovery, ...]
    path: Path | None

    def violations(self, lane: Lane | None = None) -> float:
        """Share of the requests of a lane, or of all."""
        lanes = tuple(self.arrived) if lane is None else (lane,)
        arrived = sum(self.arrived.get(one, 0) for one in lanes)
        return sum(self.missed.get(one, 0) for one in lanes) / arrived if arrived else 0.0


def score_run(case: Case, result: SimResult, window: Window, rate_per_s: float, seed: int) -> RunScore:
    """`result` needs records and samples, one a period of a second."""
    measured = [r for r in result.records.values() if window.holds(r.request.arrival_s)]
    arrived = {lane: sum(r.lane is lane for r in measured) for lane in Lane}
    missed = {lane: sum(r.lane is lane and not met(r) for r in measured) for lane in Lane}
    moves = pressure_moves(result.role_moves)
    path = path_of(result, window)
    return RunScore(
        seed=seed,
        rate_per_s=rate_per_s,
        arrived=arrived,
        missed=missed,
        in_time_per_s=(len(measured) - sum(missed.values())) / window.seconds,
        moves=len(moves),
        overshoots=overshoots(moves),
        recoveries=recoveries(changes(case), path, window),
        path=path,
    )


def pressure_moves(moves: Moves) -> list[tuple[float, RoleMove]]:
    """Those that are moves; see the module text."""
    return [(at_s, move) for at_s, move in moves if move.reason is not MoveReason.SEPARATE]


def overshoots(moves: Moves, period_s: float = 1.0) -> int:
    """Turns; see the module text."""
    return sum(
        before.role is not after.role and after_s - before_s <= TURN_PERIODS * period_s + 1e-9
        for (before_s, before), (after_s, after) in pairwise(moves)
    )


def changes(case: Case) -> list[tuple[float, str]]:
    """What happens in a case at set times, in order; several things at one time are one."""
    found: dict[float, list[str]] = {}
    for flip in case.workload.flips:
        found.setdefault(flip.at_s, []).append("mix")
    for burst in case.workload.bursts:
        found.setdefault(burst.start_s, []).append("rate")
        found.setdefault(burst.start_s + burst.seconds, []).append("rate")
    for join in case.joins:
        found.setdefault(join.at_s, []).append("joins")
    for outage in case.outages:
        found.setdefault(outage.from_s, []).append("lost")
        if outage.to_s is not None:
            found.setdefault(outage.to_s, []).append("back")
    for speed in case.speeds:
        found.setdefault(speed.from_s, []).append("speed")
    return [(at_s, " and ".join(dict.fromkeys(whats))) for at_s, whats in sorted(found.items())]


def path_of(result: SimResult, window: Window) -> Path:
    """Up to the end of the window: of what comes after it the run does not wait for all answers."""
    assert result.samples is not None
    samples = result.samples
    times = np.array(samples.time_s)
    return Path(
        tuple(samples.time_s),
        tuple(samples.sp),
        tuple(samples.lp),
        tuple(samples.mixed),
        {lane: _attainment(result.records.values(), lane, times, window.end_s) for lane in Lane},
    )


def _attainment(
    records: Iterable[SimRecord], lane: Lane, times_s: NDArray[np.float64], end_s: float
) -> tuple[float | None, ...]:
    """At each moment, of the requests of a lane that arrive within half of `SEEN_PERIODS` seconds of it."""
    pairs = sorted((r.request.arrival_s, met(r)) for r in records if r.lane is lane)
    arrivals = np.array([at_s for at_s, _ in pairs])
    good = np.concatenate(([0], np.cumsum([ok for _, ok in pairs])))
    first = np.searchsorted(arrivals, times_s - SEEN_PERIODS / 2.0)
    end = np.searchsorted(arrivals, times_s + SEEN_PERIODS / 2.0)
    return tuple(
        float((good[b] - good[a]) / (b - a))
        if b - a >= LANE_SEEN_MIN and at_s <= end_s - SEEN_PERIODS / 2.0
        else None
        for at_s, a, b in zip(times_s.tolist(), first.tolist(), end.tolist(), strict=True)
    )


def recoveries(marks: Sequence[tuple[float, str]], path: Path, window: Window) -> tuple[Recovery, ...]:
    """Of the changes inside the window. The moments looked at first are those whose surroundings lie after
    the change and before the next."""
    inside = [(at_s, what) for at_s, what in marks if window.holds(at_s)]
    half_s = SEEN_PERIODS / 2.0
    seen = sum(time_s <= window.end_s - half_s for time_s in path.time_s)
    found = []
    for (at_s, what), until_s in zip(inside, [*(at_s for at_s, _ in inside[1:]), window.end_s], strict=True):
        moments = [n for n, time_s in enumerate(path.time_s) if at_s + half_s <= time_s <= until_s - half_s]
        below = [n for n in moments if _bad(path, n)]
        if not below:
            found.append(Recovery(at_s, what, 0.0))
            continue
        good = next((n for n in range(below[-1], seen) if not _bad(path, n)), None)
        periods = None if good is None else path.time_s[good - 1] + half_s - at_s
        found.append(Recovery(at_s, what, periods))
    return tuple(found)


def _bad(path: Path, moment: int) -> bool:
    shares = (path.attainment[lane][moment] for lane in Lane)
    return any(share is not None and share < GOOD for share in shares)


def split_text(path: Path, at_s: float) -> str:
    """Pools at a moment, as 2:6."""
    n = max((n for n, time_s in enumerate(path.time_s) if time_s <= at_s), default=0)
    return "mixed" if path.mixed[n] and not path.sp[n] + path.lp[n] else f"{path.sp[n]}:{path.lp[n]}"
