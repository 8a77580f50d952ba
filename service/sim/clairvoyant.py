"""A scheduler that knows the future, relaxed until it is a linear program: a bound for arrivals as they come.

Take any run of any policy. Spread the least work of each request that met its target (`bounds.least_work_s`)
over the passes that it was in, evenly in time within each. All these passes lie between its arrival and its
target; the work in a pass is at most its length, so at any moment an engine works at rate 1 at most. What
results is a *fluid* schedule: one server as fast as all engines together, that may split and interrupt
requests at will. So if no fluid schedule serves all but the allowed misses between arrival and target, no
policy sustains the rate. The fluid problem is relaxed further, always in the policy's favour:

* time is cut into slots, arrivals rounded down and targets up;
* misses need not be whole requests, and requests in the same slots, lane and class of size may miss the share
  that saves most: x of them save x times the largest of their class.

What is left is a linear program: minimise z, the missed share of the worst scored lane, subject to the flows
of work into slots. A window of slots is written as its dyadic pieces, with one limit for each piece and what
lies within it, which for nested pieces is the same as limits for single slots (Hall).

Monotone: a rate that is infeasible stays so when it rises. The same requests come closer together and have
the same targets, so an interval that held their windows before is, shifted, long enough to hold them now,
with no less work in it; and for one server, earliest deadline first serves everybody exactly where no
interval has more work than time. So the bound is the lowest rate found infeasible. (Where something happens
at set times this holds only for the rates that were looked at.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from service.core.types import Lane
from service.sim.bounds import Bools, Floats, Jobs

if TYPE_CHECKING:
    from scipy.sparse import coo_array

Ints = NDArray[np.int64]

SLOTS_MAX = 1024
SLOTS_PER_TARGET = 8  # of the shortest target, where SLOTS_MAX allows
_CLASSES = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 1.0)  # quantiles of size that bound the classes of a lane
_FEASIBLE = 1e-6  # z is compared up to this


@dataclass(frozen=True, slots=True)
class _Groups:
    """Requests alike: slots [first, end), lane, class of size. work_s: their sum. largest_s: of one."""

    first: Ints
    end: Ints
    short: Bools
    count: Floats
    work_s: Floats
    largest_s: Floats


def missed_ratio_min(
    jobs: Jobs, work_s: Floats, engines: Callable[[Floats], Floats], scored: Collection[Lane]
) -> float:
    """The least share of misses in the worst scored lane that any fluid schedule must have.

    engines: edges of slots (seconds) -> engine seconds that there are between each two.
    Raises RuntimeError when the solver gives up.
    """
    edges_s = _edges(jobs)
    groups = _group(jobs, work_s, edges_s)
    return _solve(groups, engines(edges_s), scored)


def lowest_infeasible_per_s(
    missed: Callable[[float], float],
    levels: Sequence[float],
    capacities_per_s: Sequence[float],
    tolerance: float,
) -> tuple[float, ...]:
    """For each level a rate that is infeasible, within a relative `tolerance` of one that is feasible; or the
    capacity, where that is feasible.

    missed: rate -> `missed_ratio_min` of the run at it. Rates are shared between levels.
    """
    known: dict[float, float] = {0.0: 0.0}
    found: list[float] = []
    for level, capacity_per_s in zip(levels, capacities_per_s, strict=True):
        allowed = 1.0 - level + _FEASIBLE
        tried: float | None = capacity_per_s
        while tried is not None:
            known[tried] = missed(tried)
            tried = _next_rate(known, allowed, capacity_per_s, tolerance)
        found.append(min([capacity_per_s, *(rate for rate, z in known.items() if z > allowed)]))
    return tuple(found)


def _next_rate(
    known: dict[float, float], allowed: float, capacity_per_s: float, tolerance: float
) -> float | None:
    """By the line through both ends, kept off them; None when they are near enough."""
    high = min((rate for rate, z in known.items() if z > allowed), default=None)
    if high is None or high > capacity_per_s:
        return None
    low = max(rate for rate, z in known.items() if rate < high and z <= allowed)
    if low and high / low <= 1.0 + tolerance:
        return None
    line = low + (high - low) * (allowed - known[low]) / (known[high] - known[low])
    margin = 0.4 * tolerance * high
    return min(max(line, low + margin), high - margin)


# --- slots and groups ---


def _edges(jobs: Jobs) -> Floats:
    """Of a power of two of equal slots over all windows."""
    start_s = float(jobs.arrival_s.min())
    span_s = max(float((jobs.arrival_s + jobs.target_s).max()) - start_s, 1e-9)
    wanted = span_s / (float(jobs.target_s.min()) / SLOTS_PER_TARGET)
    slots = 1 << max(0, min(math.ceil(math.log2(max(wanted, 1.0))), int(math.log2(SLOTS_MAX))))
    return np.linspace(start_s, start_s + span_s * (1.0 + 1e-9), slots + 1)


def _group(jobs: Jobs, work_s: Floats, edges_s: Floats) -> _Groups:
    slots = len(edges_s) - 1
    first = np.clip(np.searchsorted(edges_s, jobs.arrival_s, side="right") - 1, 0, slots - 1)
    end = np.clip(np.searchsorted(edges_s, jobs.arrival_s + jobs.target_s, side="left"), first + 1, slots)
    end = np.minimum(first + _rounded_up(end - first), slots)
    kind = np.zeros(len(jobs), dtype=np.int64)
    for lane in Lane:
        mine = jobs.of(lane)
        if mine.any():
            inner = np.unique(np.quantile(work_s[mine], _CLASSES[1:-1]))
            kind[mine] = np.searchsorted(inner, work_s[mine], side="left")
    keys = np.stack([first, end, jobs.short.astype(np.int64), kind])
    unique, member = np.unique(keys, axis=1, return_inverse=True)
    largest = np.zeros(unique.shape[1])
    np.maximum.at(largest, member.ravel(), work_s)
    return _Groups(
        first=unique[0],
        end=unique[1],
        short=unique[2].astype(bool),
        count=np.bincount(member.ravel()).astype(float),
        work_s=np.bincount(member.ravel(), weights=work_s).astype(float),
        largest_s=largest,
    )


def _rounded_up(lengths: Ints) -> Ints:
    """Window lengths in slots, exact up to 8 and to the next of 8 steps an octave above: fewer groups."""
    step = np.left_shift(1, np.maximum(np.floor(np.log2(lengths)).astype(np.int64) - 3, 0))
    rounded: Ints = -(-lengths // step) * step
    return rounded


# --- the program ---


class _Triplets:
    """Entries of a sparse matrix."""

    def __init__(self) -> None:
        self._parts: list[tuple[Ints, Ints, Floats]] = []

    def add(self, rows: Ints, columns: Ints, value: float | Floats) -> None:
        self._parts.append((rows, columns, np.broadcast_to(np.asarray(value, dtype=float), rows.shape)))

    def matrix(self, rows: int, columns: int) -> coo_array:
        from scipy.sparse import coo_array

        row, column, value = (np.concatenate(part) for part in zip(*self._parts, strict=True))
        return coo_array((value, (row, column)), shape=(rows, columns))


def _solve(groups: _Groups, engine_s: Floats, scored: Collection[Lane]) -> float:
    """Variables: flows of groups into pieces, misses of groups, work within each piece, z. Piece 1 is all
    time, pieces 2 i and 2 i + 1 are the halves of piece i."""
    slots, count = len(engine_s), len(groups.count)
    flow_group, flow_piece = _flows(groups, slots)
    flows, pieces = len(flow_group), 2 * slots - 1
    every_flow, every_group, every_piece = np.arange(flows), np.arange(count), np.arange(pieces)
    miss_at, piece_at, z_at = flows, flows + count, flows + count + pieces

    most = _Triplets()  # the work of a group flows or is missed; misses of each lane within z
    most.add(flow_group, every_flow, -1.0)
    most.add(every_group, miss_at + every_group, -groups.largest_s)
    members = [np.flatnonzero(groups.short == (lane is Lane.SHORT)) for lane in scored]
    for row, member in enumerate(members, start=count):
        most.add(np.full(len(member), row), miss_at + member, 1.0)
        most.add(np.array([row]), np.array([z_at]), -float(groups.count[member].sum()))

    nested = _Triplets()  # what lies within a piece: its own flows, and what lies within its halves
    nested.add(flow_piece - 1, every_flow, 1.0)
    halves = np.arange(2, pieces + 1)
    nested.add(halves // 2 - 1, piece_at + halves - 1, 1.0)
    nested.add(every_piece, piece_at + every_piece, -1.0)

    upper = np.concatenate([np.full(flows, np.inf), groups.count, _piece_capacity(engine_s), [1.0]])
    objective = np.zeros(z_at + 1)
    objective[z_at] = 1.0
    rows = count + len(members)
    bounds_above = np.concatenate([-groups.work_s, np.zeros(len(members))])
    from scipy.optimize import Bounds, LinearConstraint, milp  # slow to import: only where it is solved

    answer = milp(  # without whole-number variables: a linear program
        objective,
        bounds=Bounds(np.zeros(z_at + 1), upper),
        constraints=[
            LinearConstraint(most.matrix(rows, z_at + 1), np.full(rows, -np.inf), bounds_above),
            LinearConstraint(nested.matrix(pieces, z_at + 1), np.zeros(pieces), np.zeros(pieces)),
        ],
    )
    if answer.x is None:
        raise RuntimeError(f"the program of the bound was not solved: {answer.message}")
    return float(answer.x[z_at])


def _flows(groups: _Groups, slots: int) -> tuple[Ints, Ints]:
    """(group, piece) of each flow: the pieces of each window, as few as there can be."""
    owner: list[int] = []
    piece: list[int] = []
    for group, (first, end) in enumerate(zip(groups.first.tolist(), groups.end.tolist(), strict=True)):
        low, high = first + slots, end + slots
        while low < high:
            if low & 1:
                owner.append(group)
                piece.append(low)
                low += 1
            if high & 1:
                high -= 1
                owner.append(group)
                piece.append(high)
            low, high = low >> 1, high >> 1
    return np.array(owner), np.array(piece)


def _piece_capacity(engine_s: Floats) -> Floats:
    """Engine seconds of pieces 1 to 2 slots - 1."""
    levels = [engine_s]
    while len(levels[-1]) > 1:
        levels.append(levels[-1].reshape(-1, 2).sum(axis=1))
    return np.concatenate(levels[::-1])
