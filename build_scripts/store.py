"""Outputs of build steps on disk: one folder a step, valid for one content key.

A step writes into `<step>.part`. When it is through, `step.json` is added and the folder renamed to `<step>`:
what carries the final name is complete, whatever was interrupted. The record holds the step's key, the hashes
of its outputs and those of the outputs that it read. A step is done when all three still hold: the same key
is not enough, because a repeated step need not give the same bytes (graphs and timings do not). Outputs of
many gigabytes are hashed once, when their step is through; a `quick` store then believes their size and time.

One build at a time works in a folder: `lock` waits for the other one, for a bounded time.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from build_scripts.spec import BuildError
from engines.bundle import sha256_file

_RECORD = "step.json"
_LOCK_POLL_S = 0.2
_ROOM_BYTES_MIN = 1 << 20  # with less left, a library that failed to write has most likely found no room


class Store:
    """The step folders below `root`, which is made when the first step begins.

    quick: a file of the recorded size and modification time is taken for undamaged without reading it.
    """

    def __init__(self, root: Path, *, quick: bool = False) -> None:
        self.root = root
        self._quick = quick

    def folder(self, step: str) -> Path:
        return self.root / step

    def done(self, step: str, key: str, after: Iterable[str] = ()) -> bool:
        """Whether the outputs of `step` are there and undamaged, of this `key` and of these `after`."""
        try:
            record = self._record(step)
            current = {other: self._record(other)["outputs"] for other in after}
            return (
                record["key"] == key
                and record["read"] == current
                and all(
                    self._same(self.folder(step) / name, digest, record.get("stamps", {}).get(name))
                    for name, digest in record["outputs"].items()
                )
            )
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return False

    def begin(self, step: str) -> Path:
        """An empty folder for the outputs of `step`."""
        part = self._part(step)
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        return part

    def commit(self, step: str, key: str, after: Iterable[str] = ()) -> None:
        """Make what `begin` gave out the outputs of `step`, made from those of the steps `after`."""
        part, folder = self._part(step), self.folder(step)
        files = sorted(path for path in part.rglob("*") if path.is_file())
        names = [path.relative_to(part).as_posix() for path in files]
        record = {
            "key": key,
            "read": {other: self._record(other)["outputs"] for other in after},
            "outputs": {name: sha256_file(path) for name, path in zip(names, files, strict=True)},
            "stamps": {name: _stamp(path) for name, path in zip(names, files, strict=True)},
        }
        (part / _RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)

    def digests(self, step: str) -> dict[str, str]:
        """SHA-256 of every output of a step that is through, by its path in the step's folder."""
        outputs: dict[str, str] = self._record(step)["outputs"]
        return outputs

    @contextmanager
    def lock(self, timeout_s: float = 600.0) -> Iterator[None]:
        """Hold this folder alone. Raises BuildError when another build does not end within `timeout_s`."""
        self.root.mkdir(parents=True, exist_ok=True)
        deadline_s = time.monotonic() + timeout_s
        with (self.root / "lock").open("w") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline_s:
                        raise BuildError(f"another build holds {self.root}: wait for it to end") from None
                    time.sleep(_LOCK_POLL_S)
            yield

    def _same(self, path: Path, digest: str, stamp: object) -> bool:
        return (self._quick and stamp == _stamp(path)) or sha256_file(path) == digest

    def _record(self, step: str) -> dict[str, Any]:
        record: dict[str, Any] = json.loads((self.folder(step) / _RECORD).read_text(encoding="utf-8"))
        return record

    def _part(self, step: str) -> Path:
        return self.root / f"{step}.part"


@contextmanager
def needs_room(step: str, folder: Path) -> Iterator[None]:
    """Around what `step` writes below `folder`. Raises BuildError where the disk was full: the system does
    not always say of which file, and libraries have errors of their own for it."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        free_bytes = shutil.disk_usage(folder).free
        is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if not is_full and (isinstance(error, OSError) or free_bytes >= _ROOM_BYTES_MIN):
            raise
        raise BuildError(
            f"{step}: no room on the disk of {folder}, {free_bytes / 1e6:.1f} MB are free ({error}); "
            "make room and build again, it goes on with this step"
        ) from error


def _stamp(path: Path) -> list[int]:
    """Size in bytes and modification time in ns."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def publish(files: list[Path], target: Path, scratch: Path) -> None:
    """Put `files` into the directory `target` in one rename; what was there before is removed afterwards.

    scratch: a folder on the same file system. Files are linked where possible, else copied.
    """
    fresh, old = scratch / "publish.new", scratch / "publish.old"
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    fresh.mkdir(parents=True)
    for file in files:
        link_or_copy(file, fresh / file.name)
    swap_in(fresh, target, old)


def swap_in(fresh: Path, target: Path, old: Path) -> None:
    """Make the directory `fresh` be `target`; what was there before is `old` for a moment, then removed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        target.rename(old)
    fresh.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)
