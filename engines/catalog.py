"""Engines by backend name. The adapter, and the library behind it, is imported when it is asked for.

One engine serves both lanes (`SP`), unless options name another one for long prefills (`LP`): then a worker
of a fleet runs the one that its role asks for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from engines.base import Engine
from engines.bundle import Bundle, open_bundle
from engines.cost_model import CostModel
from engines.gpu_bundle import GpuBundle
from engines.gpu_catalog import LP, SP, ExecutorChoice, cost_of, open_backend


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What a backend may need; each takes what concerns it.

    lp_bundle, simulated_lp_preset: of the LP engine, None: there is none. simulated_load_s: seconds to load.
    """

    bundle: Path
    lp_bundle: Path | None = None
    threads: int | None = None
    kv_capacity_tokens: int = 32_768
    simulated_preset: str = "h200_32b"
    simulated_lp_preset: str | None = None
    simulated_load_s: float = 0.0
    simulated_time_scale: float = 1.0
    executor: ExecutorChoice = field(default_factory=ExecutorChoice)
    progress: Callable[[int, int], None] | None = None  # (profiles warmed, in all)


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine ready to run, its cost model on this machine, and the bundle it came from, if any."""

    engine: Engine
    cost: CostModel
    model_name: str
    bundle: Bundle | GpuBundle | None = None

    @property
    def bundle_id(self) -> str:
        """The fingerprint of the bundle; empty: there is none."""
        return self.bundle.manifest.bundle_id if self.bundle is not None else ""


def has_lp_engine(backend: str, options: EngineOptions) -> bool:
    """Whether long prefills have an engine of their own. Raises ValueError where they can't have one."""
    if backend == "simulated":
        return options.simulated_lp_preset is not None
    if options.lp_bundle is not None and backend == "triton_server":
        raise ValueError("lp_bundle: a Triton server loads its engines by itself; leave it unset")
    return options.lp_bundle is not None


def load_engine(backend: str, options: EngineOptions, name: str = SP) -> LoadedEngine:
    """The engine `name`, SP or LP. Raises ValueError for an unknown backend, option or engine,
    `engines.bundle.BundleMismatch`; for an executor that does not come up LinkLost or BackendUnavailable."""
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is not known; choose from {', '.join(BACKENDS)}")
    if name not in (SP, LP) or (name == LP and not has_lp_engine(backend, options)):
        raise ValueError(
            f"engine {name!r}: there is none; set engine.lp_bundle or engine.simulated_lp_preset"
        )
    return BACKENDS[backend](options, name)


def _bundle_path(options: EngineOptions, name: str) -> Path:
    return options.lp_bundle if name == LP and options.lp_bundle is not None else options.bundle


def _openvino_cpu(options: EngineOptions, name: str) -> LoadedEngine:
    bundle = open_bundle(_bundle_path(options, name))  # checked before the library is imported
    from engines.openvino_cpu import OpenVinoCpuEngine

    manifest = bundle.manifest
    engine = OpenVinoCpuEngine.load(
        bundle.path,
        manifest.profiles,
        threads=options.threads or manifest.backend.threads,
        precision=manifest.backend.precision,
        kv_capacity_tokens=options.kv_capacity_tokens,
        progress=options.progress,
    )
    return LoadedEngine(engine, manifest.cost.model, manifest.model.name, bundle)


def _simulated(options: EngineOptions, name: str) -> LoadedEngine:
    from engines import simulated_settings
    from engines.simulated import SimulatedEngine, SimulatedModel

    presets = {
        "h200_32b": simulated_settings.h200_32b_like,
        "h200_32b_sp": simulated_settings.h200_32b_sp_like,
        "small_cpu": simulated_settings.small_cpu_like,
        "padded_grid": simulated_settings.padded_grid_like,
        "trtllm_like": simulated_settings.trtllm_32b_like,
    }
    preset = options.simulated_preset if name == SP else options.simulated_lp_preset
    if preset not in presets:
        raise ValueError(f"simulated preset {preset!r} is not known; choose from {', '.join(presets)}")
    capabilities, profiles, cost = presets[preset]()
    time.sleep(options.simulated_load_s)
    scale = options.simulated_time_scale
    engine = SimulatedEngine(SimulatedModel(capabilities, profiles, cost), time_scale=scale)
    return LoadedEngine(engine, cost.scaled(scale), f"simulated-{options.simulated_preset}")


def _executor(backend: str) -> Callable[[EngineOptions, str], LoadedEngine]:
    def load(options: EngineOptions, name: str) -> LoadedEngine:
        path = _bundle_path(options, name)
        part = LP if name == LP and path == options.bundle else SP  # of another bundle its one engine
        engine, bundle = open_backend(backend, path, options.executor, part)
        return LoadedEngine(engine, cost_of(bundle, part), bundle.manifest.model.name, bundle)

    return load


BACKENDS: Mapping[str, Callable[[EngineOptions, str], LoadedEngine]] = {
    "openvino_cpu": _openvino_cpu,
    "simulated": _simulated,
    **{name: _executor(name) for name in ("trtllm", "trtllm_torch", "triton_server")},
}
