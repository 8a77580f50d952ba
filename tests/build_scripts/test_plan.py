"""The plan is pure, and a step's key changes with all that its outcome depends on and nothing else."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from build_scripts import calibrate
from build_scripts.calibrate import calibration_profiles, measure_shapes, shapes_of
from build_scripts.plan import Plan, make_plan, probe_profiles
from build_scripts.spec import MODELS, BuildError, BuildSpec, build_spec
from engines.bundle import CpuIdentity, Host
from engines.profiles import Profiles
from engines.types import Layout, Padding

ROOT = Path(__file__).parents[2]
CPU = CpuIdentity(architecture="x86_64", vendor="V", model_name="M", isa=("avx2",))
HOST = Host(CPU, "1.0")
SPEC = build_spec(Path("bundles"), threads=1)


def changed(plan: Plan) -> set[str]:
    base = make_plan(SPEC, HOST, "code").keys
    return {name for name, key in plan.keys.items() if key != base[name]}


@pytest.mark.parametrize(
    ("plan", "steps"),
    [
        (make_plan(SPEC, HOST, "code"), set()),
        (make_plan(replace(SPEC, out=Path("elsewhere")), HOST, "code"), set()),
        (make_plan(replace(SPEC, gguf=Path("local.gguf")), HOST, "code"), set()),
        (make_plan(replace(SPEC, quick=True), HOST, "code"), {"calibrate"}),
        (make_plan(replace(SPEC, threads=2), HOST, "code"), {"verify", "calibrate"}),
        (make_plan(replace(SPEC, precision="f32"), HOST, "code"), {"verify", "calibrate"}),
        (make_plan(SPEC, Host(CPU.model_copy(update={"isa": ()}), "1.0"), "code"), {"verify", "calibrate"}),
        (make_plan(SPEC, Host(CPU, "1.1"), "code"), {"convert", "verify", "calibrate"}),
        (make_plan(SPEC, HOST, "other code"), {"convert", "verify", "calibrate"}),
        (
            make_plan(replace(SPEC, source=replace(SPEC.source, sha256="0" * 64)), HOST, "code"),
            {"fetch", "convert", "verify", "calibrate"},
        ),
    ],
)
def test_a_change_reaches_exactly_the_steps_that_depend_on_it(plan: Plan, steps: set[str]) -> None:
    assert changed(plan) == steps


def test_every_step_comes_after_what_it_reads() -> None:
    seen: set[str] = set()
    for step in make_plan(SPEC, HOST, "code").steps:
        assert set(step.after) <= seen
        seen.add(step.name)


def test_estimates_grow_with_what_is_asked() -> None:
    full, quick = make_plan(SPEC, HOST, "c"), make_plan(build_spec(Path("b"), quick=True), HOST, "c")
    assert quick.step("calibrate").time_s < full.step("calibrate").time_s
    assert make_plan(replace(SPEC, precision="f32"), HOST, "c").memory_bytes > full.memory_bytes


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"model": "gpt"}, "model 'gpt'"),
        ({"backend": "trtllm"}, "has a spec of its own"),
        ({"backend": "abacus"}, "backend 'abacus' is not known; use openvino_cpu or trtllm"),
        ({"precision": "f64"}, "precision 'f64'"),
        ({"threads": 0}, "threads must be between 1"),
    ],
)
def test_a_bad_option_is_refused_by_name(options: dict[str, object], named: str) -> None:
    with pytest.raises(BuildError, match=named):
        build_spec(Path("bundles"), **options)  # type: ignore[arg-type]


def test_every_source_pins_its_weights() -> None:
    for source in MODELS.values():
        assert len(bytes.fromhex(source.sha256)) == 32
        assert source.licence


EDGES = st.lists(st.integers(1, 4096), min_size=1, max_size=16, unique=True).map(sorted).map(tuple)
PROFILES = st.builds(
    lambda t, h: Profiles(Layout.PACKED, Padding.CLASS, t, (0, *h), block_mask=True), EDGES, EDGES
)


@given(PROFILES, st.booleans())
def test_calibration_measures_profiles_of_the_engine_and_and_every_t_class(
    profiles: Profiles, quick: bool
) -> None:
    loaded = calibration_profiles(profiles, quick=quick)
    shapes = shapes_of(loaded)
    assert set(loaded.t_classes) <= set(profiles.t_classes)
    assert len(set(shapes)) == len(shapes)
    assert all(t in loaded.t_classes and h in loaded.h_classes for t, h in shapes)
    assert {t for t, _ in shapes} == set(loaded.t_classes)


@given(PROFILES)
def test_the_probe_loads_a_part_of_the_profiles(profiles: Profiles) -> None:
    probe = probe_profiles(profiles)
    assert set(probe.t_classes) <= set(profiles.t_classes)
    assert set(probe.h_classes) <= set(profiles.h_classes)


def test_calibration_takes_turns_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "_waiting_s", dict)  # else a busy machine shortens these times
    order: list[tuple[int, int]] = []

    def measure(tokens: int, history: int) -> float:
        order.append((tokens, history))
        return 1e-3 * tokens + 1e-6 * history

    shapes = [(t, h) for t in (1, 8, 64) for h in (0, 256)]
    calibration = measure_shapes(measure, shapes, 1.0)
    once = {shape for shape, times in calibration.times_s.items() if len(times) == 1}
    assert once == {shape for shape in shapes if shape[0] == 64}  # slow passes would eat the budget
    assert set(order[:6]) == set(shapes)  # the first round visits each once
    assert sum(sum(times) for times in calibration.times_s.values()) <= 1.0 + 0.32
    assert [s.time_s for s in calibration.samples] == pytest.approx([1e-3 * t + 1e-6 * h for t, h in shapes])


def test_a_dry_run_prints_the_plan_writes_nothing_and_imports_no_engine(tmp_path: Path) -> None:
    out = tmp_path / "bundles"
    script = (
        "import sys; from service.cli.build import build;"
        f"build(out=__import__('pathlib').Path({str(out)!r}), dry_run=True, threads=1);"
        "heavy = {'openvino', 'gguf', 'tokenizers', 'scipy', 'torch'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    for word in (
        "fetch",
        "convert",
        "verify",
        "calibrate",
        "manifest",
        "publish",
        "to do",
        "T-classes",
        "MB",
    ):
        assert word in done.stdout
    assert not out.exists()


def test_specs_are_values() -> None:
    spec = build_spec(Path("bundles"), threads=1)
    assert spec == SPEC
    assert isinstance(spec, BuildSpec)
    assert hash(replace(spec, quick=True)) != hash(spec)
