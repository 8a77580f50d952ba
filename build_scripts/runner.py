"""Run a build: carry out the steps of the plan that are not done yet, in order, and publish the bundle."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from build_scripts.calibrate import (
    MEASURED,
    calibration_profiles,
    fit_calibration,
    measure_shapes,
    measured_origin,
    shapes_of,
    write_csv,
)
from build_scripts.convert import FACTS, code_digest, convert
from build_scripts.fetch import WEIGHTS, fetch
from build_scripts.manifest import bundle_files, make_manifest, read_json
from build_scripts.plan import Plan, make_plan, probe_profiles
from build_scripts.progress import Progress, Silent
from build_scripts.spec import DEFAULT_MODEL, BuildError, BuildSpec, build_spec
from build_scripts.store import Store, needs_room, publish
from build_scripts.verify import verify
from engines.bundle import (
    CALIBRATION,
    MANIFEST,
    TOKENIZER,
    BundleMismatch,
    Cost,
    Host,
    Limits,
    Text,
    open_bundle,
)
from engines.profiles import Profiles

if TYPE_CHECKING:
    from engines.openvino_cpu import OpenVinoCpuEngine


def plan_build(spec: BuildSpec) -> Plan:
    """The plan for this machine. Imports no engine library."""
    return make_plan(spec, Host.current(spec.backend), code_digest())


def steps_done(plan: Plan) -> dict[str, bool]:
    """Which steps an interrupted or earlier build has left valid outputs for."""
    store = Store(plan.spec.work_dir)
    done = {
        step.name: store.done(step.name, step.key, step.after)
        for step in plan.steps
        if step.name != "publish"
    }
    return {**done, "publish": is_current(plan)}


def is_current(plan: Plan) -> bool:
    """Whether the published bundle opens on this machine and came from exactly this plan."""
    try:
        return open_bundle(plan.spec.bundle_dir).manifest.steps == plan.keys
    except BundleMismatch:
        return False


def build(spec: BuildSpec, progress: Progress | None = None, *, force: bool = False) -> Path:
    """Build the bundle of `spec` and return its directory. Raises BuildError.

    Steps that are done are left alone; with `force` all are repeated but the download.
    """
    progress = progress or Silent()
    plan = plan_build(spec)
    if plan.spec.backend == "openvino_cpu" and Host.current(spec.backend).library_version == "not installed":
        raise BuildError("openvino is not installed: install the extra with `pip install 'plaserve[cpu]'`")
    store = Store(spec.work_dir)
    with store.lock():
        if not force and is_current(plan):
            return spec.bundle_dir
        actions = _actions(plan, store, progress)
        for step in plan.steps[:-1]:
            if store.done(step.name, step.key, step.after) and not (force and step.name != "fetch"):
                progress.skip(step.name)
                continue
            progress.begin(step.name, step.does)
            with needs_room(step.name, spec.work_dir):
                progress.end(actions[step.name](store.begin(step.name)))
                store.commit(step.name, step.key, step.after)
        progress.begin("publish", plan.steps[-1].does)
        files = [*bundle_files(store), store.folder("manifest") / MANIFEST]
        with needs_room("publish", spec.work_dir):
            publish(files, spec.bundle_dir, spec.work_dir)
        bundle = open_bundle(spec.bundle_dir)
        progress.end(f"{bundle.path} ({bundle.manifest.bundle_id[:12]})")
    return spec.bundle_dir


def ensure_bundle(
    out_dir: Path, progress: Progress | None = None, *, model: str = DEFAULT_MODEL, quick: bool = False
) -> Path:
    """The directory of a bundle of `model` that is valid on this machine; built when there is none.

    An existing bundle is kept, whatever its threads and precision, while it opens here and its graph and
    profiles are the present ones. A quickly calibrated one will do only where `quick` is asked for. Raises
    BuildError.
    """
    spec = build_spec(out_dir, model=model, quick=quick)
    try:
        manifest = open_bundle(spec.bundle_dir).manifest
    except BundleMismatch:
        return build(spec, progress)
    present = plan_build(spec).keys["convert"], spec.profiles
    if (manifest.steps.get("convert"), manifest.profiles) == present and (quick or not manifest.cost.quick):
        return spec.bundle_dir
    return build(spec, progress)


Action = Callable[[Path], str]  # writes a step's outputs into the folder; returns what to show


def _actions(plan: Plan, store: Store, progress: Progress) -> dict[str, Action]:
    """What each step does. Outputs of earlier steps are read from their folders in `store`."""
    spec = plan.spec

    def fetch_step(out: Path) -> str:
        fetch(spec.source, spec.gguf, out)
        return f"{(out / WEIGHTS).stat().st_size / 1e6:.0f} MB, sha256 as pinned"

    def convert_step(out: Path) -> str:
        convert(store.folder("fetch") / WEIGHTS, out)
        return f"{sum(path.stat().st_size for path in out.iterdir()) / 1e6:.0f} MB"

    def verify_step(out: Path) -> str:
        return _verify(spec, store, out, progress)

    def calibrate_step(out: Path) -> str:
        return _calibrate(spec, store, out, progress)

    def manifest_step(out: Path) -> str:
        manifest = make_manifest(plan, store, Host.current(spec.backend))
        (out / MANIFEST).write_text(manifest.to_text(), encoding="utf-8")
        return f"bundle {manifest.bundle_id[:12]}"

    return {
        "fetch": fetch_step,
        "convert": convert_step,
        "verify": verify_step,
        "calibrate": calibrate_step,
        "manifest": manifest_step,
    }


def _verify(spec: BuildSpec, store: Store, out: Path, progress: Progress) -> str:
    from tokenizers import Tokenizer

    folder = store.folder("convert")
    text = Text(**read_json(folder / FACTS)["text"])
    wanted = probe_profiles(spec.profiles)
    engine = _load(spec, store, wanted, progress)
    try:
        record = verify(engine, wanted, spec.source, Tokenizer.from_file(str(folder / TOKENIZER)), text)
    finally:
        engine.close()
    (out / "verify.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return f"answers {record['answer'].strip()!r}"


def _calibrate(spec: BuildSpec, store: Store, out: Path, progress: Progress) -> str:
    start_s = time.monotonic()
    profiles = calibration_profiles(spec.profiles, quick=spec.quick)
    engine = _load(spec, store, profiles, progress)
    warm_s = time.monotonic() - start_s
    shapes = shapes_of(profiles)
    try:
        progress.update(0.0, f"measuring {len(shapes)} profiles for about {spec.calibration_s:.0f} s")
        calibration = measure_shapes(engine.measure, shapes, spec.calibration_s, update=progress.update)
        capabilities = engine.capabilities
    finally:
        engine.close()
    result = fit_calibration(calibration, measured_origin(spec.backend, spec.threads, spec.precision))
    limits = Limits(
        context_tokens_max=capabilities.context_tokens_max,
        requests_max=capabilities.requests_max,
        block_tokens=capabilities.block_tokens,
    )
    cost = Cost(
        model=result.model,
        median_error=result.median_error,
        worst_error=result.worst_error,
        sample_count=len(result.errors),
        boundary_tokens=result.model.boundary_tokens(0),
        knee_tokens=result.model.knee_tokens(),
        quick=spec.quick,
    )
    measured = {"limits": limits.model_dump(mode="json"), "cost": cost.model_dump(mode="json")}
    (out / MEASURED).write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")
    write_csv(out / CALIBRATION, spec.source.name, calibration, result)
    return (
        f"warm in {warm_s:.0f} s; {len(shapes)} profiles, {calibration.waited_share:.0%} of the time lost to "
        f"other processes; fit within {cost.median_error:.1%} (median), {cost.worst_error:.0%} (worst)"
    )


def _load(spec: BuildSpec, store: Store, profiles: Profiles, progress: Progress) -> OpenVinoCpuEngine:
    from engines.openvino_cpu import OpenVinoCpuEngine

    def warmed(done: int, count: int) -> None:
        progress.update(done / count, f"warming profile {done} of {count}")

    return OpenVinoCpuEngine.load(
        store.folder("convert"), profiles, threads=spec.threads, precision=spec.precision, progress=warmed
    )
