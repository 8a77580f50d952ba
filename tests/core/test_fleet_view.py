"""Laws of what a role controller sees: nothing is lost, nothing is counted twice, rates are of the period."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from helpers import request, spec
from hypothesis import given
from hypothesis import strategies as st

from service.core.fleet_view import observe, totals
from service.core.reconcile import InstanceLoad
from service.core.scheduler import PrefillScheduler
from service.core.settings import SchedulerSettings
from service.core.tracked import Tracked
from service.core.types import Dispatch, InstanceUp, Lane, Role, RoleChanged, Submit
from service.policies import make_scheduler
from service.policies.fcfs import FcfsPolicy

PROMPTS = st.lists(st.sampled_from([1, 40, 200, 256, 300, 900, 3000]), max_size=20)
ROLES = st.lists(st.sampled_from(list(Role)), min_size=1, max_size=5)
KNOBS = SchedulerSettings(queue_requests_max=10_000, queue_tokens_max=10**7)


def fleet(roles: list[Role], scheduler: PrefillScheduler | None = None) -> PrefillScheduler:
    scheduler = scheduler or make_scheduler("fcfs", KNOBS)
    for number, role in enumerate(roles):
        scheduler.on_event(InstanceUp(spec(f"i{number}")), 0.0)
        scheduler.on_event(RoleChanged(f"i{number}", role), 0.0)
    return scheduler


def submit(scheduler: PrefillScheduler, prompts: list[int], at_s: float = 0.0) -> None:
    for number, prompt in enumerate(prompts):
        scheduler.on_event(Submit(request(f"{at_s}/{number}", prompt, at_s)), at_s)


def loads(scheduler: PrefillScheduler, now_s: float = 0.0) -> dict[str, InstanceLoad]:
    view, _ = observe(scheduler, totals(scheduler, 0.0), now_s)
    return {load.instance_id: load for load in view.instances}


@given(PROMPTS, ROLES, st.booleans())
def test_backlogs_sum_to_all_that_waits(prompts: list[int], roles: list[Role], running: bool) -> None:
    """Whatever the roles and whatever runs: no work is lost or counted twice, nor a request."""
    scheduler = fleet(roles)
    submit(scheduler, prompts)
    if running:
        scheduler.poll(0.0)
    waiting = list(scheduler.policy.waiting())
    seen = loads(scheduler).values()
    assert sum(load.backlog_s for load in seen) == pytest.approx(sum(t.service_s for t in waiting))
    assert sum(load.requests_waiting for load in seen) == len(waiting)
    assert all(0.0 <= load.at_risk_ratio <= 1.0 for load in seen)


@given(PROMPTS, ROLES)
def test_each_lane_waits_for_those_that_prefer_it(prompts: list[int], roles: list[Role]) -> None:
    scheduler = fleet(roles)
    submit(scheduler, prompts)
    seen = loads(scheduler)
    for lane, wanted in ((Lane.SHORT, Role.SP), (Lane.LONG, Role.LP)):
        others = [r for r in Role if r not in (wanted, Role.MIXED)]
        servers = [f"i{n}" for n, role in enumerate(roles) if role in (wanted, Role.MIXED)]
        work_s = sum(t.service_s for t in scheduler.policy.waiting() if t.lane is lane)
        if not servers:
            servers = list(seen)
        share_s = work_s / len(servers)
        assert all(seen[name].backlog_s >= share_s - 1e-9 for name in servers)
        if len(servers) < len(roles) and not any(t.lane is not lane for t in scheduler.policy.waiting()):
            idle = [name for n, name in enumerate(seen) if roles[n] in others]
            assert all(seen[name].backlog_s == 0.0 for name in idle)


@given(ROLES)
def test_an_empty_fleet_has_no_load(roles: list[Role]) -> None:
    for load in loads(fleet(roles), 5.0).values():
        assert (load.backlog_s, load.at_risk_ratio, load.utilisation, load.requests_waiting) == (0, 0, 0, 0)


def test_without_instances_there_is_nothing_to_see() -> None:
    scheduler = make_scheduler("fcfs", KNOBS)
    view, _ = observe(scheduler, totals(scheduler, 0.0), 1.0)
    assert view.instances == ()


def test_looking_changes_nothing() -> None:
    scheduler = fleet([Role.SP, Role.LP])
    submit(scheduler, [100, 900, 40])
    before = totals(scheduler, 0.0)
    assert observe(scheduler, before, 0.5) == observe(scheduler, before, 0.5)


@pytest.mark.parametrize(("now_s", "at_risk"), [(0.0, 0.0), (0.394, 0.0), (0.396, 1.0), (9.0, 1.0)])
def test_at_risk_is_within_sigma_of_the_target_or_past_it(now_s: float, at_risk: float) -> None:
    scheduler = fleet([Role.MIXED])
    submit(scheduler, [100])
    assert scheduler.settings.ttft_target_short_s - scheduler.settings.sigma_s == pytest.approx(0.395)
    assert loads(scheduler, now_s)["i0"].at_risk_ratio == at_risk


def test_prompts_in_parts_wait_where_they_are() -> None:
    scheduler = fleet([Role.MIXED, Role.MIXED])
    submit(scheduler, [100])
    waiting = next(scheduler.policy.waiting())
    waiting.instance_id = "i1"
    seen = loads(scheduler)
    assert (seen["i0"].backlog_s, seen["i1"].backlog_s) == (0.0, waiting.service_s)
    assert (seen["i0"].requests_waiting, seen["i1"].requests_waiting) == (0, 1)


class Binding(FcfsPolicy):
    """Means every other request for the first instance, and says so."""

    def bound_to(self, instance_id: str) -> Iterator[Tracked]:
        return (t for t in self.waiting() if instance_id == "i0" and t.seq % 2)


def test_requests_placed_early_wait_where_they_were_placed() -> None:
    scheduler = fleet([Role.MIXED, Role.MIXED], PrefillScheduler(KNOBS, Binding(KNOBS)))
    submit(scheduler, [100, 100, 100, 100])
    seen = loads(scheduler)
    each_s = next(scheduler.policy.waiting()).service_s
    assert seen["i0"].backlog_s == pytest.approx(3 * each_s)
    assert seen["i1"].backlog_s == pytest.approx(each_s)
    assert (seen["i0"].requests_waiting, seen["i1"].requests_waiting) == (3, 1)


@given(st.lists(PROMPTS, min_size=1, max_size=4), st.floats(0.1, 5.0))
def test_rates_are_those_of_the_period(periods: list[list[int]], period_s: float) -> None:
    scheduler = fleet([Role.MIXED])
    seen, now_s = totals(scheduler, 0.0), 0.0
    for prompts in periods:
        before = {t.request_id for t in scheduler.live.values()}
        submit(scheduler, prompts, now_s)
        now_s += period_s
        view, seen = observe(scheduler, seen, now_s)
        new = [t for t in scheduler.live.values() if t.request_id not in before]
        short = [t.service_s for t in new if t.lane is Lane.SHORT]
        long = [t.service_s for t in new if t.lane is Lane.LONG]
        assert view.arrivals == len(prompts)
        assert view.short_requests_per_s == pytest.approx(len(short) / period_s)
        assert view.long_requests_per_s == pytest.approx(len(long) / period_s)
        assert view.short_work_s_per_s == pytest.approx(sum(short) / period_s, abs=1e-9)
        assert view.long_work_s_per_s == pytest.approx(sum(long) / period_s, abs=1e-9)


def test_utilisation_counts_the_pass_that_runs() -> None:
    scheduler = fleet([Role.MIXED, Role.MIXED])
    begin = totals(scheduler, 0.0)
    submit(scheduler, [2000])
    dispatched = [c for c in scheduler.poll(0.0) if isinstance(c, Dispatch)]
    pass_s = dispatched[0].numbers.predicted_s
    assert math.isfinite(pass_s)
    view, _ = observe(scheduler, begin, pass_s / 2)
    assert [load.utilisation for load in view.instances] == [1.0, 0.0]
    view, _ = observe(scheduler, totals(scheduler, pass_s / 4), pass_s / 2)
    assert [load.utilisation for load in view.instances] == [1.0, 0.0]
