"""The pipeline on a tiny random model: real weights file, real conversion, real engine, real calibration."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

pytest.importorskip("openvino")

from build_scripts import runner
from build_scripts.progress import Silent
from build_scripts.spec import BuildError, BuildSpec
from build_scripts.store import Store
from build_scripts.verify import greedy
from engines.bundle import BundleMismatch, open_bundle
from engines.cost_fit import read_csv
from engines.openvino_cpu import OpenVinoCpuEngine
from service.cli.build import register
from tests.build_scripts import tiny

STEPS = ["fetch", "convert", "verify", "calibrate", "manifest"]


class Heard(Silent):
    """Which steps ran and which were skipped; `stop_at` plays the power failure at the start of a step."""

    def __init__(self, stop_at: str = "") -> None:
        self.stop_at = stop_at
        self.ran: list[str] = []
        self.skipped: list[str] = []

    def begin(self, step: str, detail: str) -> None:
        if step == self.stop_at:
            raise KeyboardInterrupt
        self.ran.append(step)

    def skip(self, step: str) -> None:
        self.skipped.append(step)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> BuildSpec:
    spec = tiny.spec(tmp_path_factory.mktemp("built"))
    runner.build(spec)
    return spec


@pytest.fixture
def spec(built: BuildSpec, tmp_path: Path) -> BuildSpec:
    """A finished build of one's own, to damage and repeat."""
    shutil.copytree(built.out.parent, tmp_path, dirs_exist_ok=True)
    return replace(built, out=tmp_path / "bundles", gguf=tmp_path / "tiny.gguf")


def rebuild(spec: BuildSpec, **options: bool) -> Heard:
    heard = Heard()
    runner.build(spec, heard, **options)
    return heard


def test_the_bundle_opens_runs_and_says_what_it_is(built: BuildSpec) -> None:
    bundle = open_bundle(built.bundle_dir)
    manifest = bundle.manifest
    assert manifest.model.source.sha256 == built.source.sha256
    assert manifest.model.parameters == tiny.CONFIG.parameters
    assert (manifest.profiles, manifest.backend.precision) == (tiny.PROFILES, "f32")
    assert (manifest.text.bos_id, manifest.text.eos_id, manifest.text.add_bos) == (1, 2, False)
    engine = OpenVinoCpuEngine.load(
        bundle.path, manifest.profiles, threads=manifest.backend.threads, precision="f32"
    )
    assert manifest.limits.context_tokens_max == engine.capabilities.context_tokens_max
    assert manifest.limits.requests_max == engine.capabilities.requests_max
    assert len(greedy(engine, [5, 6, 7], 4)) in range(1, 5)
    engine.close()


def test_the_cost_model_is_of_the_measured_passes(built: BuildSpec) -> None:
    cost = open_bundle(built.bundle_dir).manifest.cost
    samples = read_csv(built.bundle_dir / "calibration.csv")
    assert len(samples) == cost.sample_count == 12
    assert {(s.new_tokens, s.history) for s in samples} == {
        (t, h) for t in tiny.PROFILES.t_classes for h in tiny.PROFILES.h_classes
    }
    wrong = sorted(abs(cost.model.pass_s(s.shape) / s.time_s - 1) for s in samples)
    assert wrong[-1] == pytest.approx(cost.worst_error, abs=1e-3)
    assert cost.knee_tokens == cost.model.knee_tokens()


def test_a_finished_build_has_nothing_to_do(spec: BuildSpec) -> None:
    before = (spec.bundle_dir / "manifest.json").stat().st_ino
    heard = rebuild(spec)
    assert (heard.ran, heard.skipped) == ([], [])
    assert (spec.bundle_dir / "manifest.json").stat().st_ino == before
    assert all(runner.steps_done(runner.plan_build(spec)).values())


@pytest.mark.parametrize("stop_at", [*STEPS[1:], "publish"])
def test_an_interrupted_build_goes_on_where_it_stopped(spec: BuildSpec, stop_at: str) -> None:
    shutil.rmtree(spec.out)
    order = [*STEPS, "publish"]
    with pytest.raises(KeyboardInterrupt):
        runner.build(spec, Heard(stop_at))
    assert not spec.bundle_dir.exists()
    heard = rebuild(spec)
    assert heard.skipped == order[: order.index(stop_at)]
    assert heard.ran == order[order.index(stop_at) :]
    open_bundle(spec.bundle_dir)


def test_the_old_bundle_stays_until_the_new_one_is_complete(spec: BuildSpec) -> None:
    before = open_bundle(spec.bundle_dir).manifest.bundle_id
    with pytest.raises(KeyboardInterrupt):
        runner.build(spec, Heard("publish"), force=True)
    assert open_bundle(spec.bundle_dir).manifest.bundle_id == before
    rebuild(spec, force=True)
    assert open_bundle(spec.bundle_dir).manifest.bundle_id != before


