"""Results that are kept by all that they depend on, so that a suite can be resumed over days.

A key is a digest of plain data: case, policy with its knobs, settings, seed, and the digest of the code
(`code_digest`). Versions of libraries are not in it: delete the directory after a change of numpy or scipy.

A result is one file, written beside its place and moved into it, so that a run that is killed leaves no half
of one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

DEFAULT_DIRECTORY = Path("var/lab")


class Cache:
    """Bytes by key in a directory, which is made when needed."""

    def __init__(self, directory: Path = DEFAULT_DIRECTORY) -> None:
        self.directory = directory

    def get(self, key: str) -> bytes | None:
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            return None

    def put(self, key: str, value: bytes) -> None:
        write_whole(self._path(key), value)

    def _path(self, key: str) -> Path:
        return self.directory / "cache" / key[:2] / f"{key}.json"


def write_whole(path: Path, value: bytes) -> None:
    """All of the file or nothing of it, whenever the process is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    beside.write_bytes(value)
    beside.replace(path)


def key_of(parts: Mapping[str, object]) -> str:
    """A digest of plain data: JSON types, in any order of keys."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
