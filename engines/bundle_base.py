"""What bundles of all backends share: a manifest that is sealed by its own hash, and how it is read.

A bundle is a directory with `manifest.json`. The manifest's `bundle_id` is the hash of all the rest of it,
and there is one way to write it, so any change of a field or of the text shows. Fields that the schema does
not know are refused, not ignored: a bundle from a later version may mean something by them. Every refusal is
a `BundleMismatch`, which names the field, both sides and the remedy. `engines.bundle` has the manifest of the
CPU backend, `engines.gpu_manifest` that of the GPU backends; `bundle_backend` tells which one it is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

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

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
CALIBRATION = "calibration.csv"
REMEDY = "rebuild it with `plaserve build`"


class BundleMismatch(Exception):  # noqa: N818 - the name says what it is
    """A bundle can't be used here: `field` should be `expected` but is `found`; `remedy` says what to do."""

    def __init__(self, path: Path, field: str, expected: object, found: object, remedy: str = REMEDY) -> None:
        super().__init__(f"bundle {path}: {field}: expected {expected}, found {found}; {remedy}")
        self.path = path
        self.field = field
        self.expected = expected
        self.found = found
        self.remedy = remedy


def exact_fields(cls: type) -> Callable[[Any], Any]:
    """pydantic ignores unknown keys of plain dataclasses; a manifest must not."""
    assert is_dataclass(cls)
    known = {field.name for field in fields(cls)}

    def check(value: Any) -> Any:
        if isinstance(value, dict) and (unknown := sorted(set(value) - known)):
            raise ValueError(f"unknown field {unknown[0]!r}")
        return value

    return check


def dump_known(value: Any, dump: SerializerFunctionWrapHandler) -> Any:
    """Fields that came after the first bundles are left out while empty, so that those still open."""
    return {name: found for name, found in dump(value).items() if found or name not in LATER_FIELDS}


LATER_FIELDS = ("part_s", "captured")


class Part(BaseModel):
    """A part of a manifest: it can't be changed, and takes no field that it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


ManifestProfiles = Annotated[Profiles, BeforeValidator(exact_fields(Profiles)), WrapSerializer(dump_known)]


class Text(Part):
    """What turns messages into a prompt and tokens into an answer. `chat_template` is Jinja."""

    chat_template: str
    bos_id: int
    eos_id: int
    add_bos: bool


class Cost(Part):
    """The fitted cost model of this machine and how good the fit is (relative errors, tokens)."""

    model: Annotated[CostModel, BeforeValidator(exact_fields(CostModel)), WrapSerializer(dump_known)]
    median_error: float
    worst_error: float
    sample_count: int
    boundary_tokens: int  # L_m at H = 0
    knee_tokens: int
    quick: bool  # a short calibration, good enough for tests


class File(Part):
    """A file of a bundle. A backend that keeps all of them in one folder narrows `name`."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*$")
    size_bytes: int
    sha256: str


class Sealed(Part):
    """A manifest; those that derive from it add `schema_version` and their contents."""

    bundle_id: str = ""

    def sealed(self) -> Self:
        """With `bundle_id` set to the hash of all the rest."""
        return self.model_copy(update={"bundle_id": self.content_id()})

    def content_id(self) -> str:
        body = json.dumps(self.model_dump(mode="json", exclude={"bundle_id"}), sort_keys=True)
        return hashlib.sha256(body.encode()).hexdigest()

    def to_text(self) -> str:
        """The one way in which a manifest is written; any other text of it is refused."""
        return json.dumps(self.model_dump(mode="json"), indent=2, sort_keys=True) + "\n"


AnyManifest = TypeVar("AnyManifest", bound=Sealed)


def bundle_backend(path: Path) -> str:
    """Name of the backend that the bundle in `path` is for, whether or not this project knows it.

    Raises BundleMismatch where there is no readable manifest with a backend in it.
    """
    data, _ = _read_json(path)
    backend = data.get("backend") if isinstance(data, dict) else None
    name = backend.get("name") if isinstance(backend, dict) else None
    if not isinstance(name, str):
        raise BundleMismatch(path, "backend.name", "a name", name)
    return name


def read_manifest(
    path: Path, cls: type[AnyManifest], schema_version: int, backends: Collection[str]
) -> tuple[AnyManifest, str]:
    """The manifest in `path` and its text; of this schema version and one of `backends`, its seal unchecked.

    Raises BundleMismatch naming the first field that does not fit.
    """
    data, text = _read_json(path)
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != schema_version or isinstance(version, bool):
        raise BundleMismatch(path, "schema_version", schema_version, version)
    backend = data.get("backend")
    name = backend.get("name") if isinstance(backend, dict) else None
    if isinstance(name, str) and name not in backends:
        raise BundleMismatch(path, "backend.name", " or ".join(backends), name)
    try:
        return cls.model_validate(data), text
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise BundleMismatch(path, where, "no such field", first["input"]) from error
        raise BundleMismatch(path, where, "a valid value", first["msg"]) from error


def check_seal(path: Path, manifest: Sealed, text: str) -> None:
    """Raises BundleMismatch where the manifest is not what was built, or is written in another way."""
    if manifest.content_id() != manifest.bundle_id:
        raise BundleMismatch(path, "bundle_id", manifest.bundle_id, f"content {manifest.content_id()}")
    if manifest.to_text() != text:
        raise BundleMismatch(path, MANIFEST, "the text as it was built", "another text of the same content")


def check_size(path: Path, entry: File) -> Path:
    """The file of an entry, there and of its size. Raises BundleMismatch."""
    file = path / entry.name
    if not file.is_file():
        raise BundleMismatch(path, entry.name, "a file", "nothing")
    if (size_bytes := file.stat().st_size) != entry.size_bytes:
        raise BundleMismatch(path, entry.name, f"{entry.size_bytes} bytes", f"{size_bytes} bytes")
    return file


def check_digest(path: Path, entry: File, digest: str) -> None:
    if digest != entry.sha256:
        raise BundleMismatch(path, entry.name, f"sha256 {entry.sha256}", f"sha256 {digest}")


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_json(path: Path) -> tuple[Any, str]:
    file = path / MANIFEST
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BundleMismatch(path, MANIFEST, "a file", "nothing", "build it with `plaserve build`") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BundleMismatch(path, MANIFEST, "a readable text file", error) from error
    try:
        return json.loads(text), text
    except json.JSONDecodeError as error:
        raise BundleMismatch(path, MANIFEST, "JSON", f"{error.msg} at line {error.lineno}") from error
