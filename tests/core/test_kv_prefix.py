"""Laws of promised KV, of the prefix index and of moments at which requests end by themselves."""

from __future__ import annotations

import pytest
from helpers import tracked
from hypothesis import given
from hypothesis import strategies as st

from engines.types import BlocksRemoved, BlocksStored
from service.core.kv_budget import KvBudget
from service.core.lifecycle import RequestState
from service.core.prefix_index import PrefixIndex
from service.core.timeouts import SWEEP_MIN, Timeout, Timeouts
from service.core.types import Outcome, Reason


@given(
    total=st.integers(1, 40),
    moves=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 300), st.booleans()), max_size=60),
)
def test_promises_never_exceed_the_blocks(total: int, moves: list[tuple[int, int, bool]]) -> None:
    """The promises add up to what is held, never above the total; `fits` says just what `reserve` takes."""
    budget, held = KvBudget(total, 16), {}
    for number, tokens, release in moves:
        name = f"r{number}"
        if release:
            budget.release(name)
            held.pop(name, None)
        elif name in held:
            budget.reserve(name, tokens)  # holds some already: nothing changes
        elif budget.fits(tokens):
            budget.reserve(name, tokens)
            held[name] = budget.blocks_for(tokens)
        else:
            with pytest.raises(ValueError, match=name):
                budget.reserve(name, tokens)
        assert budget.blocks_reserved == sum(held.values()) <= total
        assert all(budget.holds(f"r{i}") == (f"r{i}" in held) for i in range(7))


@given(tokens=st.integers(1, 500), pending=st.integers(0, 10))
def test_pending_blocks_count(tokens: int, pending: int) -> None:
    """Blocks about to be promised are as good as promised; a block is whole or not at all."""
    budget = KvBudget(20, 16)
    assert budget.fits(tokens, pending) == ((tokens + 15) // 16 + pending <= 20)


@given(
    events=st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 12), max_size=6)), max_size=12),
    prompt=st.integers(1, 400),
)
def test_prefix_leaves_one_token(events: list[tuple[bool, set[int]]], prompt: int) -> None:
    """Cached are the leading known blocks of the prompt, whole ones only; a token is left to compute."""
    index, known = PrefixIndex(32), set[int]()
    for stored, hashes in events:
        index.apply([BlocksStored(tuple(hashes)) if stored else BlocksRemoved(tuple(hashes))])
        known = known | hashes if stored else known - hashes
    assert len(index) == len(known)
    row = tuple(range(prompt // 32))
    cached = index.cached_tokens(row, prompt)
    leading = next((block for block in row if block not in known), len(row))
    assert cached == min(leading, (prompt - 1) // 32) * 32
    assert cached < prompt


@given(times=st.lists(st.tuples(st.floats(0.0, 10.0), st.booleans(), st.booleans()), max_size=30))
def test_timeouts_fire_once_in_order(times: list[tuple[float, bool, bool]]) -> None:
    """Each fires once, at its time; not for ended requests, nor the queue age of one that has started."""
    timeouts, expected = Timeouts(), []
    for number, (time_s, ended, by_age) in enumerate(times):
        entry = tracked(f"r{number}", seq=number)
        entry.state = RequestState.ENDED if ended else RequestState.PREFILLING
        reason = Reason.QUEUE_AGE if by_age else Reason.DEADLINE_PASSED
        timeouts.add(time_s, Timeout(entry, Outcome.DEADLINE_EXCEEDED, reason))
        if not ended and not by_age:
            expected.append((time_s, number))
    expected.sort()
    fired = [t.tracked.seq for now_s in range(12) for t in timeouts.due(float(now_s))]
    assert fired == [number for _, number in expected]
    assert timeouts.next_s == float("inf")


def test_timeouts_follow_what_is_live() -> None:
    """Ended requests are swept out long before their time."""
    timeouts = Timeouts()
    for number in range(50 * SWEEP_MIN):
        entry = tracked(f"r{number}")
        timeouts.add(3600.0, Timeout(entry, Outcome.DEADLINE_EXCEEDED, Reason.DEADLINE_PASSED))
        entry.state = RequestState.ENDED
        assert len(timeouts) <= SWEEP_MIN + 1
