"""Laws of the online correction: bounded, still where the model is right, quick where it is wrong."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from helpers import CLASSED, CPU_COST, GPU_COST, PACKED, RECTANGULAR, request, simulate, spec
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.cost_model import CostModel, PassShape
from engines.models import load_model
from engines.profiles import Profiles
from engines.simulated import SimulatedModel
from engines.simulated_settings import KINDS, engine_setting
from engines.types import ItemResult, Pass, PassItem, PassKind, PassResult, Ran
from service.core.correction import HYSTERESIS, WARM_UP_PASSES, WINDOWS, Corrections
from service.core.policy import Instance
from service.core.scheduler import PrefillScheduler
from service.core.settings import SchedulerSettings
from service.core.types import InstanceSpec
from service.policies import make_scheduler
from service.sim.kernel import SimInstance, run

FACTORS = st.floats(0.6, 1.6)
SEEDS = st.integers(0, 2**32)
SIZES = (16, 32, 64, 120, 256, 600, 1024, 2000)  # below and above the knee


def ran(tokens: int, elapsed_s: float, history: int = 0, **more: object) -> tuple[Pass, PassResult]:
    """A pass of one prompt, all of it computed."""
    pass_ = Pass(1, PassKind.PREFILL, (PassItem("r", tokens, history),))
    items = (ItemResult("r", history + tokens, tokens, token=5),)
    return pass_, replace(PassResult(1, PassKind.PREFILL, items, tokens, history, elapsed_s), **more)


class Rig:
    """Instances of one kind whose engines take what `truth` says, times noise and a factor of their own."""

    def __init__(self, truth: CostModel, *, count: int = 1, most: float = 3.0, seed: int = 0) -> None:
        knobs = SchedulerSettings(cost_correction_max=most)
        self.corrections = Corrections(knobs)
        self.instances = [Instance(spec(f"i{n}"), knobs) for n in range(count)]
        for instance in self.instances:
            self.corrections.joined(instance)
        self.truth = truth
        self.rng = random.Random(seed)
        self.published = 0

    def run(self, passes: int, *, noise: float = 0.0, slow: dict[int, float] | None = None) -> None:
        """Each instance so many passes, in turn, of sizes drawn at random."""
        for _ in range(passes):
            for number, instance in enumerate(self.instances):
                tokens, history = self.rng.choice(SIZES), self.rng.choice((0, 0, 500))
                elapsed_s = self.truth.request_s(tokens, history) * (slow or {}).get(number, 1.0)
                elapsed_s *= 1.0 + self.rng.uniform(-noise, noise)
                if self.corrections.ran(instance, *ran(tokens, elapsed_s, history)):
                    self.published += 1

    @property
    def believed(self) -> CostModel:
        return self.instances[0].pricer.cost

    def worst_error(self) -> float:
        """Of predicted over true time, over all sizes."""
        return max(abs(self.believed.request_s(t) / self.truth.request_s(t) - 1.0) for t in SIZES)


@given(FACTORS, st.integers(1, 9))
@settings(max_examples=30)
def test_a_constant_error_is_gone_after_a_few_passes(factor: float, count: int) -> None:
    """From any error that is the same for all passes, predictions are within 3 % of the truth."""
    rig = Rig(GPU_COST.scaled(factor), count=count)
    rig.run(WARM_UP_PASSES + -(-WINDOWS[-1] // count))
    assert rig.worst_error() <= 0.03
    knee, boundary = rig.instances[0].pricer.knee_tokens, rig.instances[0].boundary_tokens(0)
    assert (knee, boundary) == (
        GPU_COST.knee_tokens(),
        GPU_COST.boundary_tokens(),
    )  # only the ratio moves them


@given(FACTORS, FACTORS, SEEDS)
@settings(max_examples=25)
def test_an_uneven_error_is_told_apart(memory: float, compute: float, seed: int) -> None:
    """Where memory and compute are wrong by different factors, both are found: within 6 % at every size."""
    rig = Rig(GPU_COST.corrected(memory, compute), seed=seed)
    rig.run(WARM_UP_PASSES + 3 * WINDOWS[-1])
    assert rig.worst_error() <= 0.06


@given(FACTORS, SEEDS)
@settings(max_examples=25)
def test_noise_slows_it_down_and_does_not_lead_it_astray(factor: float, seed: int) -> None:
    """With times off by up to 10 % at random, predictions come within 8 % at every size."""
    rig = Rig(GPU_COST.scaled(factor), count=2, seed=seed)
    rig.run(WARM_UP_PASSES + 2 * WINDOWS[-1], noise=0.1)
    assert rig.worst_error() <= 0.08


@given(st.floats(0.0, 0.1), st.integers(1, 8), SEEDS)
@settings(max_examples=25)
def test_a_right_model_stays(noise: float, count: int, seed: int) -> None:
    """Under noise of up to 10 % no prediction of a right model moves by over 5 %; without, by nothing."""
    rig = Rig(GPU_COST, count=count, seed=seed)
    rig.run(WARM_UP_PASSES + 4 * WINDOWS[-1] // count, noise=noise)
    assert rig.worst_error() <= 0.05
    assert rig.published <= 4
    if noise <= HYSTERESIS / 2:
        assert rig.published == 0
        assert rig.believed == GPU_COST


@given(st.floats(0.01, 100.0), st.floats(1.0, 4.0), SEEDS)
@settings(max_examples=25)
def test_the_correction_is_bounded(factor: float, most: float, seed: int) -> None:
    """However long passes take, each coefficient stays within the bound, and 1 keeps the stated model."""
    rig = Rig(GPU_COST.scaled(factor), most=most, seed=seed)
    rig.run(WARM_UP_PASSES + 2 * WINDOWS[-1], noise=0.5)
    for name in ("weights_s", "alpha", "beta", "gamma_r"):
        ratio = getattr(rig.believed, name) / getattr(GPU_COST, name)
        assert 1.0 / most - 1e-9 <= ratio <= most + 1e-9
    if most == 1.0:
        assert rig.published == 0


@given(FACTORS, FACTORS, st.sampled_from([PACKED, CLASSED, RECTANGULAR]), st.integers(0, 2000))
@settings(max_examples=40)
def test_prices_grow_with_tokens(memory: float, compute: float, profiles: Profiles, history: int) -> None:
    """A pass with more tokens costs no less after a correction; prices from before it are forgotten."""
    at = Instance(spec(profiles=profiles, cost=CPU_COST), SchedulerSettings())
    sizes = range(1, 512, 7)
    before = [at.pricer.pass_s([(tokens, history)]) for tokens in sizes]
    edge = at.pricer.best_edge(history, 1.0)
    cost = CPU_COST.corrected(memory, compute)
    at.reprice(cost, cost.knee_tokens())
    after = [at.pricer.pass_s([(tokens, history)]) for tokens in sizes]
    fresh = Instance(spec(profiles=profiles, cost=cost), SchedulerSettings())
    assert after == sorted(after)
    assert after == [fresh.pricer.pass_s([(tokens, history)]) for tokens in sizes]
    assert (after == before) == ((memory, compute) == (1.0, 1.0))
    assert at.pricer.best_edge(history, 1.0) == fresh.pricer.best_edge(history, 1.0)
    assert (at.tokens_per_s, at.boundary_tokens(history)) == (
        fresh.tokens_per_s,
        fresh.boundary_tokens(history),
    )
    assert edge in at.pricer.chunk_edges


@given(st.integers(2, 9), st.floats(1.5, 10.0), SEEDS)
@settings(max_examples=25)
def test_one_slow_instance_does_not_move_the_others(count: int, slow: float, seed: int) -> None:
    """One instance that takes several times as long, of two or more, leaves predictions as they are."""
    rig = Rig(GPU_COST, count=count, seed=seed)
    rig.run(WARM_UP_PASSES + 2 * WINDOWS[-1] // count, noise=0.02, slow={count - 1: slow})
    assert rig.worst_error() <= 0.03


@given(FACTORS, FACTORS)
@settings(max_examples=10)
def test_instances_that_each_run_one_class_are_believed(memory: float, compute: float) -> None:
    """One instance for small passes and one for large ones: both sides are learnt, each from one."""
    rig = Rig(GPU_COST.corrected(memory, compute), count=2)
    for _ in range(WARM_UP_PASSES + 2 * WINDOWS[-1]):
        for instance, tokens in zip(rig.instances, (32, 2000), strict=True):
            rig.corrections.ran(instance, *ran(tokens, rig.truth.request_s(tokens)))
    for tokens in (32, 2000):
        assert rig.believed.request_s(tokens) == pytest.approx(rig.truth.request_s(tokens), rel=0.05)


def test_all_instances_of_a_kind_are_priced_alike_and_late_comers_too() -> None:
    rig = Rig(GPU_COST.scaled(1.5), count=3)
    rig.run(WARM_UP_PASSES + WINDOWS[0])
    late, other = (
        Instance(spec("late"), SchedulerSettings()),
        Instance(spec("x", blocks=9), SchedulerSettings()),
    )
    for instance in (late, other):
        rig.corrections.joined(instance)
    assert all(instance.pricer.cost is rig.believed for instance in (*rig.instances, late))
    assert late.correction == rig.instances[0].correction == pytest.approx((1.5, 1.5))
    assert other.correction == (1.0, 1.0)
    assert rig.believed.weights_s == pytest.approx(1.5 * GPU_COST.weights_s, rel=1e-6)
    assert other.pricer.cost == GPU_COST  # another kind, for all that is known
    for instance in (*rig.instances, late):
        rig.corrections.left(instance)
    anew = Instance(spec("anew"), SchedulerSettings())
    rig.corrections.joined(anew)
    assert anew.pricer.cost == GPU_COST


@pytest.mark.parametrize(
    ("pass_", "result"),
    [
        ran(100, 9.0, kind=PassKind.DECODE),
        ran(100, 9.0, ran=Ran(iterations=2, requests=1, tokens=100)),
        ran(100, 9.0, items=(ItemResult("r", 0, 0, error="out of blocks"),)),
        ran(100, 9.0, items=(ItemResult("r", 100, 0, token=5),)),
        ran(100, 0.0),
        (replace(ran(100, 9.0)[0], layer_blocks=2), ran(100, 9.0)[1]),
    ],
    ids=["decode", "split", "failed", "nothing computed", "no time", "group of layers"],
)
def test_passes_that_tell_nothing(pass_: Pass, result: PassResult) -> None:
    """Only whole prefill passes that ran as one forward are samples."""
    rig = Rig(GPU_COST)
    rig.run(WARM_UP_PASSES)
    for _ in range(2 * WINDOWS[-1]):
        assert not rig.corrections.ran(rig.instances[0], pass_, result)
    assert rig.corrections.ran(rig.instances[0], *ran(100, 9.0)) == ()


def test_warm_up_is_left_out() -> None:
    """The first passes of an instance, however slow, are no samples; the same time later is one."""
    rig = Rig(GPU_COST.scaled(3.0))
    rig.run(WARM_UP_PASSES + WINDOWS[0] - 1)
    assert rig.believed == GPU_COST
    rig.run(1)
    assert rig.believed.beta == pytest.approx(3.0 * GPU_COST.beta, rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_simulated_engines_of_every_kind_keep_to_a_right_model(kind: str) -> None:
    """What a simulated pass takes is what its result says by the model: padding, parts, what rides beside."""
    capabilities, profiles, cost = engine_setting(load_model("llama-3.1-8b"), kind)
    on = InstanceSpec("i0", capabilities, profiles, cost)
    rng = random.Random(7)
    longest = min(3000, capabilities.context_tokens_max - 20)
    arrivals = [
        request(f"r{n}", rng.randint(1, longest), 0.02 * n, max_new_tokens=rng.choice((1, 9)))
        for n in range(400)
    ]
    _, scheduler = simulate(arrivals, on=on)
    assert scheduler.instances["i0"].pricer.cost is cost


def heavy(seed: int) -> list:
    rng = random.Random(seed)
    times = sorted(rng.uniform(0.0, 12.0) for _ in range(150))
    return [
        request(f"r{n}", rng.choice((30, 200, 3000)), at_s, max_new_tokens=1) for n, at_s in enumerate(times)
    ]


@pytest.mark.parametrize("policy", ["plaserve", "predicted_latency", "laps_slides"])
def test_a_scheduler_learns_from_its_engines(policy: str) -> None:
    """Engines that take 1.4 times as long as stated: whatever the policy, prices are right after a while."""
    truth, scheduler = GPU_COST.scaled(1.4), make_scheduler(policy, SchedulerSettings())
    told = [spec("i0"), spec("i1")]
    models = [SimInstance(s, lambda s=s: SimulatedModel(s.capabilities, s.profiles, truth)) for s in told]
    result = run(scheduler, models, [(r.arrival_s, r) for r in heavy(3)])
    for instance in scheduler.instances.values():
        assert instance.pricer.pass_s([(500, 0)]) == pytest.approx(truth.request_s(500), rel=0.03)
    log = [(now_s, entry) for now_s, entry in result.log]
    again = run(make_scheduler(policy, SchedulerSettings()), models, [(r.arrival_s, r) for r in heavy(3)])
    assert [repr(entry) for entry in log] == [repr(entry) for entry in again.log]


@given(st.integers(1, 4000), st.integers(0, 8000), FACTORS)
def test_the_compute_share_is_the_slope(tokens: int, history: int, factor: float) -> None:
    """A compute side that is 0.1 % longer makes a pass longer by its share of that."""
    cost = replace(CPU_COST, gamma_w=1e-6).corrected(factor, 1.0)
    shape = PassShape.of([(tokens, history)])
    slope = math.log(cost.corrected(1.0, 1.001).pass_s(shape) / cost.pass_s(shape)) / math.log(1.001)
    assert cost.compute_share(shape) == pytest.approx(slope, abs=2e-3)


def test_off_is_off() -> None:
    with pytest.raises(ValueError, match="cost_correction_max"):
        SchedulerSettings(cost_correction_max=0.5)
    scheduler: PrefillScheduler = make_scheduler("plaserve:cost_correction_max=1", SchedulerSettings())
    truth = GPU_COST.scaled(1.4)
    on = spec()
    run(
        scheduler,
        [(on, SimulatedModel(on.capabilities, on.profiles, truth))],
        [(r.arrival_s, r) for r in heavy(1)],
    )
    assert scheduler.instances["i0"].pricer.cost is on.cost
