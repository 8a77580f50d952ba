"""Who is in a fleet, which role each worker should have, and who leads: the contract, as plain data.

- Members (workers, schedulers, front ends) are there as long as their lease is renewed. Leases are liveness.
- Each worker has an `Assignment`, the wanted role and shard, written by compare and set; what it
  has is in its own `RoleReport` and its own record.
- A shard may be retired: it takes nothing new, and its workers are wanted elsewhere.
- An election of a name has one leader at a time, with an epoch that strictly grows from leader to leader.
  A worker obeys the highest epoch; a write that names the leadership (`fence`) fails once another leads.
- Reads never wait: `snapshot` gives the last known state, marked stale with its age when the service behind
  it is away. Writes then raise MembershipUnavailable; such a write may still have been carried out.
- `watch` gives whole snapshots. A slow reader skips some, never the last: compare snapshots, not steps.
- Times in records are the writer's own time of day, for people to read. Nothing is decided by them.

Facts of a member are what rarely changes (capabilities, identity of the bundle): each update goes to every
process that watches. Load belongs on the scheduler's own stream.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from service.core.reconcile import MoveReason
from service.core.types import Role

Facts = Mapping[str, Any]  # JSON-able, checked when written
DRAINING = "draining"  # fact of a worker that is about to leave: why


class MembershipError(Exception):
    """Base of all errors here."""


class MembershipUnavailable(MembershipError):  # noqa: N818 - what happened
    """The service does not answer in time. A write may have been carried out: read again before retrying."""


class MembershipRefused(MembershipError):  # noqa: N818 - what happened
    """The service answers and says no: wrong password, no permission, a request it does not take."""


class MemberExists(MembershipError):  # noqa: N818 - what happened
    """Another process is a member under this id. After a crash: until the old lease is over."""


class Conflict(MembershipError):  # noqa: N818 - what happened
    """Somebody else wrote first. `current` is what is there now."""

    def __init__(self, message: str, current: Assignment | None) -> None:
        super().__init__(message)
        self.current = current


class WorkerPinned(Conflict):
    """The worker's role is pinned; only an operator (`force`) moves it."""


class Fenced(MembershipError):  # noqa: N818 - what happened
    """The leadership under which the write was made is over."""


class MemberKind(StrEnum):
    WORKER = "worker"
    SCHEDULER = "scheduler"
    FRONTEND = "frontend"


@dataclass(frozen=True, slots=True)
class RoleReport:
    """The role that a worker has, and the number of the assignment that it follows (0: none yet)."""

    role: Role
    number: int
    at_time_s: float  # the worker's time of day


@dataclass(frozen=True, slots=True)
class Member:
    """One process. `incarnation` differs between two lives of an id, and is 0 before it has joined."""

    member_id: str
    kind: MemberKind
    address: str  # host:port of its gRPC service
    shard: str = ""
    facts: Facts = field(default_factory=dict)
    report: RoleReport | None = None  # workers only
    joined_time_s: float = 0.0  # its own time of day
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class Assignment:
    """The wanted role and shard of a worker. `number` grows with every change in the fleet; compare and set
    by it. shard: empty for the one that it was started for."""

    worker_id: str
    role: Role
    reason: MoveReason
    by: str  # member id of the controller, or the operator's name
    number: int
    pinned: bool = False
    at_time_s: float = 0.0
    shard: str = ""


@dataclass(frozen=True, slots=True)
class Move:
    """One change of a wanted role or shard, as history keeps it. from_role None: its first. Shards empty: it
    stays where it is."""

    number: int
    worker_id: str
    from_role: Role | None
    to_role: Role
    reason: MoveReason
    by: str
    at_time_s: float
    facts: Facts = field(default_factory=dict)  # figures behind it, such as the pressures
    from_shard: str = ""
    to_shard: str = ""


@dataclass(frozen=True, slots=True)
class Leader:
    """Who leads an election now, and since which epoch."""

    election: str
    candidate: str  # by custom its member id, under which its address is found
    epoch: int
    at_time_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RetiredShard:
    """A shard that is taken out of service, by whom and when."""

    name: str
    by: str
    at_time_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """Everything at one revision. The mappings are not changed after.

    stale: the service has not been heard from lately; age_s: seconds since it was.
    unreadable: keys whose content this version does not understand; they are left out.
    """

    revision: int
    members: Mapping[str, Member] = field(default_factory=dict)
    assignments: Mapping[str, Assignment] = field(default_factory=dict)
    leaders: Mapping[str, Leader] = field(default_factory=dict)
    moves: tuple[Move, ...] = ()  # newest first, the last few hundred
    retired: Mapping[str, RetiredShard] = field(default_factory=dict)
    unreadable: tuple[str, ...] = ()
    stale: bool = False
    age_s: float = 0.0

    def of(self, kind: MemberKind, shard: str | None = None) -> tuple[Member, ...]:
        """Members of a kind (and shard), by id."""
        found = (m for m in self.members.values() if m.kind is kind and shard in (None, m.shard))
        return tuple(sorted(found, key=lambda m: m.member_id))


