"""Laws of early binding: bound at arrival, moved only where it must be, the sums of a station exact."""

from __future__ import annotations

import pytest
from helpers import instance, request, spec, tracked
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from peers_cluster import LOADS, ROUTED, cluster, ran_on

from service.core.policy import Instance, PassPlan
from service.core.settings import SchedulerSettings
from service.core.tracked import Tracked
from service.core.types import Lane, Outcome
from service.policies.fcfs import FcfsPolicy
from service.policies.routed import Routed, Station
from service.policies.routers import BalanceKnobs, LoadBalancer

KNOBS = SchedulerSettings(budget_tokens=512)


@pytest.mark.parametrize("policy", ROUTED)
@settings(max_examples=20)
@given(drawn=LOADS)
def test_a_request_runs_where_it_was_bound(policy: str, drawn: list[tuple[float, int]]) -> None:
    """While all instances stay up, every request has all its passes on one of them, and all complete."""
    arrivals = [request(f"r{i}", prompt, at_s) for i, (at_s, prompt) in enumerate(drawn)]
    result = cluster(arrivals, policy, knobs=KNOBS)
    assert all(len(where) == 1 for where in ran_on(result).values())
    assert {r.outcome for r in result.records.values()} == {Outcome.COMPLETED}


class Fleet(RuleBasedStateMachine):
    """`Routed` with everything the scheduler may do to it, and a router that notes what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        router = LoadBalancer(BalanceKnobs())
        choose = router.choose

        def noted(tracked: Tracked, stations: list[Station], now_s: float) -> Station:
            self.asked.append(tracked.request_id)
            return choose(tracked, stations, now_s)

        router.choose = noted  # type: ignore[method-assign,assignment]
        self.policy = Routed(router, lambda: FcfsPolicy(KNOBS))
        self.up: dict[str, Instance] = {}
        self.live: dict[str, Tracked] = {}
        self.in_pass: dict[str, list[Tracked]] = {}
        self.seq = 0
        self.comes("i0")
        self.comes("i1")

    def comes(self, name: str) -> None:
        self.up[name] = instance(KNOBS, instance_id=name, blocks=10_000)
        self.policy.instance_up(self.up[name], 0.0)

    @rule(prompt=st.integers(1, 2000))
    def arrives(self, prompt: int) -> None:
        self.seq += 1
        lane = Lane.SHORT if prompt <= 256 else Lane.LONG
        new = tracked(f"r{self.seq}", prompt, seq=self.seq, lane=lane)
        self.live[new.request_id] = new
        self.policy.add(new, 0.0, arrival=True)

    @precondition(lambda self: len(self.up) < 3)
    @rule()
    def instance_comes(self) -> None:
        self.comes(next(name for name in ("i0", "i1", "i2") if name not in self.up))

    @precondition(lambda self: self.up)
    @rule(pick=st.randoms(use_true_random=False))
    def plans(self, pick) -> None:  # type: ignore[no-untyped-def]
        name = pick.choice(sorted(self.up))
        if name in self.in_pass:
            return
        plan = self.policy.plan(self.up[name], 0.0)
        if isinstance(plan, PassPlan):
            for item in plan.items:
                self.policy.remove(item.tracked)
                item.tracked.instance_id = name
                self.up[name].partial[item.tracked.request_id] = item.tracked
            self.policy.dispatched(plan, 0.0)
            self.in_pass[name] = [item.tracked for item in plan.items]

    @precondition(lambda self: self.in_pass)
    @rule(pick=st.randoms(use_true_random=False))
    def pass_ends(self, pick) -> None:  # type: ignore[no-untyped-def]
        name = pick.choice(sorted(self.in_pass))
        for entry in self.in_pass.pop(name):
            entry.position += min(entry.remaining, 200)
            if entry.remaining == 0:
                del self.live[entry.request_id]
                del self.up[name].partial[entry.request_id]
            else:
                self.policy.add(entry, 0.0, arrival=False)

    @precondition(lambda self: self.in_pass)
    @rule(pick=st.randoms(use_true_random=False))
    def pass_is_revoked(self, pick) -> None:  # type: ignore[no-untyped-def]
        name = pick.choice(sorted(self.in_pass))
        self.asked.clear()
        for entry in self.in_pass.pop(name):
            if entry.position == 0:
                del self.up[name].partial[entry.request_id]
                entry.instance_id = None
            self.policy.add(entry, 0.0, arrival=False)
        assert self.asked == [], "what a revoked pass gives back stays where it was"

    @precondition(lambda self: self.up)
    @rule(pick=st.randoms(use_true_random=False))
    def instance_goes(self, pick) -> None:  # type: ignore[no-untyped-def]
        name = pick.choice(sorted(self.up))
        del self.up[name]
        self.asked.clear()
        self.policy.instance_down(instance(KNOBS, instance_id=name), 0.0)
        running = {t.request_id for t in self.in_pass.pop(name, [])}
        for entry in [t for t in self.live.values() if t.instance_id == name]:
            if entry.request_id not in running:
                self.policy.remove(entry)
            entry.instance_id, entry.position, entry.failures = None, 0, 1
            self.policy.add(entry, 0.0, arrival=False)
        assert len(set(self.asked)) == len(self.asked), "everybody is placed anew once"

    @invariant()
    def all_wait_once(self) -> None:
        """Everybody who is not in a pass waits, once; loads add up; with an instance up all are placed."""
        running = {t.request_id for entries in self.in_pass.values() for t in entries}
        waiting = [t for t in self.live.values() if t.request_id not in running]
        assert sorted(t.seq for t in self.policy.waiting()) == sorted(t.seq for t in waiting)
        for lane in Lane:
            of_lane = [t for t in waiting if t.lane is lane]
            assert self.policy.lane_load(lane) == (len(of_lane), sum(t.remaining for t in of_lane))
        assert not (self.up and self.policy._unplaced)

    @invariant()
    def sums_of_stations(self) -> None:
        """Requests and tokens of a station are those in its queue."""
        for station in self.policy._stations.values():
            queued = list(station.policy.waiting())
            assert station.waiting == len(queued)
            assert station.tokens == sum(t.remaining for t in queued)
            assert station.history == sum(t.position for t in queued)
            attention = sum(t.remaining * (t.remaining + 2 * t.position) for t in queued)
            assert station.attention == attention

    @invariant()
    def only_recent_passes_are_remembered(self) -> None:
        assert len(self.policy._sent_to) <= sum(
            len(ids) for s in self.policy._stations.values() for ids in s.sent
        )


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_one_that_only_some_instances_take_goes_there() -> None:
    """Where instances differ in what they take, the router chooses among those that can."""
    policy = Routed(LoadBalancer(BalanceKnobs()), lambda: FcfsPolicy(KNOBS))
    small, large = (instance(KNOBS, instance_id=name, context=c) for name, c in [("s", 512), ("l", 4096)])
    policy.instance_up(small, 0.0)
    policy.instance_up(large, 0.0)
    for seq in range(4):
        policy.add(tracked(f"r{seq}", 2000, seq=seq, lane=Lane.LONG), 0.0, arrival=True)
    assert policy.plan(small, 0.0) is None
    assert isinstance(policy.plan(large, 0.0), PassPlan)
    policy.instance_down(large, 0.0)
    assert len(list(policy.waiting())) == 4, "they wait for one that takes them"
    policy.instance_up(instance(KNOBS, instance_id="l2", context=4096), 0.0)
    assert policy._stations["l2"].waiting == 4


def test_the_rest_of_a_cut_prompt_counts_while_its_pass_runs() -> None:
    """Tokens ahead of a newcomer: the queue, the pass under way, and what it leaves of a prompt."""
    on = instance(KNOBS, blocks=1000)
    policy = Routed(LoadBalancer(BalanceKnobs()), lambda: FcfsPolicy(KNOBS))
    policy.instance_up(on, 0.0)
    long = tracked("long", 2000, seq=0, lane=Lane.LONG)
    policy.add(long, 0.0, arrival=True)
    plan = policy.plan(on, 0.0)
    assert isinstance(plan, PassPlan)
    policy.remove(long)
    long.instance_id = "i0"
    policy.dispatched(plan, 0.0)
    station = policy._stations["i0"]
    assert (station.waiting, station.tokens, station.cut_tokens) == (0, 0, 2000 - 512)
    long.position = 512
    policy.add(long, 0.0, arrival=False)
    assert (station.tokens, station.cut_tokens) == (2000 - 512, 0)
    assert station.cut_attention == 0.0


def test_a_single_instance_is_plain_fcfs() -> None:
    """With one instance there is nothing to route: the same passes as `fcfs`, to the token."""
    arrivals = [request(f"r{i}", 40 + 61 * i % 900, 0.02 * i) for i in range(40)]
    ends = {
        policy: {name: r.first_token_s for name, r in result.records.items()}
        for policy in (*ROUTED, "fcfs")
        if (result := cluster(arrivals, policy, instances=1, knobs=KNOBS, on=spec()))
    }
    assert all(ends[policy] == ends["fcfs"] for policy in ROUTED)
