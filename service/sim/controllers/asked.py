"""What is asked of the controller, and whether it holds: a table with verdicts, from a comparison."""

from __future__ import annotations

from collections.abc import Sequence

from service.core.types import Lane
from service.sim.controllers.arms import AUTO, HALVES, MIXED, OURS, ROUTER
from service.sim.controllers.compare import Comparison, Scored
from service.sim.exhibits.exhibit import Cell, Table
from service.sim.results import t_interval

ENOUGH = 0.05  # of a lane: what static pools must miss to be compared with
BACK_PERIODS, OVERSHOOTS = 20.0, 1
BELOW_STATIC, BELOW_ROUTER = 0.28, 0.12  # published by LAPS for several instances
YES, NO = "yes", "no"
_ENOUGH, _STATIC, _ROUTER = (f"{100.0 * each:g} %" for each in (ENOUGH, BELOW_STATIC, BELOW_ROUTER))
ASKED = f"""\
*Back*: after every change, on every seed, attainment is over 95 % again within {BACK_PERIODS:g} periods.
*Overshoots*: at most {OVERSHOOTS} on any seed. *Against static*: in each lane of which {HALVES} misses
{_ENOUGH} or more, the misses are {_STATIC} fewer; *against router*: {_ROUTER} fewer than under the
{ROUTER}, in the same lanes. The figure is the lane with the least gain; both bounds are what LAPS
publishes of itself. Empty: static pools miss less.
"""


MODES = f"""\
Misses of the worse lane, in percent. *Loses*: by how many points {AUTO} has more than the better of the
other two, with the 95 % t-interval over seeds. *No loss*: the interval reaches 0.
"""


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def asked_table(comparison: Comparison) -> Table:
    """A row a case and load."""
    rows: list[tuple[Cell, ...]] = []
    for ours in comparison.scored:
        if ours.arm == OURS:
            of = {arm: comparison.of(ours.case, ours.load, arm) for arm in comparison.arms}
            most = max(run.overshoots for run in ours.runs)
            static, router = (least_gain(ours, of[HALVES], of.get(arm)) for arm in (HALVES, ROUTER))
            rows.append(
                (
                    ours.case,
                    ours.runs[0].rate_per_s,
                    slowest_text(ours),
                    YES if comes_back(ours) else NO,
                    most,
                    YES if most <= OVERSHOOTS else NO,
                    *_judged(static, BELOW_STATIC),
                    *_judged(router, BELOW_ROUTER),
                )
            )
    columns = ("case", "requests/s", "periods", "back", "overshoots", f"<= {OVERSHOOTS}")
    static_columns = ("against static", f"{_STATIC} fewer")
    return Table((*columns, *static_columns, "against router", f"{_ROUTER} fewer"), tuple(rows))


def comes_back(ours: Scored) -> bool:
    """After every change, on every seed, soon enough."""
    periods = [recovery.periods for run in ours.runs for recovery in run.recoveries]
    return all(each is not None and each <= BACK_PERIODS for each in periods)


def slowest_text(ours: Scored) -> str:
    periods = [recovery.periods for run in ours.runs for recovery in run.recoveries]
    known = [each for each in periods if each is not None]
    return "never" if len(known) < len(periods) else f"{max(known, default=0.0):.0f}"


def least_gain(ours: Scored, halves: Scored, other: Scored | None) -> float | None:
    """Relative change of the misses against `other`, in the lane where it is least to our favour, of those of
    which static pools miss enough; inf: the other has none and we have; None: no such lane, or no other."""
    changes: list[float] = []
    if other is None:
        return None
    for lane in Lane:
        if _missed(halves, lane) >= ENOUGH:
            mine, theirs = _missed(ours, lane), _missed(other, lane)
            changes.append(mine / theirs - 1.0 if theirs else (float("inf") if mine else 0.0))
    return max(changes, default=None)


def _missed(scored: Scored, lane: Lane) -> float:
    return mean([run.violations(lane) for run in scored.runs])


def _judged(change: float | None, below: float) -> tuple[Cell, Cell]:
    if change is None:
        return None, None
    shown = "it misses none" if change == float("inf") else f"{100.0 * change:+.0f} %"
    return shown, YES if change <= -below else NO


def mode_table(comparison: Comparison) -> Table:
    """A row a case and load: one pool, two, and who chooses between them."""
    rows: list[tuple[Cell, ...]] = []
    for auto in comparison.scored:
        if auto.arm == AUTO:
            found = [auto, *(comparison.of(auto.case, auto.load, arm) for arm in (MIXED, OURS))]
            missed = [[100.0 * max(run.violations(lane) for lane in Lane) for run in s.runs] for s in found]
            better = min(missed[1:], key=mean)
            more = [ours - theirs for ours, theirs in zip(missed[0], better, strict=True)]
            middle, low, high = t_interval(more) if len(more) > 1 else (more[0], more[0], more[0])
            shown = f"{middle:+.2f} [{low:+.2f}, {high:+.2f}]" if len(more) > 1 else f"{middle:+.2f}"
            figures = (f"{mean(missed[n]):.2f}" for n in (1, 2, 0))
            rate_per_s, verdict = auto.runs[0].rate_per_s, YES if low <= 0.0 else NO
            rows.append((auto.case, rate_per_s, *figures, shown, verdict))
    return Table(("case", "requests/s", MIXED, f"two pools, {OURS}", AUTO, "loses", "no loss"), tuple(rows))


def hour_table(comparison: Comparison) -> Table:
    """A row a mix, rate and controller."""
    rows = tuple(
        (
            hour.mix,
            hour.rate_per_s,
            hour.arm,
            hour.moves,
            hour.first,
            f"{100.0 * hour.violations:.2f}",
            YES if hour.moves == 0 else NO,
        )
        for hour in comparison.hours
    )
    columns = ("mix", "requests/s", "controller", "moves", "moves before", "missed %", "no moves")
    return Table(columns, rows)