def test_a_step_that_was_repeated_takes_those_after_it_along_even_across_builds(spec: BuildSpec) -> None:
    """Two conversions differ in bytes: what was measured on the first must not describe the second."""
    shutil.rmtree(spec.bundle_dir)
    with pytest.raises(KeyboardInterrupt):
        runner.build(spec, Heard("verify"), force=True)
    assert rebuild(spec).ran == ["verify", "calibrate", "manifest", "publish"]
    open_bundle(spec.bundle_dir)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()  # files are linked, not copied, into the bundle: write another one
    path.write_bytes(data)


def _damage_bundle(spec: BuildSpec) -> None:
    _flip(spec.bundle_dir / "model.bin")


def _damage_step(spec: BuildSpec) -> None:
    _damage_bundle(spec)
    _flip(spec.work_dir / "convert" / "model.bin")


@pytest.mark.parametrize(
    ("damage", "ran"),
    [
        (_damage_bundle, ["publish"]),
        (_damage_step, ["convert", "verify", "calibrate", "manifest", "publish"]),
        (lambda spec: shutil.rmtree(spec.bundle_dir), ["publish"]),
    ],
)
def test_what_is_damaged_is_made_again_and_nothing_else(
    spec: BuildSpec, damage: Callable[[BuildSpec], None], ran: list[str]
) -> None:
    damage(spec)
    assert rebuild(spec).ran == ran
    open_bundle(spec.bundle_dir)


def test_another_option_repeats_what_depends_on_it(spec: BuildSpec) -> None:
    heard = rebuild(replace(spec, threads=2))
    assert heard.skipped == ["fetch", "convert"]
    assert open_bundle(spec.bundle_dir).manifest.backend.threads == 2


def test_force_repeats_all_but_the_download(spec: BuildSpec) -> None:
    assert rebuild(spec, force=True).skipped == ["fetch"]


def test_other_weights_are_refused_naming_both_hashes(spec: BuildSpec) -> None:
    other = tiny.write_gguf(spec.out.parent / "other.gguf", seed=1)
    shutil.rmtree(spec.out)
    with pytest.raises(BuildError, match=rf"sha256 is [0-9a-f]{{64}}, expected {spec.source.sha256}"):
        runner.build(replace(spec, gguf=other))
    with pytest.raises(BuildError, match="no such file"):
        runner.build(replace(spec, gguf=spec.out / "absent.gguf"))
    assert not spec.bundle_dir.exists()


def test_a_model_that_answers_nonsense_is_not_published(spec: BuildSpec) -> None:
    shutil.rmtree(spec.out)
    asked = replace(spec.source, probe_question="What is the capital of France?", probe_answer="Paris")
    with pytest.raises(BuildError, match=r"'What is the capital of France\?' was answered .* 'Paris'"):
        runner.build(replace(spec, source=asked))
    assert not spec.bundle_dir.exists()
    with pytest.raises(BundleMismatch, match=r"manifest\.json"):
        open_bundle(spec.bundle_dir)


def _build_in_process(spec: BuildSpec) -> None:
    runner.build(spec)


def test_two_builds_at_once_give_one_bundle(spec: BuildSpec) -> None:
    shutil.rmtree(spec.out)
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_build_in_process, args=(spec,)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
    assert [process.exitcode for process in processes] == [0, 0]
    manifest = json.loads((spec.work_dir / "manifest" / "manifest.json").read_text())
    assert open_bundle(spec.bundle_dir).manifest.bundle_id == manifest["bundle_id"]


def test_waiting_for_another_build_is_bounded(tmp_path: Path) -> None:
    store = Store(tmp_path / "work")
    with store.lock(), pytest.raises(BuildError, match="another build"), store.lock(timeout_s=0.3):
        pass
    with store.lock(timeout_s=0.3):  # and is over with the other build
        pass


def _invoke(*arguments: str) -> Result:
    app = typer.Typer()
    register(app)
    app.callback()(lambda: None)  # a command group, as the real one is
    return CliRunner().invoke(app, ["build", *arguments])


def test_the_command_checks_a_bundle(built: BuildSpec, tmp_path: Path) -> None:
    good = _invoke("--check", str(built.bundle_dir))
    assert good.exit_code == 0, good.output
    assert "valid on this machine" in good.output
    assert "L_m" in good.output
    bad = _invoke("--check", str(tmp_path))
    assert bad.exit_code == 1
    assert "plaserve: bundle" in bad.stderr
    assert "plaserve build" in bad.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--backend", "abacus"), "use openvino_cpu or trtllm"),
        (("--model", "gpt"), "model 'gpt' is not known"),
        (("--gguf", "absent.gguf"), "no such file"),
    ],
)
def test_the_command_refuses_in_one_line(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    result = _invoke("--out", str(tmp_path), *arguments)
    assert result.exit_code == 1
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
