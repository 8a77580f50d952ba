"""Laws of the order inside a lane."""

from __future__ import annotations

import pytest
from helpers import tracked
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from service.core.order import SWEEP_MIN, LaneQueue
from service.core.tracked import Tracked

AGE_BOUND_S = 5.0
PLACES = (None, "a", "b")


class OrderMachine(RuleBasedStateMachine):
    """A lane is the naive order: feasible by (priority, target), then hopeless by work; those past the bound
    also by age. Each instance sees its own row and the common one, and nothing of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = LaneQueue(AGE_BOUND_S)
        self.waiting: dict[str, Tracked] = {}
        self.gone: list[Tracked] = []
        self.hopeless: set[str] = set()
        self.place: dict[str, str | None] = {}
        self.now_s = 0.0
        self.count = 0

    @rule(
        prompt=st.integers(1, 50),
        priority=st.integers(-1, 1),
        due_in_s=st.sampled_from([0.1, 0.5, 3.0, 8.0, float("inf")]),
        service_s=st.sampled_from([0.0, 0.3, 1.0]),
        place=st.sampled_from(PLACES),
    )
    def add(self, prompt: int, priority: int, due_in_s: float, service_s: float, place: str | None) -> None:
        self.count += 1
        self.insert(
            tracked(
                f"r{self.count}",
                prompt,
                seq=self.count,
                at_s=self.now_s,
                target_s=self.now_s + due_in_s,
                service_s=service_s,
                priority=priority,
            ),
            place,
        )

    @precondition(lambda self: self.gone)
    @rule(done=st.integers(0, 10))
    def comes_back(self, done: int) -> None:
        """After a chunk: less to do, a later start is useful, and it ages anew."""
        entry = self.gone.pop()
        entry.position = min(entry.position + done, entry.request.prompt_tokens - 1)
        entry.service_s /= 2
        entry.waiting_since_s = self.now_s
        self.insert(entry, None)

    @precondition(lambda self: self.waiting)
    @rule(pick=st.randoms(use_true_random=False), place=st.sampled_from(PLACES))
    def move(self, pick, place: str | None) -> None:  # type: ignore[no-untyped-def]
        """It waits for another instance now; its place in the order is the same."""
        entry = self.waiting[pick.choice(sorted(self.waiting))]
        self.queue.move(entry, place)
        self.place[entry.request_id] = place

    @precondition(lambda self: self.waiting)
    @rule(pick=st.randoms(use_true_random=False))
    def remove(self, pick) -> None:  # type: ignore[no-untyped-def]
        entry = self.waiting.pop(pick.choice(sorted(self.waiting)))
        self.queue.remove(entry)
        self.gone.append(entry)

    @rule(step_s=st.sampled_from([0.0, 0.2, 1.0, 4.0]))
    def demote(self, step_s: float) -> None:
        """Exactly those move that were feasible and can no longer meet their target."""
        self.now_s += step_s
        late = {i for i, t in self.waiting.items() if t.latest_start_s < self.now_s}
        moved = [t.request_id for t in self.queue.demote(self.now_s)]
        assert sorted(moved) == sorted(late - self.hopeless)
        self.hopeless = late

    @invariant()
    def order_is_the_naive_one(self) -> None:
        for place in PLACES:
            seen = [t for i, t in self.waiting.items() if self.place[i] in (None, place)]
            assert list(self.queue.in_order(self.now_s, place)) == self.expected(seen)
            assert list(self.queue.aged(self.now_s, place)) == self.aged(seen)
            oldest_s = min((t.waiting_since_s for t in seen), default=self.now_s)
            assert self.queue.oldest_wait_s(self.now_s, place) == self.now_s - oldest_s

    @invariant()
    def rows_are_right(self) -> None:
        for place in ("a", "b"):
            own = {t for i, t in self.waiting.items() if self.place[i] == place}
            assert set(self.queue.only_for(place)) == own
            assert self.queue.is_for(place) == bool(own)
            assert (place in self.queue.places()) == bool(own)
            assert self.queue.waits_for(place) == (bool(own) or self.queue.waits_for_any())
        assert self.queue.waits_for_any() == any(self.place[i] is None for i in self.waiting)

    @invariant()
    def books_are_right(self) -> None:
        waiting = list(self.waiting.values())
        assert len(self.queue) == len(waiting)
        assert self.queue.tokens == sum(t.remaining for t in waiting)
        assert set(self.queue.everyone()) == set(waiting)
        assert all(self.queue.is_feasible(t) == (i not in self.hopeless) for i, t in self.waiting.items())

    def insert(self, entry: Tracked, place: str | None) -> None:
        self.queue.add(entry, place)
        self.waiting[entry.request_id] = entry
        self.place[entry.request_id] = place
        self.hopeless.discard(entry.request_id)

    def aged(self, seen: list[Tracked]) -> list[Tracked]:
        old = [t for t in seen if self.now_s - t.waiting_since_s >= AGE_BOUND_S]
        return sorted(old, key=lambda t: (t.waiting_since_s, t.seq))

    def expected(self, seen: list[Tracked]) -> list[Tracked]:
        feasible = [t for t in seen if t.request_id not in self.hopeless]
        hopeless = [t for t in seen if t.request_id in self.hopeless]
        feasible.sort(key=lambda t: (-t.request.priority, t.target_s, t.seq))
        hopeless.sort(key=lambda t: (-t.request.priority, t.remaining, t.seq))
        return feasible + hopeless


OrderMachine.TestCase.settings = settings(max_examples=60, deadline=None)
TestOrder = OrderMachine.TestCase


def test_memory_follows_those_who_wait() -> None:
    """Whoever left the queue leaves nothing behind, however far its target lay."""
    queue = LaneQueue(AGE_BOUND_S)
    for number in range(20 * SWEEP_MIN):
        entry = tracked(f"r{number}", seq=number, target_s=1e9 + number)
        queue.add(entry)
        queue.remove(entry)
    assert len(queue._latest_start) <= SWEEP_MIN


@given(rows=st.lists(st.tuples(st.floats(0.1, 5.0), st.floats(0.0, 2.0), st.booleans()), max_size=12))
def test_nobody_must_start_before_the_latest_start_of_the_lane(
    rows: list[tuple[float, float, bool]],
) -> None:
    queue = LaneQueue(age_bound_s=5.0)
    waiting = []
    for seq, (target_s, service_s, leaves) in enumerate(rows):
        each = tracked(f"r{seq}", 100, seq=seq, target_s=target_s, service_s=service_s)
        queue.add(each)
        waiting.append((each, leaves))
    queue.demote(0.5)
    for each, leaves in waiting:
        if leaves:
            queue.remove(each)
    left = [each for each, leaves in waiting if not leaves]
    assert queue.work_s == pytest.approx(sum(each.service_s for each in left))
    feasible = [each for each in left if queue.is_feasible(each)]
    assert all(queue.latest_start_s <= each.latest_start_s for each in feasible)
