"""What to build for TensorRT-LLM: model, precision, parallelism, GPU, the grid and the budgets.

Two backends run what is built: `trtllm` prebuilt engines, `trtllm_torch` the checkpoint itself, with prefill
graphs that are captured when it starts. The second has no engines, so nothing of how engines are built is
asked for it.

Every field has a value of its own here, so that nothing in an engine depends on a default of TensorRT-LLM:
three of those moved between releases.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from build_scripts.spec import BuildError
from engines.models import ModelShape, known_shape

LENGTHS = (8, 16, 32, 64, 128, 256)  # the grid of LAPS
BATCHES = (1, 2, 4, 8, 16, 32, 64)
TOKENS_MAX = 16_384  # passes larger than this fail to build with several profiles (TensorRT-LLM issue 2014)
PASS_TOKENS_MAX = 8_192
ARCHITECTURES = ("qwen2", "llama")
TORCH_ARCHITECTURES = (*ARCHITECTURES, "qwen3")

# The shapes this pipeline builds, and the hub repository of each; "-Instruct" is added where it is asked for.
REPOSITORIES = {
    "qwen2.5-7b": "Qwen/Qwen2.5-7B",
    "qwen2.5-14b": "Qwen/Qwen2.5-14B",
    "qwen2.5-32b": "Qwen/Qwen2.5-32B",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
}
TORCH_REPOSITORIES = {**REPOSITORIES, "qwen3-32b": "Qwen/Qwen3-32B"}
_CHATS_ALREADY = ("qwen3-32b",)  # there is no "-Instruct" of it
# (bytes of memory, compute capability) by a word that the device's name contains, of the smallest so named.
GPUS = {
    "H200": (141_000_000_000, "9.0"),
    "H100": (80_000_000_000, "9.0"),
    "A100-SXM4-80GB": (80_000_000_000, "8.0"),
    "L40S": (48_000_000_000, "8.9"),
}
FP8_CAPABILITY_MIN = (8, 9)


class Backend(StrEnum):
    """As in the manifest of a bundle."""

    ENGINES = "trtllm"
    TORCH = "trtllm_torch"


class Quantisation(StrEnum):
    NONE = "none"
    FP8 = "fp8"  # weights and activations in FP8 with calibrated scales, KV cache in FP8


class GemmChoice(StrEnum):
    """Which engines are built. The plugin's tactics follow T in powers of two, TensorRT's the profile."""

    BOTH = "both"  # build both, keep the faster
    PLUGIN = "plugin"
    TENSORRT = "tensorrt"


class EngineName(StrEnum):
    SP = "sp"
    LP = "lp"


@dataclass(frozen=True, slots=True)
class TrtLlmSpec:
    """One build.

    model: its name on the hub, without the organisation. architecture: qwen2 (Qwen2, Qwen2.5) or llama; with
    backend trtllm_torch also qwen3.
    checkpoint: directory of the Hugging Face checkpoint; None: `repo` at `revision` is fetched from the hub.
    python: interpreter of the environment that has tensorrt_llm. gpu: name that the device must contain.
    lengths, batches: the grid, tokens and requests. pass_tokens_max, requests_max: of one iteration, those
    that decode included.
    context_tokens_max: longest prompt plus answer. separate_lp: build a second engine for long prefills (a
    second copy of the weights). memory_share: of the GPU for weights, activations and KV. calibration_s:
    seconds of measuring. calibration_text: a text file, one example a line, that FP8 scales are set from;
    None: TensorRT-LLM fetches cnn_dailymail from the hub. Of engines alone: lengths, batches, quantisation,
    calibration_text, gemm, separate_lp, lp_tokens_opt.
    """

    model: str
    architecture: str
    shape: ModelShape
    out: str  # a directory, or a URL that fsspec knows
    work_dir: Path
    backend: Backend = Backend.ENGINES
    checkpoint: Path | None = None
    repo: str | None = None
    revision: str = "main"
    python: Path = Path(sys.executable)
    dtype: str = "bfloat16"
    quantisation: Quantisation = Quantisation.NONE
    tp: int = 1
    pp: int = 1
    gpu: str = "H200"
    gpu_memory_bytes: int = 141_000_000_000
    lengths: tuple[int, ...] = LENGTHS
    batches: tuple[int, ...] = BATCHES
    pass_tokens_max: int = PASS_TOKENS_MAX
    requests_max: int = 256
    requests_opt: int = 8
    context_tokens_max: int = 32_768
    block_tokens: int = 32
    gemm: GemmChoice = GemmChoice.BOTH
    separate_lp: bool = False
    lp_tokens_opt: int = 8_192
    memory_share: float = 0.9
    calibration_s: float = 60.0
    calibration_text: Path | None = None

    def __post_init__(self) -> None:
        architectures = TORCH_ARCHITECTURES if self.torch else ARCHITECTURES
        if self.architecture not in architectures:
            raise BuildError(
                f"architecture {self.architecture!r} can't be built; use {' or '.join(architectures)}"
            )
        if self.dtype not in ("bfloat16", "float16"):
            raise BuildError(f"dtype {self.dtype!r} is not known; use bfloat16 or float16")
        if not 65 <= self.pass_tokens_max <= TOKENS_MAX:
            raise BuildError(
                f"pass_tokens_max must be 65 to {TOKENS_MAX}, got {self.pass_tokens_max}: at 64 or below "
                "TensorRT-LLM makes malformed profiles, above it a build with several profiles fails"
            )
        if self.tp < 1 or self.pp != 1:
            raise BuildError(
                f"tp must be at least 1 and pp 1, got tp={self.tp} pp={self.pp}: pipeline parallelism on the "
                "prefill side hangs in this release; use tp"
            )
        if self.tp > 1:
            raise BuildError(
                f"tp={self.tp} needs the executor's leader mode under MPI, which this adapter does not "
                "start; use tp=1, or FP8 to fit a larger model on one GPU"
            )
        if self.block_tokens not in (16, 32, 64, 128):
            raise BuildError(f"block_tokens must be 16, 32, 64 or 128, got {self.block_tokens}")
        if not 0.0 < self.memory_share < 1.0:
            raise BuildError(f"memory_share must be between 0 and 1, got {self.memory_share}")
        for name in ("lengths", "batches"):
            values = getattr(self, name)
            if not values or list(values) != sorted(set(values)) or values[0] < 1:
                raise BuildError(f"{name} must be ascending whole numbers above 0, got {values}")
        if self.requests_max < 1:
            raise BuildError(f"requests_max must be at least 1, got {self.requests_max}")
        if not 1 <= self.requests_opt <= self.requests_max:
            raise BuildError(f"requests_opt must be 1 to requests_max ({self.requests_max})")
        if self.context_tokens_max < max(self.lengths):
            raise BuildError(
                f"context_tokens_max is {self.context_tokens_max}, less than the longest cell, "
                f"{max(self.lengths)}"
            )

        if self.quantisation is Quantisation.FP8 and _version(self.compute_capability) < FP8_CAPABILITY_MIN:
            raise BuildError(
                f"quantisation fp8 needs compute capability 8.9 or later; {self.gpu} has "
                f"{self.compute_capability}: use none, or another gpu"
            )
        if self.calibration_text is not None and self.quantisation is not Quantisation.FP8:
            raise BuildError("calibration_text is for quantisation fp8; leave it out, or ask for fp8")
        if self.torch:
            self._check_torch()

    def _check_torch(self) -> None:
        if self.quantisation is not Quantisation.NONE:
            raise BuildError(
                f"quantisation {self.quantisation} is made when engines are built; with backend trtllm_torch "
                "use none"
            )
        if self.separate_lp:
            raise BuildError("separate_lp is a second engine; backend trtllm_torch has none: leave it out")
        decoding = self.requests_max * 3 // 4  # as `engines.gpu_catalog.decode_room`
        if self.pass_tokens_max <= decoding:
            raise BuildError(
                f"pass_tokens_max is {self.pass_tokens_max}, but {decoding} tokens of an iteration are kept "
                "for requests that decode; use a larger pass_tokens_max or a smaller requests_max"
            )

    @property
    def torch(self) -> bool:
        return self.backend is Backend.TORCH

    @property
    def compute_capability(self) -> str:
        """Of the GPU that is wanted; "unknown" for one that is not in `GPUS`."""
        return next((sm for name, (_, sm) in GPUS.items() if name == self.gpu), "unknown")

    @property
    def target(self) -> str:
        """Where the bundle is published: a directory or URL below `out`, named after the model."""
        return f"{self.out.rstrip('/')}/{self.bundle_name}"

    @property
    def bundle_name(self) -> str:
        """Of the bundle's directory; quantised models and those of the PyTorch backend have another one."""
        if self.torch:
            return f"{self.model.rsplit('/', 1)[-1]}-trtllm-torch"
        fp8 = "-fp8" if self.quantisation is Quantisation.FP8 else ""
        return f"{self.model.rsplit('/', 1)[-1]}{fp8}-trtllm"

    @property
    def engine_names(self) -> tuple[EngineName, ...]:
        return (EngineName.SP, EngineName.LP) if self.separate_lp else (EngineName.SP,)


