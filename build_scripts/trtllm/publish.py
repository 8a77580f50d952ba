"""Put a finished bundle into a store, and fetch it from there: a directory or any URL that fsspec knows.

    <store>/bundles/<name>/<bundle_id>/...            the bundle's files, each large or small one as it is
    <store>/bundles/<name>/<bundle_id>/<file>.sha256  written once that file is there
    <store>/bundles/<name>/<bundle_id>/manifest.json  written last: without it there is no bundle
    <store>/bundles/<name>/latest                     the id of the one published last

A bundle's place follows from its contents, so two who publish the same one write the same bytes, and nobody
ever changes what another reads. A file that is there with the right size and digest is not sent again, which
is how an interrupted upload goes on. On a file system each file is written under another name and renamed; in
an object store an object appears when it is whole. Whoever reads begins with the manifest, so it sees a whole
bundle or none.

`fetch` goes the same way: the machine is checked before the first gigabyte, a broken download goes on where
it stopped, every file is hashed, and the manifest is put in place last.
"""

from __future__ import annotations

import json
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from build_scripts.spec import BuildError
from engines.bundle_base import MANIFEST, BundleMismatch, File, bundle_backend, sha256_file
from engines.gpu_bundle import (
    GpuBundle,
    check_gpu_bundle_content,
    check_gpu_host,
    open_gpu_bundle,
    read_gpu_manifest,
    store_digest,
    store_digests,
    stored_digest,
)
from engines.gpu_host import GpuHost
from engines.gpu_manifest import DIGEST_BYTES, DIGEST_SUFFIX, GPU_BACKENDS, GpuManifest

BUNDLES = "bundles"
LATEST = "latest"
_BLOCK_BYTES = 8 * 2**20
_ID = re.compile(r"[0-9a-f]{64}")
_CLIENTS = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}

Told = Callable[[str, int, int], None]  # file, bytes of the bundle that are through, bytes in all


@dataclass(frozen=True, slots=True)
class StoredBundle:
    """One bundle of a store. latest: it was the last one published under its name."""

    name: str
    bundle_id: str
    url: str
    latest: bool


class _Store:
    """A file system of fsspec and a place in it; every failure is a BuildError that names the URL."""

    def __init__(self, url: str, options: dict[str, Any] | None) -> None:
        self.url = url.rstrip("/")
        self.fs, root = _file_system(self.url, options)
        self.root = root.rstrip("/")
        protocol = self.fs.protocol
        self.renames = "file" in ((protocol,) if isinstance(protocol, str) else protocol)
        self.fs.invalidate_cache()  # what another has written since it was listed

    def at(self, name: str) -> str:
        return f"{self.root}/{name}"

    def url_of(self, name: str) -> str:
        return f"{self.url}/{name}"

    @contextmanager
    def doing(self, what: str, name: str) -> Iterator[None]:
        """Store clients raise whatever they like: tell which place it was, and what helps."""
        try:
            yield
        except BuildError:
            raise
        except Exception as error:
            raise BuildError(
                f"{self.url_of(name)}: can't {what}: {str(error) or type(error).__name__}; check the "
                "URL, the credentials and the space there, then run it again: what is through stays"
            ) from error

    def text(self, name: str) -> str | None:
        """A small file; None where there is none."""
        with self.doing("read it", name):
            try:
                content: bytes = self.fs.cat_file(self.at(name))
                return content.decode()
            except FileNotFoundError:
                return None

    def size(self, name: str) -> int | None:
        with self.doing("look at it", name):
            try:
                return int(self.fs.info(self.at(name))["size"])
            except FileNotFoundError:
                return None

    def put(self, file: Path, name: str, through: Callable[[int], None]) -> None:
        """Send a file. through: hears of the bytes of it that are sent."""
        from fsspec.callbacks import Callback

        with self.doing("write it", name), self._written(name) as target:
            self.fs.put_file(
                str(file), target, callback=Callback(hooks={"told": lambda size, value: through(value)})
            )
        if (size := self.size(name)) != file.stat().st_size:
            raise BuildError(
                f"{self.url_of(name)}: {size} bytes are there, {file.stat().st_size} were sent; publish again"
            )

    def put_text(self, text: str, name: str) -> None:
        with self.doing("write it", name), self._written(name) as target:
            self.fs.pipe_file(target, text.encode())

    @contextmanager
    def _written(self, name: str) -> Iterator[str]:
        """Where to write what is to appear whole under `name`."""
        if not self.renames:
            yield self.at(name)
            self.fs.invalidate_cache()
            return
        part = self.at(f"{name}.{uuid.uuid4().hex}.part")
        self.fs.makedirs(part.rpartition("/")[0], exist_ok=True)
        try:
            yield part
            Path(part).replace(self.at(name))
        finally:
            Path(part).unlink(missing_ok=True)


def bundle_name(manifest: GpuManifest) -> str:
    """Under which name a bundle is stored: model, precision and backend, as its local folder is called."""
    model = re.sub(r"[^A-Za-z0-9._-]+", "-", manifest.model.name.rsplit("/", 1)[-1]).lstrip(".-") or "model"
    fp8 = "-fp8" if manifest.backend.quantisation == "fp8" else ""
    return f"{model}{fp8}-{manifest.backend.name}"


