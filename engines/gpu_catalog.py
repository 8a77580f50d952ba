"""Engines of GPU bundles: the bundle is checked, then its executor started, or found behind a Triton server.

What a bundle says of its engine becomes the executor's configuration; nothing of it can be set apart, so that
what was calibrated is what runs. An executor takes decode beside prefill: its limits are of an iteration, and
the scheduler's passes get what is left beside `decode_room`.

A Triton server has checked its engines by itself, on its own machine: of the bundle only the contents are
checked here, and that the server's model carries its fingerprint.
"""

from __future__ import annotations

import logging
import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from engines.bundle_base import REMEDY, BundleMismatch
from engines.cost_model import CostModel
from engines.executor.types import ExecutorRole, ExecutorSettings
from engines.gpu_bundle import GpuBundle, check_gpu_bundle_content, open_gpu_bundle
from engines.gpu_manifest import GpuManifest
from engines.simulated_settings import part_s
from engines.trtllm_child.config import ChildConfig, Driver
from engines.trtllm_profiles import stock_profiles

if TYPE_CHECKING:
    from engines.base import Engine
    from engines.triton_options import Tls

log = logging.getLogger(__name__)

SP: Final = "sp"  # engines of a bundle; SP serves both lanes where there is no other
LP: Final = "lp"
SHORT_TOKENS_MAX = 256  # passes above it are what an LP engine is for
NO_PYTHON = "name the interpreter of TensorRT-LLM's environment with executor.python"


@dataclass(frozen=True, slots=True)
class ExecutorChoice:
    """How the executor of a bundle is kept.

    python: of TensorRT-LLM's environment. triton_*: where the server is, for backend triton_server.
    """

    python: Path | None = None
    device: int = 0
    log: Path | None = None
    start_timeout_s: float = 600.0
    settings: ExecutorSettings = field(default_factory=ExecutorSettings)
    triton_url: str = "127.0.0.1:8001"
    triton_model: str = "tensorrt_llm"
    triton_tls: Tls | None = None
    triton_allow_plaintext: bool = False


def open_backend(
    backend: str, path: Path, choice: ExecutorChoice, name: str = SP
) -> tuple[Engine, GpuBundle]:
    """The engine `name` of the bundle at `path`, started.

    Raises BundleMismatch, LinkLost, BackendUnavailable, ValueError.
    """
    if backend == "triton_server":
        bundle = GpuBundle(path, check_gpu_bundle_content(path))
        return _triton(bundle, choice), bundle
    if choice.python is None:
        raise ValueError(f"backend {backend}: {NO_PYTHON}")
    bundle = open_gpu_bundle(path, python=choice.python)
    built_for = bundle.manifest.backend.name
    if built_for != backend:
        raise BundleMismatch(path, "backend.name", backend, built_for, f"use --backend {built_for}")
    for warning in bundle.warnings:
        log.warning("bundle %s: %s", path, warning)
    return _child(bundle, choice, name), bundle


def cost_of(bundle: GpuBundle, name: str = SP) -> CostModel:
    """Of an engine of the bundle, with what a part of a prompt costs on an executor: estimated, where not
    measured. The model is fitted to the SP engine; that of the LP engine is as much faster or slower as its
    passes were where the build timed both (`lp_ratio`).

    Raises BundleMismatch for a bundle that was never calibrated: no schedule can rest on it.
    """
    manifest = bundle.manifest
    if manifest.cost is None:
        remedy = f"calibrate it on this machine: {REMEDY}"
        raise BundleMismatch(bundle.path, "cost", "a fitted cost model", "none", remedy)
    cost = manifest.cost.model.scaled(lp_ratio(manifest) if name == LP else 1.0)
    return cost if cost.part_s else replace(cost, part_s=part_s(manifest.model.shape))


def lp_ratio(manifest: GpuManifest) -> float:
    """Time of a long pass on the LP engine over that on the SP engine: the median of the sizes above
    `SHORT_TOKENS_MAX` at which the build has timed both; 1 where it has timed none."""
    timed = {one.engine: dict(one.pass_s) for one in manifest.candidates if one.kept}
    sp, lp = timed.get(SP, {}), timed.get(LP, {})
    ratios = [lp[tokens] / sp[tokens] for tokens in lp if tokens in sp and tokens > SHORT_TOKENS_MAX]
    return statistics.median(ratios) if ratios else 1.0


def child_config(bundle: GpuBundle, device: int = 0, name: str = SP) -> ChildConfig:
    """What a child process is told to serve an engine of this bundle with, prefill and decode both.

    Raises BundleMismatch for an LP engine that the bundle does not have.
    """
    manifest = bundle.manifest
    model_dir = bundle.lp_dir if name == LP else bundle.sp_dir
    if model_dir is None:
        remedy = "build it with `plaserve build --separate-lp`, or leave engine.lp_bundle unset"
        raise BundleMismatch(bundle.path, "engines.lp", "an engine of its own", "none", remedy)
    limits, torch = manifest.limits, manifest.checkpoint
    return ChildConfig(
        driver=Driver.TORCH if torch is not None else Driver.ENGINE,
        model_dir=str(model_dir),
        version=manifest.backend.tensorrt_llm,
        role=ExecutorRole.BOTH,
        requests_max=limits.requests_max,
        pass_tokens_max=manifest.profiles.tokens_max,
        context_tokens_max=limits.context_tokens_max,
        block_tokens=limits.block_tokens,
        kv_blocks=limits.kv_blocks,
        decode_requests_max=decode_room(manifest),
        capture_tokens=() if torch is None else torch.capture_tokens,
        dtype=manifest.backend.dtype,
        device=device,
    )


def decode_room(manifest: GpuManifest) -> int:
    """Requests of an iteration, a token each, that are kept for decode: three of four, since an answer takes
    many iterations and a prompt few. With the default of 256, passes get 64 requests, the grid's largest."""
    return manifest.limits.requests_max * 3 // 4


def _child(bundle: GpuBundle, choice: ExecutorChoice, name: str) -> Engine:
    from engines import trtllm, trtllm_torch

    assert choice.python is not None
    config = child_config(bundle, choice.device, name)
    open_engine = trtllm.open_engine if config.driver is Driver.ENGINE else trtllm_torch.open_engine
    return open_engine(
        config,
        choice.python,
        _with_eos(choice.settings, bundle.manifest),
        start_timeout_s=choice.start_timeout_s,
        fingerprint=bundle.fingerprint,
        log=choice.log,
    )


def _triton(bundle: GpuBundle, choice: ExecutorChoice) -> Engine:
    from engines.triton_options import TritonOptions
    from engines.triton_server import open_engine

    manifest = bundle.manifest
    limits, room = manifest.limits, decode_room(manifest)
    pass_tokens_max = manifest.profiles.tokens_max - room
    options = TritonOptions(
        url=choice.triton_url,
        model=choice.triton_model,
        fingerprint=bundle.fingerprint,
        requests_max=limits.requests_max - room,
        pass_tokens_max=pass_tokens_max,
        context_tokens_max=limits.context_tokens_max,
        kv_blocks=limits.kv_blocks,
        block_tokens=limits.block_tokens,
        tls=choice.triton_tls,
        allow_plaintext=choice.triton_allow_plaintext,
        start_timeout_s=choice.start_timeout_s,
    )
    return open_engine(options, _with_eos(choice.settings, manifest), stock_profiles(pass_tokens_max))


def _with_eos(settings: ExecutorSettings, manifest: GpuManifest) -> ExecutorSettings:
    return replace(settings, eos_id=manifest.text.eos_id)
