"""A small queueing model of a fleet with two pools, in closed loop with a role controller.

Work flows in as a fluid: `demand` busy seconds a second for each lane, optionally with noise. A pool works
off its lane at one busy second a second and instance; nothing spills. Shorts are announced as `alone` times
the work that they really are, since a fleet predicts each request alone and then packs them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping

from service.core.reconcile import Controller, FleetView, InstanceLoad, RoleMove
from service.core.types import Lane, Role

SERVES = {Lane.SHORT: (Role.SP, Role.MIXED), Lane.LONG: (Role.LP, Role.MIXED)}
SHORT_S = 0.025  # of a request alone
TARGET_S = {Lane.SHORT: 0.4, Lane.LONG: 1.1}

Demand = Mapping[Lane, float]


def demand(total: float, short_share: float) -> Demand:
    return {Lane.SHORT: total * short_share, Lane.LONG: total * (1.0 - short_share)}


class FluidFleet:
    def __init__(
        self, instances: int, roles: list[Role] | None = None, alone: float = 3.0, noise: int | None = None
    ) -> None:
        chosen = roles or [Role.MIXED] * instances
        self.roles = {f"i{number:04d}": role for number, role in enumerate(chosen)}
        self.backlog_s = dict.fromkeys(Lane, 0.0)
        self.alone = alone
        self.long_s = 0.3  # of a request alone
        self.random = random.Random(noise) if noise is not None else None
        self.moves: list[tuple[float, RoleMove]] = []

    def pool(self, role: Role) -> int:
        return Counter(self.roles.values())[role]

    def run(
        self, controller: Controller, wanted: Callable[[float], Demand], periods: int, from_s: float
    ) -> None:
        for period in range(periods):
            now_s = from_s + period * controller.period_s
            for move in controller.step(self.look(wanted(now_s), controller.period_s), now_s):
                self.roles[move.instance_id] = move.role
                self.moves.append((now_s, move))

    def look(self, asked: Demand, period_s: float) -> FleetView:
        """One period of work, and what a controller sees of it."""
        work = {lane: rate * self._jitter() for lane, rate in asked.items()}
        mixed = self.pool(Role.MIXED)
        busy: dict[Lane, float] = {}
        for lane in Lane:
            servers = float(sum(self.pool(role) for role in SERVES[lane]))
            if mixed:  # shared by both lanes in proportion
                servers *= work[lane] / (sum(work.values()) or 1.0)
            todo = self.backlog_s[lane] + work[lane] * period_s
            done = min(todo, servers * period_s)
            self.backlog_s[lane] = todo - done
            busy[lane] = done / (servers * period_s) if servers else 0.0
        loads = tuple(self._load(name, role, busy) for name, role in self.roles.items())
        short, long = work[Lane.SHORT] * self.alone, work[Lane.LONG]
        return FleetView(loads, short / SHORT_S, long / self.long_s, short, long, arrivals=1)

    def _load(self, name: str, role: Role, busy: Mapping[Lane, float]) -> InstanceLoad:
        lanes = [lane for lane in Lane if role in SERVES[lane]]
        backlog_s = at_risk = 0.0
        for lane in lanes:
            servers = sum(self.pool(other) for other in SERVES[lane])
            each_s = self.backlog_s[lane] / servers
            backlog_s += each_s * (self.alone if lane is Lane.SHORT else 1.0)
            at_risk = max(at_risk, max(0.0, 1.0 - TARGET_S[lane] / each_s) if each_s else 0.0)
        used = sum(busy[lane] for lane in lanes) / len(lanes)
        return InstanceLoad(name, role, backlog_s, at_risk, used, round(backlog_s / 0.1))

    def _jitter(self) -> float:
        return self.random.uniform(0.8, 1.2) if self.random is not None else 1.0
