"""Child processes with a vice, for tests: a link to one, and what it says."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import stub_trtllm

from engines.executor.types import (
    Answer,
    Call,
    CallKind,
    ExecutorRole,
    LinkLost,
    Report,
)
from engines.trtllm_child.config import ChildConfig, Driver
from engines.trtllm_link import ChildLink
from engines.trtllm_process import ChildSettings

CONFIG = ChildConfig(
    driver=Driver.ENGINE,
    model_dir="/no/engine",
    version="1.2.1",
    role=ExecutorRole.BOTH,
    requests_max=8,
    pass_tokens_max=2_048,
    context_tokens_max=3_200,
    block_tokens=32,
    kv_blocks=100,
)
Make = Callable[..., ChildLink]


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stub_trtllm.write(tmp_path_factory.mktemp("stub"))


@pytest.fixture
def make(stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Links whose child has a vice; afterwards nothing of theirs may be left."""
    private = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))  # short: a socket's path is
    monkeypatch.setattr(tempfile, "tempdir", str(private))
    links: list[ChildLink] = []
    gc.collect()  # what earlier tests left for the collector is not this one's
    before, others = _descriptors(), _children()

    def make(vice: str = "", version: str = "1.2.1", **settings: object) -> ChildLink:
        environment = {"PYTHONPATH": str(stub), "STUB_VICE": vice, "STUB_VERSION": version}
        given = {"start_timeout_s": 30.0, "close_grace_s": 1.0, **settings}
        links.append(ChildLink(CONFIG, Path(sys.executable), ChildSettings(environment=environment, **given)))  # type: ignore[arg-type]
        return links[-1]

    yield make
    for link in links:
        link.close()
    assert not list(private.iterdir()), "a private directory was left"
    private.rmdir()
    gc.collect()
    assert _descriptors() == before, "descriptors leaked"
    assert _children() <= others, "a child or a zombie is left"


def _children() -> set[int]:
    """Of this process, zombies too. Earlier tests may have some."""
    found: set[int] = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            after_name = stat.read_text().rpartition(")")[2].split()
            if int(after_name[1]) == os.getpid():
                found.add(int(stat.parent.name))
    return found


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def call(name: str, tokens: int = 40, max_tokens: int = 3, kind: CallKind = CallKind.GENERATE) -> Call:
    return Call(name, kind, tuple(range(tokens)), max_tokens)


def hear(link: ChildLink, finals: int, timeout_s: float = 10.0) -> list[Report]:
    """Reports until so many calls ended."""
    heard: list[Report] = []
    deadline = time.monotonic() + timeout_s
    while sum(isinstance(r, Answer) and r.final for r in heard) < finals:
        assert time.monotonic() < deadline, heard
        heard += link.receive(0.2)
    return heard


def hear_the_end(link: ChildLink, timeout_s: float = 10.0) -> str:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            link.receive(0.2)
        except LinkLost as lost:
            return str(lost)
    raise AssertionError("it lives")
