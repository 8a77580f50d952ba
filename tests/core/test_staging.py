"""Laws of staging: a pass waits on the worker, an urgent short takes it back, decode keeps its turn."""

from __future__ import annotations

from itertools import pairwise

import pytest
from helpers import CPU_COST, dispatches, ids_of, request, simulate, spec
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.profiles import Profiles
from engines.types import ItemResult, Layout, Padding, PassKind, PassResult
from service.core.lifecycle import RequestState
from service.core.settings import SchedulerSettings
from service.core.types import (
    Command,
    Dispatch,
    InstanceUp,
    Outcome,
    PassFinished,
    PassRevoked,
    PassStarted,
    Reason,
    Request,
    Revoke,
    Submit,
)
from service.policies import make_scheduler
from service.sim.kernel import SimResult

LEAD_S = 0.05
STAGING = SchedulerSettings(stage_lead_s=LEAD_S)
PLAIN = Profiles(Layout.PACKED, Padding.NOTHING, (64, 128, 256, 512, 1024))
ENGINE = spec(cost=CPU_COST, profiles=PLAIN)


def times_of(result: SimResult, kind: type) -> dict[int, float]:
    """pass id -> time of its event of that kind."""
    found: dict[int, float] = {}
    for now_s, entry in result.log:
        if isinstance(entry, kind):
            pass_id = entry.result.pass_id if isinstance(entry, PassFinished) else entry.pass_id  # type: ignore[attr-defined]
            assert pass_id not in found, "a pass started, ended or was revoked twice"
            found[pass_id] = now_s
    return found


def with_urgent_short() -> tuple[SimResult, list[Request]]:
    """Two longs in chunks; at 20 ms before the end of the first chunk a short comes that can't wait for the
    second."""
    longs = [request(f"l{i}", 900, 0.0, max_new_tokens=1) for i in range(2)]
    probe, _ = simulate(longs, on=ENGINE, knobs=STAGING)
    first_end_s = min(times_of(probe, PassFinished).values())
    urgent = request("urgent", 20, first_end_s - 0.02, max_new_tokens=1, ttft_target_s=0.06)
    result, _ = simulate([*longs, urgent], on=ENGINE, knobs=STAGING)
    return result, [*longs, urgent]


def test_an_urgent_short_revokes_and_the_others_run_later() -> None:
    """The staged pass is taken back, the short makes its target, and nobody is lost."""
    result, arrivals = with_urgent_short()
    revokes = [entry for _, entry in result.log if isinstance(entry, Revoke)]
    assert [r.reason for r in revokes] == [Reason.URGENT_ARRIVAL]
    staged = next(c for _, c in dispatches(result) if c.pass_.pass_id == revokes[0].pass_id)
    assert staged.staged
    assert revokes[0].pass_id in times_of(result, PassRevoked)
    assert revokes[0].pass_id not in times_of(result, PassStarted)
    assert (result.records["urgent"].ttft_s or 1e9) <= 0.06
    later = [i for now_s, c in dispatches(result) if c.pass_.pass_id > revokes[0].pass_id for i in ids_of(c)]
    assert set(ids_of(staged)) <= set(later)
    assert all(result.records[r.request_id].outcome is Outcome.COMPLETED for r in arrivals)


def test_without_a_lead_nothing_is_staged() -> None:
    """At the default every pass is chosen when the engine is free, with all that is known by then."""
    result, _ = simulate([request(f"l{i}", 900, 0.0) for i in range(3)], on=ENGINE)
    assert not any(entry.staged for _, entry in result.log if isinstance(entry, Dispatch))


@settings(max_examples=40)
@given(
    drawn=st.lists(
        st.tuples(st.floats(0.0, 1.0), st.integers(1, 1500), st.sampled_from([0.05, 0.2, None])),
        min_size=2,
        max_size=20,
    )
)
def test_every_staged_pass_starts_or_is_revoked_once(drawn: list[tuple[float, int, float | None]]) -> None:
    """A staged pass is sent within the lead before its turn, revoked once at most, and starts or is back."""
    arrivals = [
        request(f"r{i}", prompt, at_s, ttft_target_s=target) for i, (at_s, prompt, target) in enumerate(drawn)
    ]
    result, _ = simulate(arrivals, on=ENGINE, knobs=STAGING)
    starts, ends, revoked = (times_of(result, kind) for kind in (PassStarted, PassFinished, PassRevoked))
    asked = [entry.pass_id for _, entry in result.log if isinstance(entry, Revoke)]
    assert len(asked) == len(set(asked))
    assert set(revoked) <= set(asked)
    for now_s, command in dispatches(result):
        pass_id = command.pass_.pass_id
        assert (pass_id in starts) != (pass_id in revoked)
        if command.staged and pass_id in starts:
            assert starts[pass_id] - now_s <= LEAD_S + 1e-9
    assert set(ends) == set(starts)
    assert {r.outcome for r in result.records.values()} == {Outcome.COMPLETED}


