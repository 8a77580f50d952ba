"""What waits in a peer's queue: one order, and one central queue for all instances.

The rank of a request is fixed while it waits (lowest first, ties by arrival), so joining and leaving cost
O(log n) and reading the first k costs O(k). Newcomers may run anywhere. A prompt in parts can go on only
where its KV is, so parts are kept by instance: a plan never walks past those of others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain
from typing import Protocol

from sortedcontainers import SortedDict

from service.core.policy import Instance
from service.core.tracked import Tracked
from service.core.types import Lane


class Gate(Protocol):
    """Who may be in the pass that is being made; `service.core.policy.KvGate` is one."""

    refused_any: bool

    def admits(self, tracked: Tracked, *, whole: bool = True) -> bool: ...


class HeadGate:
    """KV for newcomers in strict order: the first without room holds back all newcomers behind it.

    Those that hold KV here go on, or nobody could.
    """

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._pending_blocks = 0
        self.refused_any = False

    def admits(self, tracked: Tracked, *, whole: bool = True) -> bool:
        instance = self._instance
        if tracked.instance_id is not None or not instance.may_take(tracked):
            return tracked.instance_id == instance.instance_id
        if self.refused_any or not instance.kv.fits(tracked.kv_tokens_max, self._pending_blocks):
            self.refused_any = True
            return False
        self._pending_blocks += instance.kv.blocks_for(tracked.kv_tokens_max)
        return True


class Waiting:
    """The queue; see the module text."""

    def __init__(self) -> None:
        self._newcomers: SortedDict = SortedDict()  # (rank, seq) -> request
        self._parts: dict[str, SortedDict] = {}  # the same by instance
        self._place: dict[str, tuple[SortedDict, tuple[float, int]]] = {}
        self._load = {lane: [0, 0] for lane in Lane}  # requests, prompt tokens

    def __len__(self) -> int:
        return len(self._place)

    def __contains__(self, tracked: Tracked) -> bool:
        return tracked.request_id in self._place

    def __iter__(self) -> Iterator[Tracked]:
        return chain(self._newcomers.values(), *(parts.values() for parts in self._parts.values()))

    def add(self, tracked: Tracked, rank: float) -> None:
        where = self._newcomers
        if tracked.instance_id is not None:
            where = self._parts.setdefault(tracked.instance_id, SortedDict())
        key = (rank, tracked.seq)
        where[key] = tracked
        self._place[tracked.request_id] = (where, key)
        self._count(tracked, 1)

    def remove(self, tracked: Tracked) -> None:
        where, key = self._place.pop(tracked.request_id)
        del where[key]
        self._count(tracked, -1)

    def rerank(self, tracked: Tracked, rank: float) -> None:
        """Give a waiting request another rank."""
        where, key = self._place[tracked.request_id]
        if key[0] != rank:
            del where[key]
            key = (rank, tracked.seq)
            where[key] = tracked
            self._place[tracked.request_id] = (where, key)

    def rank_of(self, tracked: Tracked) -> float:
        return self._place[tracked.request_id][1][0]

    def lane_load(self, lane: Lane) -> tuple[int, int]:
        requests, tokens = self._load[lane]
        return requests, tokens

    def newcomers(self) -> Iterator[Tracked]:
        """Those that hold KV nowhere, in order."""
        return iter(self._newcomers.values())

    def parts(self, instance_id: str) -> list[Tracked]:
        """Those that hold KV on the instance, in order."""
        found = self._parts.get(instance_id)
        return list(found.values()) if found else []

    def candidates(self, instance_id: str, gate: Gate, newcomers_max: int | None = None) -> Iterator[Tracked]:
        """Who might join a pass on the instance: newcomers and parts in one order, to the first newcomer that
        `gate` refuses or to `newcomers_max` of them, and then the other parts, which need no room."""
        parts = self.parts(instance_id)
        if not parts and newcomers_max is None:
            yield from self._until_refused(gate)
            return
        taken, left = 0, math.inf if newcomers_max is None else newcomers_max
        for key, tracked in self._newcomers.items():
            while taken < len(parts) and self._place[parts[taken].request_id][1] < key:
                taken += 1
                yield parts[taken - 1]
            if left == 0 or (newcomers_max is None and gate.refused_any):
                break
            left -= 1
            yield tracked
        yield from parts[taken:]

    def _until_refused(self, gate: Gate) -> Iterator[Tracked]:
        for tracked in self._newcomers.values():
            if gate.refused_any:
                return
            yield tracked

    def _count(self, tracked: Tracked, sign: int) -> None:
        load = self._load[tracked.lane]
        load[0] += sign
        load[1] += sign * tracked.remaining
