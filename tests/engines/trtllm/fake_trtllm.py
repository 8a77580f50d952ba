"""What the tests of the drivers share: configurations, calls, what a driver said, the fakes."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from executor_fakes import package
from executor_fakes.vices import VIRTUOUS, Vices

from engines.executor.types import (
    Answer,
    Call,
    CallKind,
    ExecutorRole,
    Report,
)
from engines.trtllm_child.config import ChildConfig, Driver
from engines.trtllm_child.driver import ChildDriver, warm_up
from engines.trtllm_child.main import load

STRATA = ("S1", "S2", "S3")
BLOCK = 32
Use = Callable[..., ModuleType]
Open = Callable[..., ChildDriver]


def config(driver: Driver = Driver.ENGINE, **changes: Any) -> ChildConfig:
    made = ChildConfig(
        driver=driver,
        model_dir="",
        version="1.2.1",
        role=ExecutorRole.BOTH,
        requests_max=8,
        pass_tokens_max=1_024,
        context_tokens_max=2_048,
        block_tokens=BLOCK,
        kv_blocks=128,
    )
    return replace(made, **changes)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("fakes")
    package.write_engine(
        root / "engine", block_tokens=BLOCK, requests=8, pass_tokens=1_024, context_tokens=2_048
    )

    def written(stratum: str) -> Path:
        directory = root / stratum
        return directory if directory.exists() else package.write_package(directory, stratum)

    return written


def forget_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset, and unset again after the test, since a driver sets it."""
    for name in ("TRTLLM_USE_UCX_KVCACHE", "TRTLLM_USE_NIXL_KVCACHE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def _purge() -> None:
    for name in [
        n for n in sys.modules if n.partition(".")[0] in ("tensorrt_llm", "tensorrt", package.LOADER)
    ]:
        del sys.modules[name]


@pytest.fixture
def use(packages: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Use]:
    """Make `tensorrt_llm` that of a stratum, in this process; gives its bindings."""

    def use(stratum: str, vices: Vices = VIRTUOUS, **options: Any) -> Any:
        _purge()
        directory = packages(stratum)
        monkeypatch.syspath_prepend(str(directory))
        for name, value in package.environment(directory, vices, **options).items():
            if name != "PYTHONPATH":
                monkeypatch.setenv(name, value)
        return importlib.import_module("tensorrt_llm.bindings.executor")

    yield use
    _purge()


@pytest.fixture
def open_driver(use: Use, packages: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    opened: list[ChildDriver] = []
    forget_transport(monkeypatch)

    def open_driver(stratum: str, driver: Driver, vices: Vices = VIRTUOUS, **changes: Any) -> ChildDriver:
        options = {name: changes.pop(name) for name in ("exchange", "stop_after") if name in changes}
        use(stratum, vices, **options)
        made = config(driver, model_dir=str(packages(stratum).parent / "engine"), **changes)
        opened.append(load(made))
        warm_up(opened[-1], made)
        return opened[-1]

    yield open_driver
    for driver in opened:
        driver.shutdown()


def hear(driver: ChildDriver, finals: int, timeout_s: float = 10.0) -> list[Report]:
    heard: list[Report] = []
    deadline = time.monotonic() + timeout_s
    while sum(isinstance(r, Answer) and r.final for r in heard) < finals:
        assert time.monotonic() < deadline, heard
        said = driver.poll(0.02)
        assert said.skipped == 0
        heard += said.reports
    return heard + list(driver.poll(0.05).reports)


def answers(heard: list[Report], call_id: str) -> list[Answer]:
    return [report for report in heard if isinstance(report, Answer) and report.call_id == call_id]


def tokens(heard: list[Report], call_id: str) -> list[int]:
    return [token for answer in answers(heard, call_id) for token in answer.tokens]


def call(name: str, prompt: int = 100, most: int = 4, **more: Any) -> Call:
    kind = more.pop("kind", CallKind.GENERATE)
    return Call(name, kind, tuple(range(prompt)), most, **more)


both = pytest.mark.parametrize("driver", list(Driver))
strata = pytest.mark.parametrize("stratum", STRATA)
