"""Legal transitions of requests, hand-overs, instances and their health: one table each, the only place that
says them.

request    QUEUED -> STAGED -> PREFILLING -> (PARTIAL -> ...) -> DECODING -> ENDED
hand-over  PREFILLED -> OFFERED -> PULLED -> DONE, or EXPIRED, FAILED
instance   UP -> DRAINING -> DOWN, or back to UP
health     HEALTHY -> SUSPECT -> EJECTED -> HALF_OPEN -> HEALTHY (`outlier`)
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar


class RequestState(StrEnum):
    QUEUED = "queued"  # no pass yet, bound to no instance
    STAGED = "staged"  # in a pass that has not started
    PREFILLING = "prefilling"  # in a pass that runs
    PARTIAL = "partial"  # between chunks; its KV lives on one instance
    DECODING = "decoding"
    ENDED = "ended"


class HandoverState(StrEnum):
    """Prefill to decode on another instance; the prefill side holds the blocks until DONE."""

    PREFILLED = "prefilled"
    OFFERED = "offered"  # the decode side was told where to pull from
    PULLED = "pulled"  # all blocks arrived, not yet confirmed
    DONE = "done"
    EXPIRED = "expired"  # a state's deadline passed; the blocks are freed
    FAILED = "failed"


class InstanceState(StrEnum):
    UP = "up"
    DRAINING = "draining"
    DOWN = "down"


class HealthState(StrEnum):
    """Of an instance that is up, by how long its passes take (`outlier`)."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"  # slow so far; it works as before
    EJECTED = "ejected"  # takes nothing new, what it holds goes on
    HALF_OPEN = "half_open"  # may take one pass, by which it is judged


_R, _H, _I, _E = RequestState, HandoverState, InstanceState, HealthState

REQUEST: Mapping[RequestState, frozenset[RequestState]] = {
    _R.QUEUED: frozenset({_R.STAGED, _R.PREFILLING, _R.ENDED}),
    _R.STAGED: frozenset({_R.QUEUED, _R.PARTIAL, _R.PREFILLING, _R.ENDED}),  # back when revoked
    _R.PREFILLING: frozenset({_R.QUEUED, _R.PARTIAL, _R.DECODING, _R.ENDED}),  # QUEUED: KV lost, once more
    _R.PARTIAL: frozenset({_R.QUEUED, _R.STAGED, _R.PREFILLING, _R.ENDED}),
    _R.DECODING: frozenset({_R.ENDED}),
    _R.ENDED: frozenset(),
}

HANDOVER: Mapping[HandoverState, frozenset[HandoverState]] = {
    _H.PREFILLED: frozenset({_H.OFFERED, _H.EXPIRED, _H.FAILED}),
    _H.OFFERED: frozenset({_H.PULLED, _H.EXPIRED, _H.FAILED}),
    _H.PULLED: frozenset({_H.DONE, _H.EXPIRED, _H.FAILED}),
    _H.DONE: frozenset(),
    _H.EXPIRED: frozenset(),
    _H.FAILED: frozenset(),
}

INSTANCE: Mapping[InstanceState, frozenset[InstanceState]] = {
    _I.UP: frozenset({_I.DRAINING, _I.DOWN}),
    _I.DRAINING: frozenset({_I.UP, _I.DOWN}),
    _I.DOWN: frozenset({_I.UP}),
}

HEALTH: Mapping[HealthState, frozenset[HealthState]] = {
    _E.HEALTHY: frozenset({_E.SUSPECT}),
    _E.SUSPECT: frozenset({_E.HEALTHY, _E.EJECTED}),
    _E.EJECTED: frozenset({_E.HALF_OPEN, _E.SUSPECT}),  # SUSPECT: the fleet has shrunk, it is needed
    _E.HALF_OPEN: frozenset({_E.HEALTHY, _E.EJECTED, _E.SUSPECT}),
}


class IllegalTransition(RuntimeError):  # noqa: N818 - a broken invariant, never an outcome
    """Two parts of the program disagree about the state of something."""


S = TypeVar("S", bound=StrEnum)


def step(table: Mapping[S, frozenset[S]], old: S, new: S, what: str) -> S:
    """`new` if the table allows old -> new; raises IllegalTransition otherwise."""
    if new not in table[old]:
        raise IllegalTransition(f"{what}: {old} -> {new} is not allowed")
    return new
