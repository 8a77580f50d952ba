"""Manifest of a GPU bundle: what a directory of TensorRT-LLM engines is, and on what it may run.

    sp/config.json, sp/rank0.engine   the engine (`engine.save`); lp/ where long prefills have their own
    checkpoint/...                    in their place for the PyTorch backend
    tokenizer.json                    for the `tokenizers` library
    calibration.csv                   the measured passes behind the cost model, where it was calibrated
    model.cache                       the timing cache, so that a rebuild is quick and picks the same kernels
    manifest.json                     this

A plan loads only on the TensorRT that built it and the same kind of GPU, its kernels were timed on that
device, and the state that one instance hands to another is versioned by the exact build. So a bundle is bound
to the versions of both libraries and to the GPU's name; `bundle_id`, the hash of all of this, is the
fingerprint that both sides of a hand-over compare. `engines.gpu_bundle` checks it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from engines.bundle_base import (
    Cost,
    File,
    ManifestProfiles,
    Part,
    Sealed,
    Text,
    exact_fields,
    sha256_file,
)
from engines.models import ModelShape

GPU_SCHEMA_VERSION = 1
TRTLLM = "trtllm"  # prebuilt TensorRT engines
TRTLLM_TORCH = "trtllm_torch"  # a checkpoint, and the sizes of graphs that are captured at start-up
GPU_BACKENDS = (TRTLLM, TRTLLM_TORCH)
TIMING_CACHE = "model.cache"
DIGEST_SUFFIX = ".sha256"
DIGEST_BYTES = 64 * 2**20  # files above this are known by a digest beside them, not hashed at every start

_Directory = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]*$")]
_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Positive = Annotated[int, Field(gt=0)]
Range = tuple[_Positive, _Positive, _Positive]  # tokens: (min, opt, max)


class GpuSource(Part):
    """Where the weights come from: a repository, which commit of it, and the files that were read."""

    repo: str
    revision: str
    licence: str
    files: tuple[File, ...]


class GpuModel(Part):
    """Which model it is. architecture: qwen2 or llama, or another of the PyTorch backend."""

    name: str
    architecture: str
    shape: Annotated[ModelShape, BeforeValidator(exact_fields(ModelShape))]
    source: GpuSource


class GpuBackend(Part):
    """What runs the bundle. tensorrt: of the engines' builder; None for the PyTorch backend.

    kv_dtype: of the KV cache, the same as dtype or fp8.
    """

    name: str
    tensorrt_llm: str
    tensorrt: str | None
    dtype: Literal["bfloat16", "float16"]
    quantisation: Literal["none", "fp8"]
    kv_dtype: Literal["bfloat16", "float16", "fp8"]
    tp: _Positive = 1
    pp: _Positive = 1


class GpuIdentity(Part):
    """The device that the engines were built and timed on. memory_bytes: all that it has."""

    name: str
    compute_capability: str
    memory_bytes: _Positive
    driver: str


class EngineBuild(Part):
    """One engine.

    directory: in the bundle. build_config_sha256: of `build_config` in its config.json, see
    `engines.gpu_engine_config.build_config_digest`. gemm_plugin: whether GEMMs are the plugin's (cuBLASLt) or
    TensorRT's. plan_bytes: of its rank*.engine files, the weights among them. profiles: as read back from the
    engine, in the executor's order. requests_max: of one pass.
    """

    directory: _Directory
    build_config_sha256: _Sha256
    gemm_plugin: bool
    plan_bytes: _Positive
    profiles: tuple[Range, ...] = Field(min_length=1)
    requests_max: _Positive

    @property
    def pass_tokens_max(self) -> int:
        return self.profiles[-1][2]


class Engines(Part):
    """sp serves both lanes where lp is None; an lp engine is a second copy of the weights."""

    sp: EngineBuild
    lp: EngineBuild | None = None

    def named(self) -> tuple[tuple[str, EngineBuild], ...]:
        return (("sp", self.sp),) if self.lp is None else (("sp", self.sp), ("lp", self.lp))


class TorchBuild(Part):
    """What the PyTorch backend loads. capture_tokens: sizes of its piecewise graphs, ascending."""

    directory: _Directory
    capture_tokens: tuple[_Positive, ...]


class GpuLimits(Part):
    """Bounds of an executor. kv_blocks: its pool; an LP engine has an executor and a pool of its own.

    memory_bytes: what all of it takes on one GPU: weights, activations and KV of every engine.
    """

    context_tokens_max: _Positive
    requests_max: _Positive
    block_tokens: _Positive
    kv_blocks: _Positive
    memory_bytes: _Positive


class Candidate(Part):
    """One engine that was built and timed. pass_s: (tokens, seconds) a class. kept: it is in the bundle."""

    engine: Literal["sp", "lp"]
    gemm_plugin: bool
    plan_bytes: _Positive
    pass_s: tuple[tuple[_Positive, Annotated[float, Field(gt=0.0)]], ...]
    kept: bool


class Environment(Part):
    """What the build ran in. A hint for whoever rebuilds it: nothing is bound to it."""

    python: str
    torch: str | None = None
    cuda: str | None = None


class GpuManifest(Sealed):
    """Contents of manifest.json.

    engines: of trtllm; checkpoint: of trtllm_torch. cost: None: not calibrated, so not to be published.
    candidates: what the choice of the engines rests on. steps: content keys of the build steps.
    """

    schema_version: Literal[1] = 1
    model: GpuModel
    backend: GpuBackend
    gpu: GpuIdentity
    engines: Engines | None = None
    checkpoint: TorchBuild | None = None
    profiles: ManifestProfiles
    limits: GpuLimits
    text: Text
    cost: Cost | None
    candidates: tuple[Candidate, ...] = ()
    environment: Environment
    files: tuple[File, ...]
    steps: dict[str, str]

    @property
    def fingerprint(self) -> str:
        """What both sides of a hand-over must have in common."""
        return self.bundle_id

    @property
    def kv_value_bytes(self) -> int:
        return 1 if self.backend.kv_dtype == "fp8" else 2

    @property
    def kv_pool_bytes(self) -> int:
        """Of one executor's KV pool, on each of the GPUs that share the model."""
        shape = self.model.shape
        per_token = 2 * shape.layers * shape.kv_heads * shape.head_dim * self.kv_value_bytes
        gpus = self.backend.tp * self.backend.pp
        return self.limits.kv_blocks * self.limits.block_tokens * per_token // gpus


def gpu_file_entry(bundle: Path, name: str) -> File:
    """Size and SHA-256 of the file `name` (with `/`) below `bundle`, for the manifest."""
    file = bundle / name
    return File(name=name, size_bytes=file.stat().st_size, sha256=sha256_file(file))
