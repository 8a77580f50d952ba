"""A full disk: the build says so, leaves no half bundle and no damage, and goes on when room is made."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("openvino")

from build_scripts import runner
from build_scripts.spec import BuildError
from build_scripts.store import Store, needs_room, publish
from engines.bundle import BundleMismatch, open_bundle
from tests.build_scripts import tiny

DISK_KB = 8192
ROOMS_KB = (0, 60, 200)  # too little for the download, for its record, for the graph


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB; gone afterwards, whatever happens."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small file system needs root on Linux")
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_KB}k", "none", str(folder)]
    made = subprocess.run(mount, capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"no small file system: {made.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def leave_room(disk: Path, kb: int) -> Path:
    """Fill the disk up to `kb`; removing the file makes room again."""
    filler = disk / "filler"
    filler.unlink(missing_ok=True)
    filler.write_bytes(b"x" * (shutil.disk_usage(disk).free - kb * 1024))
    return filler


def test_a_build_on_a_full_disk_says_so_and_goes_on_when_there_is_room(disk: Path, tmp_path: Path) -> None:
    spec = replace(tiny.spec(tmp_path), out=disk / "bundles")
    for room_kb in ROOMS_KB:
        shutil.rmtree(spec.out, ignore_errors=True)
        filler = leave_room(disk, room_kb)
        with pytest.raises(BuildError, match=r"^\w+: no room on the disk of .*make room and build again"):
            runner.build(spec)
        with pytest.raises(BundleMismatch):
            open_bundle(spec.bundle_dir)
    store, plan = Store(spec.work_dir), runner.plan_build(spec)
    fetched = plan.steps[0]
    assert store.done(fetched.name, fetched.key, fetched.after)  # the last one got that far
    filler.unlink()
    bundle = open_bundle(runner.build(spec))

    leave_room(disk, 100)
    with pytest.raises(BuildError, match="no room"):
        runner.build(spec, force=True)
    assert open_bundle(spec.bundle_dir).manifest == bundle.manifest  # the one that was there


def test_publishing_to_a_full_disk_leaves_what_was_there(disk: Path, tmp_path: Path) -> None:
    """From another file system, so that files are copied."""
    old, new = tmp_path / "old", tmp_path / "new"
    for folder, size in ((old, 1000), (new, 400_000)):
        folder.mkdir()
        (folder / "model.bin").write_bytes(b"%" * size)
        (folder / "manifest.json").write_bytes(b"{}" * (size // 1000))
    target, scratch = disk / "bundle", disk / ".work"
    publish(sorted(old.iterdir()), target, scratch)
    filler = leave_room(disk, 200)
    with pytest.raises(OSError, match=r"model\.bin") as failed:
        publish([new / "manifest.json", new / "model.bin"], target, scratch)
    assert failed.value.errno == errno.ENOSPC
    assert {path.name: path.read_bytes() for path in target.iterdir()} == {
        path.name: path.read_bytes() for path in old.iterdir()
    }
    filler.unlink()
    publish(sorted(new.iterdir()), target, scratch)
    assert (target / "model.bin").stat().st_size == 400_000


def test_an_error_that_is_of_something_else_stays_what_it_is(tmp_path: Path) -> None:
    for error in (RuntimeError("a library's"), PermissionError(errno.EACCES, "no"), ValueError("bad")):
        with pytest.raises(type(error)) as raised, needs_room("convert", tmp_path):
            raise error
        assert raised.value is error
