"""Laws of the LAPS policies with a window: passes of one class, W and D as printed and as the slides say."""

from __future__ import annotations

from itertools import pairwise

import pytest
from helpers import GPU_COST, PACKED, RECTANGULAR, dispatches, instance, request, simulate, spec, tracked
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.simulated import SimulatedModel
from service.core.policy import Instance, PassPlan, Wait
from service.core.settings import SchedulerSettings
from service.core.types import Lane, Outcome, Reason, Request, Role
from service.core.wait_depth import Go, Hold
from service.policies import make_controller, make_scheduler
from service.policies.laps_common import Batch, LapsPolicy
from service.policies.laps_printed import PrintedKnobs, PrintedWindow
from service.policies.laps_printed import make_policy as printed
from service.policies.laps_slides import SlidesKnobs, SlidesWindow
from service.policies.laps_slides import make_policy as slides
from service.sim.kernel import SimResult, run

ENGINES = {
    "packed": spec(cost=GPU_COST, profiles=PACKED),
    "rectangular": spec(cost=GPU_COST, profiles=RECTANGULAR),
}
LOADS = st.lists(st.tuples(st.floats(0.0, 2.0), st.integers(1, 3000)), min_size=1, max_size=25)
KNOBS = SchedulerSettings()


def arrivals_of(drawn: list[tuple[float, int]]) -> list[Request]:
    return [request(f"r{i}", prompt, at_s, max_new_tokens=1) for i, (at_s, prompt) in enumerate(drawn)]


def is_short(result: SimResult, request_id: str) -> bool:
    return result.records[request_id].request.prompt_tokens <= 256


# --- passes ---


@pytest.mark.parametrize("policy", ["laps_printed", "laps_slides", "laps_slides:latency_first=0"])
@pytest.mark.parametrize("name", sorted(ENGINES))
@settings(max_examples=20)
@given(drawn=LOADS)
def test_a_pass_is_of_one_class(name: str, policy: str, drawn: list[tuple[float, int]]) -> None:
    """Shorts whole and together, or one long request by at most C_l tokens; the classes take turns while both
    wait, so no long chunk follows another while a short has waited since before the first."""
    chunk = 512
    separator = "," if ":" in policy else ":"
    result, _ = simulate(
        arrivals_of(drawn), policy=f"{policy}{separator}chunk_tokens={chunk}", on=ENGINES[name]
    )
    passes = dispatches(result)
    for _, command in passes:
        classes = {is_short(result, item.request_id) for item in command.pass_.items}
        assert len(classes) == 1
        if classes == {False}:
            (item,) = command.pass_.items
            assert item.new_tokens <= chunk
    for (first_s, first), (second_s, second) in pairwise(passes):
        if not is_short(result, second.pass_.items[0].request_id):
            overtaken = [
                r
                for r in result.records.values()
                if is_short(result, r.request.request_id)
                and r.request.arrival_s < first_s
                and (r.first_token_s or 0.0) > second_s
            ]
            assert not overtaken or is_short(result, first.pass_.items[0].request_id)
    assert {r.outcome for r in result.records.values()} == {Outcome.COMPLETED}


def policies() -> list[LapsPolicy]:
    return [printed(KNOBS, PrintedKnobs()), slides(KNOBS, SlidesKnobs())]


def started(policy: LapsPolicy, **roles: Role) -> dict[str, Instance]:
    made = {name: instance(instance_id=name) for name in roles}
    for name, role in roles.items():
        made[name].role = role
        policy.instance_up(made[name], 0.0)
    return made


@pytest.mark.parametrize("policy", policies())
def test_roles_are_a_wall(policy: LapsPolicy) -> None:
    """SP runs shorts only and LP longs only, however much of the other class waits."""
    at = started(policy, sp=Role.SP, lp=Role.LP)
    policy.add(tracked("short", 100, seq=0), 0.0, arrival=True)
    assert policy.plan(at["lp"], 1.0) is None
    policy.add(tracked("long", 1000, seq=1, lane=Lane.LONG), 0.0, arrival=True)
    policy.plan(at["sp"], 1.0)
    for name, expected in (("sp", "short"), ("lp", "long")):
        plan = policy.plan(at[name], 2.0)
        assert isinstance(plan, PassPlan)
        assert [item.tracked.request_id for item in plan.items] == [expected]


@pytest.mark.parametrize("policy", policies())
def test_a_class_without_instances_is_served_by_all(policy: LapsPolicy) -> None:
    """Nobody waits for a pool that is gone."""
    at = started(policy, sp=Role.SP, lp=Role.LP)
    policy.add(tracked("long", 1000, seq=0, lane=Lane.LONG), 0.0, arrival=True)
    assert policy.plan(at["sp"], 1.0) is None
    policy.instance_down(at["lp"], 1.0)
    assert isinstance(policy.plan(at["sp"], 1.0), PassPlan)


