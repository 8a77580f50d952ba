"""What a worker whose roles have engines of their own tells the fleet of them, as facts of its membership.

    role_engines    which engine each role runs, which one is loaded, what a move costs and is bounded by
    role_move       the move under way: its phase, since when
    role_moves      how the last ones ended, newest first
    role_failures   moves that failed in a row: who orders moves waits before the next one

A worker with one engine for both lanes tells none of this: its moves are labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from service.core.types import Role
from service.fleet.membership import Facts

ENGINES, MOVE, MOVES, FAILURES = "role_engines", "role_move", "role_moves", "role_failures"
MOVES_KEPT = 8


class MovePhase(StrEnum):
    """What a worker is at that changes its engine."""

    DRAINING = "draining"  # nothing new; what it holds goes on
    UNLOADING = "unloading"  # from here on no scheduler uses it
    LOADING = "loading"
    VERIFYING = "verifying"
    RESTORING = "restoring"  # the new engine can't be had: the old one is loaded again


class MoveEnd(StrEnum):
    DONE = "done"
    CALLED_OFF = "called_off"  # while it drained another role was wanted, which the loaded engine serves
    FAILED = "failed"  # it serves in its old role, or its process ends


_P, _E = MovePhase, MoveEnd
NEXT: Mapping[MovePhase, frozenset[MovePhase | MoveEnd]] = {
    _P.DRAINING: frozenset({_P.UNLOADING, _E.CALLED_OFF, _E.FAILED}),
    _P.UNLOADING: frozenset({_P.LOADING, _E.FAILED}),
    _P.LOADING: frozenset({_P.VERIFYING, _P.RESTORING, _E.FAILED}),
    _P.VERIFYING: frozenset({_P.RESTORING, _E.DONE, _E.FAILED}),
    _P.RESTORING: frozenset({_E.FAILED}),
}


@dataclass(frozen=True, slots=True)
class MoveState:
    """One move, at a phase or at its end.

    number: of the assignment that asked for it. at_time_s: the worker's time of day when that phase began.
    seconds: of the phases that are over. cut_off: requests that the bound of the drain took from it,
    to run again or go on elsewhere.
    """

    number: int
    from_role: Role
    to_role: Role
    at: MovePhase | MoveEnd
    at_time_s: float
    seconds: Mapping[MovePhase, float] = field(default_factory=dict)
    cut_off: int = 0
    error: str = ""

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    def told(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "from_role": self.from_role.value,
            "to_role": self.to_role.value,
            "at": self.at.value,
            "at_time_s": self.at_time_s,
            "seconds": {phase.value: round(seconds, 3) for phase, seconds in self.seconds.items()},
            "cut_off": self.cut_off,
            "error": self.error,
        }


@dataclass(frozen=True, slots=True)
class EnginesTold:
    """engines: role -> name of its engine. loaded: the one that runs. move_s: of drain and load, as measured
    last. bound_s: after it a move is over in any case."""

    engines: Mapping[Role, str]
    loaded: str
    move_s: float
    bound_s: float

    def told(self) -> dict[str, Any]:
        return {
            "engines": {role.value: name for role, name in self.engines.items()},
            "loaded": self.loaded,
            "move_s": round(self.move_s, 3),
            "bound_s": self.bound_s,
        }

    def loads(self, role: Role) -> bool:
        """Whether a move to `role` loads another engine."""
        return self.engines.get(role, self.loaded) != self.loaded


def engines_of(facts: Facts) -> EnginesTold | None:
    """None: one engine serves all roles, or what is said makes no sense here."""
    try:
        said = facts[ENGINES]
        engines = {Role(role): str(name) for role, name in said["engines"].items()}
        return EnginesTold(engines, str(said["loaded"]), float(said["move_s"]), float(said["bound_s"]))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def move_of(facts: Facts) -> MoveState | None:
    """The move under way."""
    return _move(facts.get(MOVE))


def moves_of(facts: Facts) -> tuple[MoveState, ...]:
    """Those that ended, newest first."""
    said = facts.get(MOVES)
    found = (_move(one) for one in said) if isinstance(said, list | tuple) else ()
    return tuple(move for move in found if move is not None)


def failures_of(facts: Facts) -> int:
    """Moves that failed in a row."""
    said = facts.get(FAILURES)
    return said if isinstance(said, int) else 0


def _move(said: Any) -> MoveState | None:
    try:
        at = said["at"]
        return MoveState(
            int(said["number"]),
            Role(said["from_role"]),
            Role(said["to_role"]),
            MoveEnd(at) if at in set(MoveEnd) else MovePhase(at),
            float(said["at_time_s"]),
            {MovePhase(phase): float(seconds) for phase, seconds in said.get("seconds", {}).items()},
            int(said.get("cut_off", 0)),
            str(said.get("error", "")),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
