"""Do the books balance? What clients saw, beside what the service says of itself.

The service's own law holds at any moment: submitted = sum of outcomes + queued + running. Client and service
agree up to two races that nobody can close. A cancel may reach the service after the last token: cancelled
for the client, completed for the service. Or before the request was submitted at all: then the service
never counted it. So completed and refused are compared within the number of requests that the clients
cancelled or saw fail. Both sides must be counted over the same time, with no other client at work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from protos.plaserve.v1 import status_pb2 as pb
from service.bench.loadgen import Ending, Observation


@dataclass(frozen=True, slots=True)
class ServiceBooks:
    """The service's counters; `outcomes` by the name of the outcome."""

    submitted: int
    outcomes: dict[str, int]
    queued: int
    running: int

    @classmethod
    def of(cls, status: pb.GetStatusResponse) -> ServiceBooks:
        return cls(
            status.submitted_count, dict(status.outcome_counts), status.queued_count, status.running_count
        )

    def since(self, before: ServiceBooks) -> ServiceBooks:
        """What was counted after `before`; queued and running are those of now."""
        outcomes = {name: count - before.outcomes.get(name, 0) for name, count in self.outcomes.items()}
        held_before = before.queued + before.running
        return ServiceBooks(
            self.submitted - before.submitted + held_before, outcomes, self.queued, self.running
        )

    @property
    def completed(self) -> int:
        return self.outcomes.get("COMPLETED", 0)

    @property
    def refused(self) -> int:
        return sum(count for name, count in self.outcomes.items() if name.startswith("REJECTED_"))


@dataclass(frozen=True, slots=True)
class Balance:
    """The comparison; `faults` is empty when the books balance."""

    client: dict[Ending, int]
    service: ServiceBooks
    faults: tuple[str, ...]

    @property
    def sent(self) -> int:
        return sum(self.client.values()) - self.client[Ending.NOT_SENT]


def balance(observations: Sequence[Observation], before: ServiceBooks, after: ServiceBooks) -> Balance:
    """Compare the clients' account with the service's, both over the same time."""
    counts = Counter(seen.ending for seen in observations)
    client = {ending: counts.get(ending, 0) for ending in Ending}
    sent = len(observations) - client[Ending.NOT_SENT]
    cancelled, failed = client[Ending.CANCELLED], client[Ending.FAILED]
    service = after.since(before)
    accounted = sum(service.outcomes.values()) + service.queued + service.running
    faults = []
    if service.submitted != accounted:
        faults.append(f"the service submitted {service.submitted} but accounts for {accounted}")
    if service.queued or service.running:
        faults.append(f"the service still holds {service.queued} queued and {service.running} running")
    # A failed call may or may not have been counted: it can fail in front of the service or inside it.
    doubtful = cancelled + failed
    faults += _fault("submitted", service.submitted, sent - doubtful, sent)
    seen_completed, seen_refused = client[Ending.COMPLETED], client[Ending.REFUSED]
    faults += _fault("completed", service.completed, seen_completed, seen_completed + doubtful)
    faults += _fault("refused", service.refused, seen_refused, seen_refused + doubtful)
    return Balance(client, service, tuple(faults))


def _fault(name: str, value: int, low: int, high: int) -> list[str]:
    """One line if `value` lies outside [low, high]."""
    if low <= value <= high:
        return []
    wanted = str(low) if low == high else f"{low} to {high}"
    return [f"{name}: the service counts {value}, the clients saw {wanted}"]
