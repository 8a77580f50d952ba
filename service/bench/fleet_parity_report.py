"""Fleet and simulator side by side, each figure with its tolerance and a verdict.

Attainment by phase and lane, counted where a request was due. TTFT P50 and P90 by lane over the whole run.
Moves after the pools were formed (all workers get a role at the first look under load), in number. A figure
that one side does not have is a fault, not a pass. Requests are the same on both sides, so the share of them
whose two TTFTs are close is shown too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from service.bench.fleet_figures import Figures, by_phase, stalls
from service.bench.fleet_parity_plan import RoleStep, Scenario, Side
from service.bench.fleet_parity_run import FleetRun
from service.bench.loadgen import Ending, Observation
from service.bench.stats import Quantiles, divide
from service.bench.workload import Label
from service.core.reconcile import MoveReason
from service.core.types import Role

ATTAINMENT_MAX = 0.03
QUANTILE_MAX = 0.15
MOVES_MAX = 1
CPU_MAX = 0.5  # of one core, for all of the control plane
CONTROL = ("scheduler", "frontend", "controller", "etcd")
CLOSE_RATIO = 0.1
FAULTS_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Check:
    """One figure of both sides. difference, bound: in points of attainment, as a ratio - 1, or in moves."""

    name: str
    fleet: float
    simulator: float
    difference: float
    bound: float
    unit: str  # share, s or count
    requests: int = 0

    @property
    def holds(self) -> bool:
        return abs(self.difference) <= self.bound + 1e-9  # False for NaN


@dataclass(frozen=True, slots=True)
class Parity:
    """close_ratio: share of requests whose TTFTs are within 10 % of each other. pool_gap: by how many workers
    the short pools differ, on average over the load. faults: all that is outside, in words."""

    scenario: Scenario
    run: FleetRun
    simulator: Side
    checks: tuple[Check, ...]
    close_ratio: float
    pool_gap: float
    faults: tuple[str, ...]

    @property
    def control_cores(self) -> float:
        return control_cores(self.run)


def control_cores(run: FleetRun) -> float:
    return sum(run.cores.get(kind, math.nan) for kind in CONTROL)


def formed(side: Side) -> int:
    return sum(move.reason == MoveReason.SEPARATE for move in side.moves)


def compare(scenario: Scenario, run: FleetRun, simulator: Side) -> Parity:
    """Both sides of one scenario. Raises ValueError where they are of different requests."""
    ids = [planned.request_id for planned in scenario.plan]
    for name, side in (("fleet", run.side), ("simulator", simulator)):
        if sorted(each.request_id for each in side.seen) != sorted(ids):
            raise ValueError(f"{name}: its requests are not those of the scenario {scenario.digest}")
    checks = (
        *_attainments(scenario, run.side, simulator),
        *_quantiles(run.side, simulator),
        *_moves(run.side, simulator),
    )
    return Parity(
        scenario,
        run,
        simulator,
        checks,
        _close(run.side.seen, simulator.seen),
        _pool_gap(scenario, run.side, simulator),
        (*_faults(run, simulator), *(_words(check) for check in checks if not check.holds)),
    )


def _attainments(scenario: Scenario, fleet: Side, simulator: Side) -> Iterator[Check]:
    sides = [by_phase(side.seen, scenario.phases) for side in (fleet, simulator)]
    for phase in scenario.phases:
        for label in Label:
            ours, theirs = (side[phase.name][label.value] for side in sides)
            if ours.requests or theirs.requests:
                yield Check(
                    f"in time, {phase.name}, {label}",
                    ours.attainment,
                    theirs.attainment,
                    ours.attainment - theirs.attainment,
                    ATTAINMENT_MAX,
                    "share",
                    ours.requests,
                )


def _quantiles(fleet: Side, simulator: Side) -> Iterator[Check]:
    for label in Label:
        ours, theirs = (_figures(side, label) for side in (fleet, simulator))
        for name in ("p50", "p90"):
            mine, other = getattr(ours.ttft_s, name), getattr(theirs.ttft_s, name)
            difference = divide(mine, other) - 1.0
            yield Check(f"TTFT {name}, {label}", mine, other, difference, QUANTILE_MAX, "s", ours.requests)


def _figures(side: Side, label: Label) -> Figures:
    return Figures.of([each for each in side.seen if each.label is label])


def _moves(fleet: Side, simulator: Side) -> Iterator[Check]:
    for name, ours, theirs in (
        ("workers given a first role", formed(fleet), formed(simulator)),
        ("moves after that", len(fleet.moves) - formed(fleet), len(simulator.moves) - formed(simulator)),
    ):
        yield Check(name, ours, theirs, ours - theirs, MOVES_MAX, "count")


def _close(fleet: Sequence[Observation], simulator: Sequence[Observation]) -> float:
    theirs = {each.request_id: each.ttft_s for each in simulator}
    pairs = [(each.ttft_s, theirs[each.request_id]) for each in fleet]
    close = [a is not None and b is not None and abs(a - b) <= CLOSE_RATIO * b for a, b in pairs]
    return fmean(close) if close else math.nan


def _pool_gap(scenario: Scenario, fleet: Side, simulator: Side) -> float:
    times_s = range(round(scenario.settings.seconds))
    return fmean(abs(fleet.pool_at(at_s, Role.SP) - simulator.pool_at(at_s, Role.SP)) for at_s in times_s)


def _faults(run: FleetRun, simulator: Side) -> Iterator[str]:
    """What makes a comparison void, whatever its figures."""
    yield from run.faults
    for name, side in (("fleet", run.side), ("simulator", simulator)):
        broken = sum(each.ending is not Ending.COMPLETED for each in side.seen)
        if broken:
            yield f"{name}: {broken} requests did not complete"
    if not control_cores(run) < CPU_MAX:
        yield f"the control plane took {control_cores(run):.2f} cores; the bound is {CPU_MAX}"


def _words(check: Check) -> str:
    return (
        f"{check.name}: fleet {_value(check.fleet, check.unit)}, simulator "
        f"{_value(check.simulator, check.unit)}, {_difference(check)}; allowed is {_bound(check)}"
    )


# --- shown ---


def view(parity: Parity) -> RenderableType:
    """One table of all checks, and below it what they were measured under."""
    table = Table("", "n", "fleet", "simulator", "difference", "allowed", "", box=box.SIMPLE_HEAD)
    for number, check in enumerate(parity.checks):
        last = number + 1 == len(parity.checks) or parity.checks[number + 1].unit != check.unit
        table.add_row(
            check.name,
            str(check.requests or ""),
            _value(check.fleet, check.unit),
            _value(check.simulator, check.unit),
            _difference(check),
            _bound(check),
            Text("within", style="green") if check.holds else Text("OUTSIDE", style="bold red"),
            end_section=last,
        )
    return Group(table, *_lines(parity))


def _lines(parity: Parity) -> Iterator[Text]:
    scenario, run = parity.scenario, parity.run
    settings, conditions = scenario.settings, run.conditions
    yield Text(
        f" Scenario {scenario.digest}, seed {settings.seed}: {len(scenario.plan)} requests in "
        f"{settings.seconds:.0f} s to {settings.workers} workers, {settings.scale:g} times slower than "
        f"modelled, load {settings.load_ratio:.0%}. All times are wall seconds."
    )
    for name, side in (("fleet", run.side), ("simulator", parity.simulator)):
        steps = " ".join(f"{s.at_s:.0f}{'+' if s.to_role == 'sp' else '-'}" for s in _later(side))
        first = sum(s.to_role == "sp" for s in side.moves if s.reason == MoveReason.SEPARATE)
        yield Text(
            f" Short pool, {name:<9}: {first} workers, then {steps or 'no move'} (s, one more or less)"
        )
    yield Text(
        f" The short pools differ by {parity.pool_gap:.2f} workers on average. "
        f"{parity.close_ratio:.0%} of requests have TTFTs within {CLOSE_RATIO:.0%} of each other."
    )
    yield Text(
        f" Given to the simulator, measured: way {conditions.way_s * 1e3:.1f} ms, link "
        f"{conditions.link_s * 1e3:.1f} ms each way, the controller looks at {conditions.look_s:.2f} s "
        "modulo its period."
    )
    late_s = Quantiles.of([each.lag_s for each in run.side.seen])
    kinds = ", ".join(f"{kind} {cores:.3f}" for kind, cores in run.cores.items())
    yield Text(
        f" Control plane: {parity.control_cores:.2f} cores (bound {CPU_MAX}); in cores: {kinds}; whole "
        f"machine {run.machine_cores:.2f}. Load average {run.loads[0]:.1f} before, {run.loads[1]:.1f} after. "
        f"Requests were sent up to {late_s.p99 * 1e3:.0f} ms late (P99)."
    )
    stood = [f"{event.text} at {event.at_s:.0f} s" for event in stalls(run.side.seen)]
    if stood:
        text = f" This machine stood still, which no fleet can help: {', '.join(stood)}. Run it again."
        yield Text(text, style="yellow")
    for fault in parity.faults[:FAULTS_SHOWN]:
        yield Text(f" {fault}", style="red")
    if not parity.faults:
        yield Text(" All within what is allowed.", style="green")


def _later(side: Side) -> list[RoleStep]:
    return [step for step in side.moves if step.reason != MoveReason.SEPARATE]


def _value(value: float, unit: str) -> str:
    if math.isnan(value):
        return "-"
    return {"share": f"{value:.1%}", "s": f"{value:.3f} s", "count": f"{value:.0f}"}[unit]


def _difference(check: Check) -> str:
    if math.isnan(check.difference):
        return "-"
    points = f"{check.difference * 100.0:+.1f} points"
    return {"share": points, "s": f"{check.difference:+.1%}", "count": f"{check.difference:+.0f}"}[check.unit]


def _bound(check: Check) -> str:
    points = f"{check.bound * 100.0:.0f} points"
    return {"share": points, "s": f"{check.bound:.0%}", "count": f"{check.bound:.0f}"}[check.unit]


def endings(side: Side) -> dict[str, int]:
    return dict(Counter(each.ending.value for each in side.seen))
