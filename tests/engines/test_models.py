"""Shipped models: what was fitted is what is shipped, scaling obeys its laws, files come back as written."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.cost_fit import Sample, errors, fit, read_csv
from engines.cost_model import CostModel
from engines.models import (
    KnownModel,
    ModelShape,
    derive_cost,
    known_models,
    known_shape,
    load_model,
    model_to_json,
    scale_cost,
)

DATA = Path(__file__).parent / "data"
H200 = Path(__file__).parents[3] / "shared" / "h200" / "prefill_reference.csv"
FITTED = {"qwen3-32b": "Qwen/Qwen3-32B", "llama-3.1-8b": "meta-llama/Meta-Llama-3.1-8B"}
DERIVED = ("qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b")
# Parameters in billions as their publishers state them.
PUBLISHED = {
    "qwen3-32b": 32.8,
    "llama-3.1-8b": 8.03,
    "qwen2.5-7b": 7.61,
    "qwen2.5-14b": 14.7,
    "qwen2.5-32b": 32.5,
    "smollm2-135m-cpu": 0.135,
}

SHAPES = st.builds(
    ModelShape,
    st.just("any"),
    layers=st.integers(8, 96),
    hidden=st.integers(4, 64).map(lambda n: 128 * n),
    ffn=st.integers(8, 256).map(lambda n: 128 * n),
    heads=st.integers(8, 64),
    kv_heads=st.integers(1, 8),
    head_dim=st.sampled_from([64, 128]),
    vocab=st.integers(1000, 200_000),
)
COSTS = st.builds(
    CostModel,
    launch_s=st.floats(0.0, 1e-2),
    weights_s=st.floats(1e-4, 5e-2),
    alpha=st.floats(1e-12, 1e-7),
    beta=st.floats(1e-7, 1e-3),
    gamma_w=st.floats(0.0, 1e-5),
    gamma_r=st.floats(0.0, 1e-5),
    smooth_p=st.floats(1.0, 16.0),
)
COEFFICIENTS = ("launch_s", "weights_s", "alpha", "beta", "gamma_w", "gamma_r", "smooth_p")


def coefficients(cost: CostModel) -> list[float]:
    return [getattr(cost, name) for name in COEFFICIENTS]


# --- scaling ----------------------------------------------------------------------------------------------


@given(SHAPES, COSTS)
def test_the_same_shape_costs_the_same(shape: ModelShape, cost: CostModel) -> None:
    assert scale_cost(cost, shape, shape) == cost
    assert coefficients(derive_cost(shape, [(shape, cost)])) == coefficients(cost)


@given(SHAPES, COSTS, st.integers(1, 4096), st.integers(0, 8192))
def test_twice_the_layers_take_twice_the_time(
    shape: ModelShape, cost: CostModel, new_tokens: int, history: int
) -> None:
    """Blocks, embedding and LM head all doubled, every coefficient doubles, and so does every pass."""
    twice = replace(shape, layers=2 * shape.layers, vocab=2 * shape.vocab)
    double = scale_cost(cost, shape, twice)
    for name in COEFFICIENTS[:-1]:
        assert getattr(double, name) == pytest.approx(2 * getattr(cost, name)), name
    assert double.request_s(new_tokens, history) == pytest.approx(2 * cost.request_s(new_tokens, history))


@given(SHAPES, SHAPES, SHAPES, COSTS)
def test_scaling_in_two_steps_is_scaling_in_one(
    first: ModelShape, second: ModelShape, third: ModelShape, cost: CostModel
) -> None:
    by_way = scale_cost(scale_cost(cost, first, second), second, third)
    assert coefficients(by_way) == pytest.approx(coefficients(scale_cost(cost, first, third)), rel=1e-9)


def test_each_size_moves_only_what_it_costs() -> None:
    shape, cost = known_models()["llama-3.1-8b"].shape, known_models()["llama-3.1-8b"].cost
    assert shape is not None

    def moved(**sizes: int) -> set[str]:
        scaled = scale_cost(cost, shape, replace(shape, **sizes))
        return {name for name in COEFFICIENTS if getattr(scaled, name) != getattr(cost, name)}

    assert moved(vocab=64_000) == {"weights_s"}
    assert moved(ffn=20_000) == {"weights_s", "beta"}
    assert moved(kv_heads=4) == {"weights_s", "beta", "gamma_r"}
    assert moved(heads=64) == {"weights_s", "beta", "alpha"}


@given(SHAPES, SHAPES, SHAPES, COSTS, COSTS)
def test_a_derived_coefficient_lies_between_its_two_predictions(
    shape: ModelShape, one: ModelShape, other: ModelShape, cost: CostModel, other_cost: CostModel
) -> None:
    fitted = [(one, cost), (other, other_cost)]
    derived = derive_cost(shape, fitted)
    ends = [scale_cost(their_cost, theirs, shape) for theirs, their_cost in fitted]
    for name in COEFFICIENTS:
        low, high = sorted(getattr(end, name) for end in ends)
        assert low * (1 - 1e-9) <= getattr(derived, name) <= high * (1 + 1e-9), name
    nearest = min(fitted, key=lambda pair: abs(math.log(pair[0].parameters / shape.parameters)))
    sizes = sorted(model.parameters for model, _ in fitted)
    if not sizes[0] < shape.parameters < sizes[1] and sizes[0] < sizes[1]:
        alone = scale_cost(nearest[1], nearest[0], shape)
        assert coefficients(derived) == pytest.approx(coefficients(alone), rel=1e-9)


@pytest.mark.parametrize("name", FITTED)
def test_next_to_a_fitted_model_the_derived_one_is_next_to_it(name: str) -> None:
    """The nearer model counts more: by gamma_r the two predictions are a factor of six apart."""
    models = [known_models()[fitted] for fitted in FITTED]
    fitted = [(model.shape, model.cost) for model in models if model.shape is not None]
    near = known_models()[name]
    assert near.shape is not None
    step = 1 if near is min(models, key=lambda model: model.cost.beta) else -1  # towards the other one
    derived = derive_cost(replace(near.shape, vocab=near.shape.vocab + step), fitted)
    assert "and" in derived.origin
    assert coefficients(derived) == pytest.approx(coefficients(near.cost), rel=1e-3)


def test_nothing_can_be_derived_from_nothing() -> None:
    shape = known_shape("qwen2.5-7b")
    assert shape is not None
    with pytest.raises(ValueError, match="at least one fitted model"):
        derive_cost(shape, [])


# --- what is shipped --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shape_has_the_published_number_of_parameters(name: str) -> None:
    shape = known_models()[name].shape
    assert shape is not None
    assert shape.parameters / 1e9 == pytest.approx(PUBLISHED[name], rel=0.01)
    assert shape.weight_bytes == 2 * shape.parameters


def test_kv_and_flops_of_a_token() -> None:
    shape = known_shape("qwen3-32b")
    assert shape is not None
    assert shape.kv_bytes_per_token == 256 * 1024
    # Twice the weights that a token meets: all but the two vocabulary matrices.
    assert shape.flops_per_token == 2 * (shape.parameters - 2 * shape.vocab * shape.hidden)


def test_fitted_and_derived_models_are_told_apart() -> None:
    models = known_models()
    assert {name for name, model in models.items() if model.derived} == set(DERIVED)
    for model in models.values():
        assert ("not measured" in model.source) == model.derived
        assert (model.fit_error_median is None) == model.derived
        assert model.cost.origin == model.source
    assert known_models() is models


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_page_shows_the_shipped_models(name: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "cost-model.md").read_text(encoding="utf-8")
    (row,) = (line for line in page.splitlines() if line.startswith(f"| `{name}`") and "KiB" in line)
    model = known_models()[name]
    cost, shape = model.cost, model.shape
    assert shape is not None
    assert ("derived" in row) == model.derived
    assert f"| {cost.boundary_tokens(0)}, {cost.boundary_tokens(16384)} | {cost.knee_tokens()} |" in row
    assert f" {shape.kv_bytes_per_token / 1024:g} KiB" in row


@pytest.mark.parametrize(("name", "row_name"), FITTED.items())
def test_the_shipped_coefficients_are_those_of_the_fit(name: str, row_name: str) -> None:
    samples = read_csv(table(), row_name)
    model, fitted = known_models()[name], fit(samples)
    assert coefficients(model.cost) == pytest.approx(coefficients(fitted.model), rel=1e-3)
    assert model.cost.tokens_max == fitted.model.tokens_max
    assert model.fit_error_median == pytest.approx(fitted.median_error, abs=1e-3)
    assert model.fit_error_worst == pytest.approx(fitted.worst_error, abs=1e-3)


@pytest.mark.parametrize("row_name", FITTED.values())
def test_points_off_the_grid_are_predicted(row_name: str) -> None:
    samples = read_csv(DATA / "h200_off_grid.csv", row_name)
    assert len(samples) == 10
    assert max(abs(error) for error in errors(load_model(row_name).cost, samples)) <= 0.15


@pytest.mark.parametrize("row_name", FITTED.values())
def test_prompts_longer_than_any_fitted_are_predicted(row_name: str) -> None:
    """They are extrapolated, and said to be: here is what that is worth."""
    samples, cost = read_csv(DATA / "h200_long.csv", row_name), load_model(row_name).cost
    assert len(samples) == 5
    assert any(cost.extrapolated(sample.shape) for sample in samples)
    assert max(abs(error) for error in errors(cost, samples)) <= 0.10


@pytest.mark.parametrize("name", DERIVED)
def test_derived_models_are_near_what_the_tool_says_of_their_sizes(name: str) -> None:
    wrong = [abs(error) for error in errors(load_model(name).cost, read_csv(DATA / "h200_derived.csv", name))]
    assert median(wrong) <= 0.05
    assert max(wrong) <= 0.20


@pytest.mark.parametrize(("known", "unknown"), [tuple(FITTED), tuple(FITTED)[::-1]])
def test_one_fitted_model_predicts_the_other_by_scaling(known: str, unknown: str) -> None:
    """docs/cost-model.md quotes these: weights, alpha and beta carry over, gamma_r does not."""
    source, target = known_models()[known], known_models()[unknown]
    assert source.shape is not None
    assert target.shape is not None
    scaled = scale_cost(source.cost, source.shape, target.shape)
    for name, tolerance in (("weights_s", 0.06), ("alpha", 0.01), ("beta", 0.02)):
        assert getattr(scaled, name) == pytest.approx(getattr(target.cost, name), rel=tolerance), name
    wrong = [abs(error) for error in errors(scaled, read_csv(table(), FITTED[unknown]))]
    assert median(wrong) <= 0.04
    assert max(wrong) <= 0.12


def table() -> Path:
    if not H200.is_file():
        pytest.skip("the published H200 table is not beside this checkout (shared/h200)")
    return H200


# --- names and files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3-32b", "QWEN3-32B", "Qwen/Qwen3-32B", "qwen/qwen3-32b"])
def test_a_model_is_found_by_its_names_in_any_case(name: str) -> None:
    assert load_model(name) is known_models()["qwen3-32b"]
    assert known_shape(name) == known_models()["qwen3-32b"].shape


def test_an_unknown_name_says_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"'gpt' is not known.*qwen3-32b.*qwen2\.5-14b.*calibrate"):
        load_model("gpt")
    assert known_shape("gpt") is None


@pytest.mark.parametrize("shape", [None, known_shape("qwen2.5-7b")])
def test_a_file_comes_back_as_it_was_written(tmp_path: Path, shape: ModelShape | None) -> None:
    cost = CostModel(1e-4, 0.0123, 1 / 3e9, 1 / 11_000, 0.0, 7e-8, 2.5, 8192, "somewhere")
    model = KnownModel("mine", shape, cost, False, "somewhere", 0.01, 0.1)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(model_to_json(model)))
    assert load_model(path) == load_model(str(path)) == model


def test_a_file_that_an_earlier_version_wrote_without_a_later_field_is_read(tmp_path: Path) -> None:
    data = model_to_json(known_models()["qwen3-32b"])
    del data["cost"]["origin"]
    path = tmp_path / "model.json"
    path.write_text(json.dumps(data))
    assert load_model(path).cost.beta == known_models()["qwen3-32b"].cost.beta


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "schema_version is not 1"),
        ({"cost": None}, "cost is not an object"),
        ({"cost": {"beta": 1.0}}, "of cost is missing"),
        ({"colour": "red"}, "field 'colour' of file is not known"),
        ({"fit_error_median": "good"}, "fit_error_median"),
        ({"shape": {"name": "x"}}, "field 'ffn' of shape is missing"),
        ({"shape.layers": 0}, "layers must be a whole number above 0"),
        ({"cost.alpha": -1.0}, "alpha must be finite and not negative"),
        ({"cost.alpha": "fast"}, r"cost\.alpha"),
    ],
)
def test_a_bad_file_is_refused_naming_the_field(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    data = model_to_json(known_models()["qwen3-32b"])
    for key, value in change.items():
        part, _, field = key.partition(".")
        (data[part] if field else data)[field or part] = value
    path = tmp_path / "model.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message) as caught:
        load_model(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"null"])
def test_what_is_no_model_file_is_refused_naming_it(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.json"):
        load_model(path)


def test_a_fit_to_samples_of_a_known_model_predicts_like_it() -> None:
    for name in ("qwen3-32b", "qwen2.5-14b"):
        truth = known_models()[name].cost
        samples = [Sample(2**i, h, truth.request_s(2**i, h)) for i in range(3, 13) for h in (0, 1024, 8192)]
        between = [(3 * 2**i, h) for i in range(2, 11) for h in (512, 4096)]
        wrong = [fit(samples).model.request_s(t, h) / truth.request_s(t, h) - 1.0 for t, h in between]
        assert max(abs(error) for error in wrong) < 0.02