class LeaseState(StrEnum):
    LIVE = "live"
    DOUBTFUL = "doubtful"  # not renewed for its whole length: others may see it as gone
    LOST = "lost"  # known to be gone
    ENDED = "ended"  # given up by its owner


class Lease(Protocol):
    """A membership that renews itself, and joins again after it has lapsed (unless the id was taken)."""

    @property
    def member(self) -> Member: ...

    @property
    def state(self) -> LeaseState: ...

    @property
    def lapses(self) -> int:
        """How often it was found to have lapsed."""
        ...

    async def lost(self) -> str:
        """Wait until it lapses the next time, or ends; says why."""
        ...

    async def update(
        self, *, facts: Facts | None = None, address: str | None = None, shard: str | None = None
    ) -> Member:
        """Write what is given, keep the rest.

        Raises MembershipUnavailable (it is written with the next renewal or join), MemberExists when the id
        was taken.
        """
        ...

    async def report(self, role: Role, number: int) -> Member:
        """Say which role it has, following which assignment."""
        ...

    async def leave(self) -> None:
        """Be gone at once; with the service away, when the lease is over. Never MembershipUnavailable."""
        ...


class Leadership(Protocol):
    """Leading an election. Once lost it does not come back: campaign again."""

    @property
    def leader(self) -> Leader: ...

    @property
    def epoch(self) -> int: ...

    @property
    def state(self) -> LeaseState:
        """DOUBTFUL: another may lead by now; its epoch would be higher, and fenced writes fail."""
        ...

    async def lost(self) -> str:
        """Wait until it is known to be over; says why."""
        ...

    async def resign(self) -> None:
        """Let others lead at once; with the service away, when the lease is over."""
        ...


LostCallback = Callable[[str], None]  # why; called in the event loop, must not block


class Membership(Protocol):
    """One process's view of a fleet and its way to write there. Opened and closed in one event loop."""

    async def open(self) -> None:
        """Connect and read. Raises MembershipRefused; MembershipUnavailable when it takes too long."""
        ...

    async def close(self) -> None:
        """Leave and resign everything, and end."""
        ...

    def snapshot(self) -> FleetSnapshot:
        """The last known state, without waiting."""
        ...

    def watch(self) -> AsyncIterator[FleetSnapshot]:
        """The snapshot now, then one after changes and when it turns stale or fresh; ends with `close`."""
        ...

    async def join(
        self, member: Member, *, ttl_s: float | None = None, on_lost: LostCallback | None = None
    ) -> Lease:
        """Become a member until `leave`. ttl_s None: the set one.

        Raises MemberExists, MembershipUnavailable; ValueError for bad names or facts that are no JSON.
        """
        ...

    async def assign(
        self,
        worker_id: str,
        role: Role,
        *,
        expected: int,
        reason: MoveReason,
        by: str,
        facts: Facts | None = None,
        fence: Leadership | None = None,
        force: bool = False,
        shard: str = "",
    ) -> Assignment:
        """Set the wanted role (and shard, where given) if the number of the present one is `expected` (0:
        there is none).

        The worker need not be a member now. shard: empty leaves it as it is wanted.

        What is wanted already is no move: the present assignment is returned. Raises Conflict, WorkerPinned
        (without `force`), Fenced, MembershipUnavailable.
        """
        ...

    async def pin(
        self,
        worker_id: str,
        pinned: bool,
        *,
        by: str,
        role: Role | None = None,
        fence: Leadership | None = None,
    ) -> Assignment:
        """Pin or release a worker, moving it to `role` where given.

        role None: the wanted one, else the reported one; ValueError where there is neither.
        """
        ...

    async def forget(self, worker_id: str, *, expected: int, fence: Leadership | None = None) -> None:
        """Drop the assignment of a worker that will not come back. Raises as `assign`."""
        ...

    async def retire(self, shard: str, retired: bool, *, by: str) -> None:
        """Take a shard out of service, or back into it. Twice is harmless. Raises MembershipUnavailable."""
        ...

    async def campaign(
        self,
        election: str,
        candidate: str,
        *,
        ttl_s: float | None = None,
        on_lost: LostCallback | None = None,
    ) -> Leadership:
        """Wait until this candidate leads; also while the service is away. Cancel it to give up."""
        ...

    def leader(self, election: str) -> Leader | None:
        """Who leads, by the last known state."""
        ...

    def observe(self, election: str) -> AsyncIterator[Leader | None]:
        """The leader now, then each other one that is seen; None while there is none."""
        ...
