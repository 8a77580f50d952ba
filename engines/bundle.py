"""A bundle: a directory with a prebuilt engine, its tokenizer and `manifest.json`.

    model.xml, model.bin   the graph and its weights (float16)
    tokenizer.json         for the `tokenizers` library
    calibration.csv        the measured passes behind the cost model
    manifest.json          what was built, for what, from what, at what measured cost

`open_bundle` refuses a bundle that is damaged or was built for something else, before any engine library is
imported: a prebuilt engine that merely runs on another CPU type or library version would serve with a wrong
cost model, and every scheduling decision rests on that. What must match: the schema version, the backend's
library version, and the CPU's architecture, vendor, model name and the instruction sets that matter to its
kernels. Every file is hashed at load; the manifest is covered by its own `bundle_id`. A mismatch names the
field, both sides and the remedy.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from pydantic import Field

from engines import bundle_base
from engines.bundle_base import (
    CALIBRATION,
    MANIFEST,
    REMEDY,
    TOKENIZER,
    BundleMismatch,
    Cost,
    ManifestProfiles,
    Part,
    Sealed,
    Text,
    check_digest,
    check_seal,
    check_size,
    read_manifest,
    sha256_file,
)

__all__ = [
    "CALIBRATION",
    "MANIFEST",
    "MODEL_BIN",
    "MODEL_XML",
    "TOKENIZER",
    "Backend",
    "Bundle",
    "BundleMismatch",
    "Cost",
    "CpuIdentity",
    "File",
    "Host",
    "Limits",
    "Manifest",
    "Model",
    "Source",
    "Text",
    "cpu_identity",
    "file_entry",
    "library_version",
    "open_bundle",
    "sha256_file",
]

SCHEMA_VERSION = 1
MODEL_XML = "model.xml"
MODEL_BIN = "model.bin"

# Instruction sets that change which kernels a CPU backend picks (/proc/cpuinfo names, x86 and Arm).
ISA_FLAGS = (
    *("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_bf16", "amx_int8", "asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2"),
)

_LIBRARIES = {"openvino_cpu": "openvino"}  # backend -> the distribution whose version it is pinned to


class CpuIdentity(Part):
    """What a calibrated bundle is bound to. `isa`: those of ISA_FLAGS that the CPU has."""

    architecture: str
    vendor: str
    model_name: str
    isa: tuple[str, ...]


class Backend(Part):
    """What runs the bundle. `threads`: engine threads of the calibration."""

    name: str
    library: str
    version: str
    precision: str
    threads: int


class Source(Part):
    """Where the weights come from."""

    package: str
    file: str
    sha256: str
    licence: str


class Model(Part):
    """Which model it is. `config`: its sizes, as the builder names them."""

    name: str
    architecture: str
    parameters: int
    config: dict[str, int | float | None]
    source: Source


class Limits(Part):
    """Bounds of the engine that a front end must know before it starts. Tokens and requests."""

    context_tokens_max: int
    requests_max: int
    block_tokens: int


class File(bundle_base.File):
    """A file of the bundle; all lie in its one folder."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")


class Manifest(Sealed):
    """Contents of manifest.json. `steps`: content keys of the build steps that made the bundle."""

    schema_version: Literal[1] = 1
    model: Model
    backend: Backend
    cpu: CpuIdentity
    profiles: ManifestProfiles
    limits: Limits
    text: Text
    cost: Cost
    files: tuple[File, ...]
    steps: dict[str, str]


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle that passed all checks."""

    path: Path
    manifest: Manifest

    @property
    def tokenizer_path(self) -> Path:
        return self.path / TOKENIZER


@dataclass(frozen=True, slots=True)
class Host:
    """This machine, as far as a bundle depends on it."""

    cpu: CpuIdentity
    library_version: str  # of the backend's library; "not installed" where it is missing

    @classmethod
    def current(cls, backend: str = "openvino_cpu") -> Host:
        return cls(cpu_identity(), library_version(backend))


def library_version(backend: str) -> str:
    """Installed version of the backend's library, read from package metadata: nothing is imported."""
    try:
        return metadata.version(_LIBRARIES[backend])
    except metadata.PackageNotFoundError:
        return "not installed"


def cpu_identity(cpuinfo: Path = Path("/proc/cpuinfo")) -> CpuIdentity:
    """Identity of this CPU, from the first processor of /proc/cpuinfo where there is one."""
    info: dict[str, str] = {}
    if cpuinfo.is_file():
        first = cpuinfo.read_text(encoding="utf-8", errors="replace").strip().split("\n\n")[0]
        pairs = (line.partition(":") for line in first.splitlines())
        info = {key.strip(): value.strip() for key, _, value in pairs}
    flags = set((info.get("flags") or info.get("Features") or "").split())
    return CpuIdentity(
        architecture=platform.machine(),
        vendor=info.get("vendor_id") or info.get("CPU implementer") or "unknown",
        model_name=info.get("model name") or info.get("CPU part") or platform.processor() or "unknown",
        isa=tuple(flag for flag in ISA_FLAGS if flag in flags),
    )


def open_bundle(path: Path, *, host: Host | None = None) -> Bundle:
    """Read and check a bundle. Raises BundleMismatch naming the first field that does not fit."""
    manifest, text = read_manifest(path, Manifest, SCHEMA_VERSION, _LIBRARIES)
    _check_host(path, manifest, host)
    check_seal(path, manifest, text)
    for file in manifest.files:
        check_digest(path, file, sha256_file(check_size(path, file)))
    for name in (MODEL_XML, MODEL_BIN, TOKENIZER):
        if name not in {file.name for file in manifest.files}:
            raise BundleMismatch(path, "files", f"an entry for {name}", "none")
    return Bundle(path, manifest)


def file_entry(path: Path) -> File:
    """Size and SHA-256 of a file, for the manifest."""
    return File(name=path.name, size_bytes=path.stat().st_size, sha256=sha256_file(path))


def _check_host(path: Path, manifest: Manifest, host: Host | None) -> None:
    backend = manifest.backend
    here = host or Host.current(backend.name)
    if backend.version != here.library_version:
        remedy = f"{REMEDY}, or install {backend.library}=={backend.version}"
        raise BundleMismatch(
            path, "backend.version", f"{backend.version} (built for)", here.library_version, remedy
        )
    for name in CpuIdentity.model_fields:
        built, found = getattr(manifest.cpu, name), getattr(here.cpu, name)
        if built != found:
            raise BundleMismatch(path, f"cpu.{name}", f"{_plain(built)} (built for)", _plain(found))


def _plain(value: str | tuple[str, ...]) -> str:
    return value if isinstance(value, str) else " ".join(value) or "none"
