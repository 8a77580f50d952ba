"""Which workers should be in which shard: pure, from what is there now to the next moves.

Every shard is to have the same capacity: front ends send sessions by capacity and the rest by load, so equal
shards are equally busy, and none is larger than a scheduler can drive. Roles are not evened out for their own
sake, as each shard makes its pools by its own pressure; they decide *which* worker goes: one of the role that
the giving shard has most more of. So a shard keeps its split, and nothing is swapped.

- A move takes a worker from the shard with most capacity to the one with least, if they differ by about two
  such workers (`GAP`). Each move lowers the sum of squares, so moves come to an end, and once they have, the
  answer is none.
- Of a fleet at most ceil(5 %) are under way at a time, because a worker on its way serves nobody.
- No shard gives its last worker, nor the last of a role that it has made a pool of.
- Pinned workers and those on their way stay as they are. A pinned one on its way may be so for ever, so it is
  none of those that may be under way.
- A retired shard gives all that it has, the last one when nothing waits there any more.
- Workers go only where theirs is served: the same model and bundle. Where a fleet has several, an empty shard
  is left to whoever starts its workers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from service.core.reconcile import MoveReason
from service.core.types import Role

SHARE_MAX = 0.05  # of the fleet, under way at a time
GAP = 1.8  # times a worker's capacity: two, less what the calibrations of equal machines differ by


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """A worker that is to stay in the fleet.

    shard: where it is wanted. moving: it is not there yet. pinned: an operator's, not moved. kind: what it
    serves. capacity: any unit.
    """

    worker_id: str
    shard: str
    role: Role = Role.MIXED
    kind: str = ""
    capacity: float = 1.0
    moving: bool = False
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class ShardState:
    """takes: it has an active scheduler and is not retired. holds: requests wait in it."""

    name: str
    takes: bool = True
    retired: bool = False
    holds: bool = False


@dataclass(frozen=True, slots=True)
class ShardMove:
    """capacities: of the two shards before it, from and to."""

    worker_id: str
    from_shard: str
    to_shard: str
    reason: MoveReason
    capacities: tuple[float, float]


def balance_shards(shards: Iterable[ShardState], workers: Iterable[WorkerPlace]) -> tuple[ShardMove, ...]:
    """The moves that may begin now; see the module text. Empty: it is as it should be, or enough move."""
    states = sorted(shards, key=lambda shard: shard.name)
    fleet = _Fleet(states, workers)
    moves: list[ShardMove] = []
    under_way = sum(place.moving and not place.pinned for place in fleet.places.values())
    may_begin = moves_max(len(fleet.places)) - under_way
    while move := _from_retired(fleet, under_way=True) or (
        (_from_retired(fleet, under_way=False) or _to_even_out(fleet)) if may_begin > 0 else None
    ):
        may_begin -= not fleet.places[move.worker_id].moving
        moves.append(move)
        moved = replace(fleet.places[move.worker_id], shard=move.to_shard, moving=True)
        fleet = _Fleet(states, [*(p for p in fleet.places.values() if p.worker_id != move.worker_id), moved])
    return tuple(moves)


def moves_max(workers: int) -> int:
    """How many of a fleet may be under way at a time."""
    return math.ceil(SHARE_MAX * workers)


class _Fleet:
    """What the rules look at. takers: shards that work, the least capacity first."""

    def __init__(self, states: Sequence[ShardState], workers: Iterable[WorkerPlace]) -> None:
        self.states = states
        self.places = {place.worker_id: place for place in sorted(workers, key=lambda w: w.worker_id)}
        self.within: dict[str, list[WorkerPlace]] = {state.name: [] for state in states}
        for place in self.places.values():
            self.within.setdefault(place.shard, []).append(place)
        self.capacity = {
            name: math.fsum(place.capacity for place in here) for name, here in self.within.items()
        }
        self._kinds = {name: {place.kind for place in here} for name, here in self.within.items()}
        self._all_kinds = {place.kind for place in self.places.values()}
        takers = [state.name for state in states if state.takes and not state.retired]
        self.takers = sorted(takers, key=lambda name: (self.capacity[name], name))

    def fits(self, place: WorkerPlace, shard: str) -> bool:
        return (self._kinds[shard] or self._all_kinds) == {place.kind}

    def spared(self, place: WorkerPlace) -> bool:
        """Whether its shard goes on without it, by those that are there."""
        others = [p for p in self.within[place.shard] if not p.moving and p is not place]
        last_of_pool = place.role is not Role.MIXED and all(p.role is not place.role for p in others)
        return not (place.moving or place.pinned or last_of_pool or not others)

    def move(self, place: WorkerPlace, to: str, reason: MoveReason) -> ShardMove:
        capacities = self.capacity[place.shard], self.capacity[to]
        return ShardMove(place.worker_id, place.shard, to, reason, capacities)


def _from_retired(fleet: _Fleet, *, under_way: bool) -> ShardMove | None:
    for state in fleet.states:
        here = fleet.within[state.name] if state.retired else []
        there = sum(not place.moving for place in here)
        for place in here:
            if place.pinned or place.moving is not under_way or (not under_way and state.holds and there < 2):
                continue
            target = next((shard for shard in fleet.takers if fleet.fits(place, shard)), None)
            if target is not None:
                return fleet.move(place, target, MoveReason.RETIRED)
    return None


def _to_even_out(fleet: _Fleet) -> ShardMove | None:
    for giver in reversed(fleet.takers):
        for taker in fleet.takers:
            gap = fleet.capacity[giver] - fleet.capacity[taker]
            spare = [
                place
                for place in fleet.within[giver]
                if gap >= GAP * place.capacity and fleet.fits(place, taker) and fleet.spared(place)
            ]
            if spare:
                more = Counter(place.role for place in fleet.within[giver])
                more.subtract(place.role for place in fleet.within[taker])
                best = min(spare, key=lambda place: (-more[place.role], -place.capacity, place.worker_id))
                return fleet.move(best, taker, MoveReason.BALANCE)
    return None
