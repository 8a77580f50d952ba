"""One etcd for the tests that leave it alone; those that stop or pause it start their own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from etcd_server import MISSING, EtcdServer, find_etcd, running_etcd
from membership_backends import Backend, InEtcd, InMemory


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


@pytest.fixture(params=["memory", "etcd"])
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
    """Each test that asks for it runs over both."""
    in_memory = request.param == "memory"
    found: Backend = InMemory() if in_memory else InEtcd(request.getfixturevalue("shared_etcd"))
    yield found
    await found.close()


@pytest.fixture
async def etcd(shared_etcd: EtcdServer) -> AsyncIterator[InEtcd]:
    backend = InEtcd(shared_etcd)
    yield backend
    await backend.close()


@pytest.fixture
async def own(own_etcd: EtcdServer) -> AsyncIterator[InEtcd]:
    backend = InEtcd(own_etcd)
    yield backend
    await backend.close()
