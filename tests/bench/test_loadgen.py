"""The clients: what they send does not depend on what comes back, and they write down what they saw."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from known_service import Behaviour, known_service

from service.bench.arms import status
from service.bench.books import ServiceBooks, balance
from service.bench.loadgen import Ending, LoadGenerator
from service.bench.workload import Label, PlannedRequest, Prompt


def planned(number: int, send_s: float = 0.0, max_tokens: int = 4) -> PlannedRequest:
    prompt = Prompt(Label.SHORT, f"Question {number}", 10)
    return PlannedRequest(f"q{number}", prompt, send_s, target_s=10.0, max_tokens=max_tokens)


def endless() -> Iterator[PlannedRequest]:
    return (planned(number, max_tokens=2) for number in itertools.count())


async def test_open_loop_sends_on_time_whatever_the_service_does() -> None:
    """All requests arrive before the first answer comes: a loop that waited for answers could not do that."""
    behaviour = Behaviour(delay_s=0.6)
    plan = [planned(n, send_s=0.01 * n) for n in range(20)]
    async with known_service(behaviour) as address, LoadGenerator(address) as generator:
        seen = await generator.open_loop(plan)
    assert [s.request_id for s in seen] == [p.request_id for p in plan]
    assert all(s.ending is Ending.COMPLETED for s in seen)
    first_answer_s = behaviour.arrivals_s[0] + behaviour.delay_s
    assert len(behaviour.arrivals_s) == 20
    assert max(behaviour.arrivals_s) < first_answer_s


async def test_ttft_counts_from_the_planned_time() -> None:
    """A generator that is late itself can't hide it: the lag is part of the TTFT."""
    async with known_service(Behaviour(delay_s=0.05)) as address, LoadGenerator(address) as generator:
        late = planned(0, send_s=-5.0)  # was due long ago
        (seen,) = await generator.open_loop([late])
    assert seen.ttft_s is not None
    assert seen.lag_s >= 5.0
    assert seen.ttft_s >= seen.lag_s + 0.05


async def test_an_answer_is_written_down_whole() -> None:
    async with known_service(Behaviour(gap_s=0.02)) as address, LoadGenerator(address) as generator:
        (seen,) = await generator.open_loop([planned(0, max_tokens=5)])
    assert seen.text == "0 1 2 3 4 "
    assert seen.output_tokens == 5
    assert len(seen.itl_s) == 4
    assert sum(seen.itl_s) == pytest.approx(seen.end_s - seen.ttft_s, abs=0.5)  # type: ignore[operator]
    assert (seen.prompt_tokens, seen.history_tokens, seen.service_lane) == (11, 3, "short")
    assert seen.met


async def test_refused_and_broken_answers_are_told_apart() -> None:
    behaviour = Behaviour(refuse=lambda n: n == 0, break_off=lambda n: n == 1)
    plan = [planned(n, send_s=0.1 * n) for n in range(3)]
    async with known_service(behaviour) as address, LoadGenerator(address) as generator:
        refused, broken, well = await generator.open_loop(plan)
    assert refused.ending is Ending.REFUSED
    assert refused.retry_after_s == pytest.approx(0.25)
    assert "the queue is full" in refused.error
    assert refused.ttft_s is None
    assert not refused.met
    assert broken.ending is Ending.FAILED
    assert broken.ttft_s is not None
    assert not broken.met  # the token came in time, the answer never did
    assert well.met


async def test_nobody_at_home_is_a_failure_not_a_refusal() -> None:
    async with known_service(Behaviour()) as address:
        pass
    async with LoadGenerator(address, timeout_s=5.0) as generator:
        (seen,) = await generator.open_loop([planned(0)])
    assert seen.ending is Ending.FAILED
    assert "UNAVAILABLE" in seen.error


async def test_requests_in_flight_are_bounded_and_the_rest_is_missed() -> None:
    plan = [planned(n) for n in range(10)]
    async with (
        known_service(Behaviour(delay_s=0.3)) as address,
        LoadGenerator(address, in_flight_max=4) as generator,
    ):
        seen = await generator.open_loop(plan)
    assert [s.ending for s in seen] == [Ending.COMPLETED] * 4 + [Ending.NOT_SENT] * 6
    assert not any(s.met for s in seen[4:])


async def test_closed_loop_balances_with_the_service() -> None:
    """Every request of every client is in the service's books once, refused and cancelled ones too."""
    behaviour = Behaviour(delay_s=0.005, gap_s=0.2, refuse=lambda n: n % 7 == 3)
    async with known_service(behaviour) as address, LoadGenerator(address, channels=2) as generator:
        before = ServiceBooks.of(await status(address))
        seen = await generator.closed_loop(endless(), clients=20, seconds=1.0, cancel_ratio=0.5)
        after = ServiceBooks.of(await status(address))
    found = balance(seen, before, after)
    assert found.faults == ()
    assert min(found.client[e] for e in (Ending.COMPLETED, Ending.REFUSED, Ending.CANCELLED)) > 0
    assert sum(found.client.values()) == len(seen)
    # A request that its client cancelled at once may never have left.
    assert 0 <= len(seen) - len(behaviour.arrivals_s) <= found.client[Ending.CANCELLED]


async def test_closed_loop_never_has_more_requests_than_clients() -> None:
    behaviour = Behaviour(delay_s=0.1)
    async with known_service(behaviour) as address, LoadGenerator(address) as generator:
        seen = await generator.closed_loop(endless(), clients=3, seconds=0.5)
    starts_and_ends = sorted([(s.send_s, 1) for s in seen] + [(s.end_s, -1) for s in seen])
    assert max(itertools.accumulate(step for _, step in starts_and_ends)) == 3


def test_books_that_do_not_balance_say_so() -> None:
    before = ServiceBooks(0, {}, 0, 0)
    lost = balance([], before, ServiceBooks(3, {"COMPLETED": 2}, 0, 0))
    assert "submitted 3 but accounts for 2" in lost.faults[0]
    invented = balance([], before, ServiceBooks(2, {"COMPLETED": 2}, 0, 0))
    assert any(fault.startswith("completed:") for fault in invented.faults)
    held = balance([], before, ServiceBooks(1, {}, 1, 0))
    assert any("still holds" in fault for fault in held.faults)
