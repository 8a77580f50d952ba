"""The door: a new request becomes a live record, or is refused with the reason.

Bounds and sizes are `admission`'s, lane and target `lanes`'; this puts them in order and keeps what does not
change between two requests (what the instances take, and their summed rate) instead of working it out for
each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from service.core.admission import Admission, QueueLoad
from service.core.fair_share import Room
from service.core.lanes import classify
from service.core.policy import Instance, PrefillPolicy
from service.core.prefix_index import PrefixTable
from service.core.settings import SchedulerSettings
from service.core.tracked import Tracked
from service.core.types import InstanceSpec, Lane, Outcome, Reason, Reject, Request


@dataclass(frozen=True, slots=True)
class _Fleet:
    """kinds: one spec for each kind of instance, kinds being alike in what they take."""

    first: Instance | None
    by_row: Mapping[int, Instance]  # of the prefix table
    kinds: tuple[InstanceSpec, ...]
    tokens_per_s: float


class Intake:
    """`instances` and `prefixes` are the scheduler's; say `changed` when an instance came or went."""

    def __init__(
        self, settings: SchedulerSettings, instances: Mapping[str, Instance], prefixes: PrefixTable
    ) -> None:
        self._settings = settings
        self._admission = Admission(settings)
        self._instances = instances
        self._prefixes = prefixes
        self._known: _Fleet | None = None
        self._weights = dict(settings.tenant_weights)
        self._taken = 0  # requests, so far
        self._rooms: tuple[tuple[int, ...], dict[Lane, Room]] | None = None  # the queue as it was refused

    def changed(self) -> None:
        self._known = None

    def closed(self, request: Request) -> Reject:
        """The answer to everybody while the service drains."""
        detail = "the service is shutting down"
        return Reject(request.request_id, Outcome.REJECTED_DRAINING, Reason.DRAINING, detail)

    def admit(self, request: Request, policy: PrefillPolicy, seq: int, now_s: float) -> Tracked | Reject:
        """The live record of `request`, or why it is refused."""
        short, long = policy.lane_load(Lane.SHORT), policy.lane_load(Lane.LONG)
        fleet = self._fleet()
        load = QueueLoad(short[0] + long[0], short[1] + long[1], fleet.tokens_per_s, *long)
        refusal = self._admission.refusal(request, load, fleet.kinds, now_s)
        if refusal is not None:
            return refusal
        tracked = classify(request, [self._best(request, fleet)], self._settings, seq)
        crowded = self._admission.long_refusal(request, load) if tracked.lane is Lane.LONG else None
        if crowded is None:
            self._taken += 1
        return crowded or tracked

    def gives_way(self, request: Request, policy: PrefillPolicy, now_s: float) -> list[Tracked]:
        """Who leaves the queue, which is full, for `request` (see `fair_share`); nobody where it stays
        refused. Counts the queue once for each state of it, so that a flood of refusals is cheap."""
        if self._settings.tenant_burst_s == 0.0:
            return []
        short, long = policy.lane_load(Lane.SHORT), policy.lane_load(Lane.LONG)
        state = (*short, *long, self._taken)
        if self._rooms is None or self._rooms[0] != state:
            self._rooms = state, self._count(policy)
        rooms = self._rooms[1]
        if not rooms[Lane.SHORT].is_within(request):
            return []
        lane = classify(request, [self._best(request, self._fleet())], self._settings, 0).lane
        if not rooms[lane].is_within(request):
            return []
        rooms, self._rooms = self._count(policy), None  # those who leave must wait now
        given = rooms[Lane.LONG].make(request) if lane is Lane.LONG else []
        more = None if given is None else rooms[Lane.SHORT].make(request, given)
        return [] if given is None or more is None else given + more

    def _count(self, policy: PrefillPolicy) -> dict[Lane, Room]:
        """What a newcomer of each lane must have room in: all, and for a long one its part of it as well."""
        requests, tokens = self._settings.queue_requests_max, self._settings.queue_tokens_max
        share, waiting = 1.0 - self._settings.queue_short_share, list(policy.waiting())
        longs = (tracked for tracked in waiting if tracked.lane is Lane.LONG)
        return {
            Lane.SHORT: Room(waiting, (requests, tokens), self._weights),
            Lane.LONG: Room(longs, (share * requests, share * tokens), self._weights),
        }

    def _best(self, request: Request, fleet: _Fleet) -> Instance:
        """The instance with most of the prompt cached; the first where none has any."""
        assert fleet.first is not None, "admission refuses where no instance is up"
        row = self._prefixes.best_row(request.block_hashes) if request.block_hashes else None
        return fleet.first if row is None else fleet.by_row[row]

    def _fleet(self) -> _Fleet:
        if self._known is None:
            instances = list(self._instances.values())
            kinds = {(i.spec.capabilities, i.spec.profiles): i.spec for i in reversed(instances)}
            self._known = _Fleet(
                first=instances[0] if instances else None,
                by_row={i.prefix.row: i for i in instances},
                kinds=tuple(reversed(kinds.values())),
                tokens_per_s=max(1.0, sum(i.tokens_per_s for i in instances)),
            )
        return self._known
