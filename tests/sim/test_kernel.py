"""The kernel's own promises. That it agrees with the runtime is tested in tests/parity."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.simulated import SimulatedModel
from engines.simulated_settings import h200_32b_like, small_cpu_like
from service.core.reconcile import FleetView, MoveReason, RoleMove
from service.core.scheduler import PrefillScheduler
from service.core.settings import SchedulerSettings
from service.core.types import (
    Command,
    InstanceSpec,
    Lane,
    Outcome,
    PassFinished,
    PassStarted,
    Reason,
    Request,
    Role,
    RoleChanged,
    WaitUntil,
)
from service.policies import make_scheduler
from service.sim.kernel import SimInstance, SimRecord, SimResult, run
from service.sim.result import GapHistogram
from service.sim.workload import Arrival

Arrivals = list[tuple[float, int, int]]  # gap in seconds, prompt tokens, answer tokens

arrivals = st.lists(
    st.tuples(st.floats(0.0, 0.2), st.integers(1, 3000), st.integers(1, 4)), min_size=1, max_size=12
)


def simulate(load: Arrivals, until_s: float = math.inf, policy: str = "plaserve") -> SimResult:
    capabilities, profiles, cost = small_cpu_like()
    model = SimulatedModel(capabilities, profiles, cost)
    requests: list[tuple[float, Request]] = []
    now_s = 0.0
    for index, (gap_s, prompt_tokens, answer_tokens) in enumerate(load):
        now_s += gap_s
        requests.append((now_s, Request(f"r{index}", prompt_tokens, answer_tokens, now_s)))
    spec = InstanceSpec("i0", capabilities, profiles, cost)
    result = run(make_scheduler(policy, SchedulerSettings()), [(spec, model)], requests, until_s=until_s)
    model.check()
    return result


@settings(max_examples=40, deadline=None)
@given(arrivals, st.sampled_from(["plaserve", "fcfs"]))
def test_everything_is_served_in_causal_order(load: Arrivals, policy: str) -> None:
    result = simulate(load, policy=policy)
    times = [now_s for now_s, _ in result.log]
    assert times == sorted(times)
    for index, (_, prompt_tokens, answer_tokens) in enumerate(load):
        record = result.records[f"r{index}"]
        assert record.outcome is Outcome.COMPLETED
        assert record.new_tokens + record.history_tokens == prompt_tokens
        assert record.output_tokens == answer_tokens
        assert record.first_token_s is not None
        assert record.last_token_s is not None
        assert record.request.arrival_s < record.first_token_s <= record.last_token_s == record.end_s


@settings(max_examples=40, deadline=None)
@given(arrivals)
def test_an_instance_runs_one_pass_at_a_time_for_as_long_as_it_takes(load: Arrivals) -> None:
    running: tuple[float, int] | None = None
    for now_s, entry in simulate(load).log:
        if isinstance(entry, PassStarted):
            assert running is None
            running = (now_s, entry.pass_id)
        elif isinstance(entry, PassFinished):
            assert running is not None
            assert running[1] == entry.result.pass_id
            assert now_s == running[0] + entry.result.elapsed_s
            running = None
    assert running is None


@settings(max_examples=40, deadline=None)
@given(arrivals, st.floats(0.0, 3.0))
def test_stopping_early_gives_the_beginning_of_the_whole(load: Arrivals, until_s: float) -> None:
    part, whole = simulate(load, until_s), simulate(load)
    assert part.log == whole.log[: len(part.log)]
    assert all(now_s > until_s for now_s, _ in whole.log[len(part.log) :])


class Spinning(PrefillScheduler):
    """Asks to be polled at a moment that is always over."""

    def poll(self, now_s: float) -> tuple[Command, ...]:
        return (WaitUntil(now_s, Reason.WAITING_FOR_DEPTH),)


def test_a_core_that_spins_is_stopped() -> None:
    capabilities, profiles, cost = h200_32b_like()
    policy = make_scheduler("fcfs", SchedulerSettings()).policy
    instance = (
        InstanceSpec("i0", capabilities, profiles, cost),
        SimulatedModel(capabilities, profiles, cost),
    )
    with pytest.raises(RuntimeError, match="spins"):
        run(Spinning(SchedulerSettings(), policy), [instance], [])


def test_an_id_that_comes_twice_is_refused() -> None:
    scheduler = make_scheduler("fcfs", SchedulerSettings())
    request = Request("r", 10, 1, 0.0)
    with pytest.raises(ValueError, match="comes twice"):
        run(scheduler, [], [(0.0, request), (1.0, request)])


def test_arrivals_out_of_order_are_refused() -> None:
    scheduler = make_scheduler("fcfs", SchedulerSettings())
    with pytest.raises(ValueError, match="sort them"):
        run(scheduler, [], [(1.0, Request("a", 10, 1, 1.0)), (0.5, Request("b", 10, 1, 0.5))])


# --- sources ---


def instance(name: str = "i0") -> SimInstance:
    return SimInstance(InstanceSpec(name, *small_cpu_like()))


class Clients:
    """A closed loop: each client sends its next request `think_s` after the one before ended."""

    def __init__(self, clients: int, turns: int, think_s: float = 0.0, delay_s: float = 0.0) -> None:
        self._first = iter(range(clients))
        self._turns = turns
        self._think_s = think_s
        self._delay_s = delay_s  # below 0: asks for the past
        self.live: set[str] = set()
        self.most_live = 0
        self.ends: dict[str, float] = {}

    def next_arrival(self) -> Arrival | None:
        client = next(self._first, None)
        return None if client is None else self._send(client, 0, 0.0)

    def ended(self, request: Request, now_s: float) -> Iterable[Arrival]:
        self.live.remove(request.request_id)
        self.ends[request.request_id] = now_s
        client, turn = map(int, request.request_id.split("."))
        if turn + 1 < self._turns:
            yield self._send(client, turn + 1, now_s + self._think_s + self._delay_s)

    def _send(self, client: int, turn: int, at_s: float) -> Arrival:
        request = Request(f"{client}.{turn}", 40 + 300 * (client % 3), 1 + turn % 2, at_s)
        self.live.add(request.request_id)
        self.most_live = max(self.most_live, len(self.live))
        return Arrival(request, Lane.SHORT)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.sampled_from([0.0, 0.01, 0.5]))
def test_a_closed_loop_has_its_concurrency_and_no_more(clients: int, turns: int, think_s: float) -> None:
    source = Clients(clients, turns, think_s)
    result = run(make_scheduler("plaserve", SchedulerSettings()), [instance()], source)
    assert len(result.records) == result.submitted == clients * turns
    assert source.most_live == clients
    assert {r.outcome for r in result.records.values()} == {Outcome.COMPLETED}
    for name, record in result.records.items():
        client, turn = map(int, name.split("."))
        assert record.end_s == source.ends[name]
        if turn:
            assert record.request.arrival_s == source.ends[f"{client}.{turn - 1}"] + think_s


def test_an_answer_in_the_past_is_refused() -> None:
    with pytest.raises(ValueError, match=r"before 0\.0 ended"):
        run(make_scheduler("fcfs", SchedulerSettings()), [instance()], Clients(1, 2, delay_s=-0.001))


def test_a_refused_client_may_come_again() -> None:
    """A source hears of refusals too, whatever the cause."""
    source = Clients(3, 4, think_s=0.1)
    result = run(make_scheduler("fcfs", SchedulerSettings(queue_requests_max=1)), [instance()], source)
    assert len(result.records) == 12
    refused = [r for r in result.records.values() if r.outcome is Outcome.REJECTED_CAPACITY]
    assert refused
    assert all(r.reason is Reason.QUEUE_COUNT and r.first_pass_s is None for r in refused)


def test_arrivals_are_read_one_ahead() -> None:
    """A run over an endless stream ends at its horizon, having read no further."""
    read = 0

    def endless() -> Iterator[tuple[float, Request]]:
        nonlocal read
        while True:
            read += 1
            yield read * 0.1, Request(f"r{read}", 20, 1, read * 0.1)

    result = run(make_scheduler("fcfs", SchedulerSettings()), [instance()], endless(), until_s=10.05)
    assert result.submitted == 100
    assert read == 101


def test_lanes_of_records_are_those_of_the_report() -> None:
    given_lane = run(make_scheduler("fcfs", SchedulerSettings()), [instance()], Clients(2, 1))
    assert {r.lane for r in given_lane.records.values()} == {Lane.SHORT}, "as the source says"
    by_length = simulate([(0.0, 256, 1), (0.0, 257, 1)])
    assert [r.lane for r in by_length.records.values()] == [Lane.SHORT, Lane.LONG]


# --- observers ---


class Ends:
    def __init__(self, stop_after: int = 10**9) -> None:
        self.records: list[SimRecord] = []
        self._stop_after = stop_after

    def ended(self, record: SimRecord) -> bool:
        self.records.append(record)
        return len(self.records) >= self._stop_after


def observed(load: Arrivals, observer: Ends, **more: bool) -> SimResult:
    now_s, requests = 0.0, []
    for index, (gap_s, prompt_tokens, answer_tokens) in enumerate(load):
        now_s += gap_s
        requests.append((now_s, Request(f"r{index}", prompt_tokens, answer_tokens, now_s)))
    knobs = SchedulerSettings(queue_requests_max=6)  # so that some are refused
    return run(make_scheduler("plaserve", knobs), [instance()], requests, observer=observer, **more)


@settings(max_examples=30, deadline=None)
@given(arrivals)
def test_the_observer_hears_of_every_end_once(load: Arrivals) -> None:
    """What it hears are the records; without records it hears the same, and nothing is kept."""
    kept, streamed = Ends(), Ends()
    with_records = observed(load, kept)
    without = observed(load, streamed, keep_records=False, keep_log=False)
    assert {r.request.request_id: r for r in kept.records} == with_records.records
    assert all(r.outcome is not None and r.end_s is not None for r in kept.records)
    assert streamed.records == kept.records
    assert [r.end_s for r in kept.records] == sorted(r.end_s or 0.0 for r in kept.records)
    assert not without.records
    assert not without.log
    assert (without.instances, without.itl, without.end_s) == (
        with_records.instances,
        with_records.itl,
        with_records.end_s,
    )


@settings(max_examples=30, deadline=None)
@given(arrivals, st.integers(1, 8))
def test_an_observer_can_stop_the_run(load: Arrivals, count: int) -> None:
    """The run ends at the instant of that end, and is the beginning of the whole."""
    whole, stopped = observed(load, Ends()), observed(load, Ends(count))
    assert stopped.stopped == (len(load) >= count)
    assert not whole.stopped
    assert stopped.log == whole.log[: len(stopped.log)]
    assert all(now_s > stopped.end_s for now_s, _ in whole.log[len(stopped.log) :])


# --- controllers and samples ---


class Mover:
    """Makes i0 an SP instance at the second look and mixed again at the fourth."""

    period_s = 0.25

    def __init__(self) -> None:
        self.looks: list[tuple[float, FleetView]] = []

    def step(self, fleet: FleetView, now_s: float) -> tuple[RoleMove, ...]:
        self.looks.append((now_s, fleet))
        role = {2: Role.SP, 4: Role.MIXED}.get(len(self.looks))
        return (RoleMove("i0", role, MoveReason.PINNED),) if role else ()


def test_a_controller_is_asked_each_period_and_its_moves_are_carried_out() -> None:
    mover = Mover()
    requests = [(0.1 * n, Request(f"r{n}", 200, 2, 0.1 * n)) for n in range(20)]
    scheduler = make_scheduler("plaserve", SchedulerSettings())
    result = run(scheduler, [instance(), instance("i1")], requests, controller=mover)
    assert [now_s for now_s, _ in mover.looks] == [0.25 * n for n in range(1, len(mover.looks) + 1)]
    assert mover.looks[-1][0] >= result.end_s - 0.25, "to the end"
    assert mover.looks[-1][0] <= result.end_s, "and no longer"
    moved = [(now_s, entry.role) for now_s, entry in result.log if isinstance(entry, RoleChanged)]
    assert moved == [(0.5, Role.SP), (1.0, Role.MIXED)]
    assert [(now_s, move.role) for now_s, move in result.role_moves] == moved
    seen = [{load.instance_id: load.role for load in view.instances}["i0"] for _, view in mover.looks]
    assert seen[:5] == [Role.MIXED, Role.MIXED, Role.SP, Role.SP, Role.MIXED]
    assert sum(view.arrivals for _, view in mover.looks) <= 20


def test_ticks_do_not_keep_a_run_alive() -> None:
    result = run(
        make_scheduler("plaserve", SchedulerSettings()),
        [instance()],
        [(0.0, Request("r", 20, 1, 0.0))],
        controller=Mover(),
        sample_s=0.001,
    )
    assert result.end_s == result.records["r"].end_s


@settings(max_examples=20, deadline=None)
@given(arrivals, st.sampled_from([0.01, 0.13]))
def test_samples_change_nothing_and_are_all_of_a_length(load: Arrivals, sample_s: float) -> None:
    plain = simulate(load)
    now_s, requests = 0.0, []
    for index, (gap_s, prompt_tokens, answer_tokens) in enumerate(load):
        now_s += gap_s
        requests.append((now_s, Request(f"r{index}", prompt_tokens, answer_tokens, now_s)))
    scheduler = make_scheduler("plaserve", SchedulerSettings())
    sampled = run(scheduler, [instance()], requests, sample_s=sample_s)
    assert plain.samples is None
    assert (sampled.log, sampled.records) == (plain.log, plain.records)
    samples = sampled.samples
    assert samples is not None
    columns = [np.asarray(getattr(samples, name)) for name in type(samples).__slots__]
    assert {len(column) for column in columns} == {len(samples.time_s)}
    assert all(samples.mixed[n] == 1 for n in range(len(samples.time_s)))
    assert np.allclose(np.diff(samples.time_s), sample_s)


@pytest.mark.parametrize("period_s", [0.0, -1.0, math.nan, math.inf])
def test_a_period_that_never_comes_round_is_refused(period_s: float) -> None:
    with pytest.raises(ValueError, match="period"):
        run(make_scheduler("fcfs", SchedulerSettings()), [instance()], [], sample_s=period_s)


# --- gaps between tokens ---


@given(st.lists(st.floats(1e-5, 100.0), min_size=1, max_size=60), st.sampled_from([0.01, 0.5, 0.9, 0.99]))
def test_quantiles_of_gaps_are_right_to_a_percent(gaps: list[float], share: float) -> None:
    histogram = GapHistogram()
    for gap_s in gaps:
        histogram.add(gap_s)
    exact = np.quantile(gaps, share, method="inverted_cdf")
    assert histogram.quantile_s(share) == pytest.approx(exact, rel=0.0101)
    assert histogram.mean_s == pytest.approx(np.mean(gaps))
    assert histogram.max_s == max(gaps)


def test_no_gaps_no_quantile() -> None:
    assert GapHistogram().quantile_s(0.5) is None
    assert GapHistogram().mean_s is None


def test_a_cancel_in_the_instant_of_the_last_token_is_answered_once() -> None:
    """The core has ended the request before it hears of the token: one answer, no token, one end heard."""
    requests = [(0.0, Request("r", 20, 1, 0.0))]
    alone = run(make_scheduler("fcfs", SchedulerSettings()), [instance()], requests)
    end_s = alone.records["r"].end_s
    assert end_s is not None
    ends, scheduler = Ends(), make_scheduler("fcfs", SchedulerSettings())
    result = run(scheduler, [instance()], requests, cancels=[(end_s, "r")], observer=ends)
    assert [record.outcome for record in ends.records] == [Outcome.CANCELLED]
    assert result.records["r"].output_tokens == 0
    assert scheduler.outcomes == {Outcome.CANCELLED: 1}