@pytest.mark.parametrize("lead_s", [0.0, LEAD_S])
def test_decode_keeps_its_turn_behind_staged_passes(lead_s: float) -> None:
    """Beside prefill work without end a request has its next token within the ITL bound and one pass."""
    knobs = SchedulerSettings(stage_lead_s=lead_s)
    arrivals = [request("talks", 20, 0.0, max_new_tokens=40)]
    arrivals += [request(f"l{i}", 1000, 0.01, max_new_tokens=1) for i in range(30)]
    result, _ = simulate(arrivals, on=ENGINE, knobs=knobs)
    steps = [now_s for now_s, _ in dispatches(result, PassKind.DECODE)]
    gaps = [later - earlier for earlier, later in pairwise(steps)]
    assert len(steps) == 39
    longest_s = max(command.numbers.predicted_s for _, command in dispatches(result))
    assert max(gaps) <= knobs.itl_bound_s + longest_s
    busy = [now_s for now_s, c in dispatches(result) if ids_of(c) != ["talks"]]
    assert steps[20] < busy[-1], "prefill was over before decode had to fight for its turn"


class Bench:
    """A scheduler with one instance, driven by hand; a pass of prefill takes 0.1 s."""

    def __init__(self) -> None:
        self.scheduler = make_scheduler("plaserve", STAGING)
        self.scheduler.on_event(InstanceUp(ENGINE), 0.0)

    def submit(self, asked: Request) -> list[Command]:
        self.scheduler.on_event(Submit(asked), asked.arrival_s)
        return self.poll(asked.arrival_s)

    def poll(self, now_s: float) -> list[Command]:
        return list(self.scheduler.poll(now_s)[:-1])

    def finish(self, now_s: float) -> list[Command]:
        """The running pass did all that was asked for, and ended no prompt."""
        flight = self.scheduler.instances["i0"].running
        assert flight is not None
        items = tuple(
            ItemResult(i.request_id, i.history + i.new_tokens, i.new_tokens) for i in flight.pass_.items
        )
        result = PassResult(flight.pass_.pass_id, flight.pass_.kind, items, flight.pass_.tokens, 0, 0.1)
        self.scheduler.on_event(PassFinished("i0", result), now_s)
        after = self.scheduler.instances["i0"].running
        if after is not None:
            self.scheduler.on_event(PassStarted("i0", after.pass_.pass_id), now_s)
        return self.poll(now_s)


def staged_part() -> tuple[Bench, float, int]:
    """A bench where the second chunk of `l0` is staged behind a chunk of `l1`; now, and the staged pass."""
    bench = Bench()
    bench.submit(request("l0", 900, 0.0))
    bench.submit(request("l1", 900, 0.0))
    bench.poll(0.1)  # within the lead of the first chunk: l1 is staged
    bench.finish(0.13)
    now_s = bench.scheduler.instances["i0"].running.end_s - 0.02  # type: ignore[union-attr]
    staged = [c for c in bench.poll(now_s) if isinstance(c, Dispatch)]
    assert [(c.staged, ids_of(c)) for c in staged] == [(True, ["l0"])]
    return bench, now_s, staged[0].pass_.pass_id


def test_a_revoked_part_ages_on() -> None:
    """Being revoked is no progress: the wait that counts for ageing goes on from its last pass."""
    bench, now_s, pass_id = staged_part()
    bench.scheduler.on_event(PassRevoked("i0", pass_id), now_s)
    assert bench.scheduler.live["l0"].state is RequestState.PARTIAL
    assert bench.scheduler.live["l0"].waiting_since_s == 0.13


def test_a_pass_is_revoked_once() -> None:
    """While the worker has not answered, a second urgent short asks for nothing more."""
    bench, now_s, pass_id = staged_part()
    urgent = [request(f"u{i}", 20, now_s, ttft_target_s=0.06) for i in range(2)]
    assert [c for c in bench.submit(urgent[0]) if isinstance(c, Revoke)] == [
        Revoke("i0", pass_id, Reason.URGENT_ARRIVAL)
    ]
    assert bench.submit(urgent[1]) == []