@pytest.mark.parametrize("policy", policies())
def test_what_was_begun_is_finished_after_a_change_of_roles(policy: LapsPolicy) -> None:
    """A long prompt in parts goes on where its KV is, also when that instance now serves shorts."""
    at = started(policy, a=Role.LP, b=Role.LP)
    part = tracked("long", 3000, seq=0, lane=Lane.LONG)
    part.instance_id, part.position = "a", 2048
    policy.add(part, 0.0, arrival=False)
    at["a"].role = Role.SP
    plan = policy.plan(at["a"], 1.0)
    assert isinstance(plan, PassPlan)
    assert plan.reason is Reason.LONG_CHUNK


def test_one_long_request_at_a_time() -> None:
    """The next long request begins when the one before it is done."""
    result, _ = simulate(arrivals_of([(0.0, 3000), (0.0, 2500), (0.0, 2700)]), policy="laps_slides")
    order = [command.pass_.items[0].request_id for _, command in dispatches(result)]
    assert order == ["r0", "r0", "r1", "r1", "r2", "r2"]


def test_the_boundary_is_a_knob() -> None:
    """threshold_tokens=0 takes L_m of the cost model: about 211 tokens here, so 230 are long."""
    boundary = GPU_COST.boundary_tokens()
    assert 128 < boundary < 230
    for threshold, lane in ((256, Lane.SHORT), (0, Lane.LONG)):
        result, _ = simulate(arrivals_of([(0.0, 230)]), policy=f"laps_printed:threshold_tokens={threshold}")
        ((_, command),) = dispatches(result)
        assert (command.reason is Reason.LONG_CHUNK) is (lane is Lane.LONG)


def test_grouping_on_a_grid() -> None:
    """The example of the slides, 29, 47, 13 and 58 tokens: latency_first pads one batch, memory_first runs
    one bucket at a time, the head's first."""
    drawn = [(0.0, 29), (0.0, 47), (0.0, 13), (0.0, 58)]
    lengths: list[list[list[int]]] = []
    for latency_first in (1, 0):
        policy = f"laps_slides:latency_first={latency_first}"
        result, _ = simulate(arrivals_of(drawn), policy=policy, on=ENGINES["rectangular"])
        lengths.append([[i.new_tokens for i in c.pass_.items] for _, c in dispatches(result)])
    one, several = lengths
    assert [sorted(batch) for batch in one] == [[13, 29, 47, 58]]
    assert several == [[29], [47, 58], [13]]


@settings(max_examples=15, deadline=None)
@given(drawn=LOADS, count=st.integers(2, 4), policy=st.sampled_from(["laps_printed", "laps_slides"]))
def test_pools_work_with_their_controller(drawn: list[tuple[float, int]], count: int, policy: str) -> None:
    """With pools formed and moved by the controller everything is answered, in passes of one class."""
    one = ENGINES["packed"]
    made = [(spec(f"i{n}"), SimulatedModel(one.capabilities, one.profiles, one.cost)) for n in range(count)]
    knobs = SchedulerSettings()
    rows = sorted(((8.0 * r.arrival_s, r) for r in arrivals_of(drawn)), key=lambda row: row[0])
    timed = [(at_s, request(r.request_id, r.prompt_tokens, at_s, max_new_tokens=1)) for at_s, r in rows]
    result = run(make_scheduler(policy, knobs), made, timed, controller=make_controller(policy, knobs))
    assert {r.outcome for r in result.records.values()} == {Outcome.COMPLETED}
    for _, command in dispatches(result):
        assert len({is_short(result, item.request_id) for item in command.pass_.items}) == 1


# --- W and D ---

BATCHES = st.lists(
    st.tuples(st.integers(1, 64), st.floats(0.0, 0.02), st.floats(-0.1, 1.0)), min_size=1, max_size=30
)


def batch(depth: int, due_s: float = 1e9, queued: int | None = None, since_s: float = 0.0) -> Batch:
    return Batch(depth, 0.02, due_s, depth if queued is None else queued, since_s)


@given(drawn=BATCHES)
def test_printed_depth_only_shrinks(drawn: list[tuple[int, float, float]]) -> None:
    """D is the smallest depth so far; W lies in its bounds and changes with full batches only."""
    window, now_s, smallest = PrintedWindow(KNOBS, 64), 0.0, 64
    for depth, took_s, slack_s in drawn:
        fits = min(depth, window.depth_max)
        before = window.window_s
        window.open(now_s)
        decision = window.decide(batch(fits, now_s + 0.02 + slack_s), now_s)
        if isinstance(decision, Hold):
            assert decision.until_s > now_s
            before = window.window_s  # the first W is set by the first batch
            now_s = min(decision.until_s, now_s + took_s)
        window.dispatched(fits, now_s)
        smallest = min(smallest, fits)
        assert window.depth_max == smallest
        assert KNOBS.window_s_min <= window.window_s <= KNOBS.window_s_max
        assert fits == smallest or window.window_s == before


