"""Laws of what the peers share: the queue, who may join a pass, and what makes one."""

from __future__ import annotations

import pytest
from helpers import CLASSED, PACKED, RECTANGULAR, instance, tracked
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engines.profiles import Profiles
from engines.types import Layout, Padding
from service.core.policy import PassPlan, Wait
from service.core.tracked import Tracked
from service.core.types import Lane, Reason
from service.policies.passes import Offer, PassBuilder
from service.policies.waiting import HeadGate, Waiting

CELLS = tuple(
    (length, rows) for length in (16, 64, 256, 512) for rows in (1, 2, 4, 8) if length * rows <= 1024
)
STEPPED = Profiles(Layout.RECTANGULAR, Padding.CELL, (1024,), cells=CELLS)  # fewer rows where they are longer
PROFILES = {"packed": PACKED, "classed": CLASSED, "rectangular": RECTANGULAR, "stepped": STEPPED}


class Queue(RuleBasedStateMachine):
    """`Waiting` against a plain list that is sorted when it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = Waiting()
        self.model: dict[str, tuple[float, int, Tracked]] = {}
        self.seq = 0

    @rule(rank=st.integers(0, 5), where=st.sampled_from([None, None, "a", "b"]), prompt=st.integers(1, 500))
    def joins(self, rank: int, where: str | None, prompt: int) -> None:
        self.seq += 1
        new = tracked(f"r{self.seq}", prompt, seq=self.seq, lane=Lane.SHORT if prompt < 256 else Lane.LONG)
        new.instance_id = where
        self.queue.add(new, rank)
        self.model[new.request_id] = (rank, new.seq, new)

    @precondition(lambda self: self.model)
    @rule(pick=st.randoms(use_true_random=False))
    def leaves(self, pick) -> None:  # type: ignore[no-untyped-def]
        _, _, gone = self.model.pop(pick.choice(sorted(self.model)))
        self.queue.remove(gone)

    @precondition(lambda self: self.model)
    @rule(pick=st.randoms(use_true_random=False), rank=st.integers(0, 5))
    def moves(self, pick, rank: int) -> None:  # type: ignore[no-untyped-def]
        _, seq, moved = self.model[pick.choice(sorted(self.model))]
        self.queue.rerank(moved, rank)
        self.model[moved.request_id] = (rank, seq, moved)

    @invariant()
    def reads_alike(self) -> None:
        ordered = [entry[2] for entry in sorted(self.model.values(), key=lambda e: e[:2])]
        assert len(self.queue) == len(ordered)
        assert {t.request_id for t in self.queue} == set(self.model)
        assert list(self.queue.newcomers()) == [t for t in ordered if t.instance_id is None]
        for name in ("a", "b"):
            assert self.queue.parts(name) == [t for t in ordered if t.instance_id == name]
            gate = HeadGate(instance(instance_id=name))
            mine = [t for t in ordered if t.instance_id in (None, name)]
            assert list(self.queue.candidates(name, gate)) == mine
            some = list(self.queue.candidates(name, gate, 2))
            left_out = [t for t in ordered if t.instance_id is None][2:]
            assert sorted(t.seq for t in some) == sorted(t.seq for t in mine if t not in left_out)
        for lane in Lane:
            of_lane = [t for t in ordered if t.lane is lane]
            assert self.queue.lane_load(lane) == (len(of_lane), sum(t.remaining for t in of_lane))


TestQueue = Queue.TestCase
TestQueue.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_the_head_without_room_holds_back_newcomers_only() -> None:
    """After one newcomer without room no other is a candidate, but whoever holds KV here is."""
    on = instance(blocks=120)
    queue, gate = Waiting(), HeadGate(on)
    entries = [tracked(f"r{seq}", 2500, seq=seq) for seq in range(4)]
    entries[3].instance_id = "i0"
    for entry in entries:
        queue.add(entry, entry.seq)
    seen = [(t.seq, gate.admits(t)) for t in queue.candidates("i0", gate)]
    assert seen == [(0, True), (1, False), (3, True)]
    assert gate.refused_any


@pytest.mark.parametrize("name", sorted(PROFILES))
@settings(max_examples=60)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 1500), st.integers(0, 800)), min_size=1, max_size=30),
    budget=st.integers(1, 5000),
    requests_max=st.one_of(st.none(), st.integers(1, 6)),
    cut=st.booleans(),
)
def test_a_pass_keeps_all_bounds(
    name: str, sizes: list[tuple[int, int]], budget: int, requests_max: int | None, cut: bool
) -> None:
    """Whatever is offered, the pass holds no more than its budget and number, some profile takes it, and what
    was not cut is whole. An offer is turned down only where the profile or a bound asks for it."""
    profiles: Profiles = PROFILES[name]
    on = instance(profiles=profiles, blocks=10_000)
    builder = PassBuilder(on, HeadGate(on), budget, requests_max)
    for seq, (new, history) in enumerate(sizes):
        if builder.full:
            break
        entry = tracked(f"r{seq}", new + history, seq=seq)
        if history:
            entry.instance_id, entry.position = "i0", history
        before = [item.size for item in builder.items]
        offer = builder.offer(entry, cut=cut)
        if offer is Offer.NO_SPACE:
            left = min(budget, profiles.tokens_max) - sum(n for n, _ in before)
            chunk = min(new, left, profiles.request_tokens_max)
            fits = profiles.executed([*before, (chunk, history)]) is not None
            assert not fits or (chunk < new and not cut)
    sizes_in = [item.size for item in builder.items]
    assert len(sizes_in) <= min(requests_max or on.requests_max, on.requests_max)
    assert sum(new for new, _ in sizes_in) <= budget
    if sizes_in:
        assert profiles.executed(sizes_in) is not None
    assert cut or not any(item.is_part for item in builder.items)


def test_a_plan_without_items_says_why() -> None:
    """Nobody waits: no plan. Somebody waits for KV: that."""
    on, queue = instance(blocks=10), Waiting()
    builder = PassBuilder(on, HeadGate(on), 2048)
    assert builder.plan(queue, Reason.BUDGET_FILLED) is None
    on.kv.reserve("other", 300)
    late = tracked("r0", 200)
    queue.add(late, 0.0)
    assert builder.offer(late) is Offer.REFUSED
    plan = builder.plan(queue, Reason.BUDGET_FILLED)
    assert isinstance(plan, Wait)
    assert plan.reason is Reason.WAITING_FOR_KV


def test_a_plan_is_priced_as_it_runs() -> None:
    """`predicted_s` is the instance's price of the pass."""
    on, queue = instance(), Waiting()
    builder = PassBuilder(on, HeadGate(on), 2048)
    for seq, prompt in enumerate([100, 30, 700]):
        builder.offer(tracked(f"r{seq}", prompt, seq=seq))
    plan = builder.plan(queue, Reason.BUDGET_FILLED)
    assert isinstance(plan, PassPlan)
    assert plan.predicted_s == on.pricer.pass_s([(100, 0), (30, 0), (700, 0)])