def architecture_of(model: str, backend: Backend = Backend.ENGINES) -> str:
    """By a model's name. Raises BuildError for one that this pipeline can't build."""
    name = model.lower().rsplit("/", 1)[-1]
    if name.startswith(("qwen2.5", "qwen2-")):
        return "qwen2"
    if name.startswith(("llama", "meta-llama")):
        return "llama"
    if backend is Backend.TORCH:
        if name.startswith("qwen3-"):
            return "qwen3"
        raise BuildError(f"model {model!r} can't be built here: Qwen2, Qwen2.5, Qwen3 and Llama can")
    raise BuildError(
        f"model {model!r} can't be built for TensorRT-LLM here: Qwen2, Qwen2.5 and Llama can; "
        "others may be served by the PyTorch adapter, see --backend trtllm_torch"
    )


def shape_of(model: str) -> ModelShape:
    """The project's own table of shapes. Raises BuildError naming what it has."""
    shape = known_shape(model)
    if shape is None:
        from engines.models import known_models

        raise BuildError(f"model {model!r} is not known; known are {', '.join(known_models())}")
    return shape


def trtllm_spec(
    model: str,
    out: Path,
    *,
    backend: str = Backend.ENGINES.value,
    publish: str | None = None,
    checkpoint: Path | None = None,
    revision: str = "main",
    python: Path | None = None,
    dtype: str = "bfloat16",
    quantisation: str = "none",
    calibration_text: Path | None = None,
    gemm: str = "both",
    separate_lp: bool = False,
    pass_tokens_max: int | None = None,
    requests_max: int = 256,
    context_tokens_max: int = 32_768,
    lengths: tuple[int, ...] = LENGTHS,
    batches: tuple[int, ...] = BATCHES,
    gpu: str = "H200",
) -> TrtLlmSpec:
    """A spec from what a user typed. Raises BuildError naming a bad option.

    model: a name of `REPOSITORIES`, in any case, with or without its organisation and "-Instruct".
    out: directory for bundles and for the work of the steps. publish: URL that bundles go to in its place.
    pass_tokens_max: None takes the backend's default.
    """
    kind = _choice(Backend, "backend", backend)
    repo, shape = _repository(model, kind)
    if publish is not None and "://" not in publish:
        raise BuildError(
            f"publish {publish!r} must be a URL, such as s3://bucket/path or file:///path; for a directory "
            "give --out"
        )
    if gpu not in GPUS:
        raise BuildError(f"gpu {gpu!r} is not known; use {', '.join(GPUS)}")
    spec = TrtLlmSpec(
        model=repo.rsplit("/", 1)[-1],
        architecture=architecture_of(repo, kind),
        shape=shape,
        out=str(out) if publish is None else publish,
        work_dir=out / ".work",
        backend=kind,
        checkpoint=checkpoint,
        repo=repo,
        revision=revision,
        python=Path(sys.executable) if python is None else python,
        dtype=dtype,
        quantisation=_choice(Quantisation, "quantisation", quantisation),
        calibration_text=calibration_text,
        gpu=gpu,
        gpu_memory_bytes=GPUS[gpu][0],
        lengths=lengths,
        batches=batches,
        pass_tokens_max=_pass_tokens_max(kind) if pass_tokens_max is None else pass_tokens_max,
        requests_max=requests_max,
        requests_opt=min(8, requests_max) if requests_max > 0 else 8,
        context_tokens_max=context_tokens_max,
        gemm=_choice(GemmChoice, "gemm", gemm),
        separate_lp=separate_lp,
    )
    return replace(spec, work_dir=spec.work_dir / spec.bundle_name)


