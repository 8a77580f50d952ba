"""The fit recovers what it should, refuses what it can't use, and its figures are what their names say."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.cost_fit import Sample, errors, fit, read_csv
from engines.cost_model import CostModel, PassShape

H200 = Path(__file__).parents[3] / "shared" / "h200" / "prefill_reference.csv"

# Both sides of the corner lie within the samples: weights are worth 8 to 2048 tokens.
MODELS = st.builds(
    CostModel,
    launch_s=st.just(0.0),
    weights_s=st.floats(1e-3, 5e-2),
    alpha=st.floats(0.0, 5e-9),
    beta=st.floats(1e-5, 1e-3),
    gamma_w=st.floats(0.0, 1e-6),
    gamma_r=st.floats(0.0, 2e-6),
    smooth_p=st.floats(2.0, 12.0),
).filter(lambda m: 8 <= m.weights_s / m.beta <= 2048)
ANY_MODEL = st.builds(
    CostModel,
    launch_s=st.floats(0.0, 1e-2),
    weights_s=st.floats(0.0, 5e-2),
    alpha=st.just(0.0) | st.floats(1e-12, 1e-6),
    beta=st.floats(1e-7, 1e-3),
    gamma_w=st.floats(0.0, 1e-3),
    gamma_r=st.floats(0.0, 1e-4),
    smooth_p=st.floats(1.0, 16.0),
)
TOKENS = st.integers(1, 4096)
HISTORY = st.integers(0, 32768)


def synthetic(model: CostModel, noise_ratio: float = 0.0, seed: int = 0) -> list[Sample]:
    """Passes over a grid as a calibration has it, with Gaussian noise on the log of the time."""
    noise = random.Random(seed)
    samples = [Sample(2**i, h, 1.0) for i in range(13) for h in (0, 512, 2048, 4096)]
    return [
        replace(s, time_s=model.pass_s(s.shape) * math.exp(noise.gauss(0.0, noise_ratio))) for s in samples
    ]


@given(MODELS)
@settings(max_examples=12, deadline=None)
def test_recovers_the_times_of_exact_samples(truth: CostModel) -> None:
    result = fit(synthetic(truth))
    assert result.median_error < 0.005
    assert result.worst_error < 0.03


@given(MODELS.filter(lambda m: m.alpha > 5e-10), st.integers(0, 1000))
@settings(max_examples=10, deadline=None)
def test_recovers_coefficients_within_the_noise(truth: CostModel, seed: int) -> None:
    """The well determined ones: weights from the smallest passes, beta and alpha from the largest."""
    model = fit(synthetic(truth, noise_ratio=0.02, seed=seed)).model
    assert model.weights_s == pytest.approx(truth.weights_s, rel=0.25)
    large = PassShape.of([(4096, 4096)])
    assert model.pass_s(large) == pytest.approx(truth.pass_s(large), rel=0.05)
    small = PassShape.of([(1, 0)])
    assert model.pass_s(small) == pytest.approx(truth.pass_s(small), rel=0.05)


def test_coefficients_that_are_plain_in_the_samples_come_back() -> None:
    truth = CostModel(0.0, 0.02, 2e-9, 9e-5, 0.0, 1e-7, smooth_p=3.0)
    model = fit(synthetic(truth)).model
    for name in ("weights_s", "alpha", "beta", "gamma_r", "smooth_p"):
        assert getattr(model, name) == pytest.approx(getattr(truth, name), rel=0.05), name


def test_one_disturbed_sample_does_not_bend_the_curve() -> None:
    truth = CostModel(0.0, 0.02, 2e-9, 9e-5, 0.0, 1e-7)
    samples = synthetic(truth)
    disturbed = [*samples[:20], replace(samples[20], time_s=10 * samples[20].time_s), *samples[21:]]
    kept = errors(fit(disturbed).model, samples)
    assert max(abs(e) for e in kept) < 0.05


def test_launch_is_kept_apart_when_it_was_measured() -> None:
    truth = CostModel(0.004, 0.02, 2e-9, 9e-5, 0.0, 1e-7)
    result = fit(synthetic(truth), launch_s=0.004)
    assert result.model.launch_s == 0.004
    assert result.model.weights_s == pytest.approx(0.02, rel=0.03)


def test_the_same_samples_give_the_same_model_and_no_history_gives_no_history_cost() -> None:
    truth = CostModel(0.0, 0.02, 2e-9, 9e-5, 1e-6, 1e-7)
    samples = [s for s in synthetic(truth, 0.02) if s.history == 0]
    assert fit(samples).model == fit(samples).model
    assert fit(samples).model.gamma_r == 0.0


def test_the_result_says_what_was_fitted() -> None:
    samples = synthetic(CostModel(0.0, 0.02, 2e-9, 9e-5, 0.0, 1e-7))
    result = fit(samples, origin="made up")
    assert result.model.origin == "made up"
    assert result.model.tokens_max == 4096
    assert len(result.errors) == len(samples)
    assert result.model.extrapolated(PassShape.of([(4097, 0)]))
    assert not result.model.extrapolated(PassShape.of([(4096, 0)]))


@given(ANY_MODEL, TOKENS, HISTORY, st.integers(1, 64))
def test_predictions_grow_with_tokens_and_history(
    model: CostModel, tokens: int, history: int, more: int
) -> None:
    base = model.request_s(tokens, history)
    assert model.request_s(tokens + more, history) >= base * (1 - 1e-12)
    assert model.request_s(tokens, history + more) >= base * (1 - 1e-12)
    assert base > 0.0


@given(ANY_MODEL, st.sampled_from([2.0, None]), TOKENS, HISTORY, st.integers(0, 5))
def test_the_pricer_with_coefficients_at_hand_gives_the_same_prices(
    model: CostModel, smooth_p: float | None, tokens: int, history: int, parts: int
) -> None:
    """To the bit, as decisions follow from both; and the short way of the usual smoothness is the formula."""
    model = replace(model, part_s=1e-3, smooth_p=smooth_p or model.smooth_p)
    sums = (tokens, float(tokens * (tokens + 2 * history)), history, parts)
    assert model.sums_pricer()(*sums) == model.sums_s(*sums)
    usual, near = replace(model, smooth_p=2.0), replace(model, smooth_p=2.0 + 1e-12)
    assert math.isclose(usual.sums_pricer()(*sums), near.sums_s(*sums), rel_tol=1e-9)


@given(ANY_MODEL, HISTORY)
def test_the_boundary_is_the_crossing_of_compute_and_memory(model: CostModel, history: int) -> None:
    boundary = model.boundary_tokens(history)

    def ahead(tokens: float) -> float:
        shape = PassShape(0, tokens * (tokens + 2.0 * history), history, 1)
        memory = model.weights_s + model.gamma_w * tokens + model.gamma_r * history
        return model.alpha * shape.attention + model.beta * tokens - memory

    assert boundary >= 0
    if model.alpha == 0.0 and model.beta <= model.gamma_w:
        assert boundary in (0, model.tokens_max)  # the two never cross
        return
    slack = 1e-9 * (model.weights_s + model.gamma_r * history + model.beta * boundary + 1e-9)
    slack += 1e-6 * (
        model.alpha * (boundary + 2 * history) + model.beta + model.gamma_w
    )  # ceil's own tolerance
    assert ahead(boundary) >= -slack
    if boundary >= 2:
        assert ahead(boundary - 1) <= slack


@given(ANY_MODEL)
def test_the_knee_lies_within_what_was_measured_and_reaches_its_share(model: CostModel) -> None:
    knee = model.knee_tokens()
    assert 1 <= knee <= model.tokens_max
    saturated = 1e9 / model.pass_s(PassShape(10**9, 0.0, 0, 1))
    rate = knee / model.pass_s(PassShape(knee, 0.0, 0, 1))
    if knee < model.tokens_max:
        assert rate >= 0.899 * saturated
    if knee > 1:
        before = (knee - 1) / model.pass_s(PassShape(knee - 1, 0.0, 0, 1))
        assert before < 0.901 * saturated


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"time_s": -1.0}, "time_s"),
        ({"time_s": 0.0}, "time_s"),
        ({"time_s": math.nan}, "time_s"),
        ({"time_s": math.inf}, "time_s"),
        ({"new_tokens": 0}, "new_tokens"),
        ({"history": -1}, "history"),
        ({"batch": 0}, "batch"),
    ],
)
def test_bad_samples_are_refused_naming_the_field(change: dict[str, float], names: str) -> None:
    samples = synthetic(CostModel(0.0, 0.02, 2e-9, 9e-5, 0.0, 1e-7))
    samples[3] = replace(samples[3], **change)
    with pytest.raises(ValueError, match=rf"samples\[3\]\.{names}"):
        fit(samples)


def test_too_little_to_fit_is_refused() -> None:
    samples = synthetic(CostModel(0.0, 0.02, 2e-9, 9e-5, 0.0, 1e-7))
    with pytest.raises(ValueError, match="at least 8"):
        fit(samples[:7])
    with pytest.raises(ValueError, match="fewer than 3"):
        fit([replace(s, new_tokens=64) for s in samples])
    with pytest.raises(ValueError, match="launch_s"):
        fit(samples, launch_s=1.0)
    with pytest.raises(ValueError, match="smooth_p_bounds"):
        fit(samples, smooth_p_bounds=(4.0, 2.0))


# --- the published H200 table ---------------------------------------------------------------------------


@pytest.fixture
def table() -> Path:
    if not H200.is_file():
        pytest.skip(
            "the published H200 table is not beside this checkout (shared/h200/prefill_reference.csv)"
        )
    return H200


@pytest.mark.parametrize("model", ["Qwen/Qwen3-32B", "meta-llama/Meta-Llama-3.1-8B"])
def test_even_rows_of_the_h200_table_predict_the_odd_rows(table: Path, model: str) -> None:
    samples = read_csv(table, model)
    assert len(samples) == 42
    held_out = [abs(error) for error in errors(fit(samples[::2]).model, samples[1::2])]
    assert median(held_out) <= 0.03
    assert max(held_out) <= 0.12


@pytest.mark.parametrize("model", ["Qwen/Qwen3-32B", "meta-llama/Meta-Llama-3.1-8B"])
def test_on_the_h200_table_only_the_boundary_with_weights_makes_sense(table: Path, model: str) -> None:
    fitted = fit(read_csv(table, model)).model
    assert fitted.printed_boundary_tokens() < 0
    assert 128 <= fitted.boundary_tokens(16384) < fitted.boundary_tokens(0) <= 512


def test_a_table_of_several_models_asks_which(table: Path) -> None:
    with pytest.raises(ValueError, match="several models"):
        read_csv(table)
    with pytest.raises(ValueError, match="no rows of model 'gpt'"):
        read_csv(table, "gpt")


# --- reading tables ---------------------------------------------------------------------------------------


def test_a_table_is_read_and_its_faults_are_named(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    header = "model,batch,new_tokens,history,prefill_ms,note\n"
    path.write_text(header + "m,2,8,16,1.5,x\n")
    assert read_csv(path) == (Sample(8, 16, 0.0015, 2),)
    path.write_text(header + "m,2,8,16,fast,x\n")
    with pytest.raises(ValueError, match=r"line 2: prefill_ms is not a number: 'fast'"):
        read_csv(path)
    path.write_text("model,batch,new_tokens,history\nm,2,8,16\n")
    with pytest.raises(ValueError, match="'prefill_ms' is missing"):
        read_csv(path)