def test_printed_window_collapses_after_one_lone_request() -> None:
    """The weak point: one batch of one that ran out of time, and every later batch is a single request."""
    drawn = [(0.0, 50), *[(1.0, 50)] * 10]
    result, _ = simulate(arrivals_of(drawn), policy="laps_printed")
    assert [len(command.pass_.items) for _, command in dispatches(result)] == [1] * 11
    result, _ = simulate(arrivals_of(drawn), policy="laps_slides")
    assert len(dispatches(result)) < 5


@pytest.mark.parametrize("make", [PrintedWindow, SlidesWindow])
def test_when_a_batch_goes(make: type[PrintedWindow] | type[SlidesWindow]) -> None:
    """At once with full depth or no slack; else it waits for W, or until its slack falls to sigma."""
    assert make(KNOBS, 4).decide(batch(4), 0.0) == Go(Reason.DEPTH_REACHED)
    late = batch(1, due_s=0.02 + KNOBS.sigma_s - 1e-6)
    assert make(KNOBS, 4).decide(late, 0.0) == Go(Reason.SLACK_OUT)
    tight = batch(1, due_s=0.02 + KNOBS.sigma_s + 0.001)
    assert make(KNOBS, 4).decide(tight, 0.0) == Hold(pytest.approx(0.001))
    window = make(KNOBS, 4)
    window.open(0.0)
    assert window.decide(batch(1), 0.0) == Hold(KNOBS.window_s_max)
    assert isinstance(window.decide(batch(2), 0.004), Hold)
    assert window.decide(batch(2), KNOBS.window_s_max) == Go(Reason.WINDOW_OVER)


def test_printed_full_batches_set_the_window() -> None:
    """W becomes the time that a full batch took to gather."""
    window = PrintedWindow(KNOBS, 4)
    window.open(0.0)
    window.decide(batch(1), 0.0)
    assert window.decide(batch(4), 0.003) == Go(Reason.DEPTH_REACHED)
    window.dispatched(4, 0.003)
    assert window.window_s == pytest.approx(0.003)


def test_printed_full_batches_set_the_window_of_the_next() -> None:
    """On a grid of 8 rows: 8 requests in 3.5 ms go when the last is there, and the next one waits as long."""
    drawn = [*((0.0005 * n, 50) for n in range(8)), (1.0, 50)]
    result, _ = simulate(arrivals_of(drawn), policy="laps_printed", on=ENGINES["rectangular"])
    assert [now_s for now_s, _ in dispatches(result)] == pytest.approx([0.0035, 1.0035])


def test_slides_depth_follows_the_rate() -> None:
    """D falls to 1 in a quiet time and is back at what W_max gathers when arrivals are."""
    window = SlidesWindow(KNOBS, 64)
    window.arrived(0.0)
    window.dispatched(1, 0.0)
    assert window.depth == 1
    for n in range(4000):
        window.arrived(10.0 + n / 1000.0)
    window.dispatched(8, 14.0)
    assert window.depth == pytest.approx(1000 * KNOBS.window_s_max, abs=1)


def test_slides_window_is_the_time_to_depth() -> None:
    """W = (D - waiting) / rate where that is shorter than the slack: 8 missing at 2000/s take 4 ms."""
    window = SlidesWindow(KNOBS, 64)
    for n in range(8000):
        window.arrived(n / 2000.0)
    window.dispatched(1, 4.0)
    window.open(4.0)
    missing = window.depth - 8
    hold = window.decide(batch(8, since_s=4.0), 4.0)
    assert isinstance(hold, Hold)
    assert hold.until_s - 4.0 == pytest.approx(missing / 2000.0, rel=0.05)


def test_slides_head_waits_no_longer_than_t_max() -> None:
    knobs = SchedulerSettings(window_s_max=1.0)
    window = SlidesWindow(knobs, 64)
    assert window.decide(batch(1, since_s=0.0), 0.001) == Hold(knobs.head_wait_s_max)
    assert window.decide(batch(1, since_s=0.0), knobs.head_wait_s_max) == Go(Reason.HEAD_WAITED)


def test_an_idle_fleet_gathers_one_batch() -> None:
    """While the window is open no instance takes the requests; when it is over, the first does."""
    policy = printed(KNOBS, PrintedKnobs())
    at = started(policy, a=Role.SP, b=Role.SP)
    policy.add(tracked("r0", 100, seq=0), 0.0, arrival=True)
    waits = [policy.plan(at[name], 0.0) for name in ("a", "b")]
    assert all(isinstance(w, Wait) and w.until_s == KNOBS.window_s_max for w in waits)
    policy.add(tracked("r1", 100, seq=1), 0.001, arrival=True)
    plan = policy.plan(at["a"], KNOBS.window_s_max)
    assert isinstance(plan, PassPlan)
    assert len(plan.items) == 2
