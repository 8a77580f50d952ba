"""The door: a new request becomes a live record, or is refused with the reason.

Bounds and sizes are `admission`'s, lane and target `lanes`'; this puts them in order and keeps what does not
change between two requests (what the instances take, and their summed rate) instead of working it out for
each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from service.core.admission import Admission, QueueLoad
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
        return crowded or tracked

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
