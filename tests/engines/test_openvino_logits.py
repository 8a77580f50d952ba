"""The graph against the numpy oracle: packing, padding and KV out of the pool leave logits as they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("openvino")

from build_scripts.gguf_model import GgufError, Weights
from build_scripts.graph import build_graph
from engines.openvino_model import MODEL_XML, PackedModel, Segment
from tests.engines import oracle

CONFIG = oracle.TINY
WEIGHTS = oracle.random_model(CONFIG)
BLOCKS_EACH = 3  # blocks of a request


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return oracle.write_model(tmp_path_factory.mktemp("tiny"), CONFIG, WEIGHTS)


@pytest.fixture(scope="module")
def exact(path: Path) -> PackedModel:
    return PackedModel(path, blocks=4 * BLOCKS_EACH, rows_max=4, threads=1, precision="f32")


@st.composite
def packs(draw: st.DrawFn) -> list[tuple[list[int], int]]:
    """Requests as (token ids, how many of them are history)."""
    requests = []
    for _ in range(draw(st.integers(1, 4))):
        tokens = draw(st.lists(st.integers(0, CONFIG.vocab - 1), min_size=1, max_size=70))
        requests.append((tokens, draw(st.integers(0, len(tokens) - 1))))
    return requests


def run(model: PackedModel, requests: list[tuple[list[int], int]], pad: tuple[int, int]) -> np.ndarray:
    """Logits of the last token of each request, history first in passes of its own; blocks interleaved."""
    blocks = [
        list(range(index, BLOCKS_EACH * len(requests), len(requests))) for index in range(len(requests))
    ]
    for (tokens, history), own in zip(requests, blocks, strict=True):
        if history:
            model.forward([Segment(tokens[:history], own, 0, logits=False)], (history + 3, 0))
    segments = [
        Segment(tokens[history:], own, history, logits=True)
        for (tokens, history), own in zip(requests, blocks, strict=True)
    ]
    new = sum(len(tokens) - history for tokens, history in requests)
    past = sum(history for _, history in requests)
    return model.forward(segments, (new + pad[0], past + pad[1])).copy()


@settings(max_examples=25, deadline=None)
@given(requests=packs(), pad=st.tuples(st.integers(0, 9), st.integers(0, 40)))
def test_packed_logits_are_those_of_each_request_alone(
    exact: PackedModel, requests: list[tuple[list[int], int]], pad: tuple[int, int]
) -> None:
    found = run(exact, requests, pad)
    for (tokens, _), row in zip(requests, found, strict=True):
        np.testing.assert_allclose(row, oracle.logits(CONFIG, WEIGHTS, tokens)[-1], atol=1e-4)


def test_bf16_stays_near_the_exact_logits(path: Path, exact: PackedModel) -> None:
    model = PackedModel(path, blocks=4 * BLOCKS_EACH, rows_max=4, threads=1, precision="bf16")
    rng = np.random.default_rng(1)
    requests = [(rng.integers(0, CONFIG.vocab, 60).tolist(), history) for history in (0, 17, 59)]
    near, true = run(model, requests, (2, 5)), run(exact, requests, (2, 5))
    assert 0.0 < np.abs(near - true).max() < 0.05 * np.abs(true).max()
    np.testing.assert_array_equal(near, run(model, requests, (2, 5)))


def test_a_probe_changes_nothing(exact: PackedModel) -> None:
    tokens = list(range(40))
    before = run(exact, [(tokens, 32)], (0, 0))
    assert exact.probe((16, 64)) > 0.0
    after = exact.forward([Segment(tokens[32:], [0, 1], 32, logits=True)], (8, 32))
    np.testing.assert_array_equal(before, after)


def broken(change: str) -> Weights:
    weights = dict(WEIGHTS)
    if change == "missing":
        del weights["blk.1.attn_q.weight"]
    elif change == "unknown":
        weights["output.weight"] = weights["token_embd.weight"]
    elif change == "shape":
        weights["output_norm.weight"] = np.ones(CONFIG.hidden + 1, np.float32)
    else:
        weights["output_norm.weight"] = np.full(CONFIG.hidden, np.nan, np.float32)
    return weights


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("missing", "blk.1.attn_q.weight"),
        ("unknown", "output.weight"),
        ("shape", "output_norm.weight"),
        ("nan", "output_norm.weight"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(change: str, named: str) -> None:
    with pytest.raises(GgufError, match=named):
        build_graph(CONFIG, broken(change))


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    options = {"blocks": 1, "rows_max": 1, "threads": 1, "precision": "f32"}
    with pytest.raises(ValueError, match="no such file"):
        PackedModel(tmp_path / MODEL_XML, **options)  # type: ignore[arg-type]
    (tmp_path / MODEL_XML).write_text("<net>")
    with pytest.raises(ValueError, match="not a model"):
        PackedModel(tmp_path / MODEL_XML, **options)  # type: ignore[arg-type]


def test_a_model_of_another_graph_version_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engines.openvino_model.GRAPH_VERSION", 99)
    with pytest.raises(ValueError, match="graph_version 1, this engine needs 99"):
        PackedModel(path, blocks=1, rows_max=1, threads=1, precision="f32")
