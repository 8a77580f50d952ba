"""An engine of its own for long prefills: which one is opened, and what is said where there is none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engines.bundle_base import BundleMismatch
from engines.catalog import EngineOptions, has_lp_engine, load_engine
from engines.gpu_bundle import GpuBundle, open_gpu_bundle
from engines.gpu_catalog import LP, SP, child_config, cost_of, lp_ratio
from engines.gpu_manifest import Candidate, GpuManifest
from tests.engines.gpu_bundles import HOST, engine_bundle, torch_bundle

TIMES = ((64, 0.002), (512, 0.010), (1024, 0.020), (2048, 0.040))


def timed(*lp: tuple[int, float]) -> tuple[Candidate, ...]:
    """Both engines, and an SP engine that was not kept."""
    sp = Candidate(engine="sp", gemm_plugin=True, plan_bytes=2048, pass_s=TIMES, kept=True)
    slow = tuple((tokens, 10 * seconds) for tokens, seconds in TIMES)
    lost = Candidate(engine="sp", gemm_plugin=False, plan_bytes=4096, pass_s=slow, kept=False)
    own = Candidate(engine="lp", gemm_plugin=False, plan_bytes=2048, pass_s=lp, kept=True)
    return (sp, lost, own)


def opened(path: Path, *lp: tuple[int, float]) -> GpuBundle:
    def change(manifest: GpuManifest) -> GpuManifest:
        return manifest.model_copy(update={"candidates": timed(*lp)}) if lp else manifest

    return open_gpu_bundle(engine_bundle(path, change), host=HOST)


def test_each_role_has_its_directory_and_nothing_else_differs(tmp_path: Path) -> None:
    bundle = opened(tmp_path / "b")
    sp, lp = child_config(bundle), child_config(bundle, name=LP)
    assert (Path(sp.model_dir).name, Path(lp.model_dir).name) == ("sp", "lp")
    assert replace(lp, model_dir=sp.model_dir) == sp


def test_a_bundle_with_one_engine_has_no_other(tmp_path: Path) -> None:
    bundle = open_gpu_bundle(torch_bundle(tmp_path / "b"), host=HOST)
    with pytest.raises(BundleMismatch, match=r"engines\.lp.*--separate-lp"):
        child_config(bundle, name=LP)


def test_the_lp_engine_costs_what_it_was_timed_at(tmp_path: Path) -> None:
    """By the long passes that both were timed at; short ones, and engines that were not kept, say nothing."""
    bundle = opened(tmp_path / "b", (64, 0.1), (512, 0.009), (1024, 0.016), (2048, 0.036), (4096, 9.0))
    assert lp_ratio(bundle.manifest) == pytest.approx(0.9)
    sp, lp = cost_of(bundle), cost_of(bundle, LP)
    assert lp.request_s(2048) == pytest.approx(0.9 * (sp.request_s(2048)))
    assert lp.part_s == pytest.approx(sp.part_s) or lp.part_s == pytest.approx(0.9 * sp.part_s)


def test_engines_that_were_not_timed_cost_the_same(tmp_path: Path) -> None:
    assert lp_ratio(opened(tmp_path / "b", (64, 0.1)).manifest) == 1.0
    assert cost_of(opened(tmp_path / "c"), LP) == cost_of(opened(tmp_path / "d"))


SIMULATED = EngineOptions(Path("none"), simulated_preset="h200_32b_sp", simulated_lp_preset="h200_32b")


def test_the_simulated_pair_is_one_model_with_passes_of_two_sizes() -> None:
    sp, lp = load_engine("simulated", SIMULATED), load_engine("simulated", SIMULATED, LP)
    assert (sp.engine.profiles.tokens_max, lp.engine.profiles.tokens_max) == (1024, 8192)
    assert (sp.model_name, sp.cost) == (lp.model_name, lp.cost)
    assert sp.engine.capabilities == lp.engine.capabilities


@pytest.mark.parametrize("name", [LP, "xp"])
def test_an_engine_that_is_not_set_is_refused_by_name(name: str) -> None:
    options = replace(SIMULATED, simulated_lp_preset=None)
    assert not has_lp_engine("simulated", options)
    with pytest.raises(ValueError, match=name):
        load_engine("simulated", options, name)
    assert load_engine("simulated", options, SP)


def test_a_server_that_loads_by_itself_has_no_engine_for_a_role() -> None:
    with pytest.raises(ValueError, match="lp_bundle"):
        has_lp_engine("triton_server", EngineOptions(Path("a"), lp_bundle=Path("b")))
    assert has_lp_engine("trtllm", EngineOptions(Path("a"), lp_bundle=Path("a")))
    assert not has_lp_engine("trtllm", EngineOptions(Path("a")))
