"""The bundle of the real model: it opens here, it answers, and its cost model tells its own measurements."""

from __future__ import annotations

from pathlib import Path

import pytest

from build_scripts.plan import probe_profiles
from build_scripts.runner import ensure_bundle
from build_scripts.spec import MODELS
from build_scripts.verify import verify
from engines.bundle import MANIFEST, open_bundle
from engines.cost_fit import errors, read_csv

pytestmark = pytest.mark.cpu_engine


def test_the_model_answers_in_the_precision_that_is_served(bundle_dir: Path) -> None:
    from tokenizers import Tokenizer

    from engines.openvino_cpu import OpenVinoCpuEngine

    bundle = open_bundle(bundle_dir)
    backend, profiles = bundle.manifest.backend, probe_profiles(bundle.manifest.profiles)
    engine = OpenVinoCpuEngine.load(
        bundle.path, profiles, threads=backend.threads, precision=backend.precision
    )
    tokenizer = Tokenizer.from_file(str(bundle.tokenizer_path))
    source = MODELS[bundle.manifest.model.name]
    record = verify(engine, profiles, source, tokenizer, bundle.manifest.text)
    engine.close()
    assert "Paris" in record["answer"]


def test_a_valid_bundle_is_not_built_again(bundle_dir: Path) -> None:
    before = (bundle_dir / MANIFEST).stat().st_ino
    assert ensure_bundle(bundle_dir.parent, quick=True) == bundle_dir
    assert (bundle_dir / MANIFEST).stat().st_ino == before


def test_the_cost_model_belongs_to_the_calibration(bundle_dir: Path) -> None:
    cost = open_bundle(bundle_dir).manifest.cost
    wrong = [abs(error) for error in errors(cost.model, read_csv(bundle_dir / "calibration.csv"))]
    assert max(wrong) == pytest.approx(cost.worst_error, abs=1e-3)
    assert 1 <= cost.knee_tokens <= cost.model.tokens_max
    assert cost.model.request_s(8) < cost.model.request_s(512)
