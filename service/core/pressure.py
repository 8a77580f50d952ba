"""How hard-pressed a pool is, and who moves instances between the pools.

Per instance, with `target` the TTFT target of the lane that it prefers,

    p = a min(1, backlog / target) + b (share of requests near their target, or past it) + c utilisation

and the pressure of a pool is the 90th percentile of its instances, smoothed over some three periods: a long
prompt that visits a short instance looks like an overload for one. Every period, level-triggered: from the
pool under less pressure to the other one when they differ by more than h (a difference: a ratio fails at and
below 0), and only

* where it helps: what the lanes ask for, in instances, must be spread more evenly after the move than before,

      demand of the giver / (its instances - 1)  <  demand of the taker / its instances

  by a tenth. Under constant demand each move lowers the larger of the two, so moves come to an end;
* at most ceil(5 % of the fleet) a period; spill (`spill`) covers the rest meanwhile;
* never below n_min; not the same instance again within the cool-down, nor against the last move, for which
  the cool-down doubles each time that moves soon turn back (up to sixteen times);
* at a price: of all in the giving pool the instance moves that has least to lose, and h grows by up to half
  where it holds work and a cache that would take the cool-down to compute again.

Demand is what arrives, smoothed. Arriving work is predicted for each request alone, but shorts share passes:
how many busy seconds a second of such work really takes is learnt from the utilisation of the fleet while
nobody is far behind. In a quiet pool every short has a pass of its own, so it looks busy with work that half
of its instances could do: more than is known already is believed only while those that serve shorts are
loaded, over some periods. What is seen counts the more, the more of the work is short.

Past what the fleet can do longs ask for what shorts leave: a little too few for both lanes would make both
late, and an instance serves many shorts in the time of a few longs.

A pool that is forecast to fall behind has that much more backlog: it is as busy as was seen, and its demand
will grow as it does now (Holt, two periods).

Utilisation adds to pressure. LAPS prints the opposite sign, which sends busy instances to idle pools; the
`laps_*` policies keep it.

Modes. `temporal`: one pool, no moves. `spatial`: pools from a start in proportion to demand. `auto`: pools
only while they are predicted to win (`separation`), for which the prediction must have been the same for some
periods, and a change stays for a while.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

from service.core.reconcile import Controller, FleetView, InstanceLoad, MoveReason, RoleMove
from service.core.separation import Separation, Stream, predict
from service.core.settings import Mode, SchedulerSettings
from service.core.types import Lane, Role

POOL = {Lane.SHORT: Role.SP, Lane.LONG: Role.LP}
MOVES_RATIO_MAX = 0.05  # of the fleet, in one period
LEVEL_GAIN, TREND_GAIN = 0.3, 0.1  # of Holt's smoothing: some three periods of memory
FORECAST_PERIODS = 2
TURNS_MAX = 16  # times the cool-down
SHARED_AT_FIRST = 0.35  # a guess until seen below saturation: 1 with a pass each, 0.2 in the fullest passes
SATURATED = 0.98  # utilisation of the fleet above which demand can't be seen in it
LOADED = 0.85  # utilisation of those that serve shorts from which on shorts share passes as they can
BEHIND_S = 0.25  # backlog of an instance above which it works off old demand
EVENNESS = 1.1  # by how much a move must make the spread of demand more even


@dataclass(frozen=True, slots=True)
class PressureSettings:
    """Knobs of the controller. Weights and hysteresis have no unit."""

    period_s: float = 1.0  # dt: how often it looks
    cool_down_s: float = 5.0
    hysteresis: float = 0.2  # h
    instances_min: int = 1  # n_min, in each pool
    backlog_weight: float = 1.0  # a
    at_risk_weight: float = 1.0  # b
    utilisation_weight: float = 0.5  # c: alone it may move an instance, but it never outweighs a backlog
    separation_gain: float = 0.02  # auto: pools are formed, or merged, for a score better by this
    separation_periods: int = 10  # auto: and after so many periods of the same opinion

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            positive = item.name in {"period_s", "instances_min", "separation_periods"}
            if math.isnan(value) or value < 0 or (positive and value == 0):
                bound = "greater than 0" if positive else "at least 0"
                raise ValueError(f"{item.name} must be {bound}, got {value}")


def instance_pressure(load: InstanceLoad, target_s: float, settings: PressureSettings) -> float:
    """p of one instance; see the module text."""
    return (
        settings.backlog_weight * min(1.0, load.backlog_s / target_s)
        + settings.at_risk_weight * load.at_risk_ratio
        + settings.utilisation_weight * load.utilisation
    )


def pool_pressure(pressures: Iterable[float]) -> float:
    """The 90th percentile (nearest rank); 0 for an empty pool."""
    ordered = sorted(pressures)
    return ordered[math.ceil(0.9 * len(ordered)) - 1] if ordered else 0.0


def _utilisation(loads: Iterable[InstanceLoad]) -> float:
    """Mean over instances; 0 for none."""
    busy = [load.utilisation for load in loads]
    return sum(busy) / len(busy) if busy else 0.0


class Trend:
    """Mean of a series with one value a period, and where it is going (Holt's linear smoothing).

    The forecast overshoots after a step; the mean approaches the new value from one side.
    """

    def __init__(self) -> None:
        self.mean = 0.0
        self._level: float | None = None
        self._slope = 0.0

    def add(self, value: float) -> None:
        if self._level is None:
            self.mean = self._level = value
            return
        self.mean += LEVEL_GAIN * (value - self.mean)
        before = self._level
        self._level += self._slope + LEVEL_GAIN * (value - self._level - self._slope)
        self._slope += TREND_GAIN * (self._level - before - self._slope)

    def ahead(self, periods: int) -> float:
        """The forecast; never negative."""
        return max(0.0, (self._level or 0.0) + periods * self._slope)


class Demand:
    """What the lanes ask for, in busy instances; see the module text."""

    def __init__(self) -> None:
        self._work = {lane: Trend() for lane in Lane}
        self._request_s = {lane: Trend() for lane in Lane}
        self._busy = Trend()
        self._short_busy = Trend()  # of those that serve shorts
        self._behind = False
        self._shared = SHARED_AT_FIRST  # busy seconds for a predicted second of a short alone

    def look(self, fleet: FleetView) -> None:
        rates = {Lane.SHORT: fleet.short_requests_per_s, Lane.LONG: fleet.long_requests_per_s}
        works = {Lane.SHORT: fleet.short_work_s_per_s, Lane.LONG: fleet.long_work_s_per_s}
        for lane in Lane:
            self._work[lane].add(works[lane])
            if rates[lane] > 0.0:
                self._request_s[lane].add(works[lane] / rates[lane])
        self._learn(fleet)

    def _learn(self, fleet: FleetView) -> None:
        """What a predicted second of a short takes; see the module text."""
        count = len(fleet.instances)
        was_behind, backlog_s = self._behind, sum(load.backlog_s for load in fleet.instances)
        self._behind = backlog_s >= BEHIND_S * count
        if was_behind or self._behind:  # busy with old demand
            self._busy, self._short_busy = Trend(), Trend()
            return
        self._busy.add(sum(load.utilisation for load in fleet.instances))
        self._short_busy.add(_utilisation(load for load in fleet.instances if load.role is not Role.LP))
        busy = self._busy.mean
        short_work, long_work = (self._work[lane].mean for lane in (Lane.SHORT, Lane.LONG))
        if short_work <= 0.0 or busy >= SATURATED * count:
            return
        seen = min(1.0, max(0.05, (busy - long_work) / short_work))
        if self._short_busy.mean >= LOADED or seen < self._shared:
            self._shared += LEVEL_GAIN * short_work / (short_work + long_work) * (seen - self._shared)

    def of(self, lane: Lane) -> float:
        """Busy instances, now."""
        return self._work[lane].mean * self._share(lane)

    def ahead(self, lane: Lane, periods: int) -> float:
        """The same, forecast."""
        return self._work[lane].ahead(periods) * self._share(lane)

    def of_fleet(self, instances: int) -> dict[Lane, float]:
        """The same for both lanes; past what the fleet can do longs ask for what shorts leave."""
        short = self.of(Lane.SHORT)
        return {Lane.SHORT: short, Lane.LONG: min(self.of(Lane.LONG), max(0.0, instances - short))}

    def request_s(self, lane: Lane) -> float:
        """Predicted seconds of a mean request alone; 0 before any came."""
        return self._request_s[lane].mean

    def _share(self, lane: Lane) -> float:
        return self._shared if lane is Lane.SHORT else 1.0

    def backlog_s(self, lane: Lane, backlog_s: float) -> float:
        """Busy seconds in a backlog of requests that were each predicted alone."""
        return backlog_s * self._share(lane)


class PressureController:
    """See the module text. `mode` is spatial or auto."""

    def __init__(
        self,
        settings: SchedulerSettings,
        knobs: PressureSettings | None = None,
        mode: Mode = Mode.SPATIAL,
    ) -> None:
        self._settings = settings
        self._knobs = knobs or PressureSettings()
        self._demand = Demand()
        self._smoothed = {lane: Trend() for lane in Lane}  # pressure
        self._separation = _Opinion(self._knobs) if mode is Mode.AUTO else None
        self._moved: tuple[float, Lane] = (-math.inf, Lane.SHORT)  # when, and to which pool
        self._turn_s = self._knobs.cool_down_s  # from there to a move the other way
        self._moved_s: dict[str, float] = {}  # instance -> its last move

    @property
    def period_s(self) -> float:
        return self._knobs.period_s

    def step(self, fleet: FleetView, now_s: float) -> tuple[RoleMove, ...]:
        self._demand.look(fleet)
        if not self._two_pools(fleet):
            mixed = (load for load in fleet.instances if load.role is not Role.MIXED)
            return tuple(RoleMove(load.instance_id, Role.MIXED, MoveReason.MERGE) for load in mixed)
        if any(load.role is Role.MIXED for load in fleet.instances):
            return self._form(fleet)
        return self._balance(fleet, now_s)

    def predicted(self, instances: int) -> Separation:
        """What `separation` says of the present demand."""
        short, long = (self._demand.request_s(lane) for lane in (Lane.SHORT, Lane.LONG))
        return predict(
            instances,
            Stream(self._demand.of(Lane.SHORT), short, short, self._target_s(Lane.SHORT)),
            Stream(
                self._demand.of(Lane.LONG),
                long,
                min(long, self._settings.long_chunk_s_max),
                self._target_s(Lane.LONG),
            ),
            self._knobs.instances_min,
        )

    def _two_pools(self, fleet: FleetView) -> bool:
        count = len(fleet.instances)
        if count < 2 * self._knobs.instances_min or count < 2:
            return False
        if self._separation is None:
            return True
        separated = any(load.role is not Role.MIXED for load in fleet.instances)
        return self._separation.wants(self.predicted(count), separated=separated)

    def _form(self, fleet: FleetView) -> tuple[RoleMove, ...]:
        """Roles for those that have none: in proportion to demand."""
        mixed = [load.instance_id for load in fleet.instances if load.role is Role.MIXED]
        count, least = len(fleet.instances), self._knobs.instances_min
        asked = self._demand.of_fleet(count)
        short, long = asked[Lane.SHORT], asked[Lane.LONG]
        if short + long <= 0.0:
            return ()
        wanted = min(max(least, round(count * short / (short + long))), count - least)
        missing = max(0, wanted - sum(load.role is Role.SP for load in fleet.instances))
        return tuple(
            RoleMove(name, Role.SP if index < missing else Role.LP, MoveReason.SEPARATE)
            for index, name in enumerate(mixed)
        )

    def _balance(self, fleet: FleetView, now_s: float) -> tuple[RoleMove, ...]:
        pools = {lane: [load for load in fleet.instances if load.role is POOL[lane]] for lane in Lane}
        for lane, other in ((Lane.SHORT, Lane.LONG), (Lane.LONG, Lane.SHORT)):
            if not pools[lane]:
                spare = min(pools[other], key=lambda load: (self._lost_s(load), load.instance_id))
                return (RoleMove(spare.instance_id, POOL[lane], MoveReason.STARVED),)
        for lane in Lane:
            self._smoothed[lane].add(self._pressure(lane, pools[lane]))
        pressure = {lane: self._smoothed[lane].mean for lane in Lane}
        taker = max(Lane, key=lambda lane: pressure[lane])
        giver = Lane.LONG if taker is Lane.SHORT else Lane.SHORT
        if self._moved[1] is giver and now_s - self._moved[0] < self._turn_s:
            return ()
        moves: list[RoleMove] = []
        for load in self._leavers(pools[giver], now_s):
            left = len(pools[giver]) - len(moves) - 1
            if (
                len(moves) == math.ceil(MOVES_RATIO_MAX * len(fleet.instances))
                or left < self._knobs.instances_min
                or pressure[taker] - pressure[giver] <= self._bar(load)
                or not self._more_even(giver, left, taker, len(pools[taker]) + len(moves))
            ):
                break
            reason, short, long = MoveReason.PRESSURE, pressure[Lane.SHORT], pressure[Lane.LONG]
            moves.append(RoleMove(load.instance_id, POOL[taker], reason, short, long))
            self._moved_s[load.instance_id] = now_s
        if moves:
            self._note(now_s, taker)
        return tuple(moves)

    def _note(self, now_s: float, taker: Lane) -> None:
        """Moves go to that pool now. Where they turn back soon after the last, the next turn waits longer."""
        before_s, before = self._moved
        if before is not taker:
            shortest_s, soon = self._knobs.cool_down_s, now_s - before_s < TURNS_MAX * self._turn_s
            self._turn_s = min(2.0 * self._turn_s, TURNS_MAX * shortest_s) if soon else shortest_s
        self._moved = (now_s, taker)

    def _more_even(self, giver: Lane, left: int, taker: Lane, count: int) -> bool:
        """Whether a giver with `left` instances is better off than a taker with `count` is."""
        asked = self._demand.of_fleet(left + 1 + count)
        return asked[giver] / left * EVENNESS < asked[taker] / count

    def _pressure(self, lane: Lane, pool: list[InstanceLoad]) -> float:
        """Of a pool, with what it is forecast to fall behind within the horizon."""
        target_s = self._target_s(lane)
        growth = max(0.0, self._demand.ahead(lane, FORECAST_PERIODS) - self._demand.of(lane)) / len(pool)
        coming_s = max(0.0, _utilisation(pool) + growth - 1.0) * FORECAST_PERIODS * self._knobs.period_s
        return pool_pressure(
            instance_pressure(
                InstanceLoad(
                    instance.instance_id,
                    instance.role,
                    self._demand.backlog_s(lane, instance.backlog_s) + coming_s,
                    instance.at_risk_ratio,
                    instance.utilisation,
                    instance.requests_waiting,
                ),
                target_s,
                self._knobs,
            )
            for instance in pool
        )

    def _leavers(self, pool: list[InstanceLoad], now_s: float) -> list[InstanceLoad]:
        """Who may leave the pool, those with least to lose first."""
        recent_s = now_s - self._knobs.cool_down_s
        self._moved_s = {name: at_s for name, at_s in self._moved_s.items() if at_s > recent_s}
        rested = [load for load in pool if load.instance_id not in self._moved_s]
        return sorted(rested, key=lambda load: (self._lost_s(load), load.instance_id))

    def _lost_s(self, load: InstanceLoad) -> float:
        """What a move may cost: work that waits for the instance, and its cache, in seconds of prefill."""
        return load.backlog_s + load.cached_s

    def _bar(self, load: InstanceLoad) -> float:
        """The difference of pressure that this move must be worth."""
        lost = min(1.0, self._lost_s(load) / self._knobs.cool_down_s) if self._knobs.cool_down_s else 0.0
        return self._knobs.hysteresis * (1.0 + 0.5 * lost)

    def _target_s(self, lane: Lane) -> float:
        """The TTFT target of a mean request of the lane."""
        short_s = self._settings.ttft_target_short_s
        if lane is Lane.SHORT:
            return short_s
        factor, offset_s = self._settings.ttft_target_long_factor, self._settings.ttft_target_long_offset_s
        return max(short_s, factor * self._demand.request_s(lane) + offset_s)


class _Opinion:
    """Whether two pools are wanted: a change of mind takes some periods of the same prediction."""

    def __init__(self, knobs: PressureSettings) -> None:
        self._knobs = knobs
        self._periods = 0  # that spoke for a change without a break

    def wants(self, found: Separation, *, separated: bool) -> bool:
        gain = found.gain
        other = gain < -self._knobs.separation_gain if separated else gain > self._knobs.separation_gain
        self._periods = self._periods + 1 if other else 0
        if self._periods < self._knobs.separation_periods:
            return separated
        self._periods = 0
        return not separated


def controller_for(
    mode: Mode, settings: SchedulerSettings, knobs: PressureSettings | None = None
) -> Controller | None:
    """The controller of a mode, a fresh one; None where nothing ever moves."""
    return None if mode is Mode.TEMPORAL else PressureController(settings, knobs, mode)
