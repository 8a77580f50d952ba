"""Roles as a preference: which instances serve a lane, and when the next of them is free.

An SP instance prefers shorts, an LP instance longs, a MIXED one takes both. A pool here is what serves a
lane: its own role and the mixed, without those that take nothing new. One look at all instances tells both
pools; it is taken at most once a turn, and only when an instance that is free asks about other instances.
Where all are mixed nobody asks.

When a busy instance is free is predicted from its passes. One that runs longer than predicted is expected to
need as long again as it is late, so that nobody waits for ever for an instance that hangs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from service.core.policy import Instance
from service.core.types import Lane, Role

OWN_LANE = {Role.SP: Lane.SHORT, Role.LP: Lane.LONG}


def serves(instance: Instance, lane: Lane) -> bool:
    """Whether the lane is one that the instance prefers."""
    return OWN_LANE.get(instance.role, lane) is lane


def free_s(instance: Instance, now_s: float) -> float:
    """When the instance is predicted to be free (see the module text); `now_s` where it is idle."""
    flight = instance.running
    if flight is None:
        return now_s
    end_s = flight.end_s if flight.end_s > now_s else now_s + (now_s - flight.end_s)
    return end_s + (instance.staged.predicted_s if instance.staged is not None else 0.0)


class Pool:
    """What serves a lane, as seen at the begin of a turn."""

    def __init__(self, instances: int, idle: list[Instance], busy_until_s: float) -> None:
        self.instances = instances
        self._idle = idle
        self._busy_until_s = busy_until_s
        self._changed = False  # some of the idle may have been given a pass since

    def dispatched(self) -> None:
        self._changed = True

    def idle_beside(self, instance: Instance) -> Iterator[Instance]:
        """Others that are idle still."""
        return (other for other in self._idle if other is not instance and other.running is None)

    def busy_until_s(self, now_s: float) -> float:
        """When the first of the busy ones is free; inf where none is busy."""
        if self._changed or math.isinf(self._busy_until_s):
            idle, self._idle, self._changed = self._idle, [], False
            for instance in idle:
                self._note(instance, now_s)
        return self._busy_until_s

    def _note(self, instance: Instance, now_s: float) -> None:
        if instance.running is None:
            self._idle.append(instance)
        else:
            self._busy_until_s = min(self._busy_until_s, free_s(instance, now_s))


class Pools:
    def __init__(self) -> None:
        self._instances: dict[str, Instance] = {}
        self._seen: dict[Lane, Pool] | None = None
        self._known_idle: dict[Lane, Instance] = {}  # idle when last heard of
        self._idle: list[Instance] | None = None  # at the begin of this turn

    def __len__(self) -> int:
        return len(self._instances)

    def get(self, instance_id: str) -> Instance | None:
        return self._instances.get(instance_id)

    def add(self, instance: Instance) -> None:
        self._instances[instance.instance_id] = instance
        self._seen = self._idle = None

    def remove(self, instance: Instance) -> None:
        self._instances.pop(instance.instance_id, None)
        self._seen = self._idle = None
        self._known_idle = {lane: i for lane, i in self._known_idle.items() if i is not instance}

    def new_turn(self) -> None:
        """Something may have happened: what was seen is old."""
        self._seen = self._idle = None

    def dispatched(self) -> None:
        """An instance was given a pass."""
        for pool in self._seen.values() if self._seen is not None else ():
            pool.dispatched()

    def idle_other(self, lane: Lane, instance: Instance) -> Instance | None:
        """Another instance that serves the lane and is idle. One that was idle before is asked first: mostly
        it still is, and nobody has to look at all of them."""
        known = self._known_idle.get(lane)
        if known is not None and known is not instance and known.running is None and serves(known, lane):
            if known.takes_new:
                return known
            del self._known_idle[lane]
        if self._idle is None:
            self._idle = [place for place in self._instances.values() if place.running is None]
        for other in reversed(self._idle):  # the first are given work first
            if other is not instance and other.running is None and other.takes_new and serves(other, lane):
                self._known_idle[lane] = other
                return other
        return None

    def of(self, lane: Lane, now_s: float) -> Pool:
        """The pool of a lane as it is this turn."""
        if self._seen is None:
            self._seen = self._look(now_s)
        return self._seen[lane]

    def _look(self, now_s: float) -> dict[Lane, Pool]:
        """One walk over all instances, which may be a thousand: `free_s` is asked only for those that may be
        the first to be free."""
        count, first_s = dict.fromkeys(Role, 0), dict.fromkeys(Role, math.inf)
        idle: dict[Role, list[Instance]] = {role: [] for role in Role}
        for instance in self._instances.values():
            if not instance.takes_new:
                continue
            role, flight = instance.role, instance.running
            count[role] += 1
            if flight is None:
                idle[role].append(instance)
            elif flight.start_s + flight.predicted_s < first_s[role]:  # it is no sooner free than that
                first_s[role] = min(first_s[role], free_s(instance, now_s))
        pools: dict[Lane, Pool] = {}
        for own, lane in OWN_LANE.items():
            free = sorted(idle[own] + idle[Role.MIXED], key=lambda place: place.place)
            first = min(first_s[own], first_s[Role.MIXED])
            pools[lane] = Pool(count[own] + count[Role.MIXED], free, first)
        return pools
