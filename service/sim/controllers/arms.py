"""What is compared: rules that give instances their roles.

All but the router run under the same policy (`plaserve`, with spill), so only the roles differ. *mixed* has
one pool and no roles: what the same policy does without a controller. *auto* has pools while they are
predicted to win. The *router* is what LAPS was measured against: another policy, without roles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from service.core.pressure import PressureController
from service.core.reconcile import Controller, FleetView, MoveReason, RoleMove
from service.core.settings import Mode, SchedulerSettings
from service.core.types import Role
from service.policies import laps_controllers

OURS = "plaserve"
HALVES = "static 50:50"
HISTORY = "static, history"
RATIO = "ratio, as printed"
DIFFERENCE = "difference, slides"
ROUTER = "load-balanced router"
MIXED = "one mixed pool"
AUTO = "mode auto"


class FixedSplit:
    """Gives every instance a pool when it comes, so that SP has the share of them, and moves nobody after.

    To the nearest instance, halves up, at least one in each pool where there are two. A pool that loses an
    instance stays short of it until one comes.
    """

    period_s = 1.0

    def __init__(self, short_share: float) -> None:
        if not 0.0 <= short_share <= 1.0:
            raise ValueError(f"short_share must be from 0 to 1, got {short_share}")
        self._share = short_share

    def step(self, fleet: FleetView, now_s: float) -> tuple[RoleMove, ...]:
        wanted = split_of(self._share, len(fleet.instances))
        short = sum(load.role is Role.SP for load in fleet.instances)
        moves = []
        for load in fleet.instances:
            if load.role is Role.MIXED:
                role = Role.SP if short < wanted else Role.LP
                short += role is Role.SP
                moves.append(RoleMove(load.instance_id, role, MoveReason.SEPARATE))
        return tuple(moves)


def split_of(short_share: float, instances: int) -> int:
    """Instances for shorts: to the nearest, halves up, at least one in each pool where there are two."""
    if instances < 2:
        return instances
    return min(max(1, math.floor(short_share * instances + 0.5)), instances - 1)


@dataclass(frozen=True, slots=True)
class Arm:
    """make: settings, share of the work that is short (of the whole run, in hindsight) -> a controller."""

    make: Callable[[SchedulerSettings, float], Controller | None]
    what: str
    policy: str = "plaserve:mode=spatial"

    @property
    def has_roles(self) -> bool:
        """Two pools from begin to end."""
        return self.policy.endswith("mode=spatial")


def _laps(*, ratio_test: bool) -> Controller:
    return laps_controllers.PressureController(laps_controllers.PressureKnobs(), ratio_test=ratio_test)


ARMS: Mapping[str, Arm] = {
    OURS: Arm(
        lambda settings, _: PressureController(settings, mode=Mode.SPATIAL),
        "the controller that serves, at its defaults (h = 0.2, cool-down 5 s)",
    ),
    HALVES: Arm(lambda *_: FixedSplit(0.5), "half of the instances for each lane, for good"),
    HISTORY: Arm(
        lambda _, short_share: FixedSplit(short_share),
        "for good, by the share of the least possible work of the whole window that is short: an oracle of "
        "the average, to the nearest instance, at least one in each pool",
    ),
    RATIO: Arm(
        lambda *_: _laps(ratio_test=True),
        "LAPS, algorithm 2: from halves on, utilisation subtracted, P_s > (1 + tau) P_l; tau = 0.2 and "
        "cool-down 5 s, the values of ours, since none is published",
    ),
    DIFFERENCE: Arm(
        lambda *_: _laps(ratio_test=False),
        "the same as the slides tell it: P_s - P_l > tau",
    ),
    ROUTER: Arm(
        lambda *_: None,
        "no roles, and the policy is `router_lb`: each arrival to the least loaded instance, `fcfs` there",
        policy="router_lb",
    ),
    MIXED: Arm(
        lambda *_: None, "no roles: every instance serves both lanes", policy="plaserve:mode=temporal"
    ),
    AUTO: Arm(
        lambda settings, _: PressureController(settings, mode=Mode.AUTO),
        "the default of the service: the same controller, with pools only while they are predicted to win",
        policy="plaserve:mode=auto",
    ),
}
