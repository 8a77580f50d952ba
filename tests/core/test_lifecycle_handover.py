"""Laws of the transition tables and of hand-overs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from service.core.handover import Handover, HandoverDeadlines, HandoverTable, may_prefill_again
from service.core.lifecycle import (
    HANDOVER,
    INSTANCE,
    REQUEST,
    HandoverState,
    IllegalTransition,
    InstanceState,
    RequestState,
    step,
)

TABLES: list[tuple[type[StrEnum], Mapping[StrEnum, frozenset[StrEnum]], StrEnum, set[StrEnum]]] = [
    (RequestState, REQUEST, RequestState.QUEUED, {RequestState.ENDED}),  # type: ignore[list-item]
    (
        HandoverState,
        HANDOVER,  # type: ignore[list-item]
        HandoverState.PREFILLED,
        {HandoverState.DONE, HandoverState.EXPIRED, HandoverState.FAILED},
    ),
    (InstanceState, INSTANCE, InstanceState.UP, set()),  # type: ignore[list-item]
]
DEADLINES = HandoverDeadlines(prefilled_s=1.0, offered_s=5.0, pulled_s=2.0)


def reachable(table: Mapping[StrEnum, frozenset[StrEnum]], start: StrEnum) -> set[StrEnum]:
    found, frontier = {start}, [start]
    while frontier:
        new = table[frontier.pop()] - found
        found |= new
        frontier += new
    return found


@pytest.mark.parametrize(("states", "table", "start", "final"), TABLES)
def test_tables_are_closed(
    states: type[StrEnum],
    table: Mapping[StrEnum, frozenset[StrEnum]],
    start: StrEnum,
    final: set[StrEnum],
) -> None:
    """Every state has a row and can be reached; exactly the end states have no way on; ends stay in reach."""
    assert set(table) == set(states)
    assert reachable(table, start) == set(states)
    assert {state for state in states if not table[state]} == final
    for state in states:
        assert not final or reachable(table, state) & final


@pytest.mark.parametrize(("states", "table", "start", "final"), TABLES)
def test_step_obeys_the_table(
    states: type[StrEnum],
    table: Mapping[StrEnum, frozenset[StrEnum]],
    start: StrEnum,
    final: set[StrEnum],
) -> None:
    """A move is allowed exactly where the table says so; a refusal names the thing and both states."""
    for old in states:
        for new in states:
            if new in table[old]:
                assert step(table, old, new, "x") is new
            else:
                with pytest.raises(IllegalTransition, match=f"request 7: {old} -> {new}"):
                    step(table, old, new, "request 7")


class HandoverMachine(RuleBasedStateMachine):
    """Against a plain dict of (state, since, blocks)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = HandoverTable(DEADLINES, "build-1")
        self.live: dict[str, tuple[HandoverState, float, int]] = {}
        self.now_s = 0.0
        self.count = 0

    @rule(blocks=st.integers(1, 50))
    def begin(self, blocks: int) -> None:
        self.count += 1
        name = f"r{self.count}"
        entry = self.table.begin(name, blocks, self.now_s)
        assert (entry.state, entry.prefills) == (HandoverState.PREFILLED, 1)
        self.live[name] = (HandoverState.PREFILLED, self.now_s, blocks)
        with pytest.raises(ValueError, match=name):
            self.table.begin(name, blocks, self.now_s)

    @precondition(lambda self: self.live)
    @rule(
        pick=st.randoms(use_true_random=False), what=st.sampled_from(["offer", "mismatch", "pulled", "done"])
    )
    def move(self, pick, what: str) -> None:  # type: ignore[no-untyped-def]
        """Only along the table; another build on the decode side fails the hand-over."""
        name = pick.choice(sorted(self.live))
        old, _, blocks = self.live[name]
        moves: dict[str, tuple[HandoverState, Callable[[], HandoverState]]] = {
            "offer": (HandoverState.OFFERED, lambda: self.table.offer(name, "build-1", self.now_s)),
            "mismatch": (HandoverState.FAILED, lambda: self.table.offer(name, "build-2", self.now_s)),
            "pulled": (HandoverState.PULLED, lambda: self.table.pulled(name, self.now_s)),
            "done": (HandoverState.DONE, lambda: self.table.done(name, self.now_s)),
        }
        new, act = moves[what]
        if new not in HANDOVER[old]:
            with pytest.raises(IllegalTransition):
                act()
            return
        assert act() is new
        self.note(name, new, blocks)

    @precondition(lambda self: self.live)
    @rule(pick=st.randoms(use_true_random=False))
    def fail(self, pick) -> None:  # type: ignore[no-untyped-def]
        name = pick.choice(sorted(self.live))
        assert self.table.failed(name, self.now_s) is HandoverState.FAILED
        self.note(name, HandoverState.FAILED, 0)

    @rule(step_s=st.sampled_from([0.0, 0.4, 1.0, 2.0, 5.0]))
    def time_passes(self, step_s: float) -> None:
        """Exactly those whose state outlived its own deadline expire, and leave."""
        self.now_s += step_s
        late = {n for n, (s, since_s, _) in self.live.items() if self.now_s >= since_s + self.allowed_s(s)}
        expired = self.table.expire(self.now_s)
        assert {entry.request_id for entry in expired} == late
        assert all(entry.state is HandoverState.EXPIRED for entry in expired)
        for name in late:
            del self.live[name]

    @invariant()
    def books_are_right(self) -> None:
        """Blocks of all live hand-overs are held; the next deadline is the earliest of theirs."""
        assert self.table.blocks_held == sum(blocks for _, _, blocks in self.live.values())
        ends_s = [since_s + self.allowed_s(state) for state, since_s, _ in self.live.values()]
        assert self.table.next_deadline_s() == (min(ends_s) if ends_s else None)

    def note(self, name: str, state: HandoverState, blocks: int) -> None:
        if HANDOVER[state]:
            self.live[name] = (state, self.now_s, blocks)
        else:
            del self.live[name]

    def allowed_s(self, state: HandoverState) -> float:
        return {
            HandoverState.PREFILLED: DEADLINES.prefilled_s,
            HandoverState.OFFERED: DEADLINES.offered_s,
            HandoverState.PULLED: DEADLINES.pulled_s,
        }[state]


HandoverMachine.TestCase.settings = settings(max_examples=50, deadline=None)
TestHandover = HandoverMachine.TestCase


def test_every_live_state_has_a_deadline() -> None:
    """No state may hold blocks for ever; end states hold none."""
    for state in HandoverState:
        assert (HandoverDeadlines().of(state) is not None) == bool(HANDOVER[state])


@pytest.mark.parametrize(
    ("prefills", "emitted", "again"), [(1, False, True), (2, False, False), (1, True, False)]
)
def test_one_prefill_more_at_most(prefills: int, emitted: bool, again: bool) -> None:
    """A hand-over is prefilled again once, and never after the decode side has emitted a token."""
    entry = Handover("r", "build-1", 3, 0.0, prefills=prefills)
    assert may_prefill_again(entry, decode_emitted=emitted) is again
