"""Opening a GPU bundle: every field that does not fit this machine is refused before anything loads CUDA.

The order is from cheap and general to dear and particular: schema, backend, versions of TensorRT-LLM and
TensorRT, GPU, memory, number of GPUs; then whether the manifest is what was built and agrees with itself;
then the files. A GPU of another name is refused even where the compute capability is the same, as with H100
and H200: kernels were timed on the device, and every scheduling decision rests on those times.

Two things are warnings, which the caller shows and acts on: a driver of another branch, after which the
engine should be verified again before it serves, and a bundle that was never calibrated, whose predicted
times would be derived from another model's.

Plans are gigabytes. Files above 64 MiB are held to their size and to the digest that `store_digests` has left
beside them, unless `full`; one without a digest, or newer than it, is hashed.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from engines.bundle_base import (
    REMEDY,
    TOKENIZER,
    BundleMismatch,
    File,
    check_digest,
    check_seal,
    check_size,
    read_manifest,
    sha256_file,
)
from engines.executor.types import BackendUnavailable
from engines.gpu_consistency import check_consistency, check_engine_files
from engines.gpu_host import Gpu, GpuHost, release
from engines.gpu_manifest import (
    DIGEST_BYTES,
    DIGEST_SUFFIX,
    GPU_BACKENDS,
    GPU_SCHEMA_VERSION,
    TRTLLM,
    GpuIdentity,
    GpuManifest,
)
from engines.trtllm_child.config import Driver
from engines.trtllm_child.guard import check_version


@dataclass(frozen=True, slots=True)
class BundleWarning:
    """A field that differs and does not hinder: what the bundle has, what is here, what follows from it."""

    field: str
    built: str
    found: str
    meaning: str

    def __str__(self) -> str:
        return f"{self.field}: {self.built} (built with), {self.found} here; {self.meaning}"


@dataclass(frozen=True, slots=True)
class GpuBundle:
    """A bundle that passed all checks. reverify: run its verification again before it serves."""

    path: Path
    manifest: GpuManifest
    warnings: tuple[BundleWarning, ...] = ()
    reverify: bool = False

    @property
    def tokenizer_path(self) -> Path:
        return self.path / TOKENIZER

    @property
    def fingerprint(self) -> str:
        return self.manifest.fingerprint

    @property
    def sp_dir(self) -> Path:
        """Engine directory of short prefills, of both lanes where there is one engine; or the checkpoint."""
        engines, checkpoint = self.manifest.engines, self.manifest.checkpoint
        if engines is not None:
            return self.path / engines.sp.directory
        assert checkpoint is not None  # one of both, by check_consistency
        return self.path / checkpoint.directory

    @property
    def lp_dir(self) -> Path | None:
        """Engine directory of long prefills where they have an engine of their own."""
        engines = self.manifest.engines
        return None if engines is None or engines.lp is None else self.path / engines.lp.directory


def open_gpu_bundle(
    path: Path, *, host: GpuHost | None = None, python: Path = Path(sys.executable), full: bool = False
) -> GpuBundle:
    """Read and check a bundle for this machine.

    python: interpreter of TensorRT-LLM's environment, asked where `host` is None. full: hash large files too.
    Raises BundleMismatch naming the first field that does not fit. Nothing of CUDA is imported.
    """
    manifest, text = read_manifest(path, GpuManifest, GPU_SCHEMA_VERSION, GPU_BACKENDS)
    _check_line(path, manifest)  # before this machine is asked, which takes seconds
    here = host or GpuHost.current(python)
    check_gpu_host(path, manifest, here)
    _check_content(path, manifest, text, full)
    warnings = (*_driver_warning(manifest, here), *_cost_warning(manifest))
    return GpuBundle(path, manifest, warnings, any(w.field == "gpu.driver" for w in warnings))


def check_gpu_host(path: Path, manifest: GpuManifest, here: GpuHost) -> None:
    """Whether a bundle fits a machine, by its manifest alone. Raises BundleMismatch."""
    _check_line(path, manifest)
    _check_versions(path, manifest, here)
    _check_gpus(path, manifest, here)


def check_gpu_bundle_content(path: Path, *, full: bool = False) -> GpuManifest:
    """All checks that need no particular machine, for whoever stores bundles. Raises BundleMismatch."""
    manifest, text = read_manifest(path, GpuManifest, GPU_SCHEMA_VERSION, GPU_BACKENDS)
    _check_line(path, manifest)
    _check_content(path, manifest, text, full)
    return manifest


def read_gpu_manifest(path: Path) -> GpuManifest:
    """The manifest alone, sealed as it was built. Raises BundleMismatch."""
    manifest, text = read_manifest(path, GpuManifest, GPU_SCHEMA_VERSION, GPU_BACKENDS)
    check_seal(path, manifest, text)
    return manifest


def gpu_identity(gpu: Gpu) -> GpuIdentity:
    """A device of `GpuHost` as the manifest has it."""
    return GpuIdentity(
        name=gpu.name,
        compute_capability=gpu.compute_capability,
        memory_bytes=gpu.memory_bytes,
        driver=gpu.driver,
    )


def store_digests(path: Path, files: tuple[File, ...]) -> None:
    """Leave `<file>.sha256` beside every large file that has none yet, in the format of `sha256sum`.

    Each is hashed first: call this where the bundle was made or arrived. Raises BundleMismatch.
    """
    for entry in files:
        if entry.size_bytes <= DIGEST_BYTES:
            continue
        file = check_size(path, entry)
        if stored_digest(file) == entry.sha256:
            continue
        check_digest(path, entry, sha256_file(file))
        store_digest(file, entry.sha256)


def store_digest(file: Path, sha256: str) -> None:
    """Leave the digest of `file`, which was just found to be this, beside it."""
    beside = file.with_name(file.name + DIGEST_SUFFIX)
    part = beside.with_name(beside.name + ".part")
    part.write_text(f"{sha256}  {file.name}\n", encoding="ascii")
    part.replace(beside)


def stored_digest(file: Path) -> str | None:
    """The digest beside `file`; None where there is none, or the file is newer than it."""
    beside = file.with_name(file.name + DIGEST_SUFFIX)
    try:
        if beside.stat().st_mtime_ns < file.stat().st_mtime_ns:
            return None
        return beside.read_text(encoding="ascii").split()[0]
    except (OSError, UnicodeDecodeError, IndexError):
        return None


def _check_line(path: Path, manifest: GpuManifest) -> None:
    backend = manifest.backend
    driver = Driver.ENGINE if backend.name == TRTLLM else Driver.TORCH
    try:
        check_version(backend.tensorrt_llm, driver)
    except BackendUnavailable as error:
        raise BundleMismatch(
            path,
            "backend.tensorrt_llm",
            "a release of the 1.2 line",
            error.reason,
            f"{REMEDY}: {error.remedy}",
        ) from None


def _check_versions(path: Path, manifest: GpuManifest, here: GpuHost) -> None:
    for name in ("tensorrt_llm", "tensorrt"):
        built, found = getattr(manifest.backend, name), getattr(here, name)
        if built is not None and release(built) != release(found):
            why = f" ({here.no_versions})" if here.no_versions else ""
            remedy = (
                f"name the interpreter of the environment that has {name}=={built}, or {REMEDY} with this one"
            )
            raise BundleMismatch(
                path,
                f"backend.{name}",
                f"{built} (built with)",
                f"{found or 'not installed'} in {here.python}{why}",
                remedy,
            )


def _check_gpus(path: Path, manifest: GpuManifest, here: GpuHost) -> None:
    built, backend = manifest.gpu, manifest.backend
    if not here.gpus:
        remedy = "start it on a machine with that GPU and its driver"
        raise BundleMismatch(path, "gpu.name", f"{built.name} (built on)", f"none: {here.no_gpus}", remedy)
    here_remedy = f"leave only GPUs of the bundle in CUDA_VISIBLE_DEVICES, or {REMEDY} on this GPU"
    for name in ("name", "compute_capability"):
        for gpu in here.gpus:
            if getattr(gpu, name) != getattr(built, name):
                raise BundleMismatch(
                    path, f"gpu.{name}", f"{getattr(built, name)} (built on)", getattr(gpu, name), here_remedy
                )
    needed, least = manifest.limits.memory_bytes, min(gpu.memory_bytes for gpu in here.gpus)
    if least < needed:
        remedy = "rebuild it with `plaserve build` and a smaller memory_share"
        raise BundleMismatch(
            path,
            "gpu.memory_bytes",
            f"at least {needed} (limits.memory_bytes), of {built.memory_bytes} built on",
            least,
            remedy,
        )
    gpus = backend.tp * backend.pp
    if gpus > len(here.gpus):
        field = "backend.tp" if backend.tp > 1 else "backend.pp"
        raise BundleMismatch(
            path,
            field,
            f"{gpus} GPUs (tp {backend.tp} x pp {backend.pp})",
            f"{len(here.gpus)} visible",
            f"make more visible in CUDA_VISIBLE_DEVICES, or {REMEDY} for fewer",
        )


def _check_content(path: Path, manifest: GpuManifest, text: str, full: bool) -> None:
    check_seal(path, manifest, text)
    check_consistency(path, manifest)
    files = [(entry, check_size(path, entry)) for entry in manifest.files]
    for entry, file in files:
        large = entry.size_bytes > DIGEST_BYTES and not full
        check_digest(path, entry, (stored_digest(file) if large else None) or sha256_file(file))
    check_engine_files(path, manifest)


def _driver_warning(manifest: GpuManifest, here: GpuHost) -> tuple[BundleWarning, ...]:
    built = manifest.gpu.driver
    others = sorted({gpu.driver for gpu in here.gpus if _branch(gpu.driver) != _branch(built)})
    if not others:
        return ()
    meaning = "another branch: verify the bundle again before it serves"
    return (BundleWarning("gpu.driver", built, ", ".join(others), meaning),)


def _branch(driver: str) -> str:
    return driver.partition(".")[0]


def _cost_warning(manifest: GpuManifest) -> tuple[BundleWarning, ...]:
    if manifest.cost is not None:
        return ()
    meaning = "it was not calibrated: times are estimated from another model's, and it can't be published"
    return (BundleWarning("cost", "none", "none", meaning),)