def publish(
    bundle: Path,
    store: str,
    *,
    name: str | None = None,
    again: bool = False,
    told: Told = lambda file, done, total: None,
    options: dict[str, Any] | None = None,
) -> str:
    """Send the bundle in the directory `bundle` to `store` and return its URL there.

    name: in the store; None: see `bundle_name`. again: send everything, whatever is there. options: of the
    fsspec file system, for example endpoint and credentials. Raises BuildError, BundleMismatch.
    """
    manifest = _publishable(bundle)
    name = _checked_name(bundle_name(manifest) if name is None else name)
    place = _Store(f"{store.rstrip('/')}/{BUNDLES}/{name}", options)
    folder, total, done = manifest.bundle_id, sum(file.size_bytes for file in manifest.files), 0
    for file in manifest.files:
        there = f"{folder}/{file.name}"
        if again or not _is_there(place, there, file):
            place.put(
                bundle / file.name,
                there,
                lambda sent, file=file, done=done: told(file.name, done + sent, total),  # type: ignore[misc]
            )
            place.put_text(f"{file.sha256}  {file.name.rpartition('/')[2]}\n", there + DIGEST_SUFFIX)
        done += file.size_bytes
        told(file.name, done, total)
    text = (bundle / MANIFEST).read_text(encoding="utf-8")
    if place.text(f"{folder}/{MANIFEST}") != text:
        place.put_text(text, f"{folder}/{MANIFEST}")
    place.put_text(f"{manifest.bundle_id}\n", LATEST)
    return place.url_of(folder)


def fetch(
    url: str,
    target: Path,
    *,
    host: GpuHost | None = None,
    python: Path | None = None,
    any_host: bool = False,
    told: Told = lambda file, done, total: None,
    options: dict[str, Any] | None = None,
) -> GpuBundle:
    """Download a bundle into the directory `target` and open it.

    url: of a bundle, or of a name in a store: then the latest. python: see `open_gpu_bundle`. any_host: take
    it though it does not fit this machine, to carry it elsewhere. Raises BuildError, BundleMismatch.
    """
    place, text = _find(url, options)
    target.mkdir(parents=True, exist_ok=True)
    manifest = _fresh_manifest(target, text, place.url)
    if not any_host:
        here = host or (GpuHost.current() if python is None else GpuHost.current(python))
        check_gpu_host(target, manifest, here)
    _check_space(target, manifest)
    total, done = sum(file.size_bytes for file in manifest.files), 0
    for file in manifest.files:
        _download(
            place,
            file,
            target,
            lambda size, file=file, done=done: told(file.name, done + size, total),  # type: ignore[misc]
        )
        done += file.size_bytes
        told(file.name, done, total)
    part = target / f"{MANIFEST}.part"
    part.write_text(text, encoding="utf-8")
    part.replace(target / MANIFEST)
    if any_host:
        return GpuBundle(target, check_gpu_bundle_content(target))
    return open_gpu_bundle(target, host=here)


def list_bundles(store: str, *, options: dict[str, Any] | None = None) -> tuple[StoredBundle, ...]:
    """All whole bundles of a store by name and id, without opening them. Raises BuildError."""
    place = _Store(f"{store.rstrip('/')}/{BUNDLES}", options)
    with place.doing("list it", ""):
        paths = [str(path).split("/")[-3:-1] for path in place.fs.glob(f"{place.root}/*/*/{MANIFEST}")]
    latest = {name: (place.text(f"{name}/{LATEST}") or "").strip() for name in {name for name, _ in paths}}
    return tuple(
        StoredBundle(name, bundle_id, place.url_of(f"{name}/{bundle_id}"), latest[name] == bundle_id)
        for name, bundle_id in sorted(paths)
        if _ID.fullmatch(bundle_id)
    )


def check_store(url: str) -> None:
    """Whether a client for this URL is installed; asks nothing of the store. Raises BuildError."""
    _file_system(url, None)


def _file_system(url: str, options: dict[str, Any] | None) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise BuildError(f"{url}: stores need fsspec: pip install fsspec") from None
    protocol = url.partition("://")[0]
    try:
        return url_to_fs(url, **(options or {}))  # type: ignore[no-any-return]
    except ImportError as error:
        client = _CLIENTS.get(protocol)
        remedy = f"pip install {client}" if client else str(error)
        raise BuildError(f"{url}: the client of {protocol}:// is missing: {remedy}") from error
    except Exception as error:
        raise BuildError(
            f"{url}: it can't be used as a store: {error}; name a directory, or a URL such as s3://bucket/path"
        ) from error


