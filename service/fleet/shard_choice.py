"""Which shard a request goes to: pure functions of what a front end knows.

A request of a session goes by weighted rendezvous hashing: each shard draws a number from the session's name
and its own, divided by its capacity, and the least one wins. So every front end finds the same shard without
a word to the others; a shard that comes takes its share from all, one that goes leaves its own to all, and
one that grows only takes. The rest of the order is where the session goes while the first takes nothing.

A request without one goes to the less loaded of two shards, drawn by capacity. Load is what this front end
itself has there: it is of this moment and costs no message, where a backlog told by schedulers is as old as
the telling and sends all front ends to the same shard until it is told again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from hashlib import blake2b
from random import Random

_DRAW_BITS = 64


def by_session(session: str, capacities: Mapping[str, float]) -> list[str]:
    """All shards in the order in which they are asked. capacities: of each shard, any unit."""
    return sorted(capacities, key=lambda shard: (_drawn(session, shard) / _some(capacities[shard]), shard))


def by_load(loads: Mapping[str, float], capacities: Mapping[str, float], random: Random) -> list[str]:
    """All shards in the order in which they are asked: the less loaded of two that are drawn, the other one,
    then the rest from less to more loaded. loads: what is under way there, in the same unit for all."""
    draws = {shard: -math.log(1.0 - random.random()) / _some(capacities[shard]) for shard in sorted(loads)}
    drawn = sorted(draws, key=draws.__getitem__)

    def less(shard: str) -> tuple[bool, float]:
        return capacities[shard] <= 0.0, loads[shard] / _some(capacities[shard])

    return [*sorted(drawn[:2], key=less), *sorted(drawn[2:], key=less)]


def _drawn(session: str, shard: str) -> float:
    """Exponentially distributed: the least of such numbers over weights falls to each by its weight."""
    digest = blake2b(f"{session}\0{shard}".encode(), digest_size=_DRAW_BITS // 8).digest()
    return -math.log((int.from_bytes(digest) + 1) / 2**_DRAW_BITS)


def _some(capacity: float) -> float:
    """A shard without workers comes last, and is asked where there is no other."""
    return max(capacity, 1e-6)
