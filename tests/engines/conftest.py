"""Engines for the contract suite, and the embedded one on a tiny model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from factories import FACTORIES, end_shared
from tiny_engine import CONFIG, PROFILES, WEIGHTS, Load

from engines.base import Engine
from engines.openvino_cpu import BLOCK_TOKENS, OpenVinoCpuEngine
from tests.engines import oracle


@pytest.fixture(scope="module")
def processes() -> Iterator[None]:
    """Processes that several engines of a module share end with it: other tests look for strays."""
    yield
    end_shared()


@pytest.fixture(params=list(FACTORIES))
def make(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, processes: None
) -> Callable[[], Engine]:
    """Makes fresh engines of one adapter."""
    directory = tmp_path_factory.getbasetemp() / f"contract_{request.param}"
    directory.mkdir(exist_ok=True)
    return partial(FACTORIES[request.param], directory)


@pytest.fixture(scope="module")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("openvino")
    return oracle.write_model(tmp_path_factory.mktemp("bundle"), CONFIG, WEIGHTS).parent


@pytest.fixture
def load(tiny_bundle: Path) -> Iterator[Load]:
    """Loads engines in f32 and checks at the end of the test that none of them leaks."""
    engines: list[OpenVinoCpuEngine] = []

    def load(blocks: int = 48, precision: str = "f32") -> OpenVinoCpuEngine:
        engine = OpenVinoCpuEngine.load(
            tiny_bundle, PROFILES, threads=1, precision=precision, kv_capacity_tokens=blocks * BLOCK_TOKENS
        )
        engines.append(engine)
        return engine

    yield load
    for engine in engines:
        engine.close()
        stats = engine.stats()
        assert stats.requests_live == 0
        assert stats.kv_blocks_free + stats.kv_blocks_cached == stats.kv_blocks_total


@pytest.fixture(scope="module")
def shared(tiny_bundle: Path) -> OpenVinoCpuEngine:
    """One engine for many examples: what they leave in its cache is part of the test."""
    return OpenVinoCpuEngine.load(tiny_bundle, PROFILES, threads=1, precision="f32", kv_capacity_tokens=2048)
