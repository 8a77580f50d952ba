"""Fake Triton servers on ports of this machine, and links to them that are closed at the end of a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

pytest.importorskip("tritonclient.grpc")

from engines.triton_link import TritonLink
from tests.executor_fakes.link import small_executor
from tests.executor_fakes.triton import FakeTriton
from tests.executor_fakes.triton_small import options_for, write_small
from tests.executor_fakes.vices import VIRTUOUS, Vices


class Serve(Protocol):
    def __call__(self, vices: Vices = VIRTUOUS, **other: Any) -> FakeTriton: ...


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model's directory in a repository."""
    return write_small(tmp_path)


@pytest.fixture
def serve(directory: Path) -> Iterator[Serve]:
    servers: list[FakeTriton] = []

    def serve(vices: Vices = VIRTUOUS, **other: Any) -> FakeTriton:
        outside = {name: other.pop(name) for name in ("port", "credentials") if name in other}
        servers.append(FakeTriton(directory, small_executor(vices, **other), **outside))
        return servers[-1]

    yield serve
    for server in servers:
        server.stop()


@pytest.fixture
def connect() -> Iterator[Callable[..., TritonLink]]:
    """A link to a server or a URL, started."""
    links: list[TritonLink] = []

    def connect(to: FakeTriton | str, **other: Any) -> TritonLink:
        url = to if isinstance(to, str) else to.url
        links.append(TritonLink(options_for(url, **other)))
        links[-1].start()
        return links[-1]

    yield connect
    for link in links:
        link.close()
