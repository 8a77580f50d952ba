"""What membership asks of a key-value service with revisions, leases, transactions: etcd's model.

Every committed write makes a new revision of the whole store. An entry knows the revision that created it and
the one that changed it last. A key under a lease is deleted when the lease lapses.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Entry:
    """What is under a key. lease_id 0: none."""

    value: str
    created: int
    changed: int
    lease_id: int = 0


class Aspect(StrEnum):
    CREATED = "created"
    CHANGED = "changed"


@dataclass(frozen=True, slots=True)
class Condition:
    """The key's revision of this aspect must be `revision`; 0: there must be no such key."""

    key: str
    revision: int
    aspect: Aspect = Aspect.CHANGED


@dataclass(frozen=True, slots=True)
class Put:
    key: str
    value: str
    lease_id: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Of one key, or of all keys from it up to `end` (not included)."""

    key: str
    end: str = ""


@dataclass(frozen=True, slots=True)
class Committed:
    """Whether the conditions held and the writes were made; the store's revision then."""

    done: bool
    revision: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Changes up to a revision, in order; None: the key is gone. Without changes it is a sign of life."""

    revision: int = 0
    changes: tuple[tuple[str, Entry | None], ...] = ()


class Compacted(Exception):  # noqa: N818 - what happened
    """Changes since the revision asked for are no longer kept, or the store is older than it: read afresh."""


class LeaseGone(Exception):  # noqa: N818 - what happened
    """The lease of a write has lapsed."""


class Store(Protocol):
    """All calls end within their own deadline. They raise MembershipUnavailable and MembershipRefused."""

    async def read(self, prefix: str) -> tuple[int, Mapping[str, Entry]]:
        """Everything under a prefix, at one revision."""
        ...

    async def get(self, keys: Sequence[str]) -> Mapping[str, Entry | None]:
        """What is under each of some keys, at one revision, as of now."""
        ...

    def follow(self, prefix: str, after: int) -> AsyncGenerator[Batch, None]:
        """Changes after a revision, none left out. Raises Compacted; never ends by itself."""
        ...

    async def commit(self, conditions: Sequence[Condition], writes: Sequence[Put | Delete]) -> Committed:
        """All writes if all conditions hold, else none. Raises LeaseGone."""
        ...

    async def grant(self, ttl_s: float) -> tuple[int, float]:
        """A new lease: its id and its length in seconds, which may be longer than asked for."""
        ...

    async def renew(self, lease_id: int) -> float:
        """Seconds that the lease lasts from now on; 0: it has lapsed."""
        ...

    async def revoke(self, lease_id: int) -> None:
        """End a lease; one that has lapsed is no error."""
        ...

    async def close(self) -> None: ...
