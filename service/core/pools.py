"""Roles as a preference: which instances serve a lane, which of them are idle, and when the next is free.

An SP instance prefers shorts, an LP instance longs, a MIXED one takes both. The *pool* of a lane is what
serves it: its own role and the mixed, without those that take nothing new.

Instances are filed, so that nobody has to walk over all of them (there may be a thousand): the idle ones by
group, the busy ones by when they are free. A *group* is idle instances that are alike: same role, same kind
(capabilities, profiles, cost model), open for new requests of anybody and empty: no KV, nothing in parts,
nobody who waits for this one. What one of them answers to a queue with no cached prefix goes for all
(`Wait.alike`). The other idle ones are odd, and each is asked for itself.

When a busy instance is free is predicted from its passes. One that runs longer than predicted is expected to
need as long again as it is late, so that nobody waits for ever for an instance that hangs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Protocol, runtime_checkable

from sortedcontainers import SortedDict, SortedList

from service.core.policy import Instance
from service.core.tracked import Tracked
from service.core.types import Lane, Role

OWN_LANE = {Role.SP: Lane.SHORT, Role.LP: Lane.LONG}
_POOL = {lane: (role, Role.MIXED) for role, lane in OWN_LANE.items()}


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


class Group:
    """Idle instances by place. role: of all of them; None: the odd ones. silent: one has spoken for all."""

    __slots__ = ("members", "role", "silent")

    def __init__(self, role: Role | None) -> None:
        self.role = role
        self.members: SortedDict = SortedDict()
        self.silent = False


@dataclass(slots=True, eq=False)
class _Filed:
    """Where an instance is filed. counted: as one of a role that takes new requests."""

    instance: Instance
    kind: int
    group: Group | None = None
    counted: Role | None = None
    busy: tuple[float, int] | None = None  # its entry among the busy of `busy_role`
    busy_role: Role = Role.MIXED


@runtime_checkable
class HasPools(Protocol):
    """A policy that looks at other instances than the one that is asked."""

    pools: Pools


class Pools:
    """`waited_for`: whether somebody waits for the instance of this id only."""

    def __init__(self, waited_for: Callable[[str], bool] = lambda _: False) -> None:
        self._waited_for = waited_for
        self._instances: dict[str, Instance] = {}
        self._filed: dict[int, _Filed] = {}  # by place
        self._kinds: dict[Hashable, int] = {}
        self._kind_numbers = count()
        self._odd = Group(None)
        self._alike: dict[tuple[Role, int], Group] = {}
        self.groups: list[Group] = [self._odd]  # of idle instances
        self._count = dict.fromkeys(Role, 0)  # that take new requests
        self._busy: dict[Role, SortedList] | None = None  # (free if in time, place); None: nobody asks
        self._first_s: dict[Lane, float] = {}  # `busy_until_s` of this turn
        self._looked = False  # in this turn
        self._given: dict[Lane, list[Instance]] = {lane: [] for lane in Lane}  # a pass, since the look
        self._changed: set[Lane] = set()  # `_given` is to be counted
        self._known_idle: dict[Lane, Instance] = {}  # idle when last heard of
        self._called_place = math.inf  # see `take_called`

    def __len__(self) -> int:
        return len(self._instances)

    def get(self, instance_id: str) -> Instance | None:
        return self._instances.get(instance_id)

    def has_most_room(self, instance: Instance, tracked: Tracked) -> bool:
        """Whether no other instance that may take `tracked` has more free KV; ties fall by place. O(n)."""

        def room(of: Instance) -> tuple[int, int]:
            return of.kv.blocks_free, -of.place

        mine = room(instance)
        return not any(room(other) > mine and other.may_take(tracked) for other in self._instances.values())

    # --- filing ---

    def file(self, instance: Instance) -> None:
        """It is new, or something about it has changed: passes, role, what it takes, who waits for it."""
        filed = self._filed.get(instance.place)
        if filed is None:
            spec = instance.spec
            kind = (spec.capabilities, spec.profiles, spec.cost)
            if kind not in self._kinds:
                self._kinds[kind] = next(self._kind_numbers)
            filed = _Filed(instance, self._kinds[kind])
            self._filed[instance.place] = filed
            self._instances[instance.instance_id] = instance
        group = self._group_of(instance, filed.kind) if instance.running is None else None
        if filed.group is not group:
            self._move(filed, group)
            if self._looked and group is None and (instance.takes_new or instance.on_trial):
                for lane in Lane:
                    if serves(instance, lane):
                        self._given[lane].append(instance)
        counted = instance.role if instance.takes_new else None
        if filed.counted is not counted:
            self._recount(filed, counted)
        if self._busy is not None:
            self._file_busy(filed)

    def refile(self, instance_id: str) -> None:
        """Somebody waits for the instance now, or nobody any more; the busy are filed when free."""
        instance = self._instances.get(instance_id)
        if instance is not None and self.is_idle(instance):
            self.file(instance)
            if self._waited_for(instance_id):
                self._called_place = min(self._called_place, instance.place)

    def take_called(self) -> float:
        """The least place of the idle instances that somebody has begun to wait for since this was asked
        last; inf: none."""
        place, self._called_place = self._called_place, math.inf
        return place

    def remove(self, instance: Instance) -> None:
        filed = self._filed.pop(instance.place, None)
        if filed is None:
            return
        del self._instances[instance.instance_id]
        self._move(filed, None)
        self._recount(filed, None)
        if not any(other.kind == filed.kind for other in self._filed.values()):
            self._forget_kind(filed.kind)
        if self._busy is not None:
            self._drop_busy(filed)
        self._known_idle = {lane: i for lane, i in self._known_idle.items() if i is not instance}

    def _forget_kind(self, kind: int) -> None:
        """The last instance of its kind is gone."""
        self._kinds = {what: number for what, number in self._kinds.items() if number != kind}
        gone = [key for key in self._alike if key[1] == kind]
        for key in gone:
            self.groups.remove(self._alike.pop(key))

    def new_turn(self) -> None:
        """Time may have gone on."""
        self._looked = False

    def is_idle(self, instance: Instance) -> bool:
        """Whether it is filed as idle."""
        filed = self._filed.get(instance.place)
        return filed is not None and filed.group is not None

    def odd(self) -> Iterator[Instance]:
        """Idle instances that nobody speaks for."""
        return iter(self._odd.members.values())

    def _group_of(self, instance: Instance, kind: int) -> Group:
        if (
            not instance.takes_new
            or instance.avoided
            or instance.partial
            or instance.decode.running
            or instance.kv.blocks_reserved
            or self._waited_for(instance.instance_id)
        ):
            return self._odd
        group = self._alike.get((instance.role, kind))
        if group is None:
            group = self._alike[instance.role, kind] = Group(instance.role)
            self.groups.append(group)
        return group

    def _move(self, filed: _Filed, group: Group | None) -> None:
        place = filed.instance.place
        if filed.group is not None:
            del filed.group.members[place]
        if group is not None:
            group.members[place] = filed.instance
        filed.group = group

    def _recount(self, filed: _Filed, counted: Role | None) -> None:
        if filed.counted is not None:
            self._count[filed.counted] -= 1
        if counted is not None:
            self._count[counted] += 1
        filed.counted = counted

    # --- pools ---

    def size(self, lane: Lane) -> int:
        """Instances of the pool."""
        return sum(self._count[role] for role in _POOL[lane])

    def idle_beside(self, lane: Lane, instance: Instance) -> int:
        """How many other instances of the pool are idle."""
        pool = _POOL[lane]
        idle = sum(len(group.members) for group in self.groups if group.role in pool)
        idle += sum(_in_pool(odd, lane) for odd in self._odd.members.values())
        return idle - (instance.running is None and _in_pool(instance, lane))

    def room_beside(self, lane: Lane, instance: Instance, tracked: Tracked) -> bool:
        """Whether another instance of the pool is idle and has room for the request."""
        pool = _POOL[lane]
        for group in self.groups:
            if group.role is None:
                others = (i for i in group.members.values() if i is not instance and _in_pool(i, lane))
                if any(has_room(other, tracked) for other in others):
                    return True
            elif group.role in pool:  # they are alike, so the first other one speaks for all
                other = next((i for i in group.members.values() if i is not instance), None)
                if other is not None and has_room(other, tracked):
                    return True
        return False

    def idle_other(self, lane: Lane, instance: Instance) -> Instance | None:
        """Another instance of the pool that is idle: the one that was found last if it still is, else the
        last in order, since the first are given work first."""
        known = self._known_idle.get(lane)
        if known is not None and known is not instance and known.running is None and serves(known, lane):
            if known.takes_new:
                return known
            del self._known_idle[lane]
        pool, last = _POOL[lane], None
        for group in self.groups:
            if group.role is None or group.role in pool:
                members = reversed(group.members.values())
                other = next((i for i in members if i is not instance and _in_pool(i, lane)), None)
                if other is not None and (last is None or other.place > last.place):
                    last = other
        if last is not None:
            self._known_idle[lane] = last
        return last

    def look(self, now_s: float) -> None:
        """Predict when the pools are free, once a turn, for the first moment at which somebody asks: plans of
        passes that are staged are made ahead of time."""
        if self._looked:
            return
        if self._busy is None:
            self._busy = {role: SortedList() for role in Role}
            for filed in self._filed.values():
                self._file_busy(filed)
        self._looked = True
        self._changed.clear()
        for lane, (own, mixed) in _POOL.items():
            least_s = self._first_free_s(self._busy[own], now_s, math.inf)
            self._first_s[lane] = self._first_free_s(self._busy[mixed], now_s, least_s)
            self._given[lane].clear()

    def dispatched(self) -> None:
        """A prefill pass was given: who has been given one since the `look` counts as busy from now on."""
        self._changed.update(Lane)

    def busy_until_s(self, lane: Lane, now_s: float) -> float:
        """When the first of the busy ones of the pool is free, with those that were given a pass since the
        `look` of this turn; inf where none is busy."""
        if lane in self._changed or math.isinf(self._first_s[lane]):
            self._changed.discard(lane)
            given = self._given[lane]
            self._first_s[lane] = min([self._first_s[lane], *(free_s(one, now_s) for one in given)])
            given.clear()
        return self._first_s[lane]

    def _file_busy(self, filed: _Filed) -> None:
        assert self._busy is not None
        instance = filed.instance
        entry, running, staged = None, instance.running, instance.staged
        if running is not None and instance.takes_new:
            entry = (running.end_s + (staged.predicted_s if staged is not None else 0.0), instance.place)
        if entry == filed.busy and (entry is None or filed.busy_role is instance.role):
            return
        self._drop_busy(filed)
        if entry is not None:
            filed.busy, filed.busy_role = entry, instance.role
            self._busy[instance.role].add(entry)

    def _drop_busy(self, filed: _Filed) -> None:
        assert self._busy is not None
        if filed.busy is not None:
            self._busy[filed.busy_role].remove(filed.busy)
            filed.busy = None

    def _first_free_s(self, busy: SortedList, now_s: float, least_s: float) -> float:
        """The least of `free_s` and `least_s`. From now on forwards nobody is free before its entry, and
        backwards nobody before it has been late as long again."""
        at = busy.bisect_left((now_s, -1))
        for entry_s, place in busy.islice(at):
            if entry_s >= least_s:
                break
            least_s = min(least_s, free_s(self._filed[place].instance, now_s))
        for entry_s, place in busy.islice(0, at, reverse=True):
            if now_s + (now_s - entry_s) >= least_s:
                break
            least_s = min(least_s, free_s(self._filed[place].instance, now_s))
        return least_s


def has_room(instance: Instance, tracked: Tracked) -> bool:
    """Whether the instance could take the request now."""
    return instance.may_take(tracked) and instance.kv.fits(tracked.kv_tokens_max)


def _in_pool(instance: Instance, lane: Lane) -> bool:
    return instance.takes_new and serves(instance, lane)