def _publishable(bundle: Path) -> GpuManifest:
    """The manifest of a bundle that is whole, calibrated and undamaged; digests are stored on the way."""
    backend = bundle_backend(bundle)
    if backend not in GPU_BACKENDS:
        raise BuildError(
            f"{bundle} is a bundle of {backend}, which is built on the machine that serves it; "
            f"stores are for {' and '.join(GPU_BACKENDS)}"
        )
    manifest = read_gpu_manifest(bundle)
    if manifest.cost is None:
        raise BuildError(
            f"{bundle} was not calibrated: run `plaserve build` on its GPU to the end, then publish"
        )
    store_digests(bundle, manifest.files)
    return check_gpu_bundle_content(bundle)


def _checked_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise BuildError(f"name {name!r} can't be one in a store; use letters, digits, '.', '_' and '-'")
    return name


def _is_there(place: _Store, name: str, file: File) -> bool:
    if place.size(name) != file.size_bytes:
        return False
    return (place.text(name + DIGEST_SUFFIX) or "").partition(" ")[0] == file.sha256


def _find(url: str, options: dict[str, Any] | None) -> tuple[_Store, str]:
    """The folder of a bundle and the text of its manifest, from its URL or that of its name."""
    place = _Store(url, options)
    if (text := place.text(MANIFEST)) is not None:
        return place, text
    latest = (place.text(LATEST) or "").strip()
    if not _ID.fullmatch(latest):
        raise BuildError(
            f"{place.url}: no bundle is here; name <store>/{BUNDLES}/<name>, or one bundle below it "
            "(an upload that was interrupted has no manifest: publish it again)"
        )
    place = _Store(place.url_of(latest), options)
    if (text := place.text(MANIFEST)) is None:
        raise BuildError(f"{place.url}: `{LATEST}` names this bundle, but it is not here; publish it again")
    return place, text


def _fresh_manifest(target: Path, text: str, url: str) -> GpuManifest:
    """The manifest in `text`, checked; `target` must be empty or hold files of the same bundle."""
    scratch = target / f".fetch-{uuid.uuid4().hex}"
    scratch.mkdir()
    try:
        (scratch / MANIFEST).write_text(text, encoding="utf-8")
        manifest = read_gpu_manifest(scratch)
    except BundleMismatch as error:
        raise BuildError(
            f"{url}/{MANIFEST}: {error.field}: expected {error.expected}, found {error.found}; "
            "publish it again"
        ) from error
    finally:
        shutil.rmtree(scratch)
    last = url.rpartition("/")[2]
    if _ID.fullmatch(last) and last != manifest.bundle_id:
        raise BuildError(f"{url}: the manifest there is of bundle {manifest.bundle_id}; publish both again")
    old = target / MANIFEST
    if old.is_file():
        try:
            found = json.loads(old.read_text(encoding="utf-8")).get("bundle_id")
        except (ValueError, AttributeError):
            found = "that can't be read"
        if found != manifest.bundle_id:
            raise BuildError(f"{target} holds the bundle {found}; fetch {url} into an empty directory")
    return manifest


def _check_space(target: Path, manifest: GpuManifest) -> None:
    """Raises BuildError where what is not here yet does not fit the disk."""
    parts = (target / f"{file.name}.part" for file in manifest.files)
    here = sum(path.stat().st_size for path in parts if path.is_file())
    missing = sum(f.size_bytes for f in manifest.files if not (target / f.name).is_file())
    if (needed := missing - here) > (free := shutil.disk_usage(target).free):
        raise BuildError(f"{target}: {needed / 1e9:.1f} GB are to be fetched, {free / 1e9:.1f} GB are free")


def _download(place: _Store, file: File, target: Path, through: Callable[[int], None]) -> None:
    """One file, hashed; what an interrupted download left is gone on with, and not trusted."""
    final = target / file.name
    if _is_here(final, file):
        return
    part = final.with_name(final.name + ".part")
    part.parent.mkdir(parents=True, exist_ok=True)
    resumed = part.is_file() and 0 < part.stat().st_size <= file.size_bytes
    digest = _receive(place, file, part, resumed, through)
    if digest != file.sha256 and resumed:  # what was there was of something else
        digest = _receive(place, file, part, False, through)
    if digest != file.sha256:
        part.unlink()
        raise BuildError(
            f"{place.url_of(file.name)}: sha256 {digest}, but its manifest says {file.sha256}: it was "
            "damaged in the store or on the way; fetch again, and if it stays, publish it with `again`"
        )
    part.replace(final)
    if file.size_bytes > DIGEST_BYTES:
        store_digest(final, file.sha256)


def _is_here(final: Path, file: File) -> bool:
    if not final.is_file() or final.stat().st_size != file.size_bytes:
        return False
    return (stored_digest(final) or sha256_file(final)) == file.sha256


def _receive(place: _Store, file: File, part: Path, resumed: bool, through: Callable[[int], None]) -> str:
    """Read a file of the store into `part` from where that ends; returns the digest of the whole."""
    with (
        place.doing("read it", file.name),
        place.fs.open(place.at(file.name), "rb") as source,
        part.open("ab" if resumed else "wb") as sink,
    ):
        source.seek(sink.tell())
        while block := source.read(_BLOCK_BYTES):
            sink.write(block)
            through(sink.tell())
    return sha256_file(part)
