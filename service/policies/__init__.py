"""The policies by name: ours and the peers', behind one interface (`service.core.policy.PrefillPolicy`)."""

from __future__ import annotations

from collections.abc import Callable

from service.core.length_aware import LengthAwarePolicy
from service.core.policy import PrefillPolicy
from service.core.scheduler import PrefillScheduler
from service.core.settings import SchedulerSettings
from service.policies.fcfs import FcfsPolicy

POLICIES: dict[str, Callable[[SchedulerSettings], PrefillPolicy]] = {
    "plaserve": LengthAwarePolicy,
    "fcfs": FcfsPolicy,
}


def make_scheduler(policy: str, settings: SchedulerSettings) -> PrefillScheduler:
    """A scheduler with the named policy. Raises ValueError naming the policies that exist."""
    if policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}; choose from {', '.join(POLICIES)}")
    return PrefillScheduler(settings, POLICIES[policy](settings))