def _repository(model: str, backend: Backend) -> tuple[str, ModelShape]:
    """Where the model is on the hub, and its shape. Raises BuildError."""
    repositories = TORCH_REPOSITORIES if backend is Backend.TORCH else REPOSITORIES
    name = model.rsplit("/", 1)[-1]
    base = name.lower().removesuffix("-instruct")
    instruct = "-Instruct" if name.lower().endswith("-instruct") else ""
    known = " ".join(repo.rsplit("/", 1)[-1] for repo in repositories.values())
    if base not in repositories:
        architecture_of(model, backend)  # names the way out for other architectures
        raise BuildError(f"model {model!r} is not known for TensorRT-LLM; known are {known}")
    if instruct and base in _CHATS_ALREADY:
        raise BuildError(f"model {model!r} is not on the hub: {repositories[base]} chats as it is")
    return repositories[base] + instruct, shape_of(base)


def _pass_tokens_max(backend: Backend) -> int:
    if backend is Backend.ENGINES:
        return PASS_TOKENS_MAX
    from engines.trtllm_torch import PASS_TOKENS_MAX as OF_TORCH

    return OF_TORCH


_Choice = TypeVar("_Choice", bound=StrEnum)


def _choice(kind: type[_Choice], name: str, value: str) -> _Choice:
    try:
        return kind(value)
    except ValueError:
        raise BuildError(f"{name} {value!r} is not known; use {' or '.join(kind)}") from None


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")) if text[:1].isdigit() else (99,)
