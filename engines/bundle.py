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

import hashlib
import json
import platform
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    WrapSerializer,
)

from engines.cost_model import CostModel
from engines.profiles import Profiles

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
MODEL_XML = "model.xml"
MODEL_BIN = "model.bin"
TOKENIZER = "tokenizer.json"
CALIBRATION = "calibration.csv"
REMEDY = "rebuild it with `plaserve build`"

# Instruction sets that change which kernels a CPU backend picks (/proc/cpuinfo names, x86 and Arm).
ISA_FLAGS = (
    *("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_bf16", "amx_int8", "asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2"),
)

_LIBRARIES = {"openvino_cpu": "openvino"}  # backend -> the distribution whose version it is pinned to


class BundleMismatch(Exception):  # noqa: N818 - the name says what it is
    """A bundle can't be used here: `field` should be `expected` but is `found`; `remedy` says what to do."""

    def __init__(self, path: Path, field: str, expected: object, found: object, remedy: str = REMEDY) -> None:
        super().__init__(f"bundle {path}: {field}: expected {expected}, found {found}; {remedy}")
        self.path = path
        self.field = field
        self.expected = expected
        self.found = found
        self.remedy = remedy


def _exact_fields(cls: type) -> Callable[[Any], Any]:
    """pydantic ignores unknown keys of plain dataclasses; a manifest must not."""
    assert is_dataclass(cls)
    known = {field.name for field in fields(cls)}

    def check(value: Any) -> Any:
        if isinstance(value, dict) and (unknown := sorted(set(value) - known)):
            raise ValueError(f"unknown field {unknown[0]!r}")
        return value

    return check


def _dump_known(value: Any, dump: SerializerFunctionWrapHandler) -> Any:
    """Fields that came after the first bundles are left out while empty, so that those still open."""
    return {name: found for name, found in dump(value).items() if found or name not in _LATER_FIELDS}


_LATER_FIELDS = ("part_s", "captured")


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class CpuIdentity(_Part):
    """What a calibrated bundle is bound to. `isa`: those of ISA_FLAGS that the CPU has."""

    architecture: str
    vendor: str
    model_name: str
    isa: tuple[str, ...]


class Backend(_Part):
    """What runs the bundle. `threads`: engine threads of the calibration."""

    name: str
    library: str
    version: str
    precision: str
    threads: int


class Source(_Part):
    """Where the weights come from."""

    package: str
    file: str
    sha256: str
    licence: str


class Model(_Part):
    """Which model it is. `config`: its sizes, as the builder names them."""

    name: str
    architecture: str
    parameters: int
    config: dict[str, int | float | None]
    source: Source


class Limits(_Part):
    """Bounds of the engine that a front end must know before it starts. Tokens and requests."""

    context_tokens_max: int
    requests_max: int
    block_tokens: int


class Text(_Part):
    """What turns messages into a prompt and tokens into an answer. `chat_template` is Jinja."""

    chat_template: str
    bos_id: int
    eos_id: int
    add_bos: bool


class Cost(_Part):
    """The fitted cost model of this machine and how good the fit is (relative errors, tokens)."""

    model: Annotated[CostModel, BeforeValidator(_exact_fields(CostModel)), WrapSerializer(_dump_known)]
    median_error: float
    worst_error: float
    sample_count: int
    boundary_tokens: int  # L_m at H = 0
    knee_tokens: int
    quick: bool  # a short calibration, good enough for tests


class File(_Part):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    size_bytes: int
    sha256: str


class Manifest(_Part):
    """Contents of manifest.json. `steps`: content keys of the build steps that made the bundle."""

    schema_version: Literal[1] = 1
    bundle_id: str = ""
    model: Model
    backend: Backend
    cpu: CpuIdentity
    profiles: Annotated[Profiles, BeforeValidator(_exact_fields(Profiles)), WrapSerializer(_dump_known)]
    limits: Limits
    text: Text
    cost: Cost
    files: tuple[File, ...]
    steps: dict[str, str]

    def sealed(self) -> Manifest:
        """With `bundle_id` set to the hash of all the rest."""
        return self.model_copy(update={"bundle_id": self.content_id()})

    def content_id(self) -> str:
        body = json.dumps(self.model_dump(mode="json", exclude={"bundle_id"}), sort_keys=True)
        return hashlib.sha256(body.encode()).hexdigest()

    def to_text(self) -> str:
        """The one way in which a manifest is written; any other text of it is refused."""
        return json.dumps(self.model_dump(mode="json"), indent=2, sort_keys=True) + "\n"


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
    manifest, text = _read_manifest(path)
    _check_host(path, manifest, host)
    if manifest.content_id() != manifest.bundle_id:
        raise BundleMismatch(path, "bundle_id", manifest.bundle_id, f"content {manifest.content_id()}")
    if manifest.to_text() != text:
        raise BundleMismatch(path, MANIFEST, "the text as it was built", "another text of the same content")
    for file in manifest.files:
        _check_file(path, file)
    for name in (MODEL_XML, MODEL_BIN, TOKENIZER):
        if name not in {file.name for file in manifest.files}:
            raise BundleMismatch(path, "files", f"an entry for {name}", "none")
    return Bundle(path, manifest)


def file_entry(path: Path) -> File:
    """Size and SHA-256 of a file, for the manifest."""
    return File(name=path.name, size_bytes=path.stat().st_size, sha256=sha256_file(path))


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_manifest(path: Path) -> tuple[Manifest, str]:
    file = path / MANIFEST
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BundleMismatch(path, MANIFEST, "a file", "nothing", "build it with `plaserve build`") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BundleMismatch(path, MANIFEST, "a readable text file", error) from error
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise BundleMismatch(path, MANIFEST, "JSON", f"{error.msg} at line {error.lineno}") from error
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        raise BundleMismatch(path, "schema_version", SCHEMA_VERSION, version)
    try:
        return Manifest.model_validate(data), text
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise BundleMismatch(path, where, "no such field", first["input"]) from error
        raise BundleMismatch(path, where, "a valid value", first["msg"]) from error


def _check_host(path: Path, manifest: Manifest, host: Host | None) -> None:
    backend = manifest.backend
    if backend.name not in _LIBRARIES:
        raise BundleMismatch(path, "backend.name", " or ".join(_LIBRARIES), backend.name)
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


def _check_file(path: Path, entry: File) -> None:
    file = path / entry.name
    if not file.is_file():
        raise BundleMismatch(path, entry.name, "a file", "nothing")
    if (size_bytes := file.stat().st_size) != entry.size_bytes:
        raise BundleMismatch(path, entry.name, f"{entry.size_bytes} bytes", f"{size_bytes} bytes")
    if (digest := sha256_file(file)) != entry.sha256:
        raise BundleMismatch(path, entry.name, f"sha256 {entry.sha256}", f"sha256 {digest}")
