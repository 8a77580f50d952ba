"""The checked-in stubs are those that the .proto files give, and a difference is named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from build_scripts import protos


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    shutil.copytree(protos.ROOT / "protos", tmp_path / "protos", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_the_stubs_are_up_to_date() -> None:
    assert protos.stale() == []


def test_what_differs_is_named(checkout: Path) -> None:
    folder = Path("protos/plaserve/v1")
    edited, gone, orphan = (folder / name for name in ("worker_pb2.py", "fleet_pb2.pyi", "old_pb2.py"))
    with (checkout / edited).open("a") as file:
        file.write("# edited\n")
    (checkout / gone).unlink()
    (checkout / orphan).write_text("")
    assert set(protos.stale(checkout)) == {edited, gone, orphan}
    protos.generate(checkout, checkout)
    assert protos.stale(checkout) == [orphan]


def test_a_broken_proto_is_an_error_with_the_compilers_words(checkout: Path) -> None:
    (checkout / "protos/plaserve/v1/worker.proto").write_text("syntax = 'proto3'; message {")
    with pytest.raises(protos.ProtoError, match=r"worker\.proto"):
        protos.stale(checkout)
