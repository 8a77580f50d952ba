"""Make the gRPC stubs under protos/ from the .proto files, or check that they are up to date.

    python -m build_scripts.protos            write them
    python -m build_scripts.protos --check    make them in a temporary folder and compare

The stubs are checked in so that an installation needs no compiler, and are never edited by hand. The include
root `-I protos=protos` is what makes them importable as `protos.plaserve.v1`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


class ProtoError(Exception):
    """The stubs can't be made, or differ from the .proto files."""


def generate(out: Path, root: Path = ROOT) -> list[Path]:
    """Write the stubs of every .proto below `root`/protos to `out`; returns their paths relative to `out`."""
    sources = sorted(path.relative_to(root) for path in (root / "protos").rglob("*.proto"))
    if not sources:
        raise ProtoError(f"no .proto file below {root / 'protos'}: run this from a full checkout")
    flags = ["-I", "protos=protos", f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"]
    command = [sys.executable, "-m", "grpc_tools.protoc", *flags, *(str(source) for source in sources)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0:
        raise ProtoError(f"protoc failed: {done.stderr.strip()}")
    return [source.with_name(source.stem + suffix) for source in sources for suffix in SUFFIXES]


def stale(root: Path = ROOT) -> list[Path]:
    """Stubs that are missing, differ from their .proto, or have lost it; relative to `root`."""
    with tempfile.TemporaryDirectory() as scratch:
        fresh = generate(Path(scratch), root)
        differing = [path for path in fresh if not _same(root / path, Path(scratch) / path)]
    known = set(fresh)
    found = (
        path.relative_to(root) for path in (root / "protos").rglob("*_pb2*.py*") if path.suffix != ".pyc"
    )
    return differing + sorted(path for path in found if path not in known)


def _same(left: Path, right: Path) -> bool:
    return left.is_file() and left.read_bytes() == right.read_bytes()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m build_scripts.protos", description="Make the gRPC stubs."
    )
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 naming what differs")
    options = parser.parse_args(arguments)
    try:
        if not options.check:
            generate(ROOT)
            return 0
        differing = stale()
    except ProtoError as error:
        sys.stderr.write(f"protos: {error}\n")
        return 1
    for path in differing:
        sys.stderr.write(f"protos: {path} is not what its .proto gives; run `make protos`\n")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
