"""What a built engine is asked: which of two is faster, what is measured, what verification refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from build_scripts.spec import BuildError
from build_scripts.trtllm.measure import (
    ATTEMPTS,
    Timed,
    calibration_shapes,
    choose,
    edges_within,
    time_classes,
    verify,
)
from engines.cost_fit import SAMPLES_MIN, Sample, fit
from engines.executor.types import ExecutorRole
from engines.trtllm_child.config import ChildConfig, Driver
from engines.trtllm_profiles import stock_classes
from engines.types import EngineStats, Pass, PassResult
from tests.build_scripts import trtllm_machine as machine
from tests.engines import gpu_bundles

EDGES = stock_classes(512)
times = st.floats(1e-4, 10.0)


@st.composite
def engines(draw: st.DrawFn) -> list[Timed]:
    classes = draw(st.lists(st.integers(1, 16_384), min_size=1, max_size=6, unique=True))
    return [
        Timed(str(n), bool(n), draw(st.integers(1, 9)), {c: draw(times) for c in classes})
        for n in range(draw(st.integers(1, 3)))
    ]


def _mean(engine: Timed) -> float:
    return math.exp(sum(map(math.log, engine.pass_s.values())) / len(engine.pass_s))


@given(engines())
def test_the_kept_engine_has_the_least_geometric_mean(timed: list[Timed]) -> None:
    choice = choose(timed)
    kept = next(engine for engine in timed if engine.name == choice.kept)
    assert all(_mean(kept) <= _mean(other) * (1 + 1e-9) for other in timed)
    assert (choice.ratio is None) == (len(timed) == 1)
    assert choice.ratio is None or choice.ratio >= 1.0
    assert set(choice.weights) == set(kept.pass_s)


@given(engines(), st.floats(0.1, 10.0), st.randoms(use_true_random=False))
def test_the_choice_depends_on_ratios_alone(timed: list[Timed], factor: float, order: Any) -> None:
    """One class in another unit changes every engine alike; so does the order in which they were built."""
    means = sorted(map(_mean, timed))
    if len(means) > 1 and means[1] < means[0] * (1 + 1e-6):
        return  # a tie but for rounding
    first = min(timed[0].pass_s)
    scaled = [
        Timed(t.name, t.gemm_plugin, t.plan_bytes, {**t.pass_s, first: t.pass_s[first] * factor})
        for t in timed
    ]
    order.shuffle(scaled)
    assert choose(scaled).kept == choose(timed).kept


def test_on_a_tie_the_smaller_plan_is_kept() -> None:
    same = {64: 1.0, 128: 2.0}
    assert choose([Timed("a", True, 2, same), Timed("b", False, 1, same)]).kept == "b"


def test_weights_decide_what_counts() -> None:
    short, long = Timed("short", True, 1, {64: 1.0, 512: 8.0}), Timed("long", False, 1, {64: 2.0, 512: 4.0})
    assert choose([short, long], {64: 2.0, 512: 1.0}).kept == "short"
    assert choose([short, long], {64: 1.0, 512: 2.0}).kept == "long"
    with pytest.raises(ValueError, match="above 0 in all"):
        choose([short, long], {7: 1.0})
    with pytest.raises(ValueError, match="same classes"):
        choose([short, Timed("other", True, 1, {64: 1.0})])


@given(st.integers(65, 16_384), st.integers(65, 131_072))
def test_what_is_measured_fits_a_request_and_covers_every_class(pass_tokens: int, context: int) -> None:
    edges = stock_classes(pass_tokens)
    shapes = calibration_shapes(edges, context)
    assert len(set(shapes)) == len(shapes) >= SAMPLES_MIN
    assert all(0 < new <= pass_tokens and new + past < context for new, past in shapes)
    largest = min(pass_tokens, context - 1)
    alone = {new for new, past in shapes if past == 0}
    assert {edge for edge in edges if edge <= largest} | {largest} <= alone
    assert edges_within(edges, context)[-1] == largest


@settings(max_examples=15)
@given(st.integers(300, 16_384), st.integers(20_000, 131_072))
def test_the_shapes_tell_the_cost_model(pass_tokens: int, context: int) -> None:
    """Exact times of a model give that model's times back."""
    shapes = calibration_shapes(stock_classes(pass_tokens), context)
    samples = [Sample(new, past, machine.COST.request_s(new, past)) for new, past in shapes]
    assert fit(samples).worst_error < 0.02


def _config(tmp_path: Path, **changed: Any) -> ChildConfig:
    gpu_bundles.engine_bundle(tmp_path)
    fields: dict[str, Any] = {
        "driver": Driver.ENGINE,
        "model_dir": str(tmp_path / "sp"),
        "version": machine.VERSION,
        "role": ExecutorRole.BOTH,
        "requests_max": 16,
        "pass_tokens_max": 512,
        "context_tokens_max": machine.CONTEXT,
        "block_tokens": machine.BLOCK,
        "kv_blocks": 100,
    }
    return ChildConfig(**{**fields, **changed})


def test_an_engine_that_does_as_planned_is_verified(tmp_path: Path) -> None:
    engine = machine.ModelEngine(_config(tmp_path))
    record = verify(engine, EDGES, 4, 600)
    assert [one["tokens"] for one in record["passes"]] == [*EDGES, 128]
    assert {one["attempts"] for one in record["passes"]} == {1}
    assert record["passes"][-1]["ran"] == {"tokens": 128, "requests": 4}
    assert record["reused_tokens"] == 64


def test_times_are_taken_at_the_edges(tmp_path: Path) -> None:
    engine = machine.ModelEngine(_config(tmp_path))
    assert time_classes(engine, EDGES, 0.05) == pytest.approx(
        {edge: machine.COST.request_s(edge) for edge in EDGES}, rel=0.95
    )


class Leaky(machine.ModelEngine):
    def stats(self) -> EngineStats:
        stats = super().stats()
        return EngineStats(stats.kv_blocks_total, stats.kv_blocks_free - 1, stats.kv_blocks_cached, 0, 0)


class Lingering(machine.ModelEngine):
    """Holds no KV, but a request that never ends."""

    def stats(self) -> EngineStats:
        return replace(super().stats(), requests_live=1)


class Unlucky(machine.ModelEngine):
    """Splits the first passes, then no more."""

    left = ATTEMPTS - 1

    def execute(self, pass_: Pass) -> PassResult:
        self._split = 2 if self.left > 0 else 1
        self.left -= 1
        return super().execute(pass_)


def test_a_pass_that_was_split_by_chance_is_tried_again(tmp_path: Path) -> None:
    record = verify(Unlucky(_config(tmp_path)), EDGES, 4, 600)
    assert [one["attempts"] for one in record["passes"]] == [ATTEMPTS, 1, 1, 1, 1]


def test_what_does_not_do_as_planned_is_refused(tmp_path: Path) -> None:
    config = _config(tmp_path)
    with pytest.raises(BuildError, match=r"class to 64: a pass of 64 tokens ran in 3 iterations.*3 times"):
        verify(machine.ModelEngine(config, split=3), EDGES, 4, 600)
    with pytest.raises(BuildError, match=r"reused 0 tokens, expected at least 64.*use_paged_context_fmha"):
        verify(machine.ModelEngine(config, reuse=False), EDGES, 4, 600)
    with pytest.raises(BuildError, match="still holds KV"):
        verify(Leaky(config), EDGES, 4, 600)
    with pytest.raises(BuildError, match="still holds KV"):
        verify(Lingering(config), EDGES, 4, 600)
