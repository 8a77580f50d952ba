"""Laws of the tenants' shares: in the order of a lane, over time, and in a full queue."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from helpers import dispatches, request, simulate, spec, tracked
from hypothesis import given, settings
from hypothesis import strategies as st

from service.core.fair_share import CREDIT_BURSTS, SWEEP_MIN, FairShare, Room
from service.core.lifecycle import RequestState
from service.core.order import DANGER_S, LaneQueue
from service.core.settings import SchedulerSettings
from service.core.tracked import Tracked
from service.core.types import Cancel, InstanceUp, Outcome, Reason, Reject, Request, Submit
from service.policies import make_scheduler
from service.sim.result import SimResult

AGE_BOUND_S = 5.0
BURST_S = 0.5
TENANTS = ("a", "b", "c")

ENTRIES = st.lists(
    st.tuples(
        st.sampled_from(TENANTS),
        st.integers(1, 50),  # prompt
        st.integers(-1, 1),  # priority
        st.sampled_from([0.1, 0.5, 3.0, 8.0, math.inf]),  # due in
        st.sampled_from([0.0, 0.4, 2.0, 6.0]),  # waits already
    ),
    max_size=14,
)
SERVED = st.lists(st.tuples(st.sampled_from(TENANTS), st.floats(0.01, 3.0)), max_size=12)


def queue_of(
    entries: list[tuple[str, int, int, float, float]], served: list[tuple[str, float]], *, told_apart: bool
) -> LaneQueue:
    """What waits at 10 s, after services by the way."""
    queue = LaneQueue(AGE_BOUND_S, FairShare(BURST_S, {"c": 2.0}) if told_apart else None)
    for number, (tenant, prompt, priority, due_s, waits_s) in enumerate(entries):
        entry = tracked(
            f"r{number}",
            prompt,
            seq=number,
            at_s=10.0 - waits_s,
            target_s=10.0 - waits_s + due_s,
            priority=priority,
            tenant=tenant,
        )
        queue.add(entry)
    for tenant, seconds in served:
        queue.served(tracked("gone", tenant=tenant), seconds)
    return queue


# --- the order of a lane ---


@given(entries=ENTRIES, served=SERVED, late=st.booleans())
def test_one_tenant_is_served_as_without_shares(entries, served, late) -> None:  # type: ignore[no-untyped-def]
    """Whatever it was served, and whether targets are missed or not."""
    alone = [("a", *rest) for _, *rest in entries]
    queue, plain = (queue_of(alone, served, told_apart=told) for told in (True, False))
    for each in (queue, plain):
        if late:
            each.demote(10.0)
    assert [t.request_id for t in queue.in_order(10.0)] == [t.request_id for t in plain.in_order(10.0)]
    assert not queue.by_share(10.0)


@given(entries=ENTRIES, served=SERVED)
def test_nothing_changes_while_all_are_in_time(entries, served) -> None:  # type: ignore[no-untyped-def]
    """The deadline order, however uneven the services were; also again after the danger is over."""
    in_time = [(tenant, prompt, priority, max(due, 8.0), 0.0) for tenant, prompt, priority, due, _ in entries]
    queue, plain = (queue_of(in_time, served, told_apart=told) for told in (True, False))
    assert not queue.demote(10.0)
    assert [t.request_id for t in queue.in_order(10.0)] == [t.request_id for t in plain.in_order(10.0)]
    late = tracked("late", seq=99, at_s=9.0, target_s=9.5, tenant="z")
    queue.add(late)
    queue.demote(10.0)
    queue.remove(late)
    assert queue.by_share(10.0) == (len({tenant for tenant, *_ in entries}) > 1)
    assert not queue.by_share(10.1 + DANGER_S)


@given(entries=ENTRIES, served=SERVED)
def test_who_is_ahead_goes_behind_and_keeps_its_own_order(entries, served) -> None:  # type: ignore[no-untyped-def]
    """While targets are missed: all are there once; those in time before the others, within a priority by
    level; requests of one tenant and priority in the order of before."""
    queue, plain = (queue_of(entries, served, told_apart=told) for told in (True, False))
    for each in (queue, plain):
        each.demote(10.0)
    if not queue.by_share(10.0):
        return
    order, before = list(queue.in_order(10.0)), list(plain.in_order(10.0))
    assert sorted(t.seq for t in order) == sorted(t.seq for t in before)
    for tenant in TENANTS:
        for priority in (-1, 0, 1):
            mine = [
                [t.seq for t in some if (t.request.tenant, t.request.priority) == (tenant, priority)]
                for some in (order, before)
            ]
            assert mine[0] == mine[1]
    share = queue._share
    assert share is not None
    level = {tenant: share.level(tenant) for tenant in TENANTS}
    live = [t for t in order if queue.is_feasible(t)]
    assert order[: len(live)] == live
    for part in (live, order[len(live) :]):
        ranks = [(-t.request.priority, level[t.request.tenant]) for t in part]
        assert ranks == sorted(ranks)


# --- over time ---


def serve(queue: LaneQueue, waiting: dict[str, list[Tracked]], rounds: int) -> dict[str, float]:
    """Always the first in order, of tenants whose requests are `waiting` without an end; seconds served."""
    given_s = dict.fromkeys(waiting, 0.0)
    for number in range(rounds):
        first = next(queue.in_order(10.0))
        tenant = first.request.tenant
        seconds = first.request.prompt_tokens / 100
        queue.remove(first)
        queue.served(first, seconds)
        given_s[tenant] += seconds
        again = tracked(
            f"{tenant}/{number}", first.request.prompt_tokens, seq=1000 + number, at_s=10.0, tenant=tenant
        )
        waiting[tenant].append(again)
        queue.add(again)
    return given_s


def backlogged(weights: dict[str, float], sizes: dict[str, int], depth: int = 3) -> LaneQueue:
    """A lane in which targets are missed; seconds of a request are its tokens over 100."""
    queue = LaneQueue(AGE_BOUND_S, FairShare(BURST_S, weights))
    late = tracked("late", 1, seq=0, at_s=9.9, target_s=9.95, tenant="z", priority=-9)
    queue.add(late)
    queue.demote(10.0)
    for tenant, size in sizes.items():
        for number in range(depth):
            seq = 1 + number + depth * list(sizes).index(tenant)
            queue.add(tracked(f"{tenant}{number}", size, seq=seq, at_s=10.0, tenant=tenant))
    return queue


@settings(max_examples=30)
@given(
    weight=st.sampled_from([0.25, 1.0, 3.0]),
    sizes=st.tuples(st.integers(1, 200), st.integers(1, 200)),
    rounds=st.integers(1, 300),
)
def test_who_always_waits_is_served_by_weight(weight: float, sizes: tuple[int, int], rounds: int) -> None:
    """Of two tenants with requests waiting at all times neither gets more, over its weight, than a burst and
    one of its requests more than the other (and the head start of whoever came second)."""
    queue = backlogged({"b": weight}, {"a": sizes[0], "b": sizes[1]})
    given_s = serve(queue, {"a": [], "b": []}, rounds)
    request_s = max(sizes[0] / 100, sizes[1] / 100 / weight)
    apart_s = given_s["a"] - given_s["b"] / weight
    assert abs(apart_s) <= (1 + CREDIT_BURSTS) * BURST_S + request_s + 1e-9


@settings(max_examples=20)
@given(size=st.integers(1, 100), idle_rounds=st.sampled_from([0, 20, 400]))
def test_idling_earns_no_credit(size: int, idle_rounds: int) -> None:
    """However much others were served meanwhile, who comes back gets no more than its head start, a burst
    and a request of each before they go on."""
    queue = backlogged({}, {"a": size})
    once = tracked("b", size, seq=500, at_s=10.0, tenant="b")
    queue.add(once)
    queue.remove(once)
    queue.served(once, size / 100)
    serve(queue, {"a": []}, idle_rounds)
    for number in range(200):
        queue.add(tracked(f"b{number}", size, seq=2000 + number, at_s=10.0, tenant="b"))
    first_s = 0.0
    while (first := next(queue.in_order(10.0))).request.tenant == "b":
        queue.remove(first)
        queue.served(first, size / 100)
        first_s += size / 100
    assert first_s <= (1 + CREDIT_BURSTS) * BURST_S + 2 * size / 100 + 1e-9


def test_memory_follows_those_who_count() -> None:
    """Tenants that come once leave nothing behind; who waits is not forgotten, nor who is ahead just now."""
    share = FairShare(BURST_S, {})
    share.joined("waits")
    share.joined("ahead")
    share.left("ahead")
    for _ in range(5):
        share.served("ahead", 1.0)
    ahead = share.level("ahead")
    for number in range(40 * SWEEP_MIN):
        share.joined(f"t{number}")
        share.left(f"t{number}")
        share.served(f"t{number}", 1e-4)
    assert ahead >= CREDIT_BURSTS
    assert share.level("ahead") == ahead
    assert len(share) <= 2 * SWEEP_MIN
    share.left("waits")  # it was known all the time
    assert share.waiting == 0


# --- a flood, in virtual time ---


def poisson(tenant: str, rate: float, seconds: float, seed: int, begin_s: float = 0.0) -> list[Request]:
    rng = np.random.default_rng(seed)
    times = begin_s + np.cumsum(rng.exponential(1.0 / rate, int(2 * rate * seconds)))
    prompts = rng.choice([32, 64, 128, 250], len(times))
    sent = [(float(at), int(prompt)) for at, prompt in zip(times, prompts, strict=True) if at < seconds]
    return [
        request(f"{tenant}{n}", prompt, at, tenant=tenant, max_new_tokens=1)
        for n, (at, prompt) in enumerate(sent)
    ]


def flooded(burst_s: float, seconds: float = 12.0, weights: tuple[tuple[str, float], ...] = ()) -> SimResult:
    """A quiet tenant at 30 % of what the instance can do, and one at 250 %, five times its share."""
    capacity = 84.0  # requests/s
    sent = poisson("quiet", 0.3 * capacity, seconds, 1) + poisson("flood", 2.5 * capacity, seconds, 2, 1.0)
    knobs = SchedulerSettings(tenant_burst_s=burst_s, tenant_weights=weights)
    return simulate(sent, on=spec(blocks=4096), knobs=knobs, until_s=seconds + 2.0)[0]


def in_time(result: SimResult, tenant: str) -> float:
    ttfts = [r.ttft_s for r in result.records.values() if r.request.tenant == tenant]
    return sum(ttft is not None and ttft <= 0.4 for ttft in ttfts) / len(ttfts)


def test_a_flood_is_late_for_itself_only() -> None:
    """The quiet tenant keeps 95 % of its targets, most of which it misses where tenants are not told apart;
    the instance serves as many requests either way."""
    with_shares, without = flooded(SchedulerSettings().tenant_burst_s), flooded(0.0)
    assert in_time(with_shares, "quiet") >= 0.95
    assert in_time(without, "quiet") < 0.3
    ends = [[r.outcome for r in result.records.values()] for result in (with_shares, without)]
    served = [each.count(Outcome.COMPLETED) for each in ends]
    assert served[0] >= 0.95 * served[1]


def test_the_same_arrivals_give_the_same_run() -> None:
    """Byte for byte, with what is refused and ranked behind."""
    first, second = (flooded(0.5, seconds=9.0) for _ in range(2))
    assert first.log == second.log
    assert any(isinstance(entry, Reject) for _, entry in first.log)


@pytest.mark.parametrize("aged_share", [0.1, 0.5, 1.0])
def test_everybody_starts_within_the_bound_of_ageing(aged_share: float) -> None:
    """Also the flood: with d the longest pass and n requests that waited longer when it was aged, within
    age_bound + (1 + 1 / aged_share) (n + 1) d."""
    bound_s = 0.5
    sent = poisson("quiet", 25.0, 4.0, 3) + poisson("flood", 120.0, 4.0, 4)
    knobs = SchedulerSettings(age_bound_s=bound_s, queue_age_s_max=1e6, aged_share=aged_share)
    result, scheduler = simulate(sent, on=spec(blocks=4096), knobs=knobs)
    assert not scheduler.live
    longest_s = max(command.numbers.predicted_s for _, command in dispatches(result))
    starts = [(r.request.arrival_s, r.first_pass_s) for r in result.records.values()]
    assert max(start - at for at, start in starts if start is not None) > 2 * bound_s
    for at_s, start_s in starts:
        assert start_s is not None
        longer = sum(at < at_s and start is not None and start > at_s + bound_s for at, start in starts)
        assert start_s - at_s <= bound_s + (1 + 1 / aged_share) * (longer + 1) * longest_s


def test_prompts_in_parts_end_whoever_is_ahead() -> None:
    """With KV for one large prompt only, the parts of the flood must not hold it while shorts of the quiet
    tenant come without an end: its own long prompts wait for that room."""
    sent = [request(f"f{i}", 3500, 0.5 * i, max_new_tokens=1, tenant="flood") for i in range(40)]
    sent += [request(f"q{i}", 3000, 1.0 + 3.0 * i, max_new_tokens=1, tenant="quiet") for i in range(6)]
    sent += [request(f"s{i}", 100, 0.022 * i, max_new_tokens=1, tenant="quiet") for i in range(1000)]
    means_s = []
    for burst_s in (0.5, 0.0):
        knobs = SchedulerSettings(tenant_burst_s=burst_s, queue_age_s_max=1000.0)
        result, _ = simulate(sent, on=spec(blocks=140), knobs=knobs)
        ttft_s = [result.records[f"q{i}"].ttft_s for i in range(6)]
        means_s.append(float(np.mean([t for t in ttft_s if t is not None])))
    assert means_s[0] <= 1.5 * means_s[1]


# --- a full queue ---

HELD = st.lists(
    st.tuples(st.sampled_from(TENANTS), st.integers(1, 40), st.booleans()), min_size=1, max_size=20
)


@given(
    held=HELD, tenant=st.sampled_from(TENANTS), prompt=st.integers(1, 60), weight=st.sampled_from([0.5, 1, 4])
)
def test_room_is_made_by_those_over_their_part(held, tenant, prompt, weight) -> None:  # type: ignore[no-untyped-def]
    """Both bounds hold afterwards; the newcomer is within the part of its tenant; the others give way newest
    first, none of its own, nobody who has begun, and nobody to below its part by more than one request."""
    waiting = [tracked(f"r{n}", size, seq=n, tenant=of) for n, (of, size, _) in enumerate(held)]
    for entry, (_, _, begun) in zip(waiting, held, strict=True):
        entry.state = RequestState.PARTIAL if begun else RequestState.QUEUED
    bounds, weights = (8.0, 150.0), {"a": float(weight)}
    newcomer = request("new", prompt, 0.0, tenant=tenant)
    gone = Room(waiting, bounds, weights).make(newcomer)
    within = Room(waiting, bounds, weights).is_within(newcomer)
    if gone is None:
        total = sum(t.remaining for t in waiting)
        assert not within or len(waiting) + 1 > bounds[0] or total + prompt > bounds[1]
        return
    assert within
    left = [t for t in waiting if t not in gone]
    assert len(left) + 1 <= bounds[0]
    assert sum(t.remaining for t in left) + prompt <= bounds[1]
    assert all(t.request.tenant != tenant and t.state is RequestState.QUEUED for t in gone)
    weight_of = {name: weights.get(name, 1.0) for name in {tenant, *(t.request.tenant for t in waiting)}}
    for name in TENANTS:
        mine = [t for t in gone if t.request.tenant == name]
        assert all(first.seq > second.seq for first, second in pairwise(mine))
        if mine:
            kept = [t for t in left if t.request.tenant == name]
            assert all(t.seq < mine[-1].seq for t in kept if t.state is RequestState.QUEUED)
            part = weight_of[name] / sum(weight_of.values())
            back = [*kept, mine[-1]]
            assert len(back) > part * bounds[0] or sum(t.remaining for t in back) > part * bounds[1]


def test_a_full_queue_is_counted_anew_when_others_are_in_it() -> None:
    """Two tenants hold half each and are refused; then one holds all, by as many requests of the same length:
    the other one, which holds nothing now, gets its part."""
    scheduler = make_scheduler("plaserve", SchedulerSettings(queue_requests_max=8))
    scheduler.on_event(InstanceUp(spec()), 0.0)
    for number, tenant in enumerate("bbbbaaaaab"):
        scheduler.on_event(Submit(request(f"r{number}", 100, 0.0, tenant=tenant)), 0.0)
    assert scheduler.outcomes[Outcome.REJECTED_CAPACITY] == 2
    for number in range(4):
        scheduler.on_event(Cancel(f"r{number}"), 0.0)
    for number in range(10, 14):
        scheduler.on_event(Submit(request(f"r{number}", 100, 0.0, tenant="a")), 0.0)
    for number in range(14, 20):
        scheduler.on_event(Submit(request(f"r{number}", 100, 0.0, tenant="b")), 0.0)
    held = [t.request.tenant for t in scheduler.policy.waiting()]
    assert (held.count("a"), held.count("b")) == (4, 4)


@pytest.mark.parametrize("policy", ["plaserve", "fcfs"])
def test_one_tenant_can_not_hold_the_whole_queue(policy: str) -> None:
    """Of a full queue a newcomer's tenant gets its part, from the newest of whoever holds most; those hear
    why and when to come back. The queue is never larger than its bound."""
    knobs = SchedulerSettings(queue_requests_max=12, tenant_weights=(("b", 2.0),))
    scheduler = make_scheduler(policy, knobs)
    scheduler.on_event(InstanceUp(spec()), 0.0)
    for number in range(14):
        scheduler.on_event(Submit(request(f"a{number}", 50, 0.0, tenant="a")), 0.0)
    for number in range(10):
        scheduler.on_event(Submit(request(f"b{number}", 50, 0.0, tenant="b")), 0.0)
        assert len(list(scheduler.policy.waiting())) == 12
    scheduler.on_event(Submit(request("a99", 50, 0.0, tenant="a")), 0.0)
    refused = [c for c in scheduler.poll(0.0) if isinstance(c, Reject)]
    assert all(c.outcome is Outcome.REJECTED_CAPACITY and c.retry_after_s for c in refused)
    gave_way = [c.request_id for c in refused if c.reason is Reason.TENANT_SHARE]
    assert gave_way == [f"a{number}" for number in range(11, 3, -1)]
    full = [c.request_id for c in refused if c.reason is Reason.QUEUE_COUNT]
    assert full == ["a12", "a13", "b8", "b9", "a99"]


def test_a_lone_tenant_is_refused_as_ever() -> None:
    """Nobody gives way to a request of the same tenant, nor anybody where tenants are not told apart."""
    for burst_s, names in ((0.5, ["a"] * 20), (0.0, ["a"] * 12 + ["b"] * 8)):
        knobs = SchedulerSettings(queue_requests_max=12, tenant_burst_s=burst_s)
        scheduler = make_scheduler("plaserve", knobs)
        scheduler.on_event(InstanceUp(spec()), 0.0)
        for number, tenant in enumerate(names):
            scheduler.on_event(Submit(request(f"r{number}", 50, 0.0, tenant=tenant)), 0.0)
        refused = [c for c in scheduler.poll(0.0) if isinstance(c, Reject)]
        assert [c.request_id for c in refused] == [f"r{number}" for number in range(12, 20)]
        assert {c.reason for c in refused} == {Reason.QUEUE_COUNT}


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ((("a", 0.0),), "above 0"),
        ((("a", math.inf),), "above 0"),
        ((("a", math.nan),), "above 0"),
        ((("a", 1.0), ("a", 2.0)), "twice"),
        (("gold",), "pairs"),
    ],
)
def test_bad_weights_are_named(weights, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=f"tenant_weights.*{words}"):
        SchedulerSettings(tenant_weights=weights)
