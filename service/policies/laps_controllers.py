"""Who moves instances between the short and the long pool under the LAPS policies.

All begin alike: with several instances and no pools yet, the first half serves shorts and the rest longs. A
newcomer joins the smaller pool, a pool that lost its last instance gets one back, and a fleet of one serves
both. None of this is said in the sources; without it an outage would leave a class unserved.

`PressureController` is Algorithm 2 of LAPS (arXiv 2601.11589). Per instance, with q its backlog in seconds,
e the share of its requests near or past their target and u its utilisation,

    psi = alpha q + beta e - gamma u            P = 90th percentile over a pool

    printed    P_s > (1 + tau) P_l    and the mirror image
    slides     P_s - P_l > tau        and the mirror image ("much greater")

One move a period at most, none during the cool-down, `instances_min` stay in a pool. As printed: busy
instances lower their own pressure, and the ratio test fires in the wrong direction where pressures are
negative. No values of the weights, of tau or of the times are published, nor the unit of q; seconds keep the
three terms of one size.

`PendingController` is the rule of the artifact's router (mini_lb.py): every interval, but only if a request
has arrived, compare the pending requests of the two classes; more than `ratio` times as many moves one
instance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from service.core.reconcile import FleetView, InstanceLoad, MoveReason, RoleMove
from service.core.types import Role


@dataclass(frozen=True, slots=True)
class PressureKnobs:
    """alpha, beta, gamma: weights of q, e, u. hysteresis: tau. None of these values is published.

    gamma is small on purpose: with the printed sign an idle pool counts as needier than a busy one, and with
    weights of one size the pools run away to the idle side.
    """

    alpha: float = 1.0
    beta: float = 1.0
    gamma: float = 0.1
    hysteresis: float = 0.2
    period_s: float = 1.0
    cool_down_s: float = 5.0
    instances_min: int = 1


def pool_moves(fleet: FleetView) -> tuple[RoleMove, ...]:
    """The moves that give every instance a pool, and every pool an instance; none where all is well."""
    loads = fleet.instances
    if len(loads) <= 1:
        return tuple(RoleMove(i.instance_id, Role.MIXED, MoveReason.MERGE) for i in _not(loads, Role.MIXED))
    pools = {role: [i.instance_id for i in loads if i.role is role] for role in Role}
    mixed, short, long = pools[Role.MIXED], pools[Role.SP], pools[Role.LP]
    if not short and not long:
        half = len(mixed) // 2
        roles = [Role.SP] * half + [Role.LP] * (len(mixed) - half)
        return tuple(RoleMove(i, r, MoveReason.SEPARATE) for i, r in zip(mixed, roles, strict=True))
    if mixed:
        moves = []
        for instance_id in mixed:
            pool, role = (short, Role.SP) if len(short) <= len(long) else (long, Role.LP)
            pool.append(instance_id)
            moves.append(RoleMove(instance_id, role, MoveReason.SEPARATE))
        return tuple(moves)
    if not short:
        return (RoleMove(long[-1], Role.SP, MoveReason.STARVED),)
    return (RoleMove(short[-1], Role.LP, MoveReason.STARVED),) if not long else ()


class PressureController:
    """Algorithm 2; see the module text. A `service.core.reconcile.Controller`."""

    def __init__(self, knobs: PressureKnobs, *, ratio_test: bool) -> None:
        self._knobs = knobs
        self._ratio_test = ratio_test
        self._moved_s = -math.inf

    @property
    def period_s(self) -> float:
        return self._knobs.period_s

    def step(self, fleet: FleetView, now_s: float) -> tuple[RoleMove, ...]:
        moves = pool_moves(fleet)
        if moves or len(fleet.instances) < 2 or now_s - self._moved_s < self._knobs.cool_down_s:
            return moves
        short = [i for i in fleet.instances if i.role is Role.SP]
        long = [i for i in fleet.instances if i.role is Role.LP]
        p_short, p_long = self._pressure(short), self._pressure(long)
        if self._above(p_short, p_long) and len(long) > self._knobs.instances_min:
            giver, role = long, Role.SP
        elif self._above(p_long, p_short) and len(short) > self._knobs.instances_min:
            giver, role = short, Role.LP
        else:
            return ()
        self._moved_s = now_s
        chosen = min(giver, key=lambda i: i.backlog_s)  # which one is not said; this one loses least
        return (RoleMove(chosen.instance_id, role, MoveReason.PRESSURE, p_short, p_long),)

    def _above(self, one: float, other: float) -> bool:
        tau = self._knobs.hysteresis
        return one > (1.0 + tau) * other if self._ratio_test else one - other > tau

    def _pressure(self, pool: list[InstanceLoad]) -> float:
        knobs = self._knobs
        scores = sorted(
            knobs.alpha * i.backlog_s + knobs.beta * i.at_risk_ratio - knobs.gamma * i.utilisation
            for i in pool
        )
        return scores[math.ceil(0.9 * len(scores)) - 1]


class PendingController:
    """The artifact's rebalance; see the module text. A `service.core.reconcile.Controller`."""

    def __init__(self, interval_s: float, ratio: float) -> None:
        self._interval_s = interval_s
        self._ratio = ratio
        self._checked_s = -math.inf
        self.period_s = min(1.0, interval_s)

    def step(self, fleet: FleetView, now_s: float) -> tuple[RoleMove, ...]:
        moves = pool_moves(fleet)
        too_soon = now_s < self._checked_s + self._interval_s - 1e-9
        if moves or len(fleet.instances) < 2 or fleet.arrivals == 0 or too_soon:
            return moves
        self._checked_s = now_s
        short = [i for i in fleet.instances if i.role is Role.SP]
        long = [i for i in fleet.instances if i.role is Role.LP]
        pending_short, pending_long = (max(1, sum(i.requests_waiting for i in p)) for p in (short, long))
        if pending_short > self._ratio * pending_long and len(long) > 1:
            return (RoleMove(long[-1].instance_id, Role.SP, MoveReason.PENDING_RATIO),)
        if pending_long > self._ratio * pending_short and len(short) > 1:
            return (RoleMove(short[-1].instance_id, Role.LP, MoveReason.PENDING_RATIO),)
        return ()


def _not(loads: Iterable[InstanceLoad], role: Role) -> list[InstanceLoad]:
    return [i for i in loads if i.role is not role]
