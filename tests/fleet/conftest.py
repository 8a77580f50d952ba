"""One etcd for the tests that leave it alone; those that stop or pause it start their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from etcd_server import MISSING, EtcdServer, find_etcd, running_etcd


@pytest.fixture(scope="session")
def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    if find_etcd() is None:
        pytest.skip(MISSING)
    with running_etcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    if find_etcd() is None:
        pytest.skip(MISSING)
    with running_etcd(tmp_path / "etcd") as server:
        yield server
