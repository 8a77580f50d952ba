"""Which instance should have which role: level-triggered and pure.

A controller is asked every `period_s` with what is observed, and answers with moves; it never waits for one
to be carried out, because the next observation shows whether it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from service.core.types import Role


@dataclass(frozen=True, slots=True)
class InstanceLoad:
    """What one instance carries.

    backlog_s: predicted seconds of prefill that wait for it. A queue that several instances share is split
        evenly over those that may serve it.
    at_risk_ratio: share of those requests within sigma of their TTFT target, or past it.
    utilisation: share of the last period that it was busy, 0 to 1.
    requests_waiting: count, not only of the present lane.
    cached_s: predicted seconds to compute again what its prefix cache holds; 0 where that is not known.
    """

    instance_id: str
    role: Role
    backlog_s: float
    at_risk_ratio: float
    utilisation: float
    requests_waiting: int
    cached_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FleetView:
    """Everything a controller may look at. Rates are of the last period: arrivals by what they bring."""

    instances: tuple[InstanceLoad, ...]
    short_requests_per_s: float
    long_requests_per_s: float
    short_work_s_per_s: float  # predicted seconds of prefill that arrive a second, alone and unbatched
    long_work_s_per_s: float
    arrivals: int  # requests submitted since the last look
    first_look: bool = False  # there was none before: rates and utilisation are of nothing yet


class MoveReason(StrEnum):
    PRESSURE = "pressure"  # the other pool is under more pressure by more than the hysteresis
    STARVED = "starved"  # work waits for a pool without instances
    SEPARATE = "separate"  # separation is predicted to win: pools are formed
    MERGE = "merge"  # separation is predicted to lose: pools are merged
    PENDING_RATIO = "pending_ratio"  # the rule of the LAPS artifact
    PINNED = "pinned"  # an operator said so
    OVERDUE = "overdue"  # a move was not carried out in time: back to the role that the instance has
    FAILED = "failed"  # the instance can't have the role: back to the one that it has
    BALANCE = "balance"  # the shard has more capacity than another one, by about two workers
    RETIRED = "retired"  # the shard is taken out of service


@dataclass(frozen=True, slots=True)
class RoleMove:
    instance_id: str
    role: Role
    reason: MoveReason
    pressure_short: float = 0.0
    pressure_long: float = 0.0


class Controller(Protocol):
    """One per fleet. `step` is called once a period with a fresh view."""

    @property
    def period_s(self) -> float: ...

    def step(self, fleet: FleetView, now_s: float) -> tuple[RoleMove, ...]: ...
