"""Laws of layered prefill: batches in arrival order, in groups of layers, one after the other."""

from __future__ import annotations

import pytest
from helpers import CPU_COST, GPU_COST, PACKED, dispatches, ids_of, request, simulate, spec
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.profiles import Profiles
from engines.simulated import SimulatedModel
from engines.types import Layout, Padding, Pass, PassKind
from service.core.settings import SchedulerSettings
from service.core.types import Outcome, Request
from service.policies import make_scheduler
from service.sim.kernel import SimResult, run

LARGE = Profiles(Layout.PACKED, Padding.NOTHING, (512, 1024, 2048, 4096, 8192))
IN_LAYERS = spec(cost=GPU_COST, profiles=LARGE, context=16_384, blocks=2000, layer_blocks=64)
WHOLE = spec(cost=GPU_COST, profiles=LARGE, context=16_384, blocks=2000)
LOADS = st.lists(st.tuples(st.floats(0.0, 2.0), st.integers(1, 6000)), min_size=1, max_size=20)
ROOMY = SchedulerSettings(queue_requests_max=10_000)


def passes(result: SimResult) -> list[Pass]:
    return [command.pass_ for _, command in dispatches(result)]


def arrivals_of(drawn: list[tuple[float, int]]) -> list[Request]:
    return [request(f"r{i}", prompt, at_s, max_new_tokens=1) for i, (at_s, prompt) in enumerate(drawn)]


@pytest.mark.parametrize(
    ("tokens", "stages"),
    [(1, 1), (512, 1), (513, 2), (1024, 2), (1025, 4), (2049, 8), (4096, 8), (4097, 16), (8192, 16)],
)
def test_stages_as_published(tokens: int, stages: int) -> None:
    result, _ = simulate([request("r", tokens, 0.0, max_new_tokens=1)], policy="layered", on=IN_LAYERS)
    assert [(p.layer_block, p.layer_blocks) for p in passes(result)] == [(n, stages) for n in range(stages)]
    assert result.records["r"].ttft_s == pytest.approx(GPU_COST.request_s(tokens)), "weights are read once"


@settings(max_examples=40)
@given(drawn=LOADS, batch=st.sampled_from([1024, 8192]))
def test_one_batch_after_the_other(drawn: list[tuple[float, int]], batch: int) -> None:
    """A batch is taken in arrival order when the one before it is through, fills its budget while anybody
    waits, and only its last prompt is cut."""
    arrivals = arrivals_of(drawn)
    result, _ = simulate(arrivals, policy=f"layered:batch_tokens={batch}", on=IN_LAYERS, knobs=ROOMY)
    order = [r.request_id for r in sorted(arrivals, key=lambda r: r.arrival_s)]
    begun: list[str] = []
    under_way: list[str] | None = None
    for now_s, command in dispatches(result):
        pass_, names = command.pass_, ids_of(command)
        assert under_way in (None, names), "another batch before this one was through"
        under_way = None if pass_.completes else names
        if pass_.layer_block > 0:
            continue
        assert pass_.tokens <= batch
        begun += [name for name in names if name not in begun]
        cut = [
            i.request_id
            for i in pass_.items
            if i.history + i.new_tokens < result.records[i.request_id].request.prompt_tokens
        ]
        assert cut in ([], names[-1:])
        waiting = [r for r in arrivals if r.request_id not in begun and r.arrival_s < now_s]
        assert pass_.tokens == batch or not waiting or len(names) == IN_LAYERS.capabilities.requests_max
    assert begun == order
    assert {r.outcome for r in result.records.values()} == {Outcome.COMPLETED}


def test_a_short_behind_a_long_gains_nothing() -> None:
    """As published: what arrives while a batch goes through waits for all of it."""
    arrivals = [request("long", 6000, 0.0, max_new_tokens=1), request("short", 20, 0.05, max_new_tokens=1)]
    result, _ = simulate(arrivals, policy="layered", on=IN_LAYERS)
    assert ids_of(dispatches(result)[-1][1]) == ["short"]
    assert (result.records["short"].ttft_s or 0.0) > GPU_COST.request_s(6000) - 0.05


def test_decode_goes_on_between_groups() -> None:
    """While a long batch goes through, answers get their next token between its groups."""
    talks = request("talks", 20, 0.0, max_new_tokens=40)
    long = request("long", 6000, 0.1, max_new_tokens=1)
    result, _ = simulate([talks, long], policy="layered", on=IN_LAYERS)
    times = [now_s for now_s, command in dispatches(result) if "long" in ids_of(command)]
    steps = [now_s for now_s, _ in dispatches(result, PassKind.DECODE)]
    assert any(times[0] < now_s < times[-1] for now_s in steps)


@settings(max_examples=30)
@given(drawn=LOADS, cancels=st.lists(st.tuples(st.floats(0.0, 9.0), st.integers(0, 19)), max_size=5))
def test_everything_is_finished_whatever_is_cancelled(
    drawn: list[tuple[float, int]], cancels: list[tuple[float, int]]
) -> None:
    """The simulated engine refuses a group out of order or of other sizes; nobody is left in between."""
    scheduler = make_scheduler("layered", ROOMY)
    model = SimulatedModel(IN_LAYERS.capabilities, IN_LAYERS.profiles, IN_LAYERS.cost)
    arrivals = sorted(arrivals_of(drawn), key=lambda r: r.arrival_s)
    at = sorted((at_s, f"r{n}") for at_s, n in cancels)
    result = run(scheduler, [(IN_LAYERS, model)], [(r.arrival_s, r) for r in arrivals], cancels=at)
    model.check()
    assert {r.outcome for r in result.records.values()} <= {Outcome.COMPLETED, Outcome.CANCELLED}
    assert model.stats().requests_live == 0


@pytest.mark.parametrize("cost", [GPU_COST, CPU_COST], ids=["gpu", "cpu"])
def test_an_engine_that_runs_whole_passes_gets_chunks(cost: object) -> None:
    """Without groups of layers: chunked prefill of `stage_tokens`, which the paper compares with."""
    on = spec(cost=cost, profiles=PACKED)  # type: ignore[arg-type]
    result, _ = simulate([request("r", 2000, 0.0, max_new_tokens=1)], policy="layered", on=on)
    assert [p.tokens for p in passes(result)] == [512, 512, 512, 464]
