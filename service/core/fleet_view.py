"""What a role controller sees of one scheduler: the loads of its instances and the rates of the last period.

Backlog is predicted prefill time that waits, each request alone (`Tracked.service_s`). What is bound to an
instance counts there: prompts between chunks, and requests that an early-binding policy has placed. What
waits unbound may be served by several, and is split evenly: a short request over the SP and mixed instances,
a long one over LP and mixed, in either case those that take new requests, and over all where there are none
of these. So the backlogs sum to the predicted time of everything that waits; but an instance that drains is
not shown, nor what is bound to it: no role can change that.

Rates count what was accepted; `arrivals` counts refused requests too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from service.core.lifecycle import InstanceState
from service.core.policy import BindsEarly, Instance
from service.core.reconcile import FleetView, InstanceLoad
from service.core.scheduler import PrefillScheduler
from service.core.tracked import Tracked
from service.core.types import Lane, Role

_SERVES = {Lane.SHORT: (Role.SP, Role.MIXED), Lane.LONG: (Role.LP, Role.MIXED)}


@dataclass(frozen=True, slots=True)
class Totals:
    """Counters since the start, read at a look; rates are the difference of two. Seconds where not counts."""

    at_s: float
    submitted: int
    requests: Mapping[Lane, int]
    work_s: Mapping[Lane, float]
    busy_s: Mapping[str, float]  # by instance


@dataclass(slots=True)
class _Waiting:
    """What waits for one instance."""

    work_s: float = 0.0
    at_risk: float = 0.0  # requests
    weight: float = 0.0  # requests, shared ones in parts
    count: int = 0


def totals(scheduler: PrefillScheduler, now_s: float) -> Totals:
    """The counters now: the state to begin from."""
    return Totals(
        at_s=now_s,
        submitted=scheduler.submitted,
        requests=dict(scheduler.accepted_requests),
        work_s=dict(scheduler.accepted_work_s),
        busy_s={name: _busy_s(instance, now_s) for name, instance in scheduler.instances.items()},
    )


def observe(scheduler: PrefillScheduler, before: Totals, now_s: float) -> tuple[FleetView, Totals]:
    """The fleet now, with rates since `before`; and the counters for the next look. Changes nothing."""
    after = totals(scheduler, now_s)
    period_s = now_s - before.at_s

    def rate(new: float, old: float) -> float:
        return (new - old) / period_s if period_s > 0.0 else 0.0

    waiting = _waiting(scheduler, now_s)
    loads = tuple(
        InstanceLoad(
            instance_id=name,
            role=instance.role,
            backlog_s=waiting[name].work_s,
            at_risk_ratio=waiting[name].at_risk / waiting[name].weight if waiting[name].weight else 0.0,
            utilisation=min(1.0, max(0.0, rate(after.busy_s[name], before.busy_s.get(name, 0.0)))),
            requests_waiting=waiting[name].count,
            cached_s=len(instance.prefix) * instance.spec.capabilities.block_tokens / instance.tokens_per_s,
        )
        for name, instance in scheduler.instances.items()
        if instance.state is InstanceState.UP
    )
    short, long = Lane.SHORT, Lane.LONG
    view = FleetView(
        instances=loads,
        short_requests_per_s=rate(after.requests[short], before.requests[short]),
        long_requests_per_s=rate(after.requests[long], before.requests[long]),
        short_work_s_per_s=rate(after.work_s[short], before.work_s[short]),
        long_work_s_per_s=rate(after.work_s[long], before.work_s[long]),
        arrivals=after.submitted - before.submitted,
    )
    return view, after


def _busy_s(instance: Instance, now_s: float) -> float:
    """Seconds in passes since it is up, the running one up to now."""
    running = instance.running
    return instance.busy_s + (max(0.0, now_s - running.start_s) if running is not None else 0.0)


def _waiting(scheduler: PrefillScheduler, now_s: float) -> dict[str, _Waiting]:
    found = {name: _Waiting() for name in scheduler.instances}
    policy, sigma_s = scheduler.policy, scheduler.settings.sigma_s
    placed: dict[str, str] = {}  # request id -> instance
    if isinstance(policy, BindsEarly):
        placed = {t.request_id: name for name in found for t in policy.bound_to(name)}
    shared: dict[Lane, list[Tracked]] = {lane: [] for lane in Lane}
    for tracked in policy.waiting():
        name = tracked.instance_id or placed.get(tracked.request_id)
        if name in found:
            _add(found[name], [tracked], 1, now_s + sigma_s)
            found[name].count += 1
        else:
            shared[tracked.lane].append(tracked)
    staying = [n for n, i in scheduler.instances.items() if i.state is InstanceState.UP]
    for lane, requests in shared.items():
        taking = [(n, i) for n, i in scheduler.instances.items() if i.takes_new]
        servers = [n for n, i in taking if i.role in _SERVES[lane]] or staying or list(found)
        for index, name in enumerate(servers):
            _add(found[name], requests, len(servers), now_s + sigma_s)
            found[name].count += len(requests) // len(servers) + (index < len(requests) % len(servers))
    return found


def _add(waiting: _Waiting, requests: list[Tracked], among: int, due_s: float) -> None:
    """An even share of `requests`, which `among` instances may serve; at risk if due by `due_s`."""
    waiting.work_s += sum(t.service_s for t in requests) / among
    waiting.at_risk += sum(t.target_s <= due_s for t in requests) / among
    waiting.weight += len(requests) / among
